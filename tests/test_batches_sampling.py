"""The law of sampled batches: every row has the law of plain sampling, and rows know nothing of each other.

Exactly, by visiting every outcome of every random choice of two rows in the real decoding loop, and by many seeded
calls on wide batches. In both paces of the loop: row by row (one position after the other, and all at once, as on an
accelerator), and in step, where a processor of the user's own wants to see the whole batch.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from test_sampling_law import DRAFTERS, Law, Tree, assert_same_law, distance, set_prices, tiny_drafter, tiny_target
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from dspark_hf import DSparkDrafter, candidate_generator, committing
from dspark_hf.candidate_generator import DSparkCandidateGenerator
from dspark_hf.sampling import draw, is_accepted, probabilities, residual

ROWS = [[0, 1, 1, 2], [2]]
CONSTANT = {"num_assistant_tokens_schedule": "constant"}


def batch(rows: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
    """Several prompts, padded on the left with 0."""
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


class Unchanged(LogitsProcessor):
    """A processor of the user's own: rows go in step."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        assert len(input_ids) == len(scores)
        return scores


class BiasByCall(LogitsProcessor):
    """A processor with a memory: each call pushes another token. One call too many, and everything shifts."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        scores = scores.clone()
        scores[:, self.num_calls % scores.shape[1]] += 1.5
        self.num_calls += 1
        return scores


class BiasByRow(LogitsProcessor):
    """A processor that treats each row in its own way, by the row's place and by its last token."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        rows = torch.arange(len(scores))
        scores = scores.clone()
        scores[rows, (input_ids[:, -1] + rows) % scores.shape[1]] += 1.5
        return scores


PACES: dict[str, dict[str, Any]] = {
    "row by row": {},
    "at once": {},
    "in step": {"own": Unchanged},
}


@pytest.fixture(params=PACES)
def pace(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Arguments of `generate` that make the loop go at this pace."""
    monkeypatch.setattr(committing, "decides_at_once", lambda device: request.param == "at once")
    return PACES[request.param]


class BatchTree(Tree):
    """A tree of choices in which every row of a batch chooses for itself."""

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self.num_rows = num_rows

    def choose(self, weights: list[float]) -> int:
        if self._depth < self.num_rows:
            # First tokens come from the prompts' pass, never from a draft: the most likely ones stand for all.
            most_likely = max(range(len(weights)), key=weights.__getitem__)
            weights = [float(index == most_likely) for index in range(len(weights))]
        options = [index for index, weight in enumerate(weights) if weight > 0]
        if self._depth == len(self._script):
            self._script.append([0, len(options)])
        choice = options[self._script[self._depth][0]]
        self._depth += 1
        self._probability *= weights[choice]
        return choice

    def multinomial(self, probs: torch.Tensor, num_samples: int = 1, **kwargs: Any) -> torch.Tensor:
        assert num_samples == 1
        return torch.tensor([[self.choose((row / row.sum()).tolist())] for row in probs.double()])

    def is_accepted(
        self, target_probs: torch.Tensor, draft_probs: torch.Tensor, token_id: torch.Tensor, uniform: torch.Tensor
    ) -> torch.Tensor:
        assert uniform.shape == token_id.shape == target_probs.shape[:-1]
        assert bool(((uniform >= 0) & (uniform < 1)).all())
        target = target_probs.gather(-1, token_id[..., None]).flatten().tolist()
        draft = draft_probs.gather(-1, token_id[..., None]).flatten().tolist()
        scripted = []
        for p, q in zip(target, draft, strict=True):
            if not q > 0:
                # Padding behind a shorter draft: whatever comes out is not looked at.
                scripted.append(0.5)
                continue
            border = min(1.0, p / q)
            border = round(border) if min(border, 1 - border) < 1e-6 else border
            rejected = bool(self.choose([border, 1 - border]))
            scripted.append((1 + border) / 2 if rejected else border / 2)
            self.num_accepted += not rejected
            self.num_rejected += rejected
        return is_accepted(target_probs, draft_probs, token_id, uniform.new_tensor(scripted).view(uniform.shape))


@pytest.fixture
def tree(monkeypatch: pytest.MonkeyPatch) -> BatchTree:
    tree = BatchTree(len(ROWS))
    monkeypatch.setattr(torch, "multinomial", tree.multinomial)
    monkeypatch.setattr(committing, "is_accepted", tree.is_accepted)
    return tree


def sampled(
    target: PreTrainedModel, own: Callable[[], LogitsProcessor] | None = None, **kwargs: Any
) -> Callable[[], tuple[int, ...]]:
    """A function that calls `generate` on both rows once, sampling, and returns the new tokens, row after row."""

    def run() -> tuple[int, ...]:
        more = {} if own is None else {"logits_processor": LogitsProcessorList([own()])}
        output = target.generate(**batch(ROWS), do_sample=True, **more, **kwargs)
        return tuple(output[:, 4:].flatten().tolist())

    return run


SETTINGS: dict[str, dict[str, Any]] = {
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.8},
    "temperature_top_p": {"temperature": 0.6, "top_p": 0.9},
    "repetition_penalty": {"repetition_penalty": 1.6, "top_k": 2},
    "no_repeat_ngram": {"no_repeat_ngram_size": 2},
    "stop_token": {"top_k": 2, "eos_token_id": 1, "pad_token_id": 0},
}


def assert_exact(
    tree: BatchTree, drafter: DSparkDrafter, drafting: dict[str, Any] | None = None, **kwargs: Any
) -> None:
    """The law of both rows together is that of plain sampling, and drafts were accepted and rejected on the way."""
    target, kwargs = tiny_target(), {"max_new_tokens": 3, **kwargs}
    expected = tree.law_of(sampled(target, **kwargs))
    actual = tree.law_of(sampled(target, assistant_model=drafter, **{**CONSTANT, **(drafting or {})}, **kwargs))
    assert_same_law(actual, expected)
    assert len(expected) > 3
    assert tree.num_accepted > 0
    assert tree.num_rejected > 0


class TestLoop:
    """Every outcome of two rows of the real loop, with its probability, against plain sampling of the same batch."""

    @pytest.mark.parametrize("settings", SETTINGS)
    def test_the_law_of_both_rows_is_that_of_plain_sampling(
        self, settings: str, pace: dict[str, Any], tree: BatchTree
    ):
        assert_exact(tree, tiny_drafter(), **SETTINGS[settings], **pace)

    @pytest.mark.parametrize("own", [BiasByCall, BiasByRow], ids=["by call", "by row"])
    def test_a_processor_of_the_users_own(self, own: type[LogitsProcessor], tree: BatchTree):
        assert_exact(tree, tiny_drafter(), own=own, top_k=2)

    @pytest.mark.parametrize("kind", DRAFTERS)
    def test_the_law_does_not_depend_on_the_drafter(self, kind: str, pace: dict[str, Any], tree: BatchTree):
        assert_exact(tree, tiny_drafter(**DRAFTERS[kind]), temperature=0.7, top_k=2, **pace)

    def test_the_law_does_not_depend_on_the_confidence_threshold(self, pace: dict[str, Any], tree: BatchTree):
        drafting = {"assistant_confidence_threshold": 0.6}
        assert_exact(tree, tiny_drafter(), drafting, top_k=2, **pace)

    @pytest.mark.parametrize("policy", ["auto", "acceptance", "entropy", "hardware", "hardware-decoupled"])
    def test_the_law_does_not_depend_on_the_schedule(
        self, policy: str, tree: BatchTree, monkeypatch: pytest.MonkeyPatch
    ):
        # A token has to survive with a chance of a third, about: rows draft different lengths. "auto" asks for more:
        # of so few tokens it expects that the slower row gets less than its share.
        price = 0.05 if policy == "auto" else 0.16
        set_prices(monkeypatch, [1 + price * n for n in range(9)])
        drafting = {"num_assistant_tokens_schedule": policy, "prompt_lookup_num_tokens": 0}
        assert_exact(tree, tiny_drafter(), drafting, top_k=2, max_new_tokens=4)

    @pytest.mark.parametrize("collected", ["output_scores", "output_logits"])
    def test_outputs_change_nothing(self, collected: str, tree: BatchTree):
        target, kwargs = tiny_target(), {"top_k": 2, "max_new_tokens": 3}

        def run() -> tuple[int, ...]:
            call = {**batch(ROWS), "do_sample": True, "return_dict_in_generate": True, collected: True, **kwargs}
            output = target.generate(**call, assistant_model=tiny_drafter(), **CONSTANT)
            return tuple(output.sequences[:, 4:].flatten().tolist())

        assert_same_law(tree.law_of(run), tree.law_of(sampled(target, **kwargs)))

    @pytest.mark.slow
    @pytest.mark.parametrize("settings", ["top_p", "temperature_top_p", "stop_token"])
    def test_longer_drafts(self, settings: str, pace: dict[str, Any], tree: BatchTree):
        assert_exact(tree, tiny_drafter(), max_new_tokens=4, **SETTINGS[settings], **pace)


class TestTeeth:
    """The comparisons of this module fail on samplers that are almost right."""

    def law_with(self, tree: BatchTree, pace: dict[str, Any], **settings: Any) -> tuple[Law, Law]:
        target, kwargs = tiny_target(), {"max_new_tokens": 3, "temperature": 1.3, **settings, **pace}
        plain = tree.law_of(sampled(target, **kwargs))
        return tree.law_of(sampled(target, assistant_model=tiny_drafter(), **CONSTANT, **kwargs)), plain

    def test_the_real_one_passes(self, pace: dict[str, Any], tree: BatchTree):
        assert distance(*self.law_with(tree, pace, top_k=2)) < 1e-5

    def test_a_residual_that_is_the_target_itself_is_noticed(
        self, pace: dict[str, Any], tree: BatchTree, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setattr(committing, "residual", lambda target_probs, draft_probs: target_probs)
        assert distance(*self.law_with(tree, pace, top_k=2)) > 1e-2

    @pytest.mark.slow
    def test_the_residual_of_another_row_is_noticed(
        self, pace: dict[str, Any], tree: BatchTree, monkeypatch: pytest.MonkeyPatch
    ):
        def mixed_up(target_probs: torch.Tensor, draft_probs: torch.Tensor) -> torch.Tensor:
            return residual(target_probs, draft_probs.flip(0))

        monkeypatch.setattr(committing, "residual", mixed_up)
        assert distance(*self.law_with(tree, pace)) > 1e-2

    @pytest.mark.parametrize("function", ["rand_like", "multinomial"])
    def test_a_number_that_rows_share_is_noticed(self, function: str, monkeypatch: pytest.MonkeyPatch):
        def rand_like(like: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            return torch.rand(1).expand(like.shape)

        def multinomial(probs: torch.Tensor, num_samples: int = 1, **kwargs: Any) -> torch.Tensor:
            total = probs.double().cumsum(dim=-1)
            number = torch.rand(1, dtype=torch.double) * (1 - 1e-9)
            return (total / total[:, -1:] <= number).sum(dim=-1, keepdim=True)

        monkeypatch.setattr(torch, function, {"rand_like": rand_like, "multinomial": multinomial}[function])
        with pytest.raises(AssertionError):
            assert_rows_are_independent(**WIDE["raw"])


class TestDraftScores:
    """In a batch too, `Draft.scores` is what each row's tokens were really drawn from."""

    @pytest.mark.parametrize("kind", ["vanilla", "reduced_vocabulary", "from_masks", "rnn"])
    @torch.no_grad()
    def test_every_token_comes_from_its_scores(self, kind: str, monkeypatch: pytest.MonkeyPatch):
        target, drafter = tiny_target(5), tiny_drafter(5, **DRAFTERS[kind])
        drawn: list[tuple[torch.Tensor, torch.Tensor]] = []

        def recording_draw(probs: torch.Tensor) -> torch.Tensor:
            tokens = draw(probs)
            drawn.append((probs, tokens))
            return tokens

        monkeypatch.setattr(candidate_generator, "draw", recording_draw)
        torch.manual_seed(0)
        prompts = batch([[0, 1, 1, 2], [2, 4]])
        with DSparkCandidateGenerator(
            drafter, target, do_sample=True, num_rows=2, prompt_mask=prompts["attention_mask"][:, :-1]
        ) as generator:
            with generator.listening(prefill=True):
                target(prompts["input_ids"][:, :-1], attention_mask=prompts["attention_mask"][:, :-1], use_cache=False)
            seen: list[set[tuple[int, ...]]] = [set(), set()]
            for _ in range(20):
                drawn.clear()
                draft = generator.draft(list(prompts["input_ids"].split(1)), [99, 1])
                longest = drafter.config.num_draft_tokens
                assert draft.row_lengths == [longest, min(1, longest)]
                assert draft.scores.shape == (2, longest, 5 if draft.columns is None else len(draft.columns))
                assert draft.scores.dtype == torch.float32
                for row, length in enumerate(draft.row_lengths):
                    for k in range(length):
                        probs, tokens = drawn[k]
                        token = tokens[row] if draft.columns is None else draft.columns[tokens[row]]
                        assert token == draft.token_ids[row, k]
                        assert torch.equal(probs[row], probabilities(draft.scores[row, k]))
                    seen[row].add(tuple(draft.token_ids[row, :length].tolist()))
            assert all(len(drafts) > 1 for drafts in seen), "argmax, not a draw"


# Quantile of the standard normal distribution that is exceeded once in a million.
Z = 4.753


def assert_follows(counts: torch.Tensor, probs: torch.Tensor) -> None:
    """Chi-square test of counts against probabilities of the same shape; rare cells are pooled."""
    counts, expected = counts.double().flatten(), probs.double().flatten() * counts.sum()
    assert not bool(counts[expected == 0].any()), "an impossible outcome occurred"
    rare = expected < 5
    counts = torch.cat((counts[~rare], counts[rare].sum()[None]))
    expected = torch.cat((expected[~rare], expected[rare].sum()[None]))
    kept = expected > 0
    statistic = float(((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum())
    freedom = int(kept.sum()) - 1
    # Wilson and Hilferty's approximation of the quantile.
    critical = freedom * (1 - 2 / (9 * freedom) + Z * math.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < critical


VOCAB, LENGTH = 5, 3


@cache
def exact_law(row: int, **kwargs: Any) -> torch.Tensor:
    """`[V, V, V]` joint probabilities of a row's new tokens, from plain generation after every prefix."""
    law = torch.ones([VOCAB] * LENGTH)
    for length in range(LENGTH):
        prefixes = [[*WIDE_ROWS[row], *prefix] for prefix in itertools.product(range(VOCAB), repeat=length)]
        call = {**batch(prefixes), "do_sample": True, "max_new_tokens": 1, **kwargs}
        output = tiny_target(VOCAB).generate(**call, return_dict_in_generate=True, output_scores=True)
        conditional = output.scores[0].softmax(-1).view([VOCAB] * (length + 1))
        law = law * conditional.view(*conditional.shape, *[1] * (LENGTH - length - 1))
    return law


WIDE_ROWS = [[3, 1, 1, 2], [2, 4]]
WIDE: dict[str, dict[str, Any]] = {
    "raw": {},
    "cold": {"temperature": 0.5},
    "top_k_top_p": {"temperature": 0.8, "top_k": 3, "top_p": 0.9},
}


def sample_wide(num_calls: int, own: Callable[[], LogitsProcessor] | None = None, **kwargs: Any) -> torch.Tensor:
    """`[calls, 2, 64, LENGTH]` new tokens of calls with 64 rows of either prompt."""
    outputs = []
    for _ in range(num_calls):
        more = {} if own is None else {"logits_processor": LogitsProcessorList([own()])}
        call = {**batch(WIDE_ROWS), "do_sample": True, "max_new_tokens": LENGTH, "num_return_sequences": 64}
        output = tiny_target(VOCAB).generate(**call, assistant_model=tiny_drafter(VOCAB), **CONSTANT, **more, **kwargs)
        outputs.append(output[:, 4:].view(2, 64, LENGTH))
    return torch.stack(outputs)


def counted(*columns: torch.Tensor) -> torch.Tensor:
    """Occurrences of each combination of tokens."""
    cells = torch.zeros(columns[0].numel(), dtype=torch.long)
    for column in columns:
        cells = VOCAB * cells + column.flatten()
    return cells.bincount(minlength=VOCAB ** len(columns))


def assert_rows_are_independent(num_calls: int = 12, **kwargs: Any) -> None:
    """Second and third tokens of pairs of rows, which come from drafts, against the product of their laws."""
    settings = {name: value for name, value in kwargs.items() if name != "own"}
    torch.manual_seed(5)
    tokens = sample_wide(num_calls, **kwargs)
    for position in (1, 2):
        others = [axis for axis in range(LENGTH) if axis != position]
        law = [exact_law(row, **settings).sum(others) for row in range(2)]
        for row in range(2):
            first, second = tokens[:, row, 0::2, position], tokens[:, row, 1::2, position]
            assert_follows(counted(first, second), torch.outer(law[row], law[row]))
        first, second = tokens[:, 0, :, position], tokens[:, 1, :, position]
        assert_follows(counted(first, second), torch.outer(*law))


class TestWideBatches:
    """Batches of 128 rows, nothing patched but the pace."""

    @pytest.mark.parametrize("settings", WIDE)
    def test_each_row_has_the_law_of_plain_sampling(self, settings: str, pace: dict[str, Any]):
        torch.manual_seed(21)
        with tiny_drafter(VOCAB).trace() as trace:
            tokens = sample_wide(24, **WIDE[settings], **pace)
        for row in range(2):
            columns = [tokens[:, row, :, i] for i in range(LENGTH)]
            assert_follows(counted(*columns), exact_law(row, **WIDE[settings]))
        proposed = sum(len(p) for r in trace.rounds for p in r.proposed)
        assert 0 < sum(sum(r.accepted) for r in trace.rounds) < proposed

    def test_rows_are_independent(self, pace: dict[str, Any]):
        assert_rows_are_independent(**WIDE["raw"], **pace)

    def test_a_wrong_law_is_noticed(self):
        torch.manual_seed(22)
        tokens = sample_wide(24, temperature=1.4)
        with pytest.raises(AssertionError):
            assert_follows(counted(*[tokens[:, 0, :, i] for i in range(LENGTH)]), exact_law(0))


class TestRandomness:
    """Rows have numbers of their own, and a seed brings them all back."""

    def texts(self, seed: int, pace: dict[str, Any], rows: Sequence[Sequence[int]], **kwargs: Any) -> list[list[int]]:
        own = pace.get("own")
        more = {} if own is None else {"logits_processor": LogitsProcessorList([own()])}
        call = {**batch(rows), "do_sample": True, "max_new_tokens": 12, **more, **kwargs}
        torch.manual_seed(seed)
        return tiny_target(VOCAB).generate(**call, assistant_model=tiny_drafter(VOCAB), **CONSTANT).tolist()

    def test_equal_rows_say_different_things(self, pace: dict[str, Any]):
        texts = self.texts(3, pace, [[0, 1, 1, 2]] * 16, temperature=2.0)
        assert len(set(map(tuple, texts))) == 16

    def test_return_sequences_say_different_things(self, pace: dict[str, Any]):
        texts = self.texts(3, pace, [[0, 1, 1, 2]], temperature=2.0, num_return_sequences=16)
        assert len(set(map(tuple, texts))) == 16

    def test_a_seed_makes_it_reproducible(self, pace: dict[str, Any]):
        rows = [[0, 1, 1, 2], [2], [4, 3]]
        first, again, other = (self.texts(seed, pace, rows, temperature=2.0) for seed in (3, 3, 4))
        assert first == again
        assert first != other
