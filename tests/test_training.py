"""Training: a step's logits are those of inference, nothing leaks, the objective is the paper's, runs resume."""

import pytest
import torch
from kit import VOCAB, new_drafter, target

from dspark_hf import DSparkCandidateGenerator
from dspark_hf.training.blocks import draft_positions, markov_latents, run_blocks
from dspark_hf.training.objective import ObjectiveWeights
from dspark_hf.training.step import TrainingStep
from dspark_hf.training.target_features import OnlineFeatures

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
