"""May this drafter draft for this target?

`check_pair` compares two configs and is cheap enough for the first step of every `generate` call; `check_alignment`
also compares tokenizers. A finding is either "must not run" (tensors would not fit, or ids would mean other tokens) or
"will run badly" (the text stays the target's, but few draft tokens are accepted). What usually lies behind the latter:

    the drafter was made for the base model, or for another release     name of the target
    another chat template, thinking switched on or off                  chat template
    tokens added since the drafter was trained                          token set
    another `<s>` before the text, another end token                    tokens around a text, bos/eos token
    the mask id of another drafter                                      mask token

Sizes of vocabularies may differ by padding. A target id that the drafter cannot read means a round without a draft,
and a draft id that the target does not have is never proposed, so neither needs equal sizes.
"""

import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from .configuration_dspark import DSparkConfig
from .errors import AlignmentError
from .vocabulary import (
    SAMPLE_TEXTS,
    DraftVocabularyMap,
    common_prefix_length,
    describe_split,
    find_split_difference,
)

MUST_NOT_RUN: Final = "must not run"
WILL_RUN_BADLY: Final = "will run badly"

# Vocabularies are padded to multiples of at most 1024 ids. Beyond that tokens were added; beyond a tenth of the
# vocabulary it is another one (128,256 against 151,936 ids, for instance).
MAX_PADDING = 1024
MAX_SIZE_RATIO = 0.1

_OTHER_DRAFTER = "Use the drafter of this model."
_TRANSLATE = (
    "If both tokenizers split text alike, pass `tokenizer=` and `assistant_tokenizer=` to `generate`, which "
    "translates ids with a `DraftVocabularyMap`; otherwise use the drafter of this model."
)
_HUB_NAME = re.compile(r"\w[\w.-]*/[\w.-]+")
_QUANTIZATION = re.compile(
    r"([-_.](awq|gptq|bnb|hqq|gguf|mlx|unsloth|exl[23]|autoround|quantized|dynamic|fp8|mxfp[48]|nvfp4|int[248]|"
    r"w[248]a(4|8|16)|[23468]-?bit|i?q[2-8](_[0-9k](_[sml])?)?|bf16|f16))+$",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Finding:
    """One way in which a drafter and a target differ.

    Attributes:
        verdict: "must not run" or "will run badly".
        field: what differs.
        target_value: what the target has.
        drafter_value: what the drafter has or needs.
        remedy: what to do, one sentence.
    """

    verdict: Literal["must not run", "will run badly"]
    field: str
    target_value: object
    drafter_value: object
    remedy: str

    def __str__(self) -> str:
        return (
            f"{self.verdict}: {self.field} is {self.target_value} in the target and {self.drafter_value} in the "
            f"drafter. {self.remedy}"
        )


@dataclass
class AlignmentReport:
    """Everything that `check_pair` or `check_alignment` found; empty for a drafter that fits."""

    findings: list[Finding] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether the drafter may run: no finding says "must not run". There may be `warnings`."""
        return not self.blockers

    @property
    def blockers(self) -> list[Finding]:
        """The "must not run" findings."""
        return [finding for finding in self.findings if finding.verdict == MUST_NOT_RUN]

    @property
    def warnings(self) -> list[Finding]:
        """The "will run badly" findings."""
        return [finding for finding in self.findings if finding.verdict == WILL_RUN_BADLY]

    def raise_if_blocked(self) -> None:
        """Raises an `AlignmentError` with both values of the first "must not run" finding, if there is one."""
        for finding in self.blockers:
            raise AlignmentError(finding.field, finding.target_value, finding.drafter_value, finding.remedy)

    def __str__(self) -> str:
        if not self.findings:
            return "The drafter fits the target."
        return "\n".join(str(finding) for finding in self.blockers + self.warnings)


def check_pair(
    target: PreTrainedModel | PreTrainedConfig,
    drafter: PreTrainedModel | DSparkConfig,
    *,
    vocabulary_map: DraftVocabularyMap | None = None,
) -> AlignmentReport:
    """Compares the configs of a target and a drafter, in microseconds. Neither raises nor warns about the pair.

    Args:
        target: the model that verifies, or its config. Of a multimodal one the text part counts.
        drafter: the drafter, or its config.
        vocabulary_map: translates between the two vocabularies, whose sizes may then differ.

    Raises:
        TypeError: `drafter` is not a DSpark drafter.
    """
    drafter_config = _drafter_config(drafter)
    target_config: Any = getattr(target, "config", target)
    if target_config.is_encoder_decoder:
        return AlignmentReport([_encoder_decoder_finding()])
    text_config = target_config.get_text_config(decoder=True)
    return AlignmentReport(
        [
            *_check_hidden_size(text_config, drafter_config),
            *_check_layers(text_config, drafter_config),
            *_check_vocabulary(text_config.vocab_size, drafter_config, vocabulary_map),
            *_check_mask_row(text_config.vocab_size, drafter_config, vocabulary_map),
            *_check_names(target_config.name_or_path, drafter_config.target_model_name_or_path),
        ]
    )


def check_alignment(
    target: PreTrainedModel | PreTrainedConfig,
    drafter: PreTrainedModel | DSparkConfig,
    target_tokenizer: PreTrainedTokenizerBase | None = None,
    drafter_tokenizer: PreTrainedTokenizerBase | None = None,
    texts: Sequence[str] | None = None,
    *,
    vocabulary_map: DraftVocabularyMap | None = None,
    raise_error: bool = True,
) -> AlignmentReport:
    """Compares a drafter with a target, and their tokenizers where given.

    Args:
        target, drafter, vocabulary_map: as for [`check_pair`].
        target_tokenizer: the target's tokenizer.
        drafter_tokenizer: what the drafter was trained with. `None`: only what one tokenizer can show is checked.
        texts: what both tokenizers must cut alike, in place of the built-in samples (a dozen languages, code, chat).
        raise_error: `False`: hand back the whole report, without an error or a warning about the pair.

    Returns:
        Every finding. Those that say "will run badly" were also issued as `UserWarning`.

    Raises:
        AlignmentError: the drafter must not run with this target (the first such finding).
        TypeError: `drafter` is not a DSpark drafter.
        ValueError: `drafter_tokenizer` without `target_tokenizer`.
    """
    if drafter_tokenizer is not None and target_tokenizer is None:
        raise ValueError("`drafter_tokenizer` needs a `target_tokenizer` to be compared with.")
    report = check_pair(target, drafter, vocabulary_map=vocabulary_map)
    config = _drafter_config(drafter)
    texts = SAMPLE_TEXTS if texts is None else texts
    if target_tokenizer is not None and drafter_tokenizer is not None:
        report.findings += _check_tokenizers(target_tokenizer, drafter_tokenizer, texts, config, vocabulary_map)
    elif target_tokenizer is not None:
        report.findings += _check_largest_id(target_tokenizer, config, vocabulary_map)
    if target_tokenizer is not None:
        report.findings += _check_mask_in_text(drafter_tokenizer or target_tokenizer, texts, config)
    if raise_error:
        report.raise_if_blocked()
        for finding in report.warnings:
            warnings.warn(str(finding), UserWarning, stacklevel=2)
    return report


def is_hub_name(name: str) -> bool:
    """Whether this is `owner/name`, and no folder here."""
    return _HUB_NAME.fullmatch(name) is not None and not os.path.isdir(name)


def model_name(hub_name: str) -> str:
    """The name without its owner and without marks of quantization, which drafters survive; in lower case."""
    return _QUANTIZATION.sub("", hub_name.rpartition("/")[2]).lower()


# Configs


def _drafter_config(drafter: PreTrainedModel | DSparkConfig) -> DSparkConfig:
    config = getattr(drafter, "config", drafter)
    if not isinstance(config, DSparkConfig):
        raise TypeError(
            f"`drafter` must be a DSpark drafter or its config, got {type(drafter).__name__}. The target comes first, "
            "the drafter second."
        )
    return config


def _encoder_decoder_finding() -> Finding:
    return Finding(
        MUST_NOT_RUN,
        "the architecture",
        "encoder-decoder",
        "decoder-only",
        "DSpark drafts for decoder-only models: run this target without an assistant.",
    )


def _check_hidden_size(target: PreTrainedConfig, drafter: DSparkConfig) -> Iterator[Finding]:
    if target.hidden_size != drafter.target_hidden_size:
        yield Finding(MUST_NOT_RUN, "hidden_size", target.hidden_size, drafter.target_hidden_size, _OTHER_DRAFTER)


def _check_layers(target: PreTrainedConfig, drafter: DSparkConfig) -> Iterator[Finding]:
    num_layers = target.num_hidden_layers
    if drafter.num_target_layers is not None and drafter.num_target_layers != num_layers:
        yield Finding(
            MUST_NOT_RUN, "the number of decoder layers", num_layers, drafter.num_target_layers, _OTHER_DRAFTER
        )
    if drafter.target_layer_ids[-1] >= num_layers - 1:
        yield Finding(
            MUST_NOT_RUN,
            "the last layer that can be tapped",
            num_layers - 2,
            f"{drafter.target_layer_ids[-1]} (`target_layer_ids` {drafter.target_layer_ids})",
            f"Of {num_layers} decoder layers the last one's output is final-normed in transformers, so it cannot be "
            "tapped: use the drafter of this model.",
        )


def _check_vocabulary(
    target_size: int, drafter: DSparkConfig, vocabulary_map: DraftVocabularyMap | None
) -> Iterator[Finding]:
    if vocabulary_map is not None:
        yield from _check_map(target_size, drafter, vocabulary_map)
        return
    difference, larger = abs(target_size - drafter.vocab_size), max(target_size, drafter.vocab_size)
    if difference > MAX_SIZE_RATIO * larger:
        remedy = _TRANSLATE if _can_translate(drafter) else _OTHER_DRAFTER
        yield Finding(MUST_NOT_RUN, "vocab_size", target_size, drafter.vocab_size, remedy)
    elif difference > MAX_PADDING:
        yield Finding(
            WILL_RUN_BADLY,
            "vocab_size",
            target_size,
            drafter.vocab_size,
            f"That is more than padding: {difference} ids are never drafted. Use the drafter of this model if there "
            "is one.",
        )


def _check_map(target_size: int, drafter: DSparkConfig, vocabulary_map: DraftVocabularyMap) -> Iterator[Finding]:
    map_sizes = (vocabulary_map.target_to_draft.numel(), vocabulary_map.draft_to_target.numel())
    if map_sizes != (target_size, drafter.vocab_size):
        yield Finding(
            MUST_NOT_RUN,
            "vocab_size",
            f"{target_size} ({map_sizes[0]} in the vocabulary map)",
            f"{drafter.vocab_size} ({map_sizes[1]} in the vocabulary map)",
            "Build the `DraftVocabularyMap` anew with the sizes of these two models.",
        )
    if vocabulary_map.num_moved and not _can_translate(drafter):
        yield Finding(
            MUST_NOT_RUN,
            f"the numbering of {vocabulary_map.num_moved} tokens",
            "its own",
            "another, but with the target's head",
            "Ids can be translated only for a drafter with its own head: use the drafter of this model.",
        )


def _can_translate(drafter: DSparkConfig) -> bool:
    # A borrowed head proposes the target's ids, to which W2 would add the bias of other tokens. A borrowed embedding
    # is no hindrance: it is read by the target's ids.
    return drafter.own_lm_head


def _check_mask_row(
    target_size: int, drafter: DSparkConfig, vocabulary_map: DraftVocabularyMap | None
) -> Iterator[Finding]:
    if not drafter.own_embed_tokens and not _has_mask_row(target_size, drafter, vocabulary_map):
        yield Finding(
            MUST_NOT_RUN,
            "the embedding row of the mask token",
            f"missing among {target_size}",
            f"{drafter.mask_token_id} (`mask_token_id`)",
            "The drafter borrows the target's embedding, which has no row for its mask: use the target that the "
            "drafter was trained with, not resized.",
        )


def _has_mask_row(target_size: int, drafter: DSparkConfig, vocabulary_map: DraftVocabularyMap | None) -> bool:
    if vocabulary_map is None or drafter.mask_token_id >= vocabulary_map.draft_to_target.numel():
        return drafter.mask_token_id < target_size
    return 0 <= vocabulary_map.mask_to_target(drafter.mask_token_id) < target_size


def _check_names(target_name: str | None, trained_with: str | None) -> Iterator[Finding]:
    if target_name == trained_with or not target_name or not trained_with:
        return
    if not (is_hub_name(target_name) and is_hub_name(trained_with)):
        return
    if model_name(target_name) != model_name(trained_with):
        yield Finding(
            WILL_RUN_BADLY,
            "the name of the target",
            target_name,
            trained_with,
            "A drafter learns one model's way of writing (base and instruct differ): use the drafter of this model.",
        )


# Tokenizers


def _check_tokenizers(
    target_tokenizer: PreTrainedTokenizerBase,
    drafter_tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    drafter: DSparkConfig,
    vocabulary_map: DraftVocabularyMap | None,
) -> Iterator[Finding]:
    target_ids, drafter_ids = target_tokenizer.get_vocab(), drafter_tokenizer.get_vocab()
    difference = find_split_difference(target_tokenizer, drafter_tokenizer, texts)
    if difference is not None:
        yield Finding(MUST_NOT_RUN, *describe_split(difference))
    if vocabulary_map is None:
        special = {*target_tokenizer.all_special_tokens, *drafter_tokenizer.all_special_tokens}
        remedy = _numbering_remedy(difference is None, drafter)
        yield from _check_numbering(target_ids, drafter_ids, special, remedy)
    yield from _check_token_sets(target_ids, drafter_ids)
    yield from _check_roles(target_tokenizer, drafter_tokenizer)
    yield from _check_surroundings(target_tokenizer, drafter_tokenizer)
    yield from _check_chat_templates(target_tokenizer.chat_template, drafter_tokenizer.chat_template)


def _numbering_remedy(same_split: bool, drafter: DSparkConfig) -> str:
    if not same_split:
        return _OTHER_DRAFTER
    if not _can_translate(drafter):
        return (
            "The tokens are the same, but this drafter borrows the target's head, whose rows it would misread: use "
            "the drafter of this model."
        )
    return (
        "The tokens are the same: pass `tokenizer=` and `assistant_tokenizer=` to `generate`, which translates ids "
        "with a `DraftVocabularyMap`."
    )


def _check_numbering(
    target_ids: Mapping[str, int], drafter_ids: Mapping[str, int], special: set[str], remedy: str
) -> Iterator[Finding]:
    """One finding for special tokens and one for the others, with examples."""
    moved = [token for token, token_id in target_ids.items() if drafter_ids.get(token, token_id) != token_id]
    moved.sort(key=target_ids.__getitem__)
    groups = {
        "special": [token for token in moved if token in special],
        "ordinary": [token for token in moved if token not in special],
    }
    for kind, tokens in groups.items():
        if tokens:
            yield Finding(
                MUST_NOT_RUN,
                f"the numbering of {len(tokens)} {kind} {'token' if len(tokens) == 1 else 'tokens'}",
                _examples({token: target_ids[token] for token in tokens[:3]}, len(tokens)),
                _examples({token: drafter_ids[token] for token in tokens[:3]}, len(tokens)),
                remedy,
            )


def _examples(shown: Mapping[str, int], num_all: int) -> str:
    """`'a' 5, 'b' 6, ...`"""
    text = ", ".join(f"{token!r} {token_id}" for token, token_id in shown.items())
    return text + ", ..." if num_all > len(shown) else text


def _check_token_sets(target_ids: Mapping[str, int], drafter_ids: Mapping[str, int]) -> Iterator[Finding]:
    if target_ids.keys() != drafter_ids.keys():
        yield Finding(
            WILL_RUN_BADLY,
            "the token set",
            _describe_own(target_ids, drafter_ids),
            _describe_own(drafter_ids, target_ids),
            "Tokens of one side only are never accepted drafts: use the drafter of this model if your text holds them "
            "often.",
        )


def _describe_own(ids: Mapping[str, int], others: Mapping[str, int]) -> str:
    """`97 tokens, 2 of its own ('<x>' 95, '<y>' 96)`"""
    own = sorted(ids.keys() - others.keys(), key=ids.__getitem__)
    listed = f" ({_examples({token: ids[token] for token in own[:3]}, len(own))})" if own else ""
    return f"{len(ids)} tokens, {len(own)} of its own{listed}"


def _check_roles(
    target_tokenizer: PreTrainedTokenizerBase, drafter_tokenizer: PreTrainedTokenizerBase
) -> Iterator[Finding]:
    # Not the pad token: it is masked, and users set it to whatever there is.
    for role in ("bos_token", "eos_token", "unk_token"):
        target_token, drafter_token = getattr(target_tokenizer, role), getattr(drafter_tokenizer, role)
        if target_token != drafter_token:
            yield Finding(
                WILL_RUN_BADLY,
                role,
                repr(target_token),
                repr(drafter_token),
                "The drafter may belong to the base model and the target be tuned for chat, or the reverse: use the "
                "drafter of this model.",
            )


def _check_surroundings(
    target_tokenizer: PreTrainedTokenizerBase, drafter_tokenizer: PreTrainedTokenizerBase
) -> Iterator[Finding]:
    target_tokens, drafter_tokens = (
        tokenizer.convert_ids_to_tokens(tokenizer("")["input_ids"])
        for tokenizer in (target_tokenizer, drafter_tokenizer)
    )
    if target_tokens != drafter_tokens:
        yield Finding(
            WILL_RUN_BADLY,
            "what the tokenizer puts around a text",
            target_tokens,
            drafter_tokens,
            "Give the target the tokens around the text that the drafter was trained with.",
        )


def _check_chat_templates(target_template: object, drafter_template: object) -> Iterator[Finding]:
    if target_template != drafter_template:
        yield Finding(
            WILL_RUN_BADLY,
            "the chat template",
            _describe_template(target_template, drafter_template),
            _describe_template(drafter_template, target_template),
            "Drafters learn the answers to prompts in one template: use the template of the drafter's training, "
            "thinking on or off included.",
        )


def _describe_template(template: object, other: object) -> str:
    """`None`, or the place where the template departs from the other one."""
    if template is None:
        return "None"
    start = 0 if other is None else common_prefix_length(str(template), str(other))
    return f"{str(template)[start : start + 40]!r} at character {start}"


def _check_largest_id(
    target_tokenizer: PreTrainedTokenizerBase, drafter: DSparkConfig, vocabulary_map: DraftVocabularyMap | None
) -> Iterator[Finding]:
    largest = max(target_tokenizer.get_vocab().values())
    if vocabulary_map is None and largest >= drafter.vocab_size:
        yield Finding(
            WILL_RUN_BADLY,
            "the largest token id",
            largest,
            drafter.vocab_size - 1,
            "Rounds after a token that the drafter cannot read have no draft: use the drafter of this model if your "
            "text holds such tokens often.",
        )


def _check_mask_in_text(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], drafter: DSparkConfig
) -> Iterator[Finding]:
    mask = drafter.mask_token_id
    for text in texts:
        if mask in tokenizer(text, add_special_tokens=False)["input_ids"]:
            yield Finding(
                WILL_RUN_BADLY,
                f"token id {mask} ({tokenizer.convert_ids_to_tokens(mask)!r})",
                f"ordinary text ({text[:30]!r}...)",
                "the mask token",
                "The drafter cannot tell such text from the places it fills: check `mask_token_id` in its config.",
            )
            return
