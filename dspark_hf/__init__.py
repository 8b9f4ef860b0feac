"""DSpark speculative decoding for transformers: `model.generate(**inputs, assistant_model=drafter)`.

Importing this package registers the drafter with the Auto classes and makes `generate` understand it (`dispatch`).
"""

import importlib
from typing import Any

from transformers import AutoConfig, AutoModel

from . import dispatch
from ._version import __version__ as __version__
from .alignment import AlignmentReport, check_alignment
from .calibrating import calibrate
from .calibration import Calibration
from .candidate_generator import DSparkCandidateGenerator
from .configuration_dspark import DSparkConfig
from .errors import (
    AlignmentError,
    CheckpointFieldError,
    DSparkError,
    IncompleteCheckpointError,
    UnsupportedCheckpointError,
    UnsupportedGenerationError,
)
from .generation import SpeculativeDecoding
from .modeling_dspark import DSparkDrafter
from .monitoring import AcceptanceMonitor
from .packed_weights import pack_weights, unpack_weights
from .trace import Trace
from .vocabulary import DraftVocabularyMap

__all__ = [
    "AcceptanceMonitor",
    "AlignmentError",
    "AlignmentReport",
    "Calibration",
    "CheckpointFieldError",
    "DSparkCandidateGenerator",
    "DSparkConfig",
    "DSparkDrafter",
    "DSparkError",
    "DSparkPipeline",
    "DraftVocabularyMap",
    "IncompleteCheckpointError",
    "SpeculativeDecoding",
    "Trace",
    "UnsupportedCheckpointError",
    "UnsupportedGenerationError",
    "calibrate",
    "check_alignment",
    "dispatch",
    "pack_weights",
    "unpack_weights",
]

# Public names that cost more to import than all the others: where they are, once somebody asks.
_LAZY = {"DSparkPipeline": ".pipeline"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name], __name__), name)


AutoConfig.register(DSparkConfig.model_type, DSparkConfig, exist_ok=True)
AutoModel.register(DSparkConfig, DSparkDrafter, exist_ok=True)
dispatch.install()
