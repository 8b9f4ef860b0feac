"""The one place where transformers is changed: `generate(assistant_model=drafter)` finds its way to our loop.

transformers chooses what to do with an assistant model by names and settings of its own, and offers third parties no
way in. So importing `dspark_hf` wraps `GenerationMixin.generate`, once. The wrapper looks at one thing: whether
`assistant_model` is a `DSparkDrafter`. If not, or if transformers' native path for drafters was asked for
(`speculation_type="dflash"`), the original runs with the very arguments it was called with. If so, the original runs
too, with `custom_generate=SpeculativeDecoding(drafter)`, an official extension point. `uninstall` puts the original
back; `custom_generate` remains as the way without any change to transformers.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from transformers import GenerationConfig, StoppingCriteriaList, StopStringCriteria
from transformers.generation import GenerationMixin

from ._compat import TargetModel
from .errors import UnsupportedGenerationError
from .generation import SpeculativeDecoding
from .modeling_dspark import DSparkDrafter
from .vocabulary import DraftVocabularyMap


def install() -> None:
    """Makes `generate` understand a DSpark drafter. Does nothing where it already does."""
    original = GenerationMixin.generate
    if not hasattr(original, "_dspark_hf_original"):
        GenerationMixin.generate = _dispatching(original)  # type: ignore[method-assign]


def uninstall() -> None:
    """Gives `generate` back as it was before `install`."""
    original = getattr(GenerationMixin.generate, "_dspark_hf_original", GenerationMixin.generate)
    GenerationMixin.generate = original  # type: ignore[method-assign]


def _dispatching(original: Callable) -> Callable:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def generate(self: TargetModel, *args: Any, **kwargs: Any) -> Any:
        drafter = kwargs.get("assistant_model")
        if drafter is None and len(args) > 2:
            drafter = signature.bind_partial(self, *args).arguments.get("assistant_model")
        if not isinstance(drafter, DSparkDrafter) or _setting("speculation_type", kwargs, None) == "dflash":
            return original(self, *args, **kwargs)
        bound = signature.bind(self, *args, **kwargs).arguments
        bound.pop("self")
        arguments = {**bound, **bound.pop("kwargs", {})}
        return original(self, **_with_speculative_decoding(self, arguments))

    generate._dspark_hf_original = original  # type: ignore[attr-defined]
    return generate


def _with_speculative_decoding(target: TargetModel, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the original `generate` that run our loop in place of `assistant_model`."""
    if arguments.get("custom_generate") is not None:
        raise UnsupportedGenerationError(
            "`assistant_model` is a DSpark drafter and `custom_generate` is given as well: leave one of them out."
        )
    arguments = dict(arguments)
    drafter = arguments.pop("assistant_model")
    _move_stop_strings(target, arguments)
    arguments["custom_generate"] = SpeculativeDecoding(
        drafter,
        num_assistant_tokens=_setting("num_assistant_tokens", arguments),
        assistant_confidence_threshold=_setting("assistant_confidence_threshold", arguments),
        streamer=arguments.get("streamer"),
        synced_gpus=_synced_gpus(target, arguments.get("synced_gpus")),
        vocabulary_map=_vocabulary_map(target, drafter, arguments),
    )
    return arguments


def _setting(name: str, arguments: dict[str, Any], default: Any = None) -> Any:
    """A generation setting of this call: its own argument, else its `generation_config`."""
    if arguments.get(name) is not None:
        return arguments[name]
    return getattr(arguments.get("generation_config"), name, default)


def _move_stop_strings(target: TargetModel, arguments: dict[str, Any]) -> None:
    # `generate` hands the tokenizer to its own modes only, and would miss it when it builds this criterion.
    stop_strings = _setting("stop_strings", arguments) or target.generation_config.stop_strings
    tokenizer = arguments.get("tokenizer")
    if not stop_strings or tokenizer is None:
        return
    criteria = StoppingCriteriaList(arguments.get("stopping_criteria") or [])
    criteria.append(StopStringCriteria(tokenizer=tokenizer, stop_strings=stop_strings))
    arguments["stopping_criteria"] = criteria
    arguments["stop_strings"] = None
    if isinstance(arguments.get("generation_config"), GenerationConfig):
        config = GenerationConfig.from_dict(arguments["generation_config"].to_dict())
        config.stop_strings = None
        arguments["generation_config"] = config


def _synced_gpus(target: TargetModel, requested: bool | None) -> bool:
    """Whether every process must keep passing through the target, decided as `generate` does."""
    return target._extract_generation_mode_kwargs(None, {}, requested, None, None)["synced_gpus"]


def _vocabulary_map(
    target: TargetModel, drafter: DSparkDrafter, arguments: dict[str, Any]
) -> DraftVocabularyMap | None:
    """The map between two tokenizers, where both are given; they are taken from the call."""
    target_tokenizer, drafter_tokenizer = arguments.get("tokenizer"), arguments.pop("assistant_tokenizer", None)
    if drafter_tokenizer is None:
        return None
    if target_tokenizer is None:
        raise UnsupportedGenerationError("`assistant_tokenizer` is given without `tokenizer`: pass both or neither.")
    return DraftVocabularyMap.from_tokenizers(
        target_tokenizer,
        drafter_tokenizer,
        target_vocab_size=target.config.get_text_config(decoder=True).vocab_size,
        drafter_vocab_size=drafter.config.vocab_size,
    )
