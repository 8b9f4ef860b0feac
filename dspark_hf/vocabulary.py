"""The layer between the token ids of a target and those of a drafter made for another order of the same tokens.

A drafter reads and proposes ids of its own tokenizer. Where the target's tokenizer cuts text into the same token
strings but numbers some of them otherwise, or knows some added tokens more or less, a `DraftVocabularyMap` translates
both ways. Only tokens that both sides know pass: the target still verifies nothing but its own ids, so the text stays
the target's. Nothing here knows of models.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from transformers import PreTrainedTokenizerBase

from .errors import AlignmentError

SAMPLE_TEXTS = (
    "The committee hasn't met since 1987; it owed $3,200.50 -- roughly 12.5 % of its budget -- by then.",
    "Die Straßenbahn fährt über die Brücke, während der Schnee fällt.",
    "L'été dernier, nous avons mangé des crêpes à Saint-Malo.",
    "Съешь же ещё этих мягких французских булок, да выпей чаю.",
    "今天天气很好，我们去公园散步吧。人工智能正在改变世界。",
    "東京の桜は三月の終わりに咲きます。",
    "오늘은 날씨가 좋아서 산책하기에 알맞습니다.",
    "ذهبت إلى السوق صباح اليوم واشتريت خبزا طازجا.",
    "नमस्ते, आप कैसे हैं?",
    "Great job 👍🏽🎉 see you at 8 👩‍👩‍👧 🇧🇷",
    "def mean(values):\n    total = 0.0\n    for v in values:\n\t\ttotal += v\n    return total / len(values)\n",
    'int main(void) {\n  for (int i = 0; i < 10; ++i) printf("%d\\n", i * i);\n  return 0;\n}\n',
    "User: What is 17 * 23?\n\nAssistant: Let me think. 17 * 20 = 340 and 17 * 3 = 51, so it is 391.\n",
)


@dataclass(frozen=True)
class SplitDifference:
    """The first sample text that two tokenizers cut into different tokens.

    Attributes:
        text: the text.
        target_tokens, drafter_tokens: at most six token strings of each, from the first difference on.
    """

    text: str
    target_tokens: list[str]
    drafter_tokens: list[str]


@dataclass(frozen=True, eq=False)
class DraftVocabularyMap:
    """Which token id of the drafter means which token id of the target. Never changed: threads may share one.

    "Drafter ids" are the ids that the drafter reads (`config.vocab_size`). A drafter that proposes fewer of them
    (`config.draft_vocab_size`) has its own table for that, which applies first.

    Attributes:
        target_to_draft (`torch.LongTensor` of shape `(target_vocab_size,)`): -1 where the drafter lacks the token.
        draft_to_target (`torch.LongTensor` of shape `(drafter_vocab_size,)`): -1 where the target lacks the token.
        is_identity: both sides give every id the same token (their vocabularies may end at different ids): ids may
            pass unmapped.
        num_common: tokens that both sides know.
        num_moved: common tokens with different ids.
    """

    target_to_draft: torch.Tensor = field(repr=False)
    draft_to_target: torch.Tensor = field(repr=False)
    is_identity: bool
    num_common: int
    num_moved: int

    @classmethod
    def from_tokenizers(
        cls,
        target_tokenizer: PreTrainedTokenizerBase,
        drafter_tokenizer: PreTrainedTokenizerBase,
        *,
        target_vocab_size: int,
        drafter_vocab_size: int,
        texts: Sequence[str] = SAMPLE_TEXTS,
    ) -> "DraftVocabularyMap":
        """Matches the tokens of two tokenizers by their strings. Takes some tenths of a second: build it once.

        Args:
            target_tokenizer, drafter_tokenizer: what each model was trained with.
            target_vocab_size: ids that the target's logits have, padding included.
            drafter_vocab_size: `config.vocab_size` of the drafter. Tokens with ids beyond either size are unknown.
            texts: what both tokenizers must cut alike.

        Raises:
            AlignmentError: the tokenizers split some text differently. What follows a token then differs too, and
                no table of ids can repair that.
        """
        difference = find_split_difference(target_tokenizer, drafter_tokenizer, texts)
        if difference is not None:
            raise AlignmentError(*describe_split(difference))
        target_ids = _ids_below(target_vocab_size, target_tokenizer.get_vocab())
        draft_ids = _ids_below(drafter_vocab_size, drafter_tokenizer.get_vocab())
        common = [(target_ids[token], draft_ids[token]) for token in target_ids.keys() & draft_ids.keys()]
        pairs = torch.tensor(common, dtype=torch.long).reshape(-1, 2)
        shared_size = min(target_vocab_size, drafter_vocab_size)
        return cls(
            target_to_draft=_table(target_vocab_size, pairs[:, 0], pairs[:, 1]),
            draft_to_target=_table(drafter_vocab_size, pairs[:, 1], pairs[:, 0]),
            is_identity=_ids_below(shared_size, target_ids) == _ids_below(shared_size, draft_ids),
            num_common=len(common),
            num_moved=int((pairs[:, 0] != pairs[:, 1]).sum()),
        )

    def to(self, device: torch.device | str) -> "DraftVocabularyMap":
        """The same map with its tables on `device`; this one stays as it is."""
        return replace(
            self,
            target_to_draft=self.target_to_draft.to(device),
            draft_to_target=self.draft_to_target.to(device),
        )

    def to_draft(self, ids: torch.Tensor) -> torch.Tensor:
        """Target ids (`torch.LongTensor` of any shape, on the map's device) to drafter ids of that shape.

        -1 where the drafter lacks the token, and for ids beyond the target's vocabulary.
        """
        return _look_up(self.target_to_draft, ids)

    def to_target(self, ids: torch.Tensor) -> torch.Tensor:
        """Drafter ids (`torch.LongTensor` of any shape, on the map's device) to target ids of that shape.

        -1 where the target lacks the token, and for ids beyond the drafter's vocabulary: such ids are not to be
        proposed.
        """
        return _look_up(self.draft_to_target, ids)

    def mask_to_target(self, mask_token_id: int) -> int:
        """The row of the target's embedding that stands for the drafter's mask, where the drafter borrows that.

        Masks are often ids without a token, from the padding. Such a row is the same in both; -1 where the target
        has no such row, or has another token that both know there.
        """
        target_id = int(self.draft_to_target[mask_token_id])
        if target_id >= 0:
            return target_id
        is_free = mask_token_id < self.target_to_draft.numel() and self.target_to_draft[mask_token_id] < 0
        return mask_token_id if is_free else -1


def split_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[str]:
    """The token strings of a text, as the model gets them but without what is put around it."""
    # `tokenize` would show pieces that have no id; the model sees the unknown token there.
    return list(tokenizer.convert_ids_to_tokens(tokenizer(text, add_special_tokens=False)["input_ids"]))


def find_split_difference(
    target_tokenizer: PreTrainedTokenizerBase,
    drafter_tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str] = SAMPLE_TEXTS,
) -> SplitDifference | None:
    """The first text that the tokenizers cut differently, or `None`.

    Texts that hold an added token of one side only are left out: there the tokenizers differ as they may.
    """
    one_sided = _one_sided_added_tokens(target_tokenizer, drafter_tokenizer)
    for text in texts:
        if any(token in text for token in one_sided):
            continue
        target_tokens, drafter_tokens = split_text(target_tokenizer, text), split_text(drafter_tokenizer, text)
        if target_tokens != drafter_tokens:
            start = common_prefix_length(target_tokens, drafter_tokens)
            window = slice(start, start + 6)
            return SplitDifference(text, target_tokens[window], drafter_tokens[window])
    return None


def describe_split(difference: SplitDifference) -> tuple[str, str, str, str]:
    """`(field, target_value, drafter_value, remedy)` of an `AlignmentError` about a split difference."""
    excerpt = difference.text if len(difference.text) <= 30 else difference.text[:30] + "..."
    return (
        f"the split of {excerpt!r} into tokens",
        repr(difference.target_tokens),
        repr(difference.drafter_tokens),
        "The tokenizers split text differently, which no mapping of ids can repair: use the drafter of this model.",
    )


def common_prefix_length(first: Sequence[str], second: Sequence[str]) -> int:
    """How many items (tokens, or characters of a string) two sequences share from the start."""
    length = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        length += 1
    return length


def _one_sided_added_tokens(
    target_tokenizer: PreTrainedTokenizerBase, drafter_tokenizer: PreTrainedTokenizerBase
) -> set[str]:
    target_only = target_tokenizer.get_added_vocab().keys() - drafter_tokenizer.get_vocab().keys()
    drafter_only = drafter_tokenizer.get_added_vocab().keys() - target_tokenizer.get_vocab().keys()
    return target_only | drafter_only


def _ids_below(size: int, vocabulary: Mapping[str, int]) -> dict[str, int]:
    return {token: token_id for token, token_id in vocabulary.items() if token_id < size}


def _table(size: int, ids: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """`values` ([n]) at the positions `ids` ([n]) of a LongTensor of `size` entries, -1 elsewhere."""
    table = torch.full((size,), -1, dtype=torch.long)
    table[ids] = values
    return table


def _look_up(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    # Masked instead of indexed by a condition: no wait for the device, and the shape stays.
    inside = (ids >= 0) & (ids < table.numel())
    return torch.where(inside, table[ids.clamp(0, table.numel() - 1)], -1)
