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


def forget_assistant_defaults(pipeline: Any, given: dict[str, Any]) -> None:
    """Takes settings of assistants that nobody gave out of a pipeline's own `generation_config`.

    Until 5.24 a pipeline has one, filled with defaults that `generate` then sees as the caller's. Goes with < 5.24.

    Args:
        given: the keyword arguments that the pipeline was made with.
    """
    config = getattr(pipeline, "generation_config", None)
    base = given.get("generation_config") or pipeline.model.generation_config
    for name in ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"):
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
