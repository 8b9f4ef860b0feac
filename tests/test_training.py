"""Training: a step's logits are those of inference, nothing leaks, the objective is the paper's, runs resume."""

import copy
import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.state import AcceleratorState
from kit import FAMILIES, VOCAB, assert_lossless, hooks_of, inputs, new_drafter, target
from transformers import AutoModelForCausalLM, FalconConfig, MptConfig, OPTConfig, TrainerCallback

from dspark_hf import DSparkCandidateGenerator, DSparkDrafter
from dspark_hf.borrowing import head_of
from dspark_hf.calibration import Calibration
from dspark_hf.figures import plot_training
from dspark_hf.training import feature_store, objective, target_features
from dspark_hf.training.arguments import DSparkTrainingArguments
from dspark_hf.training.blocks import BLOCK_ATTENTION, draft_positions, markov_latents, run_blocks
from dspark_hf.training.new_drafter import (
    choose_draft_vocabulary,
    choose_mask_token,
    with_block_size,
    with_draft_vocabulary,
    with_markov_head,
    with_more_layers,
)
from dspark_hf.training.new_drafter import new_drafter as new_drafter_for
from dspark_hf.training.objective import ObjectiveWeights
from dspark_hf.training.responses import Response, ResponseDataset, collate, read_responses, split_held_out
from dspark_hf.training.run import TrainSettings, run_training, table_of
from dspark_hf.training.step import TrainingStep
from dspark_hf.training.target_features import CachedFeatures, OnlineFeatures, TargetHead
from dspark_hf.training.trainer import DSparkTrainer

NEEDS_MUON = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch 2.9")

KINDS = {
    "vanilla": {},
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn"},
    "no markov": {"markov_head_type": "none", "enable_confidence_head": False},
    "mask positions": {"sample_from_anchor": False},
    "mask positions, rnn": {"sample_from_anchor": False, "markov_head_type": "rnn"},
    "sliding from the anchor": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3},
    "sliding from the query": {
        "layer_types": ["sliding_attention", "sliding_attention"],
        "sliding_window": 3,
        "sliding_window_origin": "query",
        "sliding_block_causal": False,
    },
    "context window": {"context_window": 4},
    "reduced vocabulary": {"draft_vocab_size": 40, "own_lm_head": True},
    "softcap": {"final_logit_softcapping": 2.0, "own_embed_tokens": True, "own_lm_head": True},
    "gemma layers": {"backbone": "gemma4"},
}


def make_drafter(kind: str):
    made = new_drafter(**KINDS[kind])
    if made.config.has_reduced_vocabulary:
        # Every second id.
        made.d2t.copy_(torch.arange(40))
    return made


def batch_of(*rows: list[int], anchors: list[list[int]]) -> dict[str, torch.Tensor]:
    longest, most = max(map(len, rows)), max(map(len, anchors))
    return {
        "row_ids": torch.arange(len(rows)),
        "lengths": torch.tensor([len(row) for row in rows]),
        "input_ids": torch.tensor([row + [0] * (longest - len(row)) for row in rows]),
        "anchors": torch.tensor([row + [-1] * (most - len(row)) for row in anchors]),
    }


def sequence(length: int, seed: int) -> list[int]:
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.no_grad()
def inference_logits(drafter, ids: list[int], anchor: int) -> torch.Tensor:
    """`[n, Vd]` logits of the draft after `ids[:anchor + 1]`, if the tokens drawn are those of `ids`."""
    model, seen = target(), []

    class Forcing(DSparkCandidateGenerator):
        def _choose(self, scored):
            seen.append(scored[0])
            token = torch.tensor([ids[anchor + len(seen)]])
            return token, token

    with Forcing(drafter, model) as generator:
        with generator.listening(prefill=True):
            model(torch.tensor([ids[:anchor]]), use_cache=False)
        generator.draft([torch.tensor([ids[: anchor + 1]])], 99)
    return torch.stack(seen)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_logits_of_a_training_step_are_those_of_inference(kind):
    drafter = make_drafter(kind)
    rows = [sequence(24, 1), sequence(17, 2)]
    batch = batch_of(*rows, anchors=[[1, 7, 8, 18], [3, 12]])
    with OnlineFeatures(target(), drafter.config.target_layer_ids) as features:
        context = features(batch).context
    step = TrainingStep(drafter, target(), ObjectiveWeights())
    hidden = run_blocks(drafter, step._embed, batch["input_ids"], batch["anchors"], context)
    positions = draft_positions(drafter.config, batch["input_ids"], batch["lengths"], batch["anchors"])
    first = drafter.config.first_draft_slot
    logits = drafter.base_logits(hidden[:, :, first:], drafter.lm_head or target().get_output_embeddings())
    if drafter.markov_head is not None:
        anchor_ids = batch["input_ids"].gather(1, batch["anchors"].clamp(min=0)).flatten()
        latents = markov_latents(drafter, hidden.flatten(0, 1), anchor_ids, positions.previous_ids.flatten(0, 1))
        logits = logits + drafter.markov_head.markov_w2(latents).view_as(logits)
    for b, row in enumerate(rows):
        for n, anchor in enumerate(batch["anchors"][b].tolist()):
            if anchor >= 0:
                expected = inference_logits(drafter, row, anchor)
                torch.testing.assert_close(logits[b, n], expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize("kind", ["vanilla", "sliding from the anchor", "mask positions"])
def test_a_block_sees_its_own_context_and_itself_alone(kind):
    drafter = make_drafter(kind)
    config, anchors = drafter.config, [[2, 6, 7], [4, 9, -1]]
    batch = batch_of(sequence(14, 1), sequence(12, 2), anchors=anchors)
    width = len(config.target_layer_ids) * config.target_hidden_size
    context = torch.randn(2, 14, width, requires_grad=True)
    embeds = torch.randn(2, 3 * config.block_size, config.hidden_size, requires_grad=True)
    hidden = run_blocks(drafter, lambda ids: embeds, batch["input_ids"], batch["anchors"], context)
    for b, n in [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]:
        of_context, of_embeds = torch.autograd.grad(hidden[b, n].square().sum(), (context, embeds), retain_graph=True)
        seen = torch.zeros(2, 14, dtype=torch.bool)
        seen[b, : anchors[b][n]] = True
        assert torch.equal(of_context.abs().sum(-1) > 0, seen)
        own = torch.zeros(2, 3, config.block_size, dtype=torch.bool)
        own[b, n] = True
        assert torch.equal(of_embeds.abs().sum(-1).view_as(own) > 0, own)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_flex_attention_sees_the_same(kind):
    drafter = make_drafter(kind)
    config = drafter.config
    batch = batch_of(sequence(14, 1), sequence(12, 2), anchors=[[2, 6, 7], [4, 9, -1]])
    context = torch.randn(2, 14, len(config.target_layer_ids) * config.target_hidden_size)
    embeds = torch.randn(2, 3 * config.block_size, config.hidden_size)
    sdpa, flex = (
        run_blocks(drafter, lambda ids: embeds, batch["input_ids"], batch["anchors"], context, implementation)
        for implementation in BLOCK_ATTENTION
    )
    torch.testing.assert_close(flex, sdpa, atol=1e-4, rtol=1e-4)


def test_flex_attention_is_refused_where_it_has_no_gradient(tmp_path):
    with pytest.raises(ValueError, match="flex_attention has no gradient on a CPU"):
        arguments(tmp_path, attn_implementation="flex_attention")


def naive_terms(drafter, coefficients, rows: list[list[int]], anchors: list[list[int]], draws=None):
    """The objective by its definition: whole distributions over the target's vocabulary, one position at a time; with
    `draws`, of the positions that are drawn."""
    model, config = target(), drafter.config
    loss, weight, acceptances = torch.zeros(()), 0.0, []
    ids_of_rows = drafter.to_target_ids(torch.arange(config.draft_vocab_size))
    with OnlineFeatures(model, config.target_layer_ids) as features:
        step = TrainingStep(drafter, model, coefficients)
        for b, (row, of_row) in enumerate(zip(rows, anchors, strict=True)):
            ids = torch.tensor([row])
            target_probs = (model(ids).logits[0] / coefficients.temperature).softmax(-1).detach()
            context = features(batch_of(row, anchors=[[0]])).context
            for n, anchor in enumerate(of_row):
                at, reached = torch.tensor([[anchor]]), 1.0
                hidden = run_blocks(drafter, step._embed, ids, at, context)[0, 0]
                states = hidden[config.first_draft_slot :]
                state = None if drafter.markov_head is None else drafter.markov_head.initial_state(1)
                for k in range(min(config.num_draft_tokens, len(row) - 1 - anchor)):
                    previous = ids[0, anchor + k : anchor + k + 1]
                    logits = drafter.base_logits(states[k : k + 1], drafter.lm_head or model.get_output_embeddings())
                    if drafter.markov_head is not None:
                        bias, state = drafter.markov_head(previous, states[k : k + 1], state)
                        logits = logits + bias
                    probs = torch.zeros(VOCAB).index_put(
                        (ids_of_rows,), (logits[0] / coefficients.temperature).softmax(-1)
                    )
                    distance = (probs - target_probs[anchor + k]).abs().sum()
                    label = row[anchor + k + 1]
                    cross_entropy = -probs[label].log() if label in ids_of_rows.tolist() else torch.zeros(())
                    w = 2.718281828 ** (-k / coefficients.decay)
                    if draws is not None:
                        w = float(draws[b, n, k] < max(0.1, reached))
                    term = coefficients.cross_entropy * cross_entropy + coefficients.distance * distance
                    survives = 1 - 0.5 * distance.detach()
                    if drafter.confidence_head is not None:
                        confidence = drafter.confidence(states[k : k + 1], previous)[0]
                        bce = -(survives * confidence.log() + (1 - survives) * (1 - confidence).log())
                        term = term + coefficients.confidence * bce
                        reached *= float(confidence.detach())
                    loss, weight = loss + w * term, weight + w
                    acceptances.append(float(survives) if w else None)
    return loss, weight, acceptances


@pytest.mark.parametrize("kind", ["vanilla", "gated", "mask positions"])
def test_positions_are_drawn_with_the_chance_that_drafts_come_to_them(kind):
    drafter, coefficients = make_drafter(kind), ObjectiveWeights(0.3, 0.7, 0.5, 3.0)
    # Confidences of all sizes.
    torch.nn.init.normal_(drafter.confidence_head.proj.weight, std=0.5)
    rows, anchors = [sequence(15, 1), sequence(12, 2)], [[2, 6, 11], [3, 8]]
    batch = batch_of(*rows, anchors=anchors)
    batch["draws"] = torch.rand(2, 3, drafter.config.num_draft_tokens, generator=torch.Generator().manual_seed(3))
    expected, weight, acceptances = naive_terms(drafter, coefficients, rows, anchors, batch["draws"])
    expected.backward()
    gradients = {name: p.grad for name, p in drafter.named_parameters() if p.grad is not None}
    drafter.zero_grad(set_to_none=True)
    step = TrainingStep(drafter, target(), coefficients)
    with OnlineFeatures(target(), drafter.config.target_layer_ids) as features:
        totals, evaluated = step(batch, features(batch)), step.eval()(batch, features(batch))
    totals.loss.backward()
    torch.testing.assert_close(totals.loss, expected, rtol=1e-4, atol=1e-4)
    assert 0 < float(totals.weight) == weight < len(acceptances)
    for name, gradient in gradients.items():
        torch.testing.assert_close(drafter.get_parameter(name).grad, gradient, rtol=1e-3, atol=1e-4)
    # An evaluation takes all of them.
    assert float(evaluated.by_position[0].sum()) == len(acceptances)


def test_the_log_of_drawn_positions_counts_for_all():
    drafter = make_drafter("vanilla")
    batch = batch_of(sequence(24, 1), anchors=[[2, 6, 11, 14]])
    step = TrainingStep(drafter, target(), ObjectiveWeights())
    with OnlineFeatures(target(), drafter.config.target_layer_ids) as features:
        found = features(batch)
    whole, drawn, times = step(batch, found), 0, 300
    generator = torch.Generator().manual_seed(4)
    for _ in range(times):
        batch["draws"] = torch.rand(1, 4, drafter.config.num_draft_tokens, generator=generator)
        totals = step(batch, found)
        assert not totals.tau.any()
        drawn = drawn + totals.by_position.detach() / times
    torch.testing.assert_close(drawn, whole.by_position, rtol=0.25, atol=0.01)


def test_the_confidence_head_learns_where_positions_are_drawn_in_half_precision(tmp_path):
    before = new_drafter().confidence_head.proj.weight.clone()
    trainer = train(tmp_path, max_steps=2, sample_positions=True, bf16=True)
    assert not torch.equal(trainer.drafter.confidence_head.proj.weight, before)


@pytest.mark.parametrize("option", ["sample_positions", "confidence_only"])
def test_what_goes_by_the_confidence_head_needs_one(option, tmp_path):
    named = f"--{option.replace('_', '-')} needs"
    with pytest.raises(ValueError, match=f"{named} the confidence head: --confidence-weight must not be 0"):
        arguments(tmp_path, **{option: True}, confidence_weight=0)
    with pytest.raises(ValueError, match=f"{named} a confidence head, and this drafter has none"):
        train(tmp_path, make_drafter("no markov"), **{option: True})


def test_the_confidence_head_is_trained_alone(tmp_path):
    before = {name: tensor.clone() for name, tensor in new_drafter().state_dict().items()}
    trainer = train(tmp_path, confidence_only=True, max_steps=30, learning_rate=1e-2)
    after = trainer.drafter.state_dict()
    assert {name for name in after if not torch.equal(after[name], before[name])} == {
        "confidence_head.proj.bias",
        "confidence_head.proj.weight",
    }
    errors = [entry["confidence_bce"] for entry in trainer.state.log_history if "confidence_bce" in entry]
    assert sum(errors[-5:]) < sum(errors[:5])


@NEEDS_MUON
def test_the_confidence_head_alone_has_no_matrices_for_muon(tmp_path):
    with pytest.raises(ValueError, match="--confidence-only trains one small head"):
        arguments(tmp_path, confidence_only=True, muon=True)


@pytest.mark.parametrize(("cached", "temperature"), [(False, 1.0), (True, 1.0), (True, 0.5)])
@pytest.mark.parametrize("kind", ["vanilla", "gated", "no markov", "reduced vocabulary", "softcap"])
def test_loss_and_gradients_are_those_of_the_definition(kind, cached, temperature, monkeypatch):
    monkeypatch.setattr(objective, "_CHUNK_LOGITS", 5 * VOCAB)
    monkeypatch.setattr(target_features, "_KEPT", torch.float32)
    drafter, coefficients = make_drafter(kind), ObjectiveWeights(0.3, 0.7, 0.5, 3.0, temperature)
    rows, anchors = [sequence(15, 1), sequence(12, 2)], [[2, 6, 11], [3, 8]]
    expected, weight, acceptances = naive_terms(drafter, coefficients, rows, anchors)
    expected.backward()
    gradients = {name: p.grad for name, p in drafter.named_parameters()}
    drafter.zero_grad(set_to_none=True)
    batch = batch_of(*rows, anchors=anchors)
    with OnlineFeatures(target(), drafter.config.target_layer_ids) as online:
        features = online
        if cached:
            dataset = ResponseDataset([Response(row[:2], row[2:], "x", 1) for row in rows], 9, 99)
            features = CachedFeatures(online, TargetHead(target(), temperature), [dataset])
        totals = TrainingStep(drafter, target(), coefficients)(batch, features(batch))
    totals.loss.backward()
    torch.testing.assert_close(totals.loss, expected, rtol=1e-4, atol=1e-4)
    assert float(totals.weight) == pytest.approx(weight, rel=1e-5)
    assert float(totals.by_position[0].sum()) == len(acceptances)
    assert float(totals.by_position[2].sum()) == pytest.approx(sum(acceptances), rel=1e-4)
    for name, parameter in drafter.named_parameters():
        if gradients[name] is None:
            assert parameter.grad is None or not parameter.grad.any(), name
        else:
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("kind", ["vanilla", "mask positions"])
def test_rows_without_an_anchor_count_nothing(kind):
    drafter, batch = make_drafter(kind), batch_of(sequence(24, 1), anchors=[[-1, -1]])
    with OnlineFeatures(target(), drafter.config.target_layer_ids) as features:
        found = features(batch)
    step = TrainingStep(drafter, target(), ObjectiveWeights())
    totals = step(batch, found)
    totals.loss.backward()
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in drafter.parameters())
    with torch.no_grad():
        of_evaluation = step(batch, found)
    for each in (totals, of_evaluation):
        assert (float(each.loss.detach()), float(each.weight)) == (0.0, 0.0)
        assert not each.by_position.any()
        assert not each.tau.any()


def test_terms_where_the_true_token_is_all_but_impossible():
    """Its probability rounds to 0: cross entropy and gradient stay what they are."""
    logits = torch.tensor([[200.0, 0.0, -1.0], [3.0, 2.0, 1.0]], requires_grad=True)
    target_probs = torch.tensor([[0.2, 0.5, 0.1], [0.5, 0.25, 0.25]])
    cross_entropy, distance = objective.distribution_terms(
        logits, torch.tensor([2, -1]), target_probs, torch.tensor([0.2, 0.0])
    )
    assert cross_entropy.tolist() == [201.0, 0.0]
    (0.7 * cross_entropy + 0.3 * distance).sum().backward()
    expected = logits.detach().clone().requires_grad_()
    log_probs = expected.log_softmax(-1)
    apart = (log_probs.exp() - target_probs).abs().sum(-1) + torch.tensor([0.2, 0.0])
    torch.testing.assert_close(distance, apart)
    (-0.7 * log_probs[0, 2] + 0.3 * apart.sum()).backward()
    torch.testing.assert_close(logits.grad, expected.grad)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_the_targets_logits_come_out_of_its_final_states(family):
    model, ids = target(family), torch.tensor([sequence(12, 3), sequence(12, 4)])
    with OnlineFeatures(model, [-1, 0, 2]) as online:
        features = online({"input_ids": ids})
    output = model(ids, output_hidden_states=True)
    head = TargetHead(model)
    torch.testing.assert_close(head.logits(features.final), output.logits, atol=1e-4, rtol=0)
    some = torch.tensor([3, 50, 96])
    torch.testing.assert_close(head.logits(features.final, some), output.logits[..., some], atol=1e-4, rtol=0)
    context = torch.cat([output.hidden_states[i + 1] for i in (-1, 0, 2)], dim=-1)
    torch.testing.assert_close(features.context, context, atol=1e-4, rtol=0)


@cache
def responses(count: int = 24) -> tuple[Response, ...]:
    """What the target says after random prompts."""
    rows = []
    for i in range(count):
        prompt = sequence(4 + i % 3, 100 + i)
        said = target().generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            max_new_tokens=10 + i % 4,
            do_sample=False,
        )
        rows.append(Response(prompt, said[0, len(prompt) :].tolist(), "x", i))
    return tuple(rows)


def arguments(folder: Path, **settings) -> DSparkTrainingArguments:
    given = {
        "max_steps": 8,
        "per_device_train_batch_size": 4,
        "num_anchors": 4,
        "learning_rate": 3e-3,
        "use_cpu": True,
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 1,
        **settings,
    }
    return DSparkTrainingArguments(output_dir=str(folder), **given)


def train(folder: Path, drafter=None, resume: bool = False, callbacks=(), eval_rows=None, **settings) -> DSparkTrainer:
    made = drafter or new_drafter()
    trainer = DSparkTrainer(
        made, target(), arguments(folder, **settings), responses(), eval_rows, callbacks=list(callbacks)
    )
    try:
        trainer.train(resume_from_checkpoint=resume or None)
    finally:
        trainer.close()
    return trainer


def losses_of(trainer: DSparkTrainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_a_short_run_learns_and_what_it_saves_drafts(tmp_path):
    settings = {"eval_strategy": "epoch", "eval_prompts": 2, "eval_max_new_tokens": 9}
    trainer = train(tmp_path, max_steps=40, eval_rows=responses()[:4], **settings)
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert history[-1]["loss"] < 0.9 * history[0]["loss"]
    assert history[-1]["tau"] > history[0]["tau"]
    evaluations = [entry for entry in trainer.state.log_history if "eval_tau" in entry]
    assert evaluations[-1]["eval_tau"] > evaluations[0]["eval_tau"]
    # The decoding loop itself, on the first two prompts.
    with trainer.drafter.trace() as trace:
        for row in responses()[:2]:
            settings = {"assistant_model": trainer.drafter, "max_new_tokens": 9, "do_sample": False}
            target().generate(**inputs(row.prompt_ids), **settings)
    assert evaluations[-1]["eval_generate_tau"] == pytest.approx(trace.summary().acceptance_length, abs=1e-4)
    trainer.save_model()
    loaded = DSparkDrafter.from_pretrained(tmp_path)
    for name, tensor in trainer.drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    loaded.generation_config.num_assistant_tokens_schedule = "constant"
    assert_lossless(target(), loaded)


class Kill(TrainerCallback):
    """The power goes out right after a step."""

    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise KeyboardInterrupt


@pytest.mark.parametrize("killed_after", [3, 6, 7])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_accumulation_steps": 2},
        {"sample_positions": True},
        pytest.param({"muon": True}, marks=NEEDS_MUON),
    ],
)
def test_a_killed_run_goes_on_as_if_nothing_had_been(killed_after, options, tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 2, **options}
    whole = train(tmp_path / "whole", **settings)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "killed", callbacks=[Kill(killed_after)], **settings)
    torch.manual_seed(99)
    # Another drafter, so that every weight must come from the checkpoint.
    other = new_drafter()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1.0)
    resumed = train(tmp_path / "killed", other, resume=True, **settings)
    assert resumed.state.global_step == 8
    for name, tensor in whole.drafter.state_dict().items():
        assert torch.equal(resumed.drafter.state_dict()[name], tensor), name
    losses = [[(e["loss"], e["draft_tokens"]) for e in t.state.log_history if "loss" in e] for t in (whole, resumed)]
    assert losses[0] == losses[1]


@NEEDS_MUON
def test_muon_turns_the_matrices_of_the_layers_and_adamw_the_rest(tmp_path):
    trainer = train(tmp_path, muon=True, max_steps=1, warmup_steps=0, weight_decay=0.0)
    start, rate = new_drafter().state_dict(), 3e-3
    for name, parameter in trainer.drafter.named_parameters():
        step = (parameter.detach() - start[name]) / rate
        if name.startswith(("layers.", "fc.")) and step.ndim == 2:
            # Orthogonal in the directions that the gradient has: none is larger. AdamW's first step is +-1 everywhere.
            values = torch.linalg.svdvals(step) / (0.2 * max(step.shape) ** 0.5)
            assert 0.6 < values.max() < 1.3, name
        else:
            assert step.abs().max() == pytest.approx(1.0, abs=0.01), name
    rates = [group["lr"] for group in trainer.optimizer.param_groups]
    assert rates == [0.0, 0.0, 0.0]  # what the schedule says after the last step


@NEEDS_MUON
@pytest.mark.parametrize("muon", [False, True])
def test_a_run_is_not_gone_on_with_another_optimizer(muon, tmp_path):
    train(tmp_path, muon=muon, max_steps=2, save_strategy="steps", save_steps=2)
    with pytest.raises(ValueError, match="checkpoint-2 holds the state of another optimizer, or of other"):
        train(tmp_path, muon=not muon, resume=True)


@NEEDS_MUON
def test_muon_and_another_optimizer_are_not_both_taken(tmp_path):
    own = torch.optim.SGD(new_drafter().parameters(), lr=0.1)
    with pytest.raises(ValueError, match="an optimizer of your own"):
        DSparkTrainer(new_drafter(), target(), arguments(tmp_path, muon=True), responses(), optimizers=(own, None))


def test_muon_needs_a_torch_that_has_it(tmp_path, monkeypatch):
    monkeypatch.delattr(torch.optim, "Muon", raising=False)
    with pytest.raises(ImportError, match="--muon needs torch 2"):
        arguments(tmp_path, muon=True)


@NEEDS_MUON
def test_muon_refuses_matrices_in_pieces(tmp_path, monkeypatch):
    plugin = SimpleNamespace(activation_checkpointing=False)
    monkeypatch.setattr(AcceleratorState, "fsdp_plugin", plugin, raising=False)
    with pytest.raises(ValueError, match="--muon needs whole matrices"):
        train(tmp_path, muon=True)


@pytest.mark.parametrize("drawn", [False, True])
def test_accumulated_steps_equal_large_ones(drawn, tmp_path):
    settings = {"max_steps": 3, "sample_positions": drawn}
    large = train(tmp_path / "large", per_device_train_batch_size=8, **settings)
    small = train(tmp_path / "small", per_device_train_batch_size=2, gradient_accumulation_steps=4, **settings)
    for name, tensor in large.drafter.state_dict().items():
        torch.testing.assert_close(small.drafter.state_dict()[name], tensor, atol=2e-4, rtol=0, msg=name)
    assert losses_of(small) == pytest.approx(losses_of(large), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("drawn", ["", "drawn"])
def test_two_processes_take_the_steps_of_one(drawn, tmp_path):
    results = []
    for processes, batch_size in [(1, 8), (2, 4)]:
        folder = tmp_path / str(processes)
        folder.mkdir()
        worker = [str(Path(__file__).parent / "train_worker.py"), str(folder), str(batch_size), drawn]
        # What `accelerate launch` runs where there are several processes; by itself it starts one on a CPU.
        launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={processes}", "--standalone"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        subprocess.run([*launcher, *worker], check=True, capture_output=True, env=environment, timeout=300)
        results.append(json.loads((folder / "result.json").read_text()))
    one, two = results
    # Where positions are drawn, few blocks have all of theirs.
    for name in ("loss", "cross_entropy", "distance", "acceptance_1", "draft_tokens", *([] if drawn else ["tau"])):
        expected = [entry[name] for entry in one["history"]]
        assert [entry[name] for entry in two["history"]] == pytest.approx(expected, rel=1e-3), name
    for name in ("eval_loss", "eval_tau", "eval_greedy_tau", "eval_cross_entropy", "eval_acceptance_1"):
        assert two["evaluated"][name] == pytest.approx(one["evaluated"][name], rel=1e-3), name
    for name, weights in one["weights"].items():
        torch.testing.assert_close(
            torch.tensor(two["weights"][name]), torch.tensor(weights), atol=1e-3, rtol=0, msg=name
        )


def test_the_clock_ends_a_run_and_leads_the_learning_rate(tmp_path):
    trainer = train(tmp_path, max_steps=-1, max_seconds=1.5)
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    assert trainer.state.global_step > 3
    assert max(rates) > 2e-3
    assert rates[-1] < 0.1 * max(rates)


class Stop(TrainerCallback):
    """Somebody ends the run after a step."""

    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step


def test_a_run_by_the_clock_goes_on_from_its_checkpoint(tmp_path):
    settings = {"max_steps": -1, "max_seconds": 600.0, "save_strategy": "steps", "save_steps": 2}
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, callbacks=[Kill(3)], **settings)
    saved = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())
    before = saved["stateful_callbacks"]["ClockCallback"]["attributes"]
    assert before["elapsed"] > 0
    time.sleep(0.5)
    trainer = train(tmp_path, resume=True, callbacks=[Stop(6)], **settings)
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in history] == [1, 2, 3, 4, 5, 6]
    assert [entry["draft_tokens"] for entry in history][1] == before["draft_tokens"]
    seconds = [entry["seconds"] for entry in history]
    assert seconds == sorted(seconds)
    assert seconds[2] >= round(before["elapsed"], 1)
    # The warm-up of 0.04 x 600 s goes by the same clock.
    rates = [entry["learning_rate"] for entry in history]
    assert rates == sorted(rates)
    assert rates[-1] == pytest.approx(3e-3 * seconds[-1] / 24, abs=3e-3 / 24)


def test_the_bar_of_a_run_by_the_clock_counts_seconds(tmp_path, capsys):
    train(tmp_path, max_steps=-1, max_seconds=1.5, disable_tqdm=False)
    assert re.search(r"/2 \[.*s/s\]", capsys.readouterr().err)


def test_the_log_counts_the_draft_tokens(tmp_path):
    trainer = train(tmp_path, max_steps=12, eval_rows=responses()[:4], eval_strategy="epoch")
    config = trainer.drafter.config
    history = [entry["draft_tokens"] for entry in trainer.state.log_history if "loss" in entry]
    by_epoch = []
    for epoch in range(2):
        trainer.train_dataset.set_epoch(epoch)
        items = [trainer.train_dataset[i] for i in range(len(trainer.train_dataset))]
        room = [len(item["input_ids"]) - 1 - item["anchors"] for item in items]
        by_epoch.append(int(torch.cat(room).clamp(max=config.num_draft_tokens).sum()))
    assert len(history) == 12
    assert history == sorted(set(history))
    assert [history[5], history[11]] == [by_epoch[0], sum(by_epoch)]
    evaluated = [entry["draft_tokens"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert evaluated == [history[5], history[11]]


def test_the_training_curve_shows_each_run(tmp_path):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    history = [
        {"draft_tokens": 1_000_000, "cross_entropy": 3.0, "tau": 1.5},
        {"draft_tokens": 1_000_000, "eval_a_cross_entropy": 4.0, "eval_a_tau": 1.0, "eval_a_greedy_tau": 9.0},
        {"draft_tokens": 1_000_000, "eval_b_cross_entropy": 5.0, "eval_b_tau": 2.0, "eval_b_generate_tau": 9.0},
    ]
    figures, close = [], pyplot.close
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pyplot, "close", figures.append)
        plot_training({"one": history, "two": history[:1]}, tmp_path / "curve.png")
    (figure,) = figures
    left, right = figure.axes
    assert [line.get_ydata().tolist() for line in left.lines] == [[3.0], [4.5], [3.0], []]
    assert [line.get_ydata().tolist() for line in right.lines] == [[1.5], [1.5], [1.5], []]
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    close(figure)


@pytest.mark.parametrize("bits", [16, 8])
def test_a_cache_of_features_changes_nothing_but_rounding(bits, tmp_path):
    plain = losses_of(train(tmp_path / "a", max_steps=12))
    cache = {"feature_cache": str(tmp_path / "features"), "feature_cache_bits": bits}
    kept = losses_of(train(tmp_path / "b", max_steps=12, **cache))
    assert kept == pytest.approx(plain, rel=2e-2)
    assert kept != plain
    in_memory = losses_of(train(tmp_path / "c", max_steps=12, **{**cache, "feature_cache": "memory"}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OnlineFeatures, "__call__", None)  # the target rests
        again = losses_of(train(tmp_path / "d", max_steps=12, **cache))
    assert kept == in_memory == again


def test_a_cache_is_written_in_files_and_serves_other_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(feature_store, "_BYTES_OF_A_SHARD", 4000)
    rows, seen = responses(), []
    run = OnlineFeatures.__call__

    def noted(self, batch):
        seen.extend(batch["row_ids"].tolist())
        return run(self, batch)

    monkeypatch.setattr(OnlineFeatures, "__call__", noted)

    def features_of(some: Sequence[Response], folder: Path = tmp_path / "features") -> tuple[CachedFeatures, list]:
        dataset = ResponseDataset(some, 4, 99)
        with OnlineFeatures(target(), [1, 2]) as online:
            cache = CachedFeatures(online, TargetHead(target()), [dataset], folder)
            missing = cache.num_missing_bytes
            found = [cache(collate([dataset[i]])) for i in range(len(some))]
            cache.flush()
        return missing, found

    first_missing, first = features_of(rows[:10])
    files = list((tmp_path / "features").glob("*.safetensors"))
    assert len(files) > 1
    assert 0.8 < sum(file.stat().st_size for file in files) / first_missing < 1.5
    assert seen == [*range(10)]
    # Others in front, so that the numbers of the rows are other ones.
    seen.clear()
    missing, found = features_of(rows[14:4:-1])
    assert seen == [0, 1, 2, 3, 4]
    assert 0.3 < missing / first_missing < 0.7
    for row in range(5, 10):
        for name in ("context", "final", "log_normalizer"):
            assert torch.equal(getattr(found[14 - row], name), getattr(first[row], name))
    # A run that another one writes beside.
    seen.clear()
    with OnlineFeatures(target(), [1, 2]) as online:
        dataset = ResponseDataset(rows, 4, 99)
        cache = CachedFeatures(online, TargetHead(target()), [dataset], tmp_path / "features")
        features_of(rows[15:18])
        seen.clear()
        cache(collate([dataset[16]]))
    assert seen == []


def test_what_a_kill_left_of_a_cache_is_cleared_or_named(tmp_path):
    settings = {"max_steps": 1, "feature_cache": str(tmp_path / "features")}
    train(tmp_path / "a", **settings)
    names = ("states-1-00000.tmp", "states-2-00000.tmp", "theirs.tmp")
    old, _, foreign = paths = [tmp_path / "features" / name for name in names]
    for path in paths:
        path.touch()
    for path in (old, foreign):
        os.utime(path, (0, 0))
    train(tmp_path / "b", **settings)
    assert [path.exists() for path in paths] == [False, True, True]
    (tmp_path / "features" / "states-3-00000.safetensors").write_bytes(b"half")
    with pytest.raises(OSError, match=r"states-3-00000\.safetensors cannot be read .* Delete it"):
        train(tmp_path / "c", **settings)


def test_a_cache_that_there_is_no_room_for_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(ValueError, match=r"GB more, but .*features has room for 0\.00 GB"):
        train(tmp_path / "a", feature_cache=str(tmp_path / "features"))


def test_8_bits_are_near_what_they_stand_for():
    states = torch.randn(5, 96)
    states[:, 7] *= 300  # such channels there are
    states[2] = 0.0
    quantized, scales = feature_store.in_8_bits(states.bfloat16())
    assert (quantized.dtype, quantized.shape, scales.shape) == (torch.int8, (5, 96), (5, 3))
    back = feature_store.of_8_bits(quantized, scales).float().unflatten(1, (3, 32))
    wanted = states.bfloat16().float().unflatten(1, (3, 32))
    assert ((back - wanted).abs() <= 0.006 * wanted.abs().amax(dim=-1, keepdim=True)).all()


@pytest.mark.parametrize("size", [1, 9000, 10**9])
@pytest.mark.parametrize("killed_after", [3, 6])
def test_a_killed_run_with_a_cache_goes_on_as_if_nothing_had_been(killed_after, size, tmp_path, monkeypatch):
    monkeypatch.setattr(feature_store, "_BYTES_OF_A_SHARD", size)
    settings = {"save_strategy": "steps", "save_steps": 2}
    whole = train(tmp_path / "whole", feature_cache=str(tmp_path / "one"), **settings)
    cache = {"feature_cache": str(tmp_path / "other")}
    with pytest.raises(KeyboardInterrupt), pytest.MonkeyPatch.context() as patch:
        # A power cut: nothing is put down behind it.
        patch.setattr(DSparkTrainer, "close", lambda self: self._online.close())
        train(tmp_path / "killed", callbacks=[Kill(killed_after)], **cache, **settings)
    resumed = train(tmp_path / "killed", new_drafter(), resume=True, **cache, **settings)
    for name, tensor in whole.drafter.state_dict().items():
        assert torch.equal(resumed.drafter.state_dict()[name], tensor), name


@pytest.mark.parametrize("cached", [False, True])
def test_rows_of_the_head_behind_the_vocabulary_belong_to_no_id(cached, tmp_path):
    def losses(folder: str, padding: int) -> list[float]:
        model = copy.deepcopy(target())
        head = torch.nn.Linear(model.config.hidden_size, VOCAB + padding, bias=False)
        with torch.no_grad():
            head.weight[:VOCAB] = model.get_output_embeddings().weight
            head.weight[VOCAB:] = 1.0
        model.set_output_embeddings(head)
        settings = {"feature_cache": "memory"} if cached else {}
        trainer = DSparkTrainer(
            new_drafter(), model, arguments(tmp_path / folder, max_steps=2, **settings), responses()
        )
        trainer.train()
        trainer.close()
        return losses_of(trainer)

    assert losses("padded", 7) == pytest.approx(losses("plain", 0), rel=1e-5)


@pytest.mark.parametrize("name", ["opt", "falcon", "mpt"])
def test_targets_that_name_their_sizes_otherwise(name):
    common = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = {
        "opt": OPTConfig(**common, ffn_dim=48, word_embed_proj_dim=32),
        "falcon": FalconConfig(**common),
        "mpt": MptConfig(vocab_size=60, d_model=32, n_layers=3, n_heads=4),
    }[name]
    drafter = new_drafter_for(AutoModelForCausalLM.from_config(config), mask_token_id=1, markov_rank=4, block_size=4)
    assert drafter.config.intermediate_size == (48 if name == "opt" else 128)
    assert drafter.config.hidden_size == 32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target_layer_ids": [0, 1]}, "`target_layer_ids` is"),
        ({"temperature": 0.5}, "`temperature` is"),
        ({"feature_cache_bits": 8}, "`bits` is"),
    ],
)
def test_a_cache_of_something_else_is_refused(change, message, tmp_path):
    train(tmp_path / "a", max_steps=1, feature_cache=str(tmp_path / "features"))
    layers = {name: change.pop(name) for name in ["target_layer_ids"] if name in change}
    with pytest.raises(ValueError, match=message):
        train(tmp_path / "b", new_drafter(**layers), feature_cache=str(tmp_path / "features"), **change)


def test_anchors_stand_in_the_response_with_a_token_behind():
    rows = [Response([1, 2, 3], [4, 5, 6, 7], "x", 1), Response([1], [2], "x", 2), Response([1, 2], [3, 4], "x", 3)]
    dataset = ResponseDataset(rows, num_anchors=9, max_length=99)
    assert dataset.num_dropped == 1
    batch = collate([dataset[0], dataset[1]])
    assert batch["anchors"].tolist() == [[3, 4, 5], [2, -1, -1]]
    cut = ResponseDataset(rows, num_anchors=9, max_length=5)
    assert cut[0]["anchors"].tolist() == [3]
    drawn = set()
    few = ResponseDataset(rows, num_anchors=2, max_length=99)
    for epoch in range(20):
        few.set_epoch(epoch)
        assert few[0]["anchors"].tolist() == few[0]["anchors"].tolist()
        drawn.add(tuple(few[0]["anchors"].tolist()))
    assert drawn == {(3, 4), (3, 5), (4, 5)}


def test_the_most_frequent_ids_are_drafted():
    rows = [Response([1], [7, 7, 7, 9, 9, 30, 5], "x", 1)]
    assert choose_draft_vocabulary(rows, 4, VOCAB, always=[2]).tolist() == [2, 5, 7, 9]
    assert choose_draft_vocabulary(rows, 7, VOCAB).tolist() == [0, 1, 2, 5, 7, 9, 30]
    with pytest.raises(ValueError, match="`size` is 98, expected at least 1 and at most the target's 97 ids"):
        choose_draft_vocabulary(rows, 98, VOCAB)


def test_the_mask_is_an_id_that_no_text_has():
    rows = [Response([1, 96], [7, 95], "x", 1)]
    assert choose_mask_token(rows, target()) == 94
    assert choose_mask_token(rows, target(), special_ids=[96, 12, 40]) == 12


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
@torch.no_grad()
def test_draft_layers_start_as_layers_of_the_target(family):
    model = target(family)
    drafter = new_drafter_for(model, init_layer_ids=[1, 3], mask_token_id=96, markov_rank=4, block_size=4)
    layers = model.get_decoder().layers
    for ours, theirs in zip(drafter.layers, [layers[1], layers[3]], strict=True):
        assert torch.equal(ours.mlp.down_proj.weight, theirs.mlp.down_proj.weight)
        assert torch.equal(ours.self_attn.k_proj.weight, theirs.self_attn.k_proj.weight)
        # Queries keep about the size that they have in the target.
        states = torch.randn(1, 2000, 32)
        theirs_size = theirs.self_attn.q_proj(theirs.input_layernorm(states)).square().mean().sqrt()
        queries = ours.self_attn.q_proj(ours.input_layernorm(states)).view(1, 2000, 4, 8)
        ours_size = ours.self_attn.q_norm(queries).square().mean().sqrt()
        if family != "qwen3":
            assert float(ours_size / theirs_size) == pytest.approx(1.0, abs=0.1)
    assert float(drafter.markov_head.markov_w2.weight.abs().max()) == 0


def test_a_new_drafter_with_a_draft_vocabulary_has_the_targets_rows(tmp_path):
    ids = torch.tensor([3, 4, 50, 96])
    shape = {"draft_ids": ids, "num_hidden_layers": 1, "mask_token_id": 96, "block_size": 4}
    own = new_drafter_for(target(), own_lm_head=True, **shape)
    assert torch.equal(own.lm_head.weight, target().lm_head.weight[ids])
    drafter = new_drafter_for(target(), **shape)
    assert drafter.lm_head is None
    assert torch.equal(head_of(drafter, target()).weight, target().lm_head.weight[ids])
    assert torch.equal(drafter.to_target_ids(torch.arange(4)), ids)
    drafter.save_pretrained(tmp_path)
    assert torch.equal(DSparkDrafter.from_pretrained(tmp_path).d2t, drafter.d2t)


@pytest.mark.parametrize("before", ["all ids", "other ids", "borrowed head"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_a_drafter_gets_another_draft_vocabulary(before, dtype, tmp_path):
    own = {} if before == "borrowed head" else {"own_lm_head": True}
    old = new_drafter(**own, **({"draft_vocab_size": 40} if before == "other ids" else {}))
    if before == "other ids":
        old.d2t.copy_(torch.arange(20, 60) - torch.arange(40))
    old = old.to(dtype).eval()
    old.generation_config.num_assistant_tokens = 2
    ids = torch.arange(10, 85, 3)
    new = with_draft_vocabulary(old, target(), ids)
    assert (new.dtype, new.generation_config.num_assistant_tokens) == (dtype, 2)
    new.save_pretrained(tmp_path)
    new = DSparkDrafter.from_pretrained(tmp_path, dtype=dtype)
    assert new.to_target_ids(torch.arange(len(ids))).tolist() == ids.tolist()
    states = torch.randn(1, 3, old.config.hidden_size).to(dtype)
    previous = torch.tensor([[4, 33, 90]])
    logits = []
    for one in (old, new):
        latents = markov_latents(one, torch.randn(1, one.config.block_size, 32).to(dtype), previous[:, 0], previous)
        logits.append(one.base_logits(states, head_of(one, target())).float())
        logits[-1] += one.markov_head.markov_w2(latents).float()
    old_ids = old.to_target_ids(torch.arange(old.config.draft_vocab_size)).tolist()
    known = [i for i, token in enumerate(ids.tolist()) if token in old_ids]
    assert (len(known) < len(ids)) == (before == "other ids")
    theirs = [old_ids.index(token) for token in ids[known].tolist()]
    torch.testing.assert_close(logits[1][..., known], logits[0][..., theirs], atol=0.02, rtol=0.02)
    fresh = [i for i in range(len(ids)) if i not in known]
    rows = target().get_output_embeddings().weight[ids[fresh]]
    assert torch.equal(head_of(new, target()).weight[fresh], rows.to(dtype) if new.lm_head is not None else rows)
    assert not new.markov_head.markov_w2.weight[fresh].any()
    if dtype == torch.float32:
        assert_lossless(target(), new, wrong_at=[None])


@torch.no_grad()
def test_a_head_that_is_the_targets_is_borrowed_with_other_ids():
    old = new_drafter(own_lm_head=True, draft_vocab_size=40)
    old.lm_head.weight.copy_(target().lm_head.weight[:40])
    assert with_draft_vocabulary(old, target(), torch.tensor([3, 50])).lm_head is None
    old.lm_head.weight[7, 7] += 1
    assert with_draft_vocabulary(old, target(), torch.tensor([3, 50])).lm_head is not None


@pytest.mark.parametrize("kind", ["vanilla", "gemma layers", "sliding from the anchor"])
@torch.no_grad()
def test_a_drafter_with_more_layers_drafts_as_before_and_learns_with_all(kind, tmp_path):
    old = make_drafter(kind)
    new = with_more_layers(old, old.config.num_hidden_layers + 2)
    assert len(new.layers) == len(new.config.layer_types) == old.config.num_hidden_layers + 2
    ids = sequence(9, 3)
    assert torch.equal(inference_logits(new, ids, 4), inference_logits(old, ids, 4))
    with torch.enable_grad():
        trained = train(tmp_path, with_more_layers(new_drafter(), 3), max_steps=3).drafter
    for name, parameter in trained.layers[2].named_parameters():
        if "proj" in name:
            assert not torch.equal(parameter, with_more_layers(new_drafter(), 3).layers[2].get_parameter(name)), name


@torch.no_grad()
def test_a_gated_markov_head_starts_as_the_vanilla_one_and_learns(tmp_path):
    old = new_drafter()
    new = with_markov_head(old, "gated")
    assert (new.config.markov_head_type, with_markov_head(new, "gated")) == ("gated", new)
    ids = sequence(9, 3)
    torch.testing.assert_close(inference_logits(new, ids, 4), inference_logits(old, ids, 4))
    with torch.enable_grad():
        trained = train(tmp_path, new, max_steps=2).drafter
    assert trained.markov_head.gate_proj.weight.any()
    with pytest.raises(ValueError, match="The drafter's Markov head is gated and is to be vanilla"):
        with_markov_head(new, "vanilla")


@pytest.mark.parametrize("kind", ["vanilla", "mask positions"])
def test_a_drafter_gets_longer_and_shorter_blocks(kind, tmp_path):
    old = make_drafter(kind)
    size = old.config.block_size
    longer = with_block_size(old, size + 3)
    assert longer.config.num_draft_tokens == old.config.num_draft_tokens + 3
    for name, tensor in old.state_dict().items():
        assert torch.equal(longer.state_dict()[name], tensor), name
    again = with_block_size(longer, size)
    ids = sequence(9, 3)
    assert torch.equal(inference_logits(again, ids, 4), inference_logits(old, ids, 4))
    trained = train(tmp_path, longer, max_steps=3).drafter
    assert_lossless(target(), trained.eval())
    with pytest.raises(ValueError, match="`block_size` must be an integer"):
        with_block_size(old, 0)


def test_layers_are_added_and_not_taken_away(tmp_path):
    with pytest.raises(ValueError, match="The drafter has 2 layers and is to have 1"):
        with_more_layers(new_drafter(), 1)


def test_a_draft_vocabulary_of_another_target_is_refused():
    with pytest.raises(ValueError, match="its draft vocabulary cannot come from this target"):
        with_draft_vocabulary(new_drafter(), target(), torch.tensor([1, VOCAB]))


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("gemma3", {"init_layer_ids": [0]}, "are built otherwise than draft layers"),
        ("llama", {"init_layer_ids": [4]}, "names layer 4, but the target has layers 0 to 3"),
        (
            "llama",
            {"init_layer_ids": [1], "num_hidden_layers": 2},
            "names 1 layers of the target, but the drafter has 2",
        ),
        ("llama", {"init_layer_ids": [1], "intermediate_size": 16}, "Leave out the sizes that differ"),
    ],
)
def test_layers_that_cannot_be_taken_over_are_refused(family, settings, message):
    with pytest.raises(ValueError, match=message):
        new_drafter_for(target(family), mask_token_id=96, **settings)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is no JSON"),
        ("[1]", "line 2 holds list, expected a JSON object"),
        ('{"prompt_ids": [1]}', "line 2: `response_ids` is missing, expected a list of token ids"),
        ('{"prompt_ids": [], "response_ids": [1]}', r"line 2: `prompt_ids` is \[\], expected"),
        ('{"prompt_ids": [1], "response_ids": "text"}', "line 2: `response_ids` is 'text', expected"),
        ('{"prompt_ids": [1], "response_ids": [97]}', "`response_ids` holds 97, but the target has 97 ids"),
        ('{"prompt_ids": [1], "response_ids": [9], "index": "a"}', "`index` is 'a', expected an integer"),
    ],
)
def test_a_bad_row_is_named_by_its_line(line, message, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt_ids": [1], "response_ids": [2, 3]}\n' + line + "\n")
    with pytest.raises(ValueError, match=message):
        read_responses(path, VOCAB)


def test_rows_are_read_and_held_out(tmp_path):
    path = tmp_path / "rows.jsonl.gz"
    rows = [{"prompt_ids": [1], "response_ids": [2, 3], "dataset": "mt-bench", "index": 1}]
    rows += [{"prompt_ids": [1], "response_ids": [2, 3], "dataset": "gsm8k", "index": i} for i in (19, 20, 21)]
    rows += [{"prompt_ids": [1], "response_ids": [2, 3]}]
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    found = read_responses(path, VOCAB)
    assert found[-1] == Response([1], [2, 3], "rows", 5)
    train_rows, held_out = split_held_out(found)
    assert [(row.dataset, row.index) for row in train_rows] == [("gsm8k", 19), ("gsm8k", 21), ("rows", 5)]
    assert [(row.dataset, row.index) for row in held_out] == [("mt-bench", 1), ("gsm8k", 20)]
    with pytest.raises(ValueError, match="All 5 rows are held out"):
        split_held_out(found, every=1)
    with pytest.raises(ValueError, match="holds no rows"):
        (tmp_path / "empty.jsonl").touch()
        read_responses(tmp_path / "empty.jsonl")


@pytest.mark.parametrize(
    ("drafter", "settings", "message"),
    [
        (lambda: new_drafter().to(torch.bfloat16), {}, "The drafter is in torch.bfloat16"),
        (new_drafter, {"max_length": 5}, "None of the 24 rows has two response tokens within `max_length`"),
        (lambda: new_drafter(num_target_layers=9), {}, "the number of decoder layers is 4 in the target and 9"),
        (new_drafter, {"max_seconds": 9, "lr_scheduler_type": "reduce_lr_on_plateau"}, "cannot follow the clock"),
    ],
)
def test_what_cannot_be_trained_is_refused(drafter, settings, message, tmp_path):
    if "lr_scheduler_type" in settings:
        settings = {**settings, "eval_strategy": "epoch", "metric_for_best_model": "loss"}
    with pytest.raises(ValueError, match=message):
        train(tmp_path, drafter(), eval_rows=responses()[:4], **settings)


def test_a_checkpoint_of_another_drafter_is_refused(tmp_path):
    train(tmp_path, save_strategy="steps", save_steps=2, max_steps=2)
    with pytest.raises(ValueError, match="holds another drafter than the one that is trained: markov_head"):
        train(tmp_path, new_drafter(markov_rank=8), resume=True)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"mask_token_id": 95}, "`mask_token_id` is 96 there and 95 here"),
        ({"target_layer_ids": [0, 1]}, r"`target_layer_ids` is \[1, 2\] there and \[0, 1\] here"),
        ({"block_size": 5}, "`block_size` is 4 there and 5 here"),
        ({}, "proposes other ids than the drafter that is trained"),
    ],
)
def test_a_checkpoint_whose_weights_mean_something_else_is_refused(changed, message, tmp_path):
    fields = {"mask_token_id": 96, "target_layer_ids": [1, 2], "block_size": 4}

    def made(first_id: int, **changed) -> DSparkDrafter:
        return with_draft_vocabulary(
            new_drafter(**{**fields, **changed}), target(), torch.arange(first_id, first_id + 40)
        )

    train(tmp_path, made(0), save_strategy="steps", save_steps=2, max_steps=2)
    with pytest.raises(ValueError, match=message):
        train(tmp_path, made(0 if changed else 1, **changed), resume=True)


def test_a_calibration_does_not_outlive_the_weights_it_was_made_with(tmp_path):
    trainer = train(tmp_path, max_steps=1)
    drafter = trainer.drafter
    count = drafter.config.num_draft_tokens
    drafter.calibration = Calibration([2.0] * count)
    trainer.save_model()
    assert DSparkDrafter.from_pretrained(tmp_path).calibration is not None
    again = train(tmp_path, DSparkDrafter.from_pretrained(tmp_path, dtype=torch.float32), max_steps=1)
    again.save_model()
    assert DSparkDrafter.from_pretrained(tmp_path).calibration is None


class Slow(TrainerCallback):
    """The first evaluation, or checkpoint, takes two thirds of the time of the run."""

    def on_evaluate(self, args, state, control, **kwargs):
        time.sleep(args.max_seconds * 2 / 3 if state.global_step == 5 else 0.0)

    on_save = on_evaluate


@pytest.mark.parametrize("pause", [{"eval_strategy": "steps"}, {"save_strategy": "steps"}])
def test_what_comes_between_two_steps_does_not_end_a_run_by_the_clock(pause, tmp_path):
    limit = 6.0
    settings = {"max_steps": -1, "max_seconds": limit, "eval_steps": 5, "save_steps": 5, **pause}
    trainer = train(tmp_path, eval_rows=responses()[:2], callbacks=[Slow()], **settings)
    assert trainer._clock.elapsed > 0.9 * limit
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    assert rates[-1] < 0.1 * max(rates)


def command_settings(tmp_path, algorithm="dspark") -> dict:
    """Of a short run, with everything that it reads in a folder."""
    target().save_pretrained(tmp_path / "target")
    rows = [{"prompt_ids": r.prompt_ids, "response_ids": r.response_ids, "index": r.index} for r in responses()]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "output_dir": str(tmp_path / "drafter"),
        "target": str(tmp_path / "target"),
        "target_dtype": "float32",
        "data": [str(tmp_path / "rows.jsonl")],
        "held_out_every": 5,
        "algorithm": algorithm,
        "num_hidden_layers": 1,
        "block_size": 3,
        "markov_rank": 4 if algorithm == "dspark" else None,
        "draft_vocab_size": 60,
        "mask_token_id": 96,
        "max_steps": 4,
        "use_cpu": True,
        "disable_tqdm": True,
        "feature_cache": "memory",
        "save_strategy": "steps",
        "save_steps": 2,
    }


def test_a_checkpoint_that_was_not_written_to_its_end_is_passed_over(tmp_path):
    settings = command_settings(tmp_path)
    run_training(TrainSettings(**settings), report=[].append)
    lines: list[str] = []
    (tmp_path / "drafter" / "checkpoint-4" / "trainer_state.json").unlink()
    run_training(TrainSettings(**settings), report=lines.append)
    assert f"{tmp_path}/drafter/checkpoint-4 is incomplete: the run was interrupted while it was written." in lines
    assert f"Going on from {tmp_path}/drafter/checkpoint-2." in lines


def test_rows_that_processes_see_twice_count_once(tmp_path):
    trainer = train(tmp_path, max_steps=1)
    trainer.accelerator = SimpleNamespace(num_processes=2, process_index=1, gather=lambda ids: gathered)
    batch = {"row_ids": torch.tensor([3, 0]), "anchors": torch.tensor([[1, 2], [3, 4]])}
    gathered = torch.tensor([0, 1, 3, 0])
    assert trainer._without_repeats(batch)["anchors"].tolist() == [[1, 2], [-1, -1]]
    # In a later batch, all of those were there.
    gathered = torch.tensor([5, 6, 7, 3])
    batch["row_ids"] = torch.tensor([7, 3])
    assert trainer._without_repeats(batch)["anchors"].tolist() == [[1, 2], [-1, -1]]


def test_a_table_says_nothing_of_what_there_is_not():
    metrics = {f"eval_whole_acceptance_{k}": 0.5 for k in (1, 2)} | {
        "eval_whole_tau": 1.5,
        "eval_whole_greedy_tau": 1.6,
    }
    metrics |= {f"eval_short_acceptance_{k}": 0.25 for k in (1, 2)} | {"eval_short_confidence_error": 0.1}
    cells = [[*column.cells] for column in table_of(metrics, 2).columns]
    assert [*zip(*cells, strict=True)] == [
        ("whole", "1.50", "1.60", "50.0%", "50.0%", ""),
        ("short", "", "", "25.0%", "25.0%", "10.0%"),
    ]


def test_one_gpu_of_several_is_used(tmp_path, caplog):
    args = arguments(tmp_path)
    args._n_gpu = 2
    trainer = DSparkTrainer(new_drafter(), target(), args, responses())
    trainer.close()
    assert args.n_gpu == 1
    assert trainer.model is trainer.model_wrapped


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"gradient_checkpointing": True}, "--gradient-checkpointing is not supported"),
        ({"push_to_hub": True}, "publish the drafter with `dspark-hf push`"),
        ({"muon": True, "optim": "adafactor"}, "--muon comes with AdamW"),
        ({"feature_cache_bits": 8}, "--feature-cache-bits is of --feature-cache, which is missing"),
        ({"feature_cache_bits": 4, "feature_cache": "memory"}, "--feature-cache-bits is 4, it must be 8 or 16"),
        ({"attn_implementation": "eager"}, "--attn-implementation is eager, it must be sdpa or flex_attention"),
    ],
)
def test_what_a_drafter_has_no_use_for_is_refused(option, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        arguments(tmp_path, **option)


@pytest.mark.parametrize("algorithm", ["dspark", "dflash"])
def test_the_command_from_files_to_a_drafter(algorithm, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    settings = command_settings(tmp_path, algorithm) | {"plot": str(tmp_path / "curve.png")}
    lines = []
    trainer = run_training(TrainSettings(**settings), report=lines.append)
    assert lines[0].startswith("19 rows to train on")
    assert "5 held out" in lines[0]
    assert "GB in memory" in lines[2]
    assert "τ greedy" in capsys.readouterr().out
    assert (tmp_path / "curve.png").is_file()
    assert hooks_of(trainer.target) == 0
    drafter = DSparkDrafter.from_pretrained(tmp_path / "drafter")
    assert drafter.config.draft_vocab_size == 60
    assert drafter.config.sample_from_anchor == (algorithm == "dspark")
    assert drafter.config.target_model_name_or_path is None
    assert_lossless(target(), drafter, wrong_at=[None])
    # The same folder again: there is nothing left to do.
    again = run_training(TrainSettings(**settings), report=lines.append)
    assert f"Going on from {tmp_path}/drafter/checkpoint-4." in lines
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(again.drafter.state_dict()[name], tensor), name


@pytest.mark.slow
@pytest.mark.parametrize("start", [[], ["--new"]], ids=["from the package's drafter", "new"])
def test_the_example_makes_a_drafter_from_its_target_alone(start, tmp_path):
    script = Path(__file__).parents[1] / "examples" / "train_smollm2.py"
    settings = ["--output-dir", str(tmp_path), "--num-prompts", "6", "--max-new-tokens", "24", "--minutes", "0.2"]
    settings += ["--num-function-prompts", "2", "--num-self-prompts", "2", "--num-varied", "2"]
    settings += ["--num-assistant-prompts", "2"]
    (tmp_path / "sums.jsonl").write_text(json.dumps({"index": 1, "prompt": "Ada has 12 cups. How many?"}) + "\n")
    settings += ["--vary", str(tmp_path / "sums.jsonl")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, str(script), *settings, *start], check=True, env=environment, timeout=600)
    folder = tmp_path / "bfloat16"
    drafter = DSparkDrafter.from_pretrained(folder)
    assert (drafter.lm_head, drafter.dtype) == (None, torch.bfloat16)
    assert drafter.config.draft_vocab_size == 16384
    assert sum(path.stat().st_size for path in folder.iterdir()) < 40e6
    assert json.loads((tmp_path / "trainer_state.json").read_text())["log_history"][-1]["draft_tokens"] > 0
