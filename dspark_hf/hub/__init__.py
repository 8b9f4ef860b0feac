"""Publishing a drafter: its model card, and one commit on the Hub with everything that `from_pretrained` and
`generate(custom_generate=...)` need. `dspark-hf push` in Python: [`push_drafter_to_hub`].
"""

from .card import make_model_card
from .pushing import PushReport, push_drafter_to_hub
from .running import PushSettings, run_push

__all__ = ["PushReport", "PushSettings", "make_model_card", "push_drafter_to_hub", "run_push"]
