"""Differences between the supported versions of transformers, each with the version that ends it."""

from typing import Any

from transformers import Cache, cache_utils
from transformers.cache_utils import QuantizedLayer
from transformers.generation import GenerateDecoderOnlyOutput

# What a target is: a `PreTrainedModel` with `GenerationMixin`. Its loop-building methods are private, hence untyped.
TargetModel = Any

# Until 5.24 the cache is called `past_key_values` in arguments and outputs. Goes with support for < 5.24.
CACHE_NAME = "cache" if "cache" in GenerateDecoderOnlyOutput.__annotations__ else "past_key_values"


# What a cache has in the place of a layer without keys and values of its own. Older versions have no such thing.
DUMMY_LAYER: Any = getattr(cache_utils, "DummyLayer", ())

# Until 5.24 a prefill in chunks starts over on a part-filled cache, and plain generation is wrong. Goes with < 5.24.
CHUNKS_PART_FILLED_CACHE = CACHE_NAME == "cache"


def get_cache(holder: Any) -> Any:
    """The `Cache` in a model's output or in its keyword arguments; `None` where there is none."""
    return holder.get(CACHE_NAME)


def generate_output(*, cache: Cache | None, **fields: Any) -> GenerateDecoderOnlyOutput:
    """The output that `generate(return_dict_in_generate=True)` gives in this version."""
    fields[CACHE_NAME] = cache
    return GenerateDecoderOnlyOutput(**fields)


_ASSISTANT_SETTINGS = ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")
# Nobody sets these for a drafter, so they show that defaults were filled in.
_LOOKBEHINDS = ("assistant_lookbehind", "target_lookbehind")


def given_setting(config: Any, name: str) -> Any:
    """A setting in a call's `generation_config`; `None` where nobody set it.

    Until 5.24 a pipeline hands over a config of its own that is filled with defaults, those of assistants among them
    (20 tokens, "constant", 0.4). Goes with < 5.24.
    """
    value = getattr(config, name, None)
    if value is None or name not in _ASSISTANT_SETTINGS:
        return value
    defaults = config._get_default_generation_params()
    is_filled = all(getattr(config, other, None) == defaults.get(other) for other in _LOOKBEHINDS)
    return None if is_filled and value == defaults.get(name) else value


def forget_assistant_defaults(pipeline: Any, given: dict[str, Any]) -> None:
    """Takes settings of assistants that nobody gave out of a pipeline's own `generation_config`, so that what was
    given counts even where it is the default (`given_setting`). Goes with < 5.24.

    Args:
        given: the keyword arguments that the pipeline was made with.
    """
    config = getattr(pipeline, "generation_config", None)
    base = given.get("generation_config") or pipeline.model.generation_config
    for name in (*_ASSISTANT_SETTINGS, *_LOOKBEHINDS):
        if config is not None and name not in given:
            setattr(config, name, getattr(base, name))


def is_croppable(layer: Any) -> bool:
    """Whether rejected positions can be taken back out of a layer of a cache."""
    # Until 5.24 a quantized layer says so of itself, but its `crop` forgets what it quantized. Goes with < 5.24.
    return layer.is_croppable and not isinstance(layer, QuantizedLayer)


def stop_recording_past(cache: Cache) -> None:
    """Undoes `activate_past_recording`, so that a returned cache behaves as one that plain generation returns."""
    for layer in cache.layers:
        if hasattr(layer, "record_past"):
            layer.record_past = False
