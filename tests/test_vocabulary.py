"""Two orders of the same tokens, a few added tokens, and tokenizers that cut text differently."""

import dataclasses

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dspark_hf.errors import AlignmentError, DSparkError
from dspark_hf.vocabulary import SAMPLE_TEXTS, DraftVocabularyMap, find_split_difference, split_text

MERGES = [("t", "h"), ("th", "e"), ("i", "n"), ("Ġ", "w"), ("Ġ", "the")]


def byte_tokens() -> list[str]:
    return sorted(pre_tokenizers.ByteLevel.alphabet()) + [left + right for left, right in MERGES]


def byte_tokenizer(tokens=None, merges=MERGES, **kwargs) -> PreTrainedTokenizerFast:
    """Byte-level BPE over `tokens`, numbered in their order."""
    tokens = tokens or byte_tokens()
    model = models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **kwargs)


def metaspace_tokenizer() -> PreTrainedTokenizerFast:
    tokens = ["<unk>", "▁", *"abcdefghijklmnopqrstuvwxyz"]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def build(target, drafter, target_size=None, drafter_size=None, **kwargs) -> DraftVocabularyMap:
    return DraftVocabularyMap.from_tokenizers(
        target,
        drafter,
        target_vocab_size=target_size or len(target),
        drafter_vocab_size=drafter_size or len(drafter),
        **kwargs,
    )


def ids(tokenizer, text) -> torch.Tensor:
    return torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])


def test_same_tokenizers_are_the_identity():
    vocabulary = build(byte_tokenizer(), byte_tokenizer())
    size = len(byte_tokens())
    assert vocabulary.is_identity
    assert (vocabulary.num_common, vocabulary.num_moved) == (size, 0)
    assert torch.equal(vocabulary.target_to_draft, torch.arange(size))
    assert torch.equal(vocabulary.draft_to_target, torch.arange(size))
    assert vocabulary.target_to_draft.dtype == vocabulary.draft_to_target.dtype == torch.long


@pytest.mark.parametrize("text", SAMPLE_TEXTS)
def test_permuted_ids_are_translated_both_ways(text):
    target, drafter = byte_tokenizer(), byte_tokenizer(byte_tokens()[::-1])
    vocabulary = build(target, drafter)
    assert not vocabulary.is_identity
    assert vocabulary.num_common == len(byte_tokens())
    assert torch.equal(vocabulary.to_draft(ids(target, text)), ids(drafter, text))
    assert torch.equal(vocabulary.to_target(ids(drafter, text)), ids(target, text))


def test_every_mapped_id_means_the_same_token():
    target, drafter = byte_tokenizer(), byte_tokenizer(byte_tokens()[7:] + byte_tokens()[:7])
    target.add_tokens(["<think>"])
    drafter.add_tokens(["<tool>", "<think>"])
    vocabulary = build(target, drafter)
    for target_id, draft_id in enumerate(vocabulary.target_to_draft.tolist()):
        assert target.convert_ids_to_tokens(target_id) == drafter.convert_ids_to_tokens(draft_id)
        assert vocabulary.draft_to_target[draft_id] == target_id


@pytest.mark.parametrize("richer", ["target", "drafter"])
def test_added_tokens_of_one_side_are_unknown_to_the_other(richer):
    target, drafter = byte_tokenizer(), byte_tokenizer()
    (target if richer == "target" else drafter).add_tokens(["<x>", "<y>"])
    vocabulary = build(target, drafter)
    size = len(byte_tokens())
    longer = vocabulary.target_to_draft if richer == "target" else vocabulary.draft_to_target
    assert longer[size:].tolist() == [-1, -1]
    assert vocabulary.num_common == size
    assert vocabulary.num_moved == 0
    assert vocabulary.is_identity, "below the end of both, every id means the same token"


def test_one_id_for_two_tokens_is_no_identity():
    target, drafter = byte_tokenizer(), byte_tokenizer()
    target.add_tokens(["<x>"])
    drafter.add_tokens(["<y>"])
    vocabulary = build(target, drafter)
    assert not vocabulary.is_identity
    assert vocabulary.num_moved == 0
    assert vocabulary.to_draft(torch.tensor([len(byte_tokens())])).item() == -1


def test_padding_means_no_token():
    vocabulary = build(byte_tokenizer(), byte_tokenizer(), target_size=300, drafter_size=280)
    assert vocabulary.target_to_draft.shape == (300,)
    assert vocabulary.draft_to_target.shape == (280,)
    assert (vocabulary.target_to_draft[len(byte_tokens()) :] == -1).all()
    assert vocabulary.is_identity


def test_tokens_beyond_the_target_are_never_proposed():
    vocabulary = build(byte_tokenizer(), byte_tokenizer(), target_size=10)
    assert vocabulary.num_common == 10
    assert vocabulary.to_target(torch.tensor([9, 10, 11])).tolist() == [9, -1, -1]


def test_row_of_the_mask():
    size = len(byte_tokens())
    permuted = build(
        byte_tokenizer(), byte_tokenizer(byte_tokens()[::-1]), target_size=size + 8, drafter_size=size + 9
    )
    assert permuted.mask_to_target(0) == size - 1, "a token: where the target has it"
    assert permuted.mask_to_target(size + 7) == size + 7, "padding of both: the same row"
    assert permuted.mask_to_target(size + 8) == -1, "beyond the target"
    shifted = build(byte_tokenizer(), byte_tokenizer(["<mask>", *byte_tokens()]))
    assert shifted.mask_to_target(0) == -1, "another token's row"


def test_lookups_keep_shapes_and_take_any_id():
    vocabulary = build(byte_tokenizer(), byte_tokenizer())
    size = len(byte_tokens())
    assert vocabulary.to_draft(torch.tensor([[-1, 0], [size, size - 1]])).tolist() == [[-1, 0], [-1, size - 1]]
    assert vocabulary.to_target(torch.empty(2, 0, dtype=torch.long)).shape == (2, 0)


def test_frozen_and_moved_as_a_copy():
    vocabulary = build(byte_tokenizer(), byte_tokenizer())
    with pytest.raises(dataclasses.FrozenInstanceError):
        vocabulary.num_common = 0
    moved = vocabulary.to("meta")
    assert moved.target_to_draft.device.type == moved.draft_to_target.device.type == "meta"
    assert vocabulary.target_to_draft.device.type == "cpu"
    assert (moved.num_common, moved.is_identity) == (vocabulary.num_common, vocabulary.is_identity)
    assert "tensor" not in repr(vocabulary)


def test_other_merges_are_refused():
    with pytest.raises(AlignmentError, match="tokenizers split text differently") as error:
        build(byte_tokenizer(), byte_tokenizer(merges=MERGES[2:4]), texts=["in the sun"])
    assert isinstance(error.value, ValueError)
    assert isinstance(error.value, DSparkError)
    assert "the split of 'in the sun' into tokens is ['Ġthe', " in str(error.value)
    assert "in the target and ['Ġ', 't', 'h', 'e'" in str(error.value)
    assert "use the drafter of this model" in str(error.value)


def test_byte_level_against_metaspace_is_refused():
    with pytest.raises(AlignmentError, match="tokenizers split text differently"):
        build(byte_tokenizer(), metaspace_tokenizer())


def test_built_in_samples_see_a_lost_merge():
    assert find_split_difference(byte_tokenizer(), byte_tokenizer(merges=MERGES[:3])) is not None
    assert find_split_difference(byte_tokenizer(), byte_tokenizer()) is None


def test_texts_with_an_added_token_of_one_side_do_not_refuse():
    target = byte_tokenizer()
    target.add_tokens(["<x>"])
    vocabulary = build(target, byte_tokenizer(), texts=["a <x> b", "the sun"])
    assert vocabulary.num_common == len(byte_tokens())


def test_split_text_shows_what_the_model_gets():
    assert split_text(byte_tokenizer(), "in the") == ["in", "Ġthe"]
    assert split_text(metaspace_tokenizer(), "a7") == ["▁", "a", "<unk>"]
