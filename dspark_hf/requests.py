"""Which calls of `generate` the decoding loop takes, and what it says to the others, before any work."""

import inspect
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation import GenerationMode

from ._compat import CHUNKS_PART_FILLED_CACHE, TargetModel, get_cache
from .errors import UnsupportedGenerationError
from .target_rows import can_roll_back, layer_windows, takes_batches


def check_request(
    model: TargetModel,
    input_ids: torch.Tensor,
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
    draft_invariant: bool = False,
) -> None:
    """Refuses, before any work, what the loop does not do exactly.

    Raises:
        UnsupportedGenerationError: the message says what to do instead.
    """
    problem = _unsupported_setting(config) or _unsupported_inputs(model, input_ids, model_kwargs)
    if problem is not None:
        raise UnsupportedGenerationError(problem)
    if draft_invariant and model.config._attn_implementation != "sdpa":
        raise UnsupportedGenerationError(
            "`draft_invariant` needs a target with `attn_implementation='sdpa'`, got "
            f"{model.config._attn_implementation!r}. Load it so, or leave `draft_invariant` out."
        )
    cache = get_cache(model_kwargs)
    if input_ids.shape[0] > 1 and cache is not None and not takes_batches(cache):
        raise cannot_batch(cache)
    if model._is_stateful or (cache is not None and not _may_roll_back(cache)):
        raise cannot_crop(model, cache)
    if cache is None:
        raise UnsupportedGenerationError(
            f"{type(model).__name__} got no key/value cache from `generate`, which verification needs. "
            "Leave out `assistant_model` for this model."
        )
    if config.prefill_chunk_size and not CHUNKS_PART_FILLED_CACHE and int(cache.get_seq_length()) > 0:
        raise UnsupportedGenerationError(
            "`prefill_chunk_size` together with a part-filled cache gives wrong text in this version of transformers, "
            "with or without a drafter: leave one of them out, or update transformers."
        )


def _unsupported_setting(config: GenerationConfig) -> str | None:
    mode = config.get_generation_mode()
    rivals = {
        "assistant_early_exit": config.assistant_early_exit,
        "use_mtp": getattr(config, "use_mtp", None),
    }
    if config.prompt_lookup_num_tokens:
        return (
            "`prompt_lookup_num_tokens` goes with `generate(..., assistant_model=drafter)` as an argument or in the "
            "`generation_config` of the call, or to `SpeculativeDecoding(prompt_lookup_num_tokens=...)`."
        )
    rival = next((name for name, value in rivals.items() if value), None)
    if rival is not None:
        return f"`{rival}` and a DSpark drafter both propose tokens: leave one of them out."
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        return (
            f"A DSpark drafter speeds up greedy search and sampling, not {mode.value.replace('_', ' ')}. "
            "Leave out `assistant_model`, or the settings that ask for this mode."
        )
    if config.assistant_ensemble_weight is not None:
        return (
            "`assistant_ensemble_weight` changes the distribution of the output, which a DSpark drafter never does: "
            "leave it out."
        )
    if not config.use_cache:
        return "A DSpark drafter needs `use_cache=True`: verification continues from the target's cache."
    return None


def _unsupported_inputs(model: TargetModel, input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> str | None:
    if model_kwargs.get("inputs_embeds") is not None:
        return "A DSpark drafter needs to know the tokens: pass `input_ids` instead of `inputs_embeds`."
    return None if input_ids.shape[0] == 1 else _unsupported_batch(model)


def _unsupported_batch(model: TargetModel) -> str | None:
    """Rows of different lengths need masks and positions of their own, which not every model takes."""
    remedy = "Call `generate` for each prompt, or leave out `assistant_model` for batches."
    attention = model.config._attn_implementation
    if attention not in ("sdpa", "eager"):
        return (
            f"A DSpark drafter takes batches of models with `attn_implementation` 'sdpa' or 'eager': {attention!r} "
            f"has no room for rows of different lengths. {remedy}"
        )
    strange = set(layer_windows(model)) - {"full_attention", "sliding_attention"}
    if strange:
        return (
            f"A DSpark drafter takes batches of models with full and sliding attention; {type(model).__name__} has "
            f"{', '.join(sorted(strange))}. {remedy}"
        )
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return f"A DSpark drafter takes no batches of {type(model).__name__}, which has no `position_ids`. {remedy}"
    return None


def _may_roll_back(cache: Any) -> bool:
    """False only where a layer can tell already: one with a convolution knows after its first pass."""
    return all(can_roll_back(layer) or hasattr(layer, "is_conv_states_initialized") for layer in cache.layers)


def cannot_crop(model: TargetModel, cache: Any) -> UnsupportedGenerationError:
    kept = "a state" if cache is None else _described(cache)
    return UnsupportedGenerationError(
        f"{type(model).__name__} keeps {kept}, which cannot take back rejected draft tokens. Use the default "
        "(dynamic) cache; for a model with a recurrent state, leave out `assistant_model`."
    )


def cannot_batch(cache: Any) -> UnsupportedGenerationError:
    return UnsupportedGenerationError(
        f"A DSpark drafter takes batches with a dynamic or a static cache, got {_described(cache)}. Use one of them, "
        "or call `generate` for each prompt."
    )


def _described(cache: Any) -> str:
    offloaded = "offloaded " if cache.offloading else ""
    return f"{offloaded}{type(cache).__name__}({', '.join(sorted({type(layer).__name__ for layer in cache.layers}))})"
