"""Our own format: `config.json` is a saved [`DSparkConfig`]."""

from typing import Any

from ..configuration_dspark import DSparkConfig
from .fields import Fields, read_block, read_taps

MODEL_TYPE = DSparkConfig.model_type
SPARE_TENSORS = ()


def translate(source: str, config_dict: dict[str, Any]) -> dict[str, Any]:
    """The file as it is, after a check that the fields which no default may replace are written."""
    fields = Fields(source, config_dict)
    read_taps(fields)
    read_block(fields, fields.whole("vocab_size"), fields.flag("sample_from_anchor"))
    return config_dict
