"""The one place where transformers is changed: `generate(assistant_model=drafter)` finds its way to our loop.

transformers chooses what to do with an assistant model by names and settings of its own, and offers third parties no
way in. So importing `dspark_hf` wraps `GenerationMixin.generate`, once. The wrapper looks at one thing: whether
`assistant_model` is a `DSparkDrafter`. If not, or if transformers' native path for drafters was asked for
(`speculation_type="dflash"`), the original runs with the very arguments it was called with. If so, the original runs
too, with `custom_generate=SpeculativeDecoding(drafter)`, an official extension point. `uninstall` puts the original
back; `custom_generate` remains as the way without any change to transformers.
"""

import copy
import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedTokenizerBase, StoppingCriteriaList, StopStringCriteria
from transformers.generation import GenerationMixin

from ._compat import TargetModel, given_setting
from .alignment import check_pair
from .configuration_dspark import DSparkConfig
from .errors import UnsupportedGenerationError
from .generation import SpeculativeDecoding
from .modeling_dspark import DSparkDrafter
from .vocabulary import DraftVocabularyMap


def install() -> None:
    """Makes `generate` understand a DSpark drafter. Does nothing where it already does."""
    if not is_installed():
        GenerationMixin.generate = _dispatching(GenerationMixin.generate)  # type: ignore[method-assign]


def uninstall() -> None:
    """Gives `generate` back as it was before `install`; leaves it alone where somebody wrapped it since.

    From then on `assistant_model=drafter` fails in transformers, which does not know drafters, and
    `custom_generate=SpeculativeDecoding(drafter)` is the way.
    """
    original = _original_of(GenerationMixin.generate)
    if original is not None:
        GenerationMixin.generate = original  # type: ignore[method-assign]


def is_installed() -> bool:
    """Whether `generate` is our wrapper itself: neither taken off, nor wrapped by somebody else since."""
    return _original_of(GenerationMixin.generate) is not None


def _original_of(function: Callable) -> Callable | None:
    """What our wrapper wraps, if `function` is our wrapper itself and not one around it."""
    marker = getattr(function, "_dspark_hf", None)
    return marker[1] if marker is not None and marker[0]() is function else None


def _dispatching(original: Callable) -> Callable:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def generate(self: TargetModel, *args: Any, **kwargs: Any) -> Any:
        if not any(map(_is_ours, (*args, kwargs.get("assistant_model")))):
            return original(self, *args, **kwargs)
        arguments = dict(signature.bind(self, *args, **kwargs).arguments)
        arguments.pop("self")
        arguments.update(arguments.pop("kwargs", {}))
        drafter: Any = arguments.get("assistant_model")
        if not _is_ours(drafter):
            return original(self, *args, **kwargs)
        if _speculation_type(self, arguments) == "dflash":
            _refuse_what_the_native_path_ignores(drafter)
            return original(self, *args, **kwargs)
        return original(self, **_with_speculative_decoding(self, arguments))

    # `functools.wraps` copies attributes to wrappers around this one: the first item tells them apart.
    generate._dspark_hf = (weakref.ref(generate), original)  # type: ignore[attr-defined]
    return generate


def _is_ours(argument: object) -> bool:
    """Whether an argument is a drafter. A class or a config in its place is a slip that deserves an answer."""
    if argument is DSparkDrafter or isinstance(argument, DSparkConfig):
        raise TypeError(
            "`assistant_model` must be a loaded drafter, `DSparkDrafter.from_pretrained(...)`, not its "
            f"{'class' if argument is DSparkDrafter else 'config'}."
        )
    return isinstance(argument, DSparkDrafter)


def _speculation_type(target: TargetModel, arguments: dict[str, Any]) -> str | None:
    # Versions before the native path do not have this setting.
    return _setting("speculation_type", arguments) or getattr(target.generation_config, "speculation_type", None)


def _refuse_what_the_native_path_ignores(drafter: DSparkDrafter) -> None:
    config = drafter.config
    if config.sample_from_anchor or config.has_markov_head or config.enable_confidence_head or config.own_lm_head:
        raise UnsupportedGenerationError(
            "`speculation_type='dflash'` runs transformers' own drafting, which knows neither a prediction at the "
            "anchor nor a Markov head, a confidence head or a head of the drafter's own: it would draft badly with "
            "this drafter. Leave `speculation_type` out."
        )


def _with_speculative_decoding(target: TargetModel, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the original `generate` that run our loop in place of `assistant_model`."""
    drafter = arguments.pop("assistant_model")
    _refuse_what_never_reaches_the_loop(arguments)
    # Before `generate` hands the prompt to a streamer and makes a cache.
    vocabulary_map = _vocabulary_map(target, drafter, arguments)
    check_pair(target, drafter, vocabulary_map=vocabulary_map).raise_if_blocked()
    _move_stop_strings(target, arguments)
    lookup, draft_invariant = _take_lookup(arguments), arguments.pop("draft_invariant", False)
    arguments["custom_generate"] = SpeculativeDecoding(
        drafter,
        num_assistant_tokens=_setting("num_assistant_tokens", arguments),
        assistant_confidence_threshold=_setting("assistant_confidence_threshold", arguments),
        num_assistant_tokens_schedule=_setting("num_assistant_tokens_schedule", arguments),
        prompt_lookup_num_tokens=lookup,
        draft_invariant=bool(draft_invariant),
        streamer=arguments.get("streamer"),
        synced_gpus=_synced_gpus(target, arguments.get("synced_gpus")),
        vocabulary_map=vocabulary_map,
    )
    return arguments


def _refuse_what_never_reaches_the_loop(arguments: dict[str, Any]) -> None:
    if arguments.get("custom_generate") is not None:
        raise UnsupportedGenerationError(
            "`assistant_model` is a DSpark drafter and `custom_generate` is given as well: leave one of them out."
        )
    if _setting("cache_implementation", arguments) == "paged":
        raise UnsupportedGenerationError(
            "`cache_implementation='paged'` switches to continuous batching, which takes no `assistant_model`: leave "
            "one of them out."
        )
    if _setting("token_healing", arguments):
        raise UnsupportedGenerationError(
            "`token_healing` does not go together with a DSpark drafter: heal the prompt first with "
            "`model.heal_tokens(input_ids, tokenizer)`, and pass what it returns."
        )


def _setting(name: str, arguments: dict[str, Any]) -> Any:
    """A generation setting of this call: its own argument, else its `generation_config`."""
    if arguments.get(name) is not None:
        return arguments[name]
    return given_setting(arguments.get("generation_config"), name)


def _move_stop_strings(target: TargetModel, arguments: dict[str, Any]) -> None:
    # `generate` hands the tokenizer to its own modes only, and would miss it when it builds this criterion.
    tokenizer, config = arguments.get("tokenizer"), arguments.get("generation_config")
    if "stop_strings" in arguments:
        stop_strings = arguments["stop_strings"]
    else:
        stop_strings = getattr(config, "stop_strings", None) or target.generation_config.stop_strings
    if not stop_strings or tokenizer is None:
        return
    criteria = StoppingCriteriaList(arguments.get("stopping_criteria") or [])
    # The user's own criterion of this kind replaces the built one, as in `generate`.
    if not any(type(criterion) is StopStringCriteria for criterion in criteria):
        criteria.append(StopStringCriteria(tokenizer=tokenizer, stop_strings=stop_strings))
    arguments["stopping_criteria"] = criteria
    if config is not None and "stop_strings" not in arguments and target.generation_config.stop_strings is None:
        # Not as an argument: `generate` warns about arguments beside a `generation_config`.
        arguments["generation_config"] = copy.deepcopy(config)
        arguments["generation_config"].stop_strings = None
    else:
        arguments["stop_strings"] = None


def _take_lookup(arguments: dict[str, Any]) -> int | None:
    """`prompt_lookup_num_tokens`, which alone would start transformers' own prompt lookup: here both work together."""
    config: Any = arguments.get("generation_config")
    lookup = arguments.pop("prompt_lookup_num_tokens", None)
    if getattr(config, "prompt_lookup_num_tokens", None) is not None:
        lookup = config.prompt_lookup_num_tokens if lookup is None else lookup
        arguments["generation_config"] = copy.deepcopy(config)
        arguments["generation_config"].prompt_lookup_num_tokens = None
    return lookup


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
    sizes = (target.config.get_text_config(decoder=True).vocab_size, drafter.config.vocab_size)
    return _cached_map(target_tokenizer, drafter_tokenizer, *sizes)


def _cached_map(
    target_tokenizer: PreTrainedTokenizerBase,
    drafter_tokenizer: PreTrainedTokenizerBase,
    target_vocab_size: int,
    drafter_vocab_size: int,
) -> DraftVocabularyMap:
    """The map of two tokenizers, built once while both live: it takes a second for a large vocabulary."""
    of_target = _maps.setdefault(target_tokenizer, weakref.WeakKeyDictionary())
    sizes = (target_vocab_size, drafter_vocab_size, len(target_tokenizer), len(drafter_tokenizer))
    known = of_target.setdefault(drafter_tokenizer, {})
    if sizes not in known:
        known[sizes] = DraftVocabularyMap.from_tokenizers(
            target_tokenizer,
            drafter_tokenizer,
            target_vocab_size=target_vocab_size,
            drafter_vocab_size=drafter_vocab_size,
        )
    return known[sizes]


_maps: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
