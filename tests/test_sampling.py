"""Speculative sampling as pure functions: against recorded cases of the reference and against its definition."""

import json

import pytest
import torch
from conftest import FIXTURES
from safetensors.torch import load_file

from dspark_hf.sampling import draw, is_accepted, probabilities, residual

CASES = json.loads((FIXTURES / "sampling_math" / "golden.json").read_text(encoding="utf-8"))["cases"]
TENSORS = load_file(FIXTURES / "sampling_math" / "golden.safetensors")
ALL_CASES = [case["case"] for case in CASES]  # case 0 is greedy: its distributions are one-hot
SAMPLED = [case["case"] for case in CASES if case["temperature"] > 0]


def random_pairs(num_pairs: int = 300) -> tuple[torch.Tensor, torch.Tensor]:
    """`[N, 6]` distributions of targets and drafts, with tokens that one, the other or both cannot produce."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randint(0, 5, (2, num_pairs, 6), generator=generator).float()
    weights[..., 0] += weights.sum(-1) == 0
    target, draft = weights / weights.sum(-1, keepdim=True)
    assert bool(((target == 0) & (draft > 0)).any()) and bool(((target > 0) & (draft == 0)).any())
    return target, draft


def tensor_of(case: int, name: str) -> torch.Tensor:
    return TENSORS[f"case{case}.{name}"]


class TestRecordedCases:
    """Blocks of five draft tokens, decided by the reference with the uniforms that are recorded beside them."""

    @pytest.mark.parametrize("case", SAMPLED)
    @pytest.mark.parametrize("side", ["draft", "target"])
    def test_probabilities(self, case, side):
        scores = tensor_of(case, f"{side}_logits") / CASES[case]["temperature"]
        torch.testing.assert_close(probabilities(scores), tensor_of(case, f"{side}_probs"), atol=1e-6, rtol=0)

    @pytest.mark.parametrize("case", ALL_CASES)
    def test_acceptance(self, case):
        target, draft = tensor_of(case, "target_probs")[:5], tensor_of(case, "draft_probs")
        tokens = torch.tensor(CASES[case]["draft_tokens"])
        accepted = is_accepted(target, draft, tokens, tensor_of(case, "uniforms"))
        # The reference records the accepted prefix only.
        assert accepted.long().cumprod(dim=0).tolist() == CASES[case]["accept_prefix_mask"]

    @pytest.mark.parametrize("case", ALL_CASES)
    def test_distribution_of_the_next_token(self, case):
        accepted = CASES[case]["accepted_draft_tokens"]
        target = tensor_of(case, "target_probs")[accepted]
        if accepted < 5:
            target = residual(target, tensor_of(case, "draft_probs")[accepted])
        torch.testing.assert_close(target, tensor_of(case, "next_token_distribution"), atol=1e-6, rtol=0)
        assert int(target.argmax()) == CASES[case]["next_token_argmax_of_distribution"]


class TestProbabilities:
    def test_they_are_float32_whatever_the_scores(self):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            probs = probabilities(torch.randn(3, 50).to(dtype))
            assert probs.dtype == torch.float32
            torch.testing.assert_close(probs.sum(-1), torch.ones(3))

    def test_a_filtered_score_has_no_chance(self):
        assert probabilities(torch.tensor([0.0, -torch.inf, 0.0])).tolist() == [0.5, 0.0, 0.5]

    def test_large_scores_do_not_overflow(self):
        assert probabilities(torch.tensor([1e30, 0.0])).tolist() == [1.0, 0.0]


class TestAcceptance:
    @pytest.mark.parametrize("token", range(6))
    def test_it_is_a_uniform_below_p_over_q(self, token):
        target, draft = random_pairs()
        possible = draft[:, token] > 0  # what the draft cannot produce is never asked about
        target, draft = target[possible], draft[possible]
        ratio = target[:, token].double() / draft[:, token].double()
        tokens = torch.full((len(ratio),), token)
        for uniform in torch.linspace(0.003, 0.997, 97).double():
            expected = uniform < ratio
            assert torch.equal(is_accepted(target, draft, tokens, uniform.float().expand(len(ratio))), expected)

    @pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-24])
    def test_equal_distributions_accept_everything(self, uniform):
        probs = probabilities(torch.randn(1, 40))
        tokens = torch.arange(40)
        accepted = is_accepted(probs.expand(40, -1), probs.expand(40, -1), tokens, torch.full((40,), uniform))
        assert bool(accepted.all())

    def test_what_the_target_cannot_produce_never_stands(self):
        target, draft = torch.tensor([1.0, 0.0]), torch.tensor([0.5, 0.5])
        assert not bool(is_accepted(target, draft, torch.tensor(1), torch.tensor(0.0)))

    @pytest.mark.parametrize("uniform", [0.0, 1 - 2**-24])
    def test_a_token_likelier_in_the_target_always_stands(self, uniform):
        target, draft = torch.tensor([0.6, 0.4]), torch.tensor([0.5, 0.5])
        assert bool(is_accepted(target, draft, torch.tensor(0), torch.tensor(uniform)))

    def test_a_one_hot_draft_stands_with_the_probability_of_its_token(self):
        target, draft = torch.tensor([0.25, 0.75]), torch.tensor([1.0, 0.0])
        below, above = torch.tensor(0.249), torch.tensor(0.251)
        assert bool(is_accepted(target, draft, torch.tensor(0), below))
        assert not bool(is_accepted(target, draft, torch.tensor(0), above))

    def test_leading_dimensions_are_independent(self):
        target, draft = torch.rand(2, 3, 7).softmax(-1), torch.rand(2, 3, 7).softmax(-1)
        tokens, uniforms = torch.randint(0, 7, (2, 3)), torch.rand(2, 3)
        together = is_accepted(target, draft, tokens, uniforms)
        for i in range(2):
            for j in range(3):
                alone = is_accepted(target[i, j], draft[i, j], tokens[i, j], uniforms[i, j])
                assert bool(alone) == bool(together[i, j])


class TestResidual:
    def test_it_is_what_acceptance_leaves_of_the_target(self):
        target, draft = random_pairs()
        accepted = torch.minimum(target, draft)  # mass that arrives through accepted drafts
        rejected = 1 - accepted.sum(-1, keepdim=True)
        law = accepted + rejected * residual(target, draft)
        torch.testing.assert_close(law, target, atol=1e-6, rtol=0)

    def test_it_is_a_distribution_within_the_targets_support(self):
        target, draft = random_pairs()
        probs = residual(target, draft)
        torch.testing.assert_close(probs.sum(-1), torch.ones(len(probs)))
        assert bool((probs >= 0).all())
        assert not bool(probs[target == 0].any())

    def test_equal_distributions_leave_the_targets_own(self):
        probs = torch.tensor([[0.2, 0.8, 0.0]])
        assert torch.equal(residual(probs, probs), probs)

    def test_what_rounding_leaves_of_equal_distributions_is_harmless(self):
        target = torch.tensor([0.3, 0.7])
        probs = residual(target, target * (1 - 2**-23))
        torch.testing.assert_close(probs.sum(), torch.tensor(1.0))
        assert bool(torch.isfinite(probs).all())

    def test_a_tiny_mass_is_normalised(self):
        target, draft = torch.tensor([1e-30, 1.0, 0.0]), torch.tensor([0.0, 1.0, 0.0])
        assert residual(target, draft).tolist() == [1.0, 0.0, 0.0]

    def test_a_one_hot_draft_leaves_the_other_tokens(self):
        probs = residual(torch.tensor([0.5, 0.3, 0.2]), torch.tensor([1.0, 0.0, 0.0]))
        torch.testing.assert_close(probs, torch.tensor([0.0, 0.6, 0.4]))

    def test_disjoint_supports_leave_the_whole_target(self):
        target = torch.tensor([0.0, 0.25, 0.75])
        assert torch.equal(residual(target, torch.tensor([1.0, 0.0, 0.0])), target)


class TestDraw:
    def test_one_id_from_each_row(self):
        assert draw(torch.eye(5)[[3, 0, 4]]).tolist() == [3, 0, 4]

    def test_what_has_no_chance_is_never_drawn(self):
        torch.manual_seed(0)
        drawn = draw(torch.tensor([[0.5, 0.0, 0.5]]).expand(5000, -1))
        assert set(drawn.tolist()) == {0, 2}
