"""`model.generate(custom_generate="org/drafter", trust_remote_code=True)`: what the code of a pushed drafter calls.

A pushed drafter carries `custom_generate/generate.py`, which imports `generate` from here and does nothing else. So
the caller need not import this package, and a repository never has to be mended when the package changes.
"""

import sys
import threading
import weakref
from typing import Any

import torch

from ._compat import TargetModel
from .modeling_dspark import HUB_ARGUMENTS, DSparkDrafter

# The drafters that were opened for a target live as long as it does.
_drafters: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def generate(model: TargetModel, **arguments: Any) -> Any:
    """Runs `model.generate` with the drafter of the repository, or folder, that was named as `custom_generate`.

    The drafter is opened once for a target, in its dtype and on its device; threads that call at the same time share
    it.

    Args:
        model: the target.
        arguments: of `generate`. Those that say where files are (`revision`, `token`, `cache_dir`, ...) are for the
            drafter; `assistant_model` names another drafter.

    Raises:
        ValueError: nobody says where the drafter is.
        OSError, AlignmentError: as `DSparkDrafter.from_pretrained` and `generate` do.
    """
    location = {name: arguments.pop(name) for name in HUB_ARGUMENTS if name in arguments}
    # transformers copies generate.py into its cache before it runs it, and hands it every argument but
    # `custom_generate`: where the file came from stands in the frame of the calling `generate` only.
    source = arguments.pop("assistant_model", None) or sys._getframe(1).f_locals.get("custom_generate")
    if not isinstance(source, str):
        raise ValueError(
            f"The drafter is named by {type(source).__name__}, expected the name of a repository or folder: "
            "`model.generate(custom_generate='org/drafter', trust_remote_code=True)`, without `assistant_model`. To "
            "call `dspark_hf.custom_generate.generate` yourself, say `assistant_model='org/drafter'`."
        )
    return model.generate(**arguments, assistant_model=_opened(model, source, location))


def _opened(target: TargetModel, source: str, location: dict[str, Any]) -> DSparkDrafter:
    place = {name: str(value) for name, value in location.items() if name != "token"}
    key = (source, *sorted(place.items()), target.dtype, str(target.device))
    with _lock:
        opened = _drafters.setdefault(target, {})
        if key not in opened:
            # Tensors that are made in inference mode would be of no use outside of it.
            with torch.inference_mode(False):
                drafter = DSparkDrafter.from_pretrained(source, dtype=target.dtype, **location)
                opened[key] = drafter.to(target.device).eval()
        return opened[key]
