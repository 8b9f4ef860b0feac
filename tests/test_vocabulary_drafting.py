"""A drafter whose ids are another order of the target's drafts exactly what its twin with the target's order drafts.

No comparison of texts can show an error here: the text stays the target's, and only acceptance would fall.
"""

from collections.abc import Sequence

import kit
import pytest
import torch

from dspark_hf import DSparkDrafter, SpeculativeDecoding
from dspark_hf.trace import Round
from dspark_hf.vocabulary import DraftVocabularyMap

ORDER = torch.randperm(kit.VOCAB, generator=torch.Generator().manual_seed(7))
"""Drafter id of each target id."""


def vocabulary_map() -> DraftVocabularyMap:
    moved = int((torch.arange(kit.VOCAB) != ORDER).sum())
    return DraftVocabularyMap(ORDER, ORDER.argsort(), is_identity=False, num_common=kit.VOCAB, num_moved=moved)


def twin_of(drafter: DSparkDrafter) -> DSparkDrafter:
    """The same drafter with its ids in the other order."""
    config = drafter.config.to_dict()
    twin = kit.new_drafter(**{name: config[name] for name in SETTINGS} | {"mask_token_id": int(ORDER[kit.MASK])})
    twin.load_state_dict(drafter.state_dict())
    with torch.no_grad():
        reordered = [twin.markov_head.markov_w1] if twin.markov_head is not None else []
        reordered += [part for part in (twin.embed_tokens,) if part is not None]
        if not twin.config.has_reduced_vocabulary:
            reordered += [twin.lm_head] + ([twin.markov_head.markov_w2] if twin.markov_head is not None else [])
        for part in reordered:
            part.weight.copy_(part.weight[ORDER.argsort()])
        if twin.config.has_reduced_vocabulary:
            # The rows stay; where they point to changes.
            rows = torch.arange(twin.config.draft_vocab_size)
            twin.d2t.copy_(ORDER[drafter.to_target_ids(rows)] - rows)
    return twin


SETTINGS = (
    "own_embed_tokens",
    "own_lm_head",
    "draft_vocab_size",
    "markov_head_type",
    "confidence_head_with_markov",
    "embedding_scale",
)


def rounds(drafter: DSparkDrafter, mapping: DraftVocabularyMap | None, **kwargs) -> Sequence[Round]:
    torch.manual_seed(3)
    decoding = SpeculativeDecoding(drafter, vocabulary_map=mapping)
    with drafter.trace() as trace:
        kit.target().generate(**kit.inputs(), max_new_tokens=16, custom_generate=decoding, **kwargs)
    return trace.rounds


@pytest.mark.parametrize("sampling", [{"do_sample": False}, {"do_sample": True}, {"repetition_penalty": 1.3}], ids=str)
@pytest.mark.parametrize(
    "settings",
    [
        {"own_embed_tokens": True, "own_lm_head": True},
        {"own_embed_tokens": True, "own_lm_head": True, "markov_head_type": "rnn"},
        {"own_embed_tokens": False, "own_lm_head": True},
        {"own_embed_tokens": True, "own_lm_head": True, "draft_vocab_size": 40},
    ],
    ids=["own embedding", "rnn", "borrowed embedding", "reduced vocabulary"],
)
def test_twins_draft_alike(settings, sampling):
    drafter = kit.new_drafter(**settings)
    if drafter.config.has_reduced_vocabulary:
        drafter.d2t.copy_(torch.arange(40))  # every second token
    ours, twins = rounds(drafter, None, **sampling), rounds(twin_of(drafter), vocabulary_map(), **sampling)
    assert [r.proposed for r in twins] == [r.proposed for r in ours]
    for one, other in zip(twins, ours, strict=True):
        assert one.confidence == pytest.approx(other.confidence, abs=1e-5)
    assert any(r.proposed for r in ours)
