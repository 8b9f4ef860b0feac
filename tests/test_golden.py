"""Agreement with the published implementations, whose own runs are recorded in the fixtures.

`golden.json` holds tokens and counts of every round, `golden.safetensors` the tensors of the first two rounds and of
one block without a cache. Everything must agree to 1e-4 in float32.
"""

import json
from functools import cache

import pytest
import torch
from conftest import FIXTURES, embed, head_of, load_pair
from safetensors.torch import load_file
from transformers import PreTrainedModel

from dspark_hf import DSparkDrafter, UnsupportedCheckpointError
from dspark_hf.draft_cache import DraftCache
from dspark_hf.target_taps import TargetTaps
from dspark_hf.trace import Round

DEEPSPEC_SINGLE = [
    "deepspec_qwen3_vanilla",
    "deepspec_qwen3_gated",
    "deepspec_qwen3_rnn",
    "deepspec_qwen3_nomarkov",
    "deepspec_gemma4",
    "zlab_dflash",
]
SPECULATORS_SINGLE = [
    "speculators_dspark",
    "speculators_dspark_reduced",
    "speculators_dspark_noanchor",
    "speculators_dspark_swa",
]
WITH_BLOCK = DEEPSPEC_SINGLE + SPECULATORS_SINGLE
NO_DRAFTER = {"deepspec_eagle3", "sampling_math"}
ATTENTION = ["sdpa", "eager"]


@cache
def golden(name: str) -> dict:
    return json.loads((FIXTURES / name / "golden.json").read_text(encoding="utf-8"))


@cache
def tensors(name: str) -> dict[str, torch.Tensor]:
    return load_file(FIXTURES / name / "golden.safetensors")


RUNS = [(name, run["name"]) for name in WITH_BLOCK for run in golden(name)["runs"]]
RECORDED = [(name, run) for name, run in RUNS if f"{run}.round0.block_hidden" in tensors(name)]


def find_run(name: str, run_name: str) -> dict:
    return next(run for run in golden(name)["runs"] if run["name"] == run_name)


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


def generate(target: PreTrainedModel, drafter: DSparkDrafter, run: dict, **kwargs):
    return target.generate(
        torch.tensor([run["prompt_ids"]]),
        assistant_model=drafter,
        do_sample=False,
        max_new_tokens=run["max_new_tokens"],
        eos_token_id=run["stop_token_ids"],
        assistant_confidence_threshold=run.get("confidence_threshold"),
        **kwargs,
    )


def expected_new_tokens(run: dict) -> list[int]:
    """Tokens that each round adds until the output is complete; a reference may count those beyond its end as well."""
    left = len(run["new_token_ids"]) - 1  # the prefill gives the first one
    counts = []
    for count in run["acceptance_lengths"]:
        if left > 0:
            counts.append(min(count, left))
            left -= count
    return counts


def draft_logits(drafter: DSparkDrafter, base: torch.Tensor, hidden: torch.Tensor, previous: list[int]):
    """`[n, Vd]` base logits plus the Markov bias of the tokens before each slot, target ids."""
    if drafter.markov_head is None:
        return base
    state, rows = drafter.markov_head.initial_state(1), []
    for k, token in enumerate(previous):
        bias, state = drafter.markov_head(torch.tensor([token]), hidden[k : k + 1], state)
        rows.append(base[k] + bias[0])
    return torch.stack(rows)


def greedy_chain(drafter: DSparkDrafter, base: torch.Tensor, hidden: torch.Tensor, anchor: int) -> list[int]:
    """Target ids of the most likely tokens, left to right; `base` and `hidden` start at the first predicting slot."""
    state = None if drafter.markov_head is None else drafter.markov_head.initial_state(1)
    previous, chain = torch.tensor([anchor]), []
    for k in range(base.shape[0]):
        logits = base[k]
        if drafter.markov_head is not None:
            bias, state = drafter.markov_head(previous, hidden[k : k + 1], state)
            logits = logits + bias[0]
        previous = drafter.to_target_ids(logits.argmax()[None])
        chain.append(int(previous))
    return chain


def in_draft_vocabulary(drafter: DSparkDrafter, logits: torch.Tensor) -> torch.Tensor:
    """Reference logits over the target's ids, -inf outside the draft vocabulary, to the rows of the drafter's head."""
    ids = drafter.to_target_ids(torch.arange(drafter.config.draft_vocab_size))
    assert bool((logits == -torch.inf).sum() == logits.numel() - logits[..., ids].numel())
    return logits[..., ids]


def test_every_fixture_is_covered():
    assert {*WITH_BLOCK, *NO_DRAFTER} == {path.name for path in FIXTURES.iterdir()}
    assert len(RUNS) == sum(len(golden(name)["runs"]) for name in WITH_BLOCK) > 50


def test_an_eagle3_head_is_refused_by_name():
    with pytest.raises(UnsupportedCheckpointError, match=r"(?i)eagle"):
        DSparkDrafter.from_pretrained(FIXTURES / "deepspec_eagle3")


@cache
def traced_run(name: str, run_name: str) -> tuple[list[int], list[Round]]:
    """Output ids and rounds of our own run of the same call."""
    run, (target, drafter) = find_run(name, run_name), load_pair(name)
    with drafter.trace() as trace:
        output = generate(target, drafter, run)
    return output[0].tolist(), trace.rounds


class TestRuns:
    """Whole calls of `generate`."""

    @pytest.mark.parametrize(("name", "run_name"), RUNS)
    def test_output_and_every_round_are_those_of_the_reference(self, name, run_name):
        run, (output, rounds) = find_run(name, run_name), traced_run(name, run_name)
        assert output == run["output_ids"]
        assert [r.num_new_tokens for r in rounds] == expected_new_tokens(run)
        left = run["max_new_tokens"] - 1
        for ours, theirs in zip(rounds, run["rounds"], strict=False):
            # Nothing is drafted beyond the length limit, where the reference cuts its output.
            assert ours.proposed == theirs["verify_input_ids"][1:][: max(0, left - 1)]
            assert ours.accepted == min(theirs["accepted_draft_tokens"], len(ours.proposed))
            left -= ours.num_new_tokens

    @pytest.mark.parametrize(("name", "run_name"), RUNS)
    def test_confidence_of_every_round_is_that_of_the_reference(self, name, run_name):
        run, drafter, (_, rounds) = find_run(name, run_name), load_pair(name)[1], traced_run(name, run_name)
        threshold = run.get("confidence_threshold") or 0.0
        left = run["max_new_tokens"] - 1
        for ours, theirs in zip(rounds, run["rounds"], strict=False):
            room = min(drafter.config.num_draft_tokens, left - 1)
            left -= ours.num_new_tokens
            if drafter.confidence_head is None or room < 1:
                assert ours.confidence is None
                continue
            # With a threshold, the position that ended the draft is the last one looked at.
            looked_at = min(room, len(ours.proposed) + 1) if threshold else len(ours.proposed)
            expected = torch.tensor(theirs["confidence_logits"][:looked_at]).sigmoid()
            assert_near(torch.tensor(ours.confidence), expected)

    def test_the_recorded_runs_hold_full_partial_and_empty_drafts(self):
        runs = [find_run(*key) for key in RUNS]
        rounds = [one for run in runs for one in run["rounds"]]
        accepted = {one["accepted_draft_tokens"] for one in rounds}
        assert accepted >= set(range(8))
        assert any(len(one["verify_input_ids"]) == 1 for one in rounds)

    @pytest.mark.parametrize(("name", "run_name"), RECORDED)
    def test_taps_and_verification_logits_are_those_of_the_reference(self, name, run_name, monkeypatch):
        run, (target, drafter) = find_run(name, run_name), load_pair(name)
        features, project = [], drafter.project_context

        def record(context: torch.Tensor) -> torch.Tensor:
            features.append(context[0])
            return project(context)

        monkeypatch.setattr(drafter, "project_context", record)
        output = generate(target, drafter, run, output_logits=True, return_dict_in_generate=True)
        logits, recorded = torch.cat(output.logits), tensors(name)
        position = 1
        for index in range(2):
            assert_near(features[index], recorded[f"{run_name}.round{index}.context_features"])
            committed = run["acceptance_lengths"][index]
            expected = recorded[f"{run_name}.round{index}.verify_logits"][:committed]
            assert_near(logits[position : position + committed], expected)
            position += committed


class TestRounds:
    """Two rounds of the drafter alone, on the features that the reference had."""

    @pytest.mark.parametrize("attn", ATTENTION)
    @pytest.mark.parametrize(("name", "run_name"), RECORDED)
    @torch.no_grad()
    def test_block_states_logits_confidence_and_draft_cache(self, name, run_name, attn):
        run, recorded, (target, drafter) = find_run(name, run_name), tensors(name), load_pair(name, attn)
        cache, first = DraftCache(drafter.config.num_hidden_layers), drafter.config.first_draft_slot
        for index in range(2):
            prefix, reference = f"{run_name}.round{index}", run["rounds"][index]
            features = recorded[f"{prefix}.context_features"][None]
            block_ids = [reference["anchor_token"], *[drafter.config.mask_token_id] * (drafter.config.block_size - 1)]
            assert reference.get("block_input_ids", block_ids) == block_ids
            assert cache.length == reference["draft_cache_len_before"]
            hidden = drafter(embed(drafter, target, block_ids), features, cache=cache).last_hidden_state[0]
            cache.commit(features.shape[1])
            assert cache.length == reference["draft_cache_len_after_crop"] == reference["start"]
            assert_near(hidden, recorded[f"{prefix}.block_hidden"])
            self._check_logits(drafter, target, hidden[first:], reference, prefix, recorded)
            for layer in range(drafter.config.num_hidden_layers):
                for kind, states in zip("kv", cache.layer(layer), strict=True):
                    key = f"{prefix}.draft_cache.layer{layer}.{kind}"
                    assert run_name != "p23" or key in recorded
                    if key in recorded:
                        assert_near(states[0], recorded[key])

    def _check_logits(self, drafter, target, hidden, reference, prefix, recorded):
        drafted, anchor = reference["draft_tokens"], reference["anchor_token"]
        base = drafter.base_logits(hidden, head_of(drafter, target))
        previous = [anchor, *drafted[:-1]]
        if f"{prefix}.base_logits" in recorded:
            assert_near(base, in_draft_vocabulary(drafter, recorded[f"{prefix}.base_logits"]))
        corrected = draft_logits(drafter, base, hidden, previous)
        assert_near(corrected, in_draft_vocabulary(drafter, recorded[f"{prefix}.draft_logits"]))
        assert greedy_chain(drafter, base, hidden, anchor) == drafted
        if drafter.confidence_head is not None:
            confidence = drafter.confidence(hidden[None], torch.tensor([previous]))[0]
            assert_near(confidence, torch.tensor(reference["confidence_logits"]).sigmoid())
            run_name, index = prefix.split(".round")
            assert_near(confidence, recorded[f"{run_name}.confidence_logits"][int(index)].sigmoid())


class TestTaps:
    """What the hooks read out of a pass of the target."""

    @pytest.mark.parametrize("name", WITH_BLOCK)
    @torch.no_grad()
    def test_features_are_the_named_hidden_states_side_by_side(self, name):
        block, recorded, (target, drafter) = golden(name)["single_block"], tensors(name), load_pair(name)
        teacher = name in SPECULATORS_SINGLE
        ids = block["fixed_teacher"]["input_ids"] if teacher else block["context_ids"]
        taps = TargetTaps(target, drafter.config.target_layer_ids)
        with taps.listening():
            states = target(torch.tensor([ids]), output_hidden_states=True).hidden_states
        (features,) = taps.take()
        taps.close()
        by_id = torch.cat([states[i + 1] for i in drafter.config.target_layer_ids], dim=-1)
        assert torch.equal(features, by_id)
        assert_near(
            features[0], recorded["single.fixed_teacher.aux_hidden_states" if teacher else "single.context_features"]
        )
        if not teacher:
            for index, state in enumerate(states):
                assert_near(state[0], recorded[f"single.target_hidden_states.{index}"])


@torch.no_grad()
def run_block(name: str, attn: str, context: torch.Tensor, block_ids: list[int]) -> dict[str, torch.Tensor]:
    """One block without a cache, and the output of every draft layer on the way."""
    target, drafter = load_pair(name, attn)
    noise, seen = embed(drafter, target, block_ids), {}
    handles = [
        layer.register_forward_hook(lambda module, args, output, i=i: seen.update({f"layer{i}_out": output[0]}))
        for i, layer in enumerate(drafter.layers)
    ]
    seen["block_hidden"] = drafter(noise, context[None]).last_hidden_state[0]
    for handle in handles:
        handle.remove()
    return {
        **seen,
        "noise_embedding": noise[0],
        "fc_out": drafter.fc(context),
        "context_after_hidden_norm": drafter.project_context(context),
        "base_logits": drafter.base_logits(seen["block_hidden"], head_of(drafter, target)),
    }


@pytest.mark.parametrize("attn", ATTENTION)
@pytest.mark.parametrize("name", DEEPSPEC_SINGLE)
class TestSingleBlock:
    """One block on a context of 12 tokens, recorded stage by stage."""

    def test_every_stage(self, name, attn):
        block, recorded = golden(name)["single_block"], tensors(name)
        stages = run_block(name, attn, recorded["single.context_features"], block["block_input_ids"])
        logits = "base_logits" if "single.base_logits" in recorded else "logits_all_positions"
        for stage, actual in stages.items():
            key = f"single.{logits if stage == 'base_logits' else stage}"
            assert_near(actual, recorded[key])

    @torch.no_grad()
    def test_logits_and_confidence_behind_given_tokens(self, name, attn):
        block, recorded, drafter = golden(name)["single_block"], tensors(name), load_pair(name, attn)[1]
        stages = run_block(name, attn, recorded["single.context_features"], block["block_input_ids"])
        hidden, base = stages["block_hidden"], stages["base_logits"]
        # z-lab's drafter has no head that looks at earlier tokens: nothing to record.
        kinds = {"fixed_tokens": "fixed_prev_tokens", "greedy": "greedy_prev_tokens"} if name != "zlab_dflash" else {}
        for kind, key in kinds.items():
            previous = block[key]
            assert_near(draft_logits(drafter, base, hidden, previous), recorded[f"single.{kind}_corrected_logits"])
            if drafter.confidence_head is not None:
                confidence = drafter.confidence(hidden[None], torch.tensor([previous]))[0]
                assert_near(confidence, recorded[f"single.{kind}_confidence_logits"].sigmoid())

    @torch.no_grad()
    def test_greedy_chain(self, name, attn):
        block, recorded, drafter = golden(name)["single_block"], tensors(name), load_pair(name, attn)[1]
        stages = run_block(name, attn, recorded["single.context_features"], block["block_input_ids"])
        first = drafter.config.first_draft_slot
        hidden, base = stages["block_hidden"][first:], stages["base_logits"][first:]
        if "single.draft_logits" in recorded:
            assert_near(base, recorded["single.draft_logits"])
        assert greedy_chain(drafter, base, hidden, block["anchor_token"]) == block["greedy_tokens"]


@pytest.mark.parametrize("attn", ATTENTION)
@pytest.mark.parametrize("name", SPECULATORS_SINGLE)
class TestTeacherForcedBlock:
    """speculators' training pass with the anchor at position 12 of a sequence; nothing behind it is visible."""

    @pytest.mark.parametrize("teacher", ["fixed_teacher", "greedy_teacher"])
    @torch.no_grad()
    def test_block_states_logits_and_confidence(self, name, attn, teacher):
        block, recorded = golden(name)["single_block"][teacher], tensors(name)
        anchor, drafter = block["anchor_position"], load_pair(name, attn)[1]
        context = recorded[f"single.{teacher}.aux_hidden_states"][:anchor]
        stages = run_block(name, attn, context, block["block_input_ids"])
        hidden, base, previous = stages["block_hidden"], stages["base_logits"], block["prev_token_ids"]
        assert_near(hidden, recorded[f"single.{teacher}.block_hidden"])
        assert_near(base, recorded[f"single.{teacher}.base_logits"])
        corrected = draft_logits(drafter, base, hidden, previous)
        assert_near(corrected, recorded[f"single.{teacher}.corrected_logits"])
        confidence = drafter.confidence(hidden[None], torch.tensor([previous]))[0]
        assert_near(confidence, recorded[f"single.{teacher}.confidence_logits"].sigmoid())

    def test_context_features_and_layer_outputs(self, name, attn):
        block, recorded = golden(name)["single_block"]["greedy_teacher"], tensors(name)
        anchor = block["anchor_position"]
        context = recorded["single.greedy_teacher.aux_hidden_states"][:anchor]
        taps = golden(name)["aux_hidden_state_layer_ids"]
        states = torch.cat([recorded[f"single.target_hidden_states.{i}"] for i in taps], dim=-1)
        assert torch.equal(context, states[:anchor])
        stages = run_block(name, attn, context, block["block_input_ids"])
        for stage in ("fc_out", "context_after_hidden_norm"):
            assert_near(stages[stage], recorded[f"single.{stage}"][:anchor])
        for stage in ("layer0_out", "layer1_out"):
            assert_near(stages[stage], recorded[f"single.{stage}"])

    @torch.no_grad()
    def test_greedy_chain(self, name, attn):
        single, recorded, drafter = golden(name)["single_block"], tensors(name), load_pair(name, attn)[1]
        chain, block = single["derived_greedy_chain"], single["greedy_teacher"]
        context = recorded["single.greedy_teacher.aux_hidden_states"][: block["anchor_position"]]
        stages = run_block(name, attn, context, block["block_input_ids"])
        first = drafter.config.first_draft_slot
        assert chain["first_slot"] == first
        hidden, base = stages["block_hidden"][first:], stages["base_logits"][first:]
        anchor = block["block_input_ids"][0]
        tokens = greedy_chain(drafter, base, hidden, anchor)
        assert tokens == chain["target_vocab_tokens"]
        previous = [anchor, *tokens[:-1]]
        assert previous == chain["prev_token_ids"][first:]
        corrected = draft_logits(drafter, base, hidden, previous)
        assert corrected.argmax(dim=-1).tolist() == chain["draft_vocab_tokens"]
        assert_near(corrected, recorded["single.chain.corrected_logits"])
        confidence = drafter.confidence(hidden[None], torch.tensor([previous]))[0]
        assert_near(confidence, recorded["single.chain.confidence_logits"].sigmoid())

    def test_generate_proposes_the_same_chain(self, name, attn):
        single, (target, drafter) = golden(name)["single_block"], load_pair(name, attn)
        block, chain = single["greedy_teacher"], single["derived_greedy_chain"]
        anchor = block["anchor_position"]
        prompt = torch.tensor([block["input_ids"][:anchor]])
        with drafter.trace() as trace:
            output = target.generate(prompt, assistant_model=drafter, do_sample=False, max_new_tokens=20)
        assert output[0, anchor] == block["input_ids"][anchor]
        assert trace.rounds[0].proposed == chain["target_vocab_tokens"]
