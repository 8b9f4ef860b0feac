"""A drafter with a draft vocabulary that borrows the rows of its target's head drafts as with a copy of its own."""

import gc
import weakref

import kit
import pytest
import torch

from dspark_hf import DSparkDrafter, borrowing, pack_weights
from dspark_hf.borrowing import head_of
from dspark_hf.candidate_generator import _DraftVocabulary

IDS = torch.arange(5, 90, 2)


@torch.no_grad()
def twins(target, dtype=torch.float32) -> tuple[DSparkDrafter, DSparkDrafter]:
    """A drafter with the target's rows as its own head, and the same one without a head."""
    own = kit.new_drafter(own_lm_head=True, draft_vocab_size=len(IDS))
    borrowing_one = kit.new_drafter(draft_vocab_size=len(IDS))
    for drafter in (own, borrowing_one):
        drafter.d2t.copy_(IDS - torch.arange(len(IDS)))
    own.lm_head.weight.copy_(target.lm_head.weight[IDS])
    borrowing_one.load_state_dict({name: t for name, t in own.state_dict().items() if name != "lm_head.weight"})
    return own.to(dtype), borrowing_one.to(dtype)


def drafted(target, drafter, **settings) -> tuple[list, list]:
    """Texts, and what was proposed in every round."""
    prompts = torch.tensor([kit.PROMPT, kit.PROMPT[::-1]]) if settings.pop("is_batch", False) else None
    input_ids = torch.tensor([kit.PROMPT]) if prompts is None else prompts
    options = {"max_new_tokens": 20, "do_sample": False, "num_assistant_tokens_schedule": "constant", **settings}
    torch.manual_seed(0)
    with drafter.trace() as trace:
        output = target.generate(input_ids, assistant_model=drafter, **options)
    return output.tolist(), [[row[0] for row in one.per_row()] for one in trace.rounds]


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("settings", [{}, {"do_sample": True}, {"is_batch": True}], ids=["greedy", "sampled", "batch"])
def test_drafts_are_those_of_an_own_head(settings, dtype, is_packed):
    target = kit.new_target().to(dtype)
    pair = twins(target, dtype)
    if is_packed:
        for model in (target, *pair):
            pack_weights(model)
    own, borrowed = (drafted(target, drafter, **settings) for drafter in pair)
    assert borrowed == own
    assert any(len(proposed) for one in own[1] for proposed in one)


def test_the_file_holds_no_head(tmp_path):
    target = kit.new_target()
    own, borrowed = twins(target)
    borrowed.save_pretrained(tmp_path)
    loaded = DSparkDrafter.from_pretrained(tmp_path)
    assert loaded.lm_head is None
    assert (loaded.config.draft_vocab_size, loaded.config.own_lm_head) == (len(IDS), False)
    assert drafted(target, loaded) == drafted(target, own)


def test_rows_are_copied_once_and_again_when_weights_change():
    target = kit.new_target()
    _, drafter = twins(target)
    head = head_of(drafter, target)
    assert head_of(drafter, target) is head
    with torch.no_grad():
        target.lm_head.weight[IDS[3]] += 1
    again = head_of(drafter, target)
    assert again is not head
    assert torch.equal(again.weight, target.lm_head.weight[IDS])
    target.to(torch.bfloat16)
    assert head_of(drafter, target).weight.dtype == torch.bfloat16
    with torch.no_grad():
        drafter.d2t += 1
    assert torch.equal(head_of(drafter, target).weight, target.lm_head.weight[IDS + 1])


def test_other_targets_have_rows_of_their_own_and_leave_nothing_behind():
    one, other = kit.new_target(), kit.new_target()
    with torch.no_grad():
        other.lm_head.weight.mul_(2)
    _, drafter = twins(one)
    assert torch.equal(2 * head_of(drafter, one).weight, head_of(drafter, other).weight)
    rows = weakref.ref(head_of(drafter, other))
    del other
    gc.collect()
    assert rows() is None
    assert len(borrowing._rows[drafter]) == 1


class ForeignHead(torch.nn.Module):
    """A head without readable rows, as quantization makes it."""

    def __init__(self, linear):
        super().__init__()
        self.inner = linear

    def forward(self, states):
        return self.inner(states)


def test_a_head_without_rows_runs_whole():
    target = kit.new_target()
    own, borrowed = twins(target)
    expected = drafted(target, own)
    target.set_output_embeddings(ForeignHead(target.lm_head))
    assert drafted(target, borrowed) == expected


def test_ids_that_the_target_lacks_are_never_proposed():
    target = kit.new_target()
    _, drafter = twins(target)
    target.resize_token_embeddings(80)
    there = IDS[IDS < 80]
    assert torch.equal(head_of(drafter, target).weight[: len(there)], target.lm_head.weight[there])
    vocabulary = _DraftVocabulary(drafter, target, None, torch.device("cpu"))
    assert torch.equal(vocabulary.columns, there)
    scores = vocabulary.scatter(torch.ones(1, len(IDS)))
    assert scores.isfinite().nonzero()[:, 1].tolist() == there.tolist()


def test_a_reduced_drafter_with_a_borrowed_head_trains_only_what_is_its_own():
    from dspark_hf.training.objective import ObjectiveWeights
    from dspark_hf.training.step import TrainingStep

    target = kit.new_target()
    _, drafter = twins(target)
    step = TrainingStep(drafter, target, ObjectiveWeights())
    assert not [name for name, _ in step.named_parameters() if "lm_head" in name]
