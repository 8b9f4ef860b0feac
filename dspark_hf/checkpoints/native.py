"""Our own format: `config.json` is a saved [`DSparkConfig`]."""

import json
from collections.abc import Sequence
from typing import Any

from ..configuration_dspark import DSparkConfig
from .fields import Fields, read_block, read_taps

MODEL_TYPE = DSparkConfig.model_type
ARCHITECTURES = ("DSparkDrafter",)
SPARE_TENSORS = ()
OWN_PARTS = "optional"


def translate(source: str, config_dict: dict[str, Any]) -> dict[str, Any]:
    """The file as it is, after a check that the fields which no default may replace are written."""
    fields = Fields(source, config_dict)
    read_taps(fields)
    read_block(fields, fields.whole("vocab_size"), fields.flag("sample_from_anchor"))
    return config_dict


def render(config: DSparkConfig, target_architectures: Sequence[str]) -> dict[str, Any]:
    """The `config.json` of a drafter in this format: what `save_pretrained` writes."""
    return {**json.loads(config.to_json_string()), "architectures": list(ARCHITECTURES)}
