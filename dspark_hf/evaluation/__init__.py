"""`dspark-hf eval`: how good drafters are, several side by side, for one target and the same prompts.

For each prompt, in turns whose order rotates: plain generation; from each drafter a call with full drafts, which shows
what is accepted at every position; and a call with each schedule, nothing attached, which shows the speed. So two
drafters are compared by drafts of the same length, and their speed is that of use.
"""

from .running import run_evaluation
from .settings import EvaluationSettings

__all__ = ["EvaluationSettings", "run_evaluation"]
