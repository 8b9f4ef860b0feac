"""The law of the output: with a drafter, tokens have exactly the distribution of plain sampling.

Three levels: the acceptance kernel alone, by many draws; the real decoding loop, exactly, by visiting every outcome of
every random choice with its probability; and the real loop again, by many seeded calls.
"""

import copy
import itertools
import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache

import pytest
import torch
from kit import new_drafter
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM
from transformers.generation import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from dspark_hf import (
    DraftVocabularyMap,
    DSparkCandidateGenerator,
    DSparkDrafter,
    SpeculativeDecoding,
    candidate_generator,
    committing,
    generation,
)
from dspark_hf.admission import SurvivalGate, budget, spend
from dspark_hf.candidate_generator import Draft
from dspark_hf.costs import CostTable, RoundCosts
from dspark_hf.policies import SCHEDULES
from dspark_hf.sampling import draw, is_accepted, probabilities, residual
from dspark_hf.scheduling import DraftLength, Plan, RowPlan, RowState, Schedule

PROMPT = [0, 1, 1, 2]
Law = dict[tuple[int, ...], float]


@cache
def tiny_target(vocab_size: int = 3) -> PreTrainedModel:
    """Three layers and a few tokens, with a peaked distribution that depends on the prefix."""
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        initializer_range=0.5,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(1)
    return Qwen3ForCausalLM(config).eval()


@cache
def tiny_drafter(vocab_size: int = 3, **settings) -> DSparkDrafter:
    if settings.pop("reduced", False):
        settings |= {"draft_vocab_size": (vocab_size + 1) // 2, "own_lm_head": True}
    drafter = new_drafter(
        **{
            "vocab_size": vocab_size,
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 4,
            "block_size": 3,
            "mask_token_id": vocab_size - 1,
            "target_layer_ids": [0, 1],
            "num_target_layers": 3,
            "markov_rank": 2,
            "initializer_range": 0.7,
            **settings,
        }
    )
    if drafter.config.has_reduced_vocabulary:
        # Every second token: 0, 2, ...
        drafter.d2t.copy_(torch.arange(drafter.config.draft_vocab_size))
    with torch.no_grad():
        drafter.confidence_head.proj.weight.mul_(3)  # sure of some positions, unsure of others
        if drafter.lm_head is not None:
            drafter.lm_head.weight.mul_(0.3)  # less peaked than random weights are
    return drafter


class Tree:
    """Visits every outcome of a random computation, one run each, and adds up their probabilities."""

    def __init__(self) -> None:
        self._script: list[list[int]] = []  # for each choice on the way: option taken, number of options
        self._depth = 0
        self._probability = 1.0
        self.num_accepted = 0
        self.num_rejected = 0

    def law_of(self, run: Callable[[], tuple[int, ...]]) -> Law:
        law: Law = defaultdict(float)
        self._script = []
        while True:
            self._depth, self._probability = 0, 1.0
            outcome = run()
            law[outcome] += self._probability
            while self._script and self._script[-1][0] == self._script[-1][1] - 1:
                self._script.pop()
            if not self._script:
                assert sum(law.values()) == pytest.approx(1, abs=1e-6)
                return dict(law)
            self._script[-1][0] += 1

    def choose(self, weights: list[float]) -> int:
        options = [index for index, weight in enumerate(weights) if weight > 0]
        if self._depth == 0:
            # The first token comes from the prompt's pass, never from a draft: the most likely one stands for all.
            options = [max(options, key=weights.__getitem__)]
            weights = [1.0] * len(weights)
        if self._depth == len(self._script):
            self._script.append([0, len(options)])
        choice = options[self._script[self._depth][0]]
        self._depth += 1
        self._probability *= weights[choice]
        return choice

    def multinomial(self, probs: torch.Tensor, num_samples: int = 1, **kwargs) -> torch.Tensor:
        """In place of `torch.multinomial`, which plain sampling, drafting and verification all draw with."""
        assert probs.shape[0] == num_samples == 1
        row = probs[0].double()
        return torch.tensor([[self.choose((row / row.sum()).tolist())]])

    def is_accepted(self, target_probs, draft_probs, token_id, uniform) -> torch.Tensor:
        """In place of the loop's `is_accepted`: a uniform from either side of the border, weighted by its share."""
        assert uniform.shape == token_id.shape == (1,)
        assert 0 <= float(uniform) < 1
        token = int(token_id)
        target, draft = float(target_probs[0, token]), float(draft_probs[0, token])
        assert draft > 0, "a token was proposed that the draft distribution cannot produce"
        border = min(1.0, target / draft)
        border = round(border) if min(border, 1 - border) < 1e-6 else border
        rejected = bool(self.choose([border, 1 - border]))
        scripted = torch.tensor([(1 + border) / 2 if rejected else border / 2])
        accepted = is_accepted(target_probs, draft_probs, token_id, scripted)
        assert bool(accepted) != rejected
        self.num_accepted += not rejected
        self.num_rejected += rejected
        return accepted


@pytest.fixture
def tree(monkeypatch) -> Tree:
    tree = Tree()
    monkeypatch.setattr(torch, "multinomial", tree.multinomial)
    monkeypatch.setattr(committing, "is_accepted", tree.is_accepted)
    return tree


def sampled(
    target: PreTrainedModel, own_processor: type[LogitsProcessor] | None = None, **kwargs
) -> Callable[[], tuple[int, ...]]:
    """A function that calls `generate` once, sampling, and returns the new tokens."""
    input_ids = torch.tensor([PROMPT])

    def run() -> tuple[int, ...]:
        own = {} if own_processor is None else {"logits_processor": LogitsProcessorList([own_processor()])}
        mask = torch.ones_like(input_ids)
        output = target.generate(input_ids, attention_mask=mask, do_sample=True, **own, **kwargs)
        return tuple(output[0, len(PROMPT) :].tolist())

    return run


def assert_same_law(actual: Law, expected: Law, tolerance: float = 1e-6) -> None:
    for outcome in actual.keys() | expected.keys():
        assert actual.get(outcome, 0.0) == pytest.approx(expected.get(outcome, 0.0), abs=tolerance), outcome


def distance(first: Law, second: Law) -> float:
    return sum(abs(first.get(key, 0.0) - second.get(key, 0.0)) for key in first.keys() | second.keys())


class BiasByCall(LogitsProcessor):
    """A processor with a memory: each call pushes another token. One call too many, and everything shifts."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        scores = scores.clone()
        scores[:, self.num_calls % scores.shape[1]] += 1.5
        self.num_calls += 1
        return scores


class BiasByPrefix(LogitsProcessor):
    """A processor of the user's own, without a memory: pushes the token that follows the last one."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        scores = scores.clone()
        scores[:, (int(input_ids[0, -1]) + 1) % scores.shape[1]] += 1.5
        return scores


PROCESSORS = {
    "no_processor": {},
    "cold": {"temperature": 0.4},
    "hot": {"temperature": 2.5},
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.3},
    "typical_p": {"typical_p": 0.7},
    "epsilon_cutoff": {"epsilon_cutoff": 0.1},
    "repetition_penalty": {"repetition_penalty": 1.6},
    "no_repeat_ngram": {"no_repeat_ngram_size": 2},
    "sequence_bias": {"sequence_bias": [[[1], 1.0], [[1, 2], -2.0]]},
    "temperature_top_k_top_p": {"temperature": 0.8, "top_k": 2, "top_p": 0.9},
    "penalty_min_p": {"repetition_penalty": 1.3, "min_p": 0.3},
    "stop_token": {"eos_token_id": 2, "pad_token_id": 0},
    "stop_token_but_not_yet": {"eos_token_id": 2, "pad_token_id": 0, "min_new_tokens": 3},
    "own_processor": {"own_processor": BiasByPrefix, "top_k": 2},
    "own_processor_with_memory": {"own_processor": BiasByCall, "top_k": 2},
}
DRAFTERS = {
    "vanilla": {},
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn"},
    "no_markov_head": {"markov_head_type": "none"},
    "from_masks": {"sample_from_anchor": False},
    "reduced_vocabulary": {"reduced": True},
    "own_embedding_and_head": {"own_embed_tokens": True, "own_lm_head": True},
}


def assert_exact(tree: Tree, drafter: DSparkDrafter | None, drafting: dict | None = None, **kwargs) -> None:
    """The law with the drafter is that of plain sampling, and drafts were accepted and rejected on the way."""
    kwargs = {"max_new_tokens": 4, **kwargs}
    target = tiny_target()
    expected = tree.law_of(sampled(target, **kwargs))
    actual = tree.law_of(sampled(target, assistant_model=drafter, **(drafting or {}), **kwargs))
    assert_same_law(actual, expected)
    assert len(expected) > 3


class TestLoop:
    """Every outcome of the real loop, with its probability, against every outcome of plain sampling."""

    @pytest.mark.parametrize("processors", PROCESSORS)
    def test_the_law_is_that_of_plain_sampling(self, processors, tree):
        assert_exact(tree, tiny_drafter(), **PROCESSORS[processors])
        assert tree.num_accepted > 0
        assert tree.num_rejected > 0

    @pytest.mark.parametrize("kind", DRAFTERS)
    def test_the_law_does_not_depend_on_the_drafter(self, kind, tree):
        assert_exact(tree, tiny_drafter(**DRAFTERS[kind]), temperature=0.7, top_k=2)
        assert tree.num_accepted > 0
        assert tree.num_rejected > 0

    @pytest.mark.parametrize("processors", ["top_p", "repetition_penalty", "no_repeat_ngram"])
    def test_the_law_with_a_reduced_vocabulary_and_processors(self, processors, tree):
        assert_exact(tree, tiny_drafter(**DRAFTERS["reduced_vocabulary"]), **PROCESSORS[processors])
        assert tree.num_accepted > 0
        assert tree.num_rejected > 0

    @pytest.mark.parametrize("to_target", [[2, 0, 1], [2, -1, 0]], ids=["moved", "moved_and_one_unknown"])
    def test_the_law_does_not_depend_on_the_numbers_that_the_drafter_gives_tokens(self, to_target, tree):
        to_draft = [to_target.index(token) if token in to_target else -1 for token in range(3)]
        tables = torch.tensor(to_draft), torch.tensor(to_target)
        num_common = sum(token >= 0 for token in to_target)
        vocabulary_map = DraftVocabularyMap(*tables, is_identity=False, num_common=num_common, num_moved=num_common)
        drafter = tiny_drafter(**DRAFTERS["own_embedding_and_head"])
        decoding = SpeculativeDecoding(drafter, vocabulary_map=vocabulary_map)
        assert_exact(tree, None, {"custom_generate": decoding}, repetition_penalty=1.3, top_k=2)
        assert tree.num_accepted > 0
        assert tree.num_rejected > 0

    @pytest.mark.parametrize("num_tokens", [1, 2, 3])
    def test_the_law_does_not_depend_on_the_length_of_drafts(self, num_tokens, tree):
        assert_exact(
            tree, tiny_drafter(), {"num_assistant_tokens": num_tokens}, top_k=2, temperature=0.8, max_new_tokens=5
        )
        assert tree.num_accepted > 0
        assert tree.num_rejected > 0

    @pytest.mark.parametrize("threshold", [0.0, 0.6, 1.0])
    @pytest.mark.parametrize("kind", ["vanilla", "gated"])
    def test_the_law_does_not_depend_on_the_confidence_threshold(self, kind, threshold, tree, monkeypatch):
        cut_short: set[bool] = set()
        real_draft = DSparkCandidateGenerator.draft

        def draft(generator, prefixes, limits, gate=None):
            proposed = real_draft(generator, prefixes, limits, gate)
            cut_short.add(proposed.length < limits[0])
            return proposed

        monkeypatch.setattr(DSparkCandidateGenerator, "draft", draft)
        drafter = tiny_drafter(**DRAFTERS[kind])
        assert_exact(tree, drafter, {"assistant_confidence_threshold": threshold}, top_k=2)
        # 0 is off, nothing is ever so sure as 1; between, it differs from draft to draft.
        assert cut_short == {0.0: {False}, 0.6: {False, True}, 1.0: {True}}[threshold]
        assert (tree.num_accepted > 0) == (threshold < 1)
        assert (tree.num_rejected > 0) == (threshold < 1)

    def test_a_confidence_may_tell_the_token_before_it(self, tree, monkeypatch):
        """As in the counterexample of the paper's appendix; no rule may look at it before that token is drawn."""
        drafter, first = tiny_drafter(), int(tiny_target().generate(torch.tensor([PROMPT]), max_new_tokens=1)[0, -1])

        def confidence(hidden_states: torch.Tensor, previous_ids: torch.Tensor, position: int = 0) -> torch.Tensor:
            return torch.where(previous_ids == first, 0.9, 0.0)

        monkeypatch.setattr(drafter, "confidence", confidence)
        assert_exact(tree, drafter, {"assistant_confidence_threshold": 0.5}, temperature=1.2)
        assert tree.num_accepted > 0
        assert tree.num_rejected > 0

    def test_an_overflow_that_depends_on_a_drawn_token_takes_nothing_back(self, tree):
        # After token 2 the next position overflows. To drop token 2 itself for that would make it rarer.
        drafter = copy.deepcopy(tiny_drafter())
        with torch.no_grad():
            drafter.markov_head.markov_w1.weight[2] = torch.nan
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            assert_exact(tree, drafter)
        assert tree.num_accepted > 0
        assert tree.num_rejected > 0

    def test_a_draft_distribution_without_a_finite_score_changes_nothing(self, tree):
        drafter = copy.deepcopy(tiny_drafter())
        with torch.no_grad():
            drafter.markov_head.markov_w2.weight.fill_(torch.nan)
        with pytest.warns(UserWarning, match="overflow"):
            assert_exact(tree, drafter)
        assert tree.num_accepted + tree.num_rejected == 0


class Turns(Schedule):
    """The context and the drafter take turns, so that a one-hot draft follows a drawn one and the other way round."""

    def __init__(self, settings: DraftLength, table: CostTable, pads_rows: bool = False):
        self.num_rounds = 0

    def plan(self, rows: Sequence[RowState]) -> Plan:
        self.num_rounds += 1
        return Plan([self.plan_row(row) for row in rows], "turns")

    def plan_row(self, row: RowState) -> RowPlan:
        if row.offer is not None and (self.num_rounds + row.row) % 2:
            return RowPlan("lookup", min(2, len(row.offer.token_ids)))
        return RowPlan("drafter", min(2, row.room)) if row.room else RowPlan("none", 0)


class TestContextLookup:
    """Tokens copied from the context are proposed without chance: their distribution is one-hot."""

    @pytest.mark.parametrize("processors", ["no_processor", "top_k", "repetition_penalty", "own_processor"])
    def test_the_law_is_that_of_plain_sampling(self, processors, tree, monkeypatch):
        sources: set[str] = set()
        real = generation._record

        def record(plan: Plan, *args, **kwargs):
            sources.update(row.source for row in plan.rows)
            return real(plan, *args, **kwargs)

        monkeypatch.setattr(generation, "_record", record)
        monkeypatch.setattr(generation, "new_schedule", Turns)
        drafter = tiny_drafter()
        with drafter.trace():
            assert_exact(tree, drafter, {"prompt_lookup_num_tokens": 2}, **PROCESSORS[processors], max_new_tokens=5)
        assert {"lookup", "drafter"} <= sources
        assert tree.num_accepted > 0
        assert tree.num_rejected > 0

    def test_rows_of_both_kinds_in_one_draft(self):
        torch.manual_seed(0)
        scores = torch.randn(2, 2, 5)
        drawn = Draft(torch.tensor([[1, 2], [3, 4]]), scores, lengths=[2, 0])
        mixed = generation._with_copies(drawn, {1: [0, 2, 1]})
        assert mixed.row_lengths == [2, 3]
        assert mixed.token_ids[0, :2].tolist() == [1, 2]
        assert mixed.token_ids[1].tolist() == [0, 2, 1]
        assert torch.equal(mixed.scores[0, :2], scores[0])
        assert probabilities(mixed.scores[1]).tolist() == torch.eye(5)[[0, 2, 1]].tolist()


def set_prices(monkeypatch: pytest.MonkeyPatch, seconds: Sequence[float]) -> None:
    """Passes have these prices by their number of draft tokens, and drafts none; each call learns for itself."""
    monkeypatch.setattr(generation, "_cost_table", lambda *of: CostTable())
    monkeypatch.setattr(RoundCosts, "num_plain", lambda self, num_rows: 100)
    monkeypatch.setattr(RoundCosts, "draft_seconds", lambda self, num_rows: (0.0, 0.0))
    monkeypatch.setattr(
        RoundCosts,
        "pass_seconds",
        lambda self, num_rows, size: [seconds[min(n, len(seconds) - 1)] for n in range(size + 1)],
    )


class Certain(LogitsProcessor):
    """The target says 0 with a chance of 0.7 and 1 with 0.3, always."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        return torch.tensor([[0.7, 0.3, 0.0]]).log().expand_as(scores)


class TestPolicies:
    """How a draft's length is decided never shows in the law of the output."""

    # A token has to survive with a chance of a third, about.
    SLOPE = (1.0, 1.33, 1.66, 2.0)

    @pytest.mark.parametrize("processors", ["top_k", "own_processor"])
    @pytest.mark.parametrize("policy", SCHEDULES)
    def test_the_law_is_that_of_plain_sampling(self, policy, processors, tree, monkeypatch):
        set_prices(monkeypatch, self.SLOPE)
        lengths: set[int] = set()
        real_draft = DSparkCandidateGenerator.draft

        def draft(generator, prefixes, limits, gate=None):
            proposed = real_draft(generator, prefixes, limits, gate)
            lengths.add(proposed.length)
            return proposed

        monkeypatch.setattr(DSparkCandidateGenerator, "draft", draft)
        settings = {"num_assistant_tokens_schedule": policy, "prompt_lookup_num_tokens": 0}
        assert_exact(tree, tiny_drafter(), settings, **PROCESSORS[processors], max_new_tokens=5)
        assert tree.num_accepted > 0
        assert tree.num_rejected > 0
        # The others have one length that pays, by what they know so far.
        assert policy in ("constant", "auto", "acceptance") or len(lengths) > 1

    @pytest.mark.parametrize("policy", ["confidence", "entropy"])
    @pytest.mark.parametrize("threshold", [0.0, 0.7, 1.0])
    def test_the_law_does_not_depend_on_the_threshold(self, threshold, policy, tree):
        settings = {"num_assistant_tokens_schedule": policy, "assistant_confidence_threshold": threshold}
        assert_exact(tree, tiny_drafter(), settings)
        assert (tree.num_accepted > 0) == (threshold < 1)

    def law_of_the_appendix(self, tree: Tree, monkeypatch: pytest.MonkeyPatch, policy: str | None) -> Law:
        """The paper's appendix A: 1, 0.5 and 0.45 steps per second, an even draft, and a confidence that gives the
        first token away: 0.8, then 0.9 after a 0 and 0 after a 1."""
        set_prices(monkeypatch, [1.0, 2.0, 1 / 0.45, 1 / 0.45])

        def confidence(self, hidden_states, previous_ids, position=0):
            return torch.full(previous_ids.shape, 0.8) if position == 0 else 0.9 * (previous_ids == 0).float()

        def score(self, logits, rows, prefixes):
            return torch.tensor([[0.5, 0.5, 0.0]]).log().expand(len(rows), -1), torch.zeros(len(rows))

        monkeypatch.setattr(DSparkDrafter, "confidence", confidence)
        monkeypatch.setattr(DSparkCandidateGenerator, "_score", score)
        drafting = {}
        if policy is not None:
            drafting = {"assistant_model": tiny_drafter(), "num_assistant_tokens_schedule": policy}
            drafting |= {"num_assistant_tokens": 2}
        return tree.law_of(sampled(tiny_target(), Certain, max_new_tokens=4, **drafting))

    @pytest.mark.parametrize("policy", ["hardware", "hardware-decoupled", "constant"])
    def test_the_counterexample_of_the_paper(self, policy, tree, monkeypatch):
        law = self.law_of_the_appendix(tree, monkeypatch, policy)
        assert_same_law(law, self.law_of_the_appendix(tree, monkeypatch, None))
        assert sum(p for tokens, p in law.items() if tokens[1] == 0) == pytest.approx(0.7)

    def test_a_search_that_sees_the_draft_is_noticed(self, tree, monkeypatch):
        def admitted(self, lengths):
            drawn = [values[:length] for values, length in zip(self.survivals, lengths, strict=True)]
            return spend(drawn, budget(drawn, self.costs))

        monkeypatch.setattr(SurvivalGate, "admitted", admitted)
        law = self.law_of_the_appendix(tree, monkeypatch, "hardware")
        assert sum(p for tokens, p in law.items() if tokens[1] == 0) == pytest.approx(0.85)


class TestTeeth:
    """The comparison above fails on samplers that are almost right."""

    def law_with(self, tree: Tree) -> tuple[Law, Law]:
        target, kwargs = tiny_target(), {"max_new_tokens": 3, "temperature": 1.3}
        plain = tree.law_of(sampled(target, **kwargs))
        return tree.law_of(sampled(target, assistant_model=tiny_drafter(), **kwargs)), plain

    def test_the_real_one_passes(self, tree):
        assert distance(*self.law_with(tree)) < 1e-5

    def test_a_residual_that_is_the_target_itself_is_noticed(self, tree, monkeypatch):
        monkeypatch.setattr(committing, "residual", lambda target_probs, draft_probs: target_probs)
        assert distance(*self.law_with(tree)) > 1e-2

    def test_the_most_likely_draft_with_a_soft_distribution_is_noticed(self, tree, monkeypatch):
        monkeypatch.setattr(candidate_generator, "draw", lambda probs: probs.argmax(dim=-1))
        assert distance(*self.law_with(tree)) > 1e-2

    def test_another_temperature_for_the_draft_alone_is_noticed(self, tree, monkeypatch):
        monkeypatch.setattr(candidate_generator, "draw", lambda probs: draw(probs.sqrt()))
        assert distance(*self.law_with(tree)) > 1e-2

    def test_a_draft_cut_by_its_own_last_token_is_noticed(self, tree, monkeypatch):
        real_draft = DSparkCandidateGenerator.draft

        def draft(generator, prefixes, limits, gate=None):
            proposed = real_draft(generator, prefixes, limits, gate)
            if proposed.length and int(proposed.token_ids[0, -1]) == 0:
                return Draft(proposed.token_ids[:, :-1], proposed.scores[:, :-1], columns=proposed.columns)
            return proposed

        monkeypatch.setattr(DSparkCandidateGenerator, "draft", draft)
        assert distance(*self.law_with(tree)) > 1e-2


class TestDraftScores:
    """`Draft.scores` is what its tokens were really drawn from."""

    @pytest.mark.parametrize("kind", ["vanilla", "reduced_vocabulary", "from_masks"])
    @pytest.mark.parametrize(
        "warpers", [[], [TemperatureLogitsWarper(0.5), TopKLogitsWarper(2)]], ids=["raw", "warped"]
    )
    @torch.no_grad()
    def test_every_token_comes_from_its_scores(self, kind, warpers, monkeypatch):
        target, drafter = tiny_target(5), tiny_drafter(5, **DRAFTERS[kind])
        drawn: list[tuple[torch.Tensor, int]] = []

        def recording_draw(probs: torch.Tensor) -> torch.Tensor:
            token = draw(probs)
            drawn.append((probs[0], int(token)))
            return token

        monkeypatch.setattr(candidate_generator, "draw", recording_draw)
        torch.manual_seed(0)
        with DSparkCandidateGenerator(
            drafter, target, do_sample=True, logits_processor=LogitsProcessorList(warpers)
        ) as generator:
            with generator.listening(prefill=True):
                target(torch.tensor([PROMPT[:-1]]), use_cache=False)
            seen = set()
            for _ in range(20):
                drawn.clear()
                draft = generator.draft(torch.tensor([PROMPT]), 99)
                assert draft.length == drafter.config.num_draft_tokens
                assert draft.scores.shape == (1, draft.length, 5 if draft.columns is None else len(draft.columns))
                assert draft.scores.dtype == torch.float32
                for k, (probs, column) in enumerate(drawn):
                    token = column if draft.columns is None else int(draft.columns[column])
                    assert token == draft.token_ids[0, k]
                    assert torch.equal(probs, probabilities(draft.scores[0, k]))
                    proposed = draft.probabilities((0, k), 5)
                    assert float(proposed[token]) == float(probs[column])
                    assert float(proposed.sum()) == pytest.approx(1)
                    assert proposed.tolist() == pytest.approx(
                        probabilities(draft.over_vocabulary(5).scores[0, k]).tolist(), abs=1e-6
                    )
                seen.add(tuple(draft.token_ids[0].tolist()))
            assert len(seen) > 1, "argmax, not a draw"
            support = torch.isfinite(draft.over_vocabulary(5).scores).any(dim=1)[0]
            if kind == "reduced_vocabulary":
                assert not bool(support[[1, 3]].any())

    @torch.no_grad()
    def test_a_greedy_draft_has_none(self):
        target, drafter = tiny_target(5), tiny_drafter(5)
        with DSparkCandidateGenerator(drafter, target) as generator:
            with generator.listening(prefill=True):
                target(torch.tensor([PROMPT[:-1]]), use_cache=False)
            assert generator.draft(torch.tensor([PROMPT]), 99).scores is None


# 99.99 % quantile of the standard normal distribution.
Z = 3.719


def assert_follows(counts: torch.Tensor, probs: torch.Tensor) -> None:
    """Chi-square test of `[cells]` counts against `[cells]` probabilities; rare cells are pooled."""
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


WARPERS = {
    "raw": [],
    "cold": [TemperatureLogitsWarper(0.3)],
    "hot": [TemperatureLogitsWarper(2.0)],
    "top_k": [TopKLogitsWarper(2)],
    "top_p": [TopPLogitsWarper(0.7)],
    "min_p": [MinPLogitsWarper(0.2)],
    "typical_p": [TypicalLogitsWarper(0.6)],
    "temperature_top_k_top_p": [TemperatureLogitsWarper(0.7), TopKLogitsWarper(3), TopPLogitsWarper(0.9)],
}


class TestKernel:
    """Many draws of whole blocks where both distributions are tables: five tokens, the last one decides the next."""

    NUM_SAMPLES, VOCAB, LENGTH = 40_000, 5, 3

    def tables(self, warpers: list) -> tuple[torch.Tensor, torch.Tensor]:
        """`[V, V]` distributions of the target and of a draft that is only like it."""
        generator = torch.Generator().manual_seed(7)
        logits = 2 * torch.randn(self.VOCAB, self.VOCAB, generator=generator)
        noise = torch.randn(self.VOCAB, self.VOCAB, generator=generator)
        process = LogitsProcessorList(warpers)
        return tuple(probabilities(process(None, scores)) for scores in (logits, logits + noise))

    def simulate(self, target: torch.Tensor, draft: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`[N, LENGTH]` tokens after one round, filled up by the target, and the `[N]` numbers of accepted ones."""
        previous = torch.zeros(self.NUM_SAMPLES, dtype=torch.long)
        alive = torch.ones(self.NUM_SAMPLES, dtype=torch.bool)
        accepted, columns = torch.zeros(self.NUM_SAMPLES, dtype=torch.long), []
        drafted = previous
        for _ in range(self.LENGTH):
            # While alive, the committed prefix is the draft's own.
            p, q = target[previous], draft[drafted]
            drafted = draw(q)
            stands = is_accepted(p, q, drafted, torch.rand(self.NUM_SAMPLES)) & alive
            corrected = draw(torch.where(alive[:, None], residual(p, q), p))
            previous = torch.where(stands, drafted, corrected)
            accepted, alive = accepted + stands, stands
            columns.append(previous)
        return torch.stack(columns, dim=-1), accepted

    @pytest.mark.parametrize("warpers", WARPERS)
    def test_three_tokens_have_the_targets_joint_law(self, warpers):
        torch.manual_seed(11)
        target, draft = self.tables(WARPERS[warpers])
        tokens, accepted = self.simulate(target, draft)
        assert int((accepted > 0).sum()) > 0
        assert int((accepted < self.LENGTH).sum()) > 0
        law = target[0][:, None, None] * target[:, :, None] * target[None]
        cells = tokens @ torch.tensor([self.VOCAB**2, self.VOCAB, 1])
        assert_follows(cells.bincount(minlength=self.VOCAB**3), law)

    def test_the_acceptance_rate_is_the_overlap_of_both_distributions(self):
        torch.manual_seed(12)
        target, draft = self.tables([])
        _, accepted = self.simulate(target, draft)
        overlap = float(torch.minimum(target[0], draft[0]).sum())
        assert float((accepted > 0).float().mean()) == pytest.approx(overlap, abs=0.01)

    def test_a_wrong_law_is_noticed(self):
        torch.manual_seed(13)
        target, draft = self.tables([])
        counts = draw(draft[:1].expand(self.NUM_SAMPLES, -1)).bincount(minlength=self.VOCAB)
        with pytest.raises(AssertionError):
            assert_follows(counts, target[0])


@pytest.mark.slow
class TestManyCalls:
    """Seeded calls of `generate` against the exact law, nothing patched."""

    @pytest.mark.parametrize(
        ("kind", "processors"), [("vanilla", "no_processor"), ("reduced_vocabulary", "temperature_top_k_top_p")]
    )
    def test_three_tokens_have_the_law_of_plain_sampling(self, kind, processors):
        target, drafter = tiny_target(5), tiny_drafter(5, **DRAFTERS[kind])
        kwargs = {"max_new_tokens": 3, **PROCESSORS[processors]}
        law = exact_law(target, 3, **PROCESSORS[processors])
        torch.manual_seed(14)
        counts = torch.zeros(5, 5, 5)
        with drafter.trace() as trace:
            for _ in range(2000):
                counts[sampled(target, assistant_model=drafter, **kwargs)()] += 1
        assert_follows(counts, law)
        accepted = sum(r.accepted for r in trace.rounds)
        assert 0 < accepted < sum(len(r.proposed) for r in trace.rounds)


def exact_law(target: PreTrainedModel, num_tokens: int, **kwargs) -> torch.Tensor:
    """`[V] * num_tokens` joint probabilities, from the processed scores of plain generation after every prefix."""
    vocab_size = target.config.vocab_size
    law = torch.zeros([vocab_size] * num_tokens)
    conditional: dict[tuple[int, ...], torch.Tensor] = {}
    for length in range(num_tokens):
        for prefix in itertools.product(range(vocab_size), repeat=length):
            input_ids = torch.tensor([[*PROMPT, *prefix]])
            output = target.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                do_sample=True,
                max_new_tokens=1,
                output_scores=True,
                return_dict_in_generate=True,
                **kwargs,
            )
            conditional[prefix] = output.scores[0][0].softmax(-1)
    for outcome in itertools.product(range(vocab_size), repeat=num_tokens):
        law[outcome] = math.prod(float(conditional[outcome[:i]][token]) for i, token in enumerate(outcome))
    return law
