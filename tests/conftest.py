"""Shared by every test module: where the fixtures are, how a pair is loaded, and a quiet transformers."""

from functools import cache
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from dspark_hf import DSparkDrafter

FIXTURES = Path(__file__).parent / "fixtures"

logging.disable_progress_bar()
logging.set_verbosity_error()


@cache
def load_target(name: str) -> PreTrainedModel:
    """The target of a fixture in float32, shared by all tests: leave it as it is.

    It ends nowhere by itself: a test says which token stops it.
    """
    target = AutoModelForCausalLM.from_pretrained(FIXTURES / name / "target", dtype=torch.float32)
    target.generation_config.eos_token_id = None
    return target.eval()


@cache
def load_pair(name: str, attn_implementation: str = "sdpa") -> tuple[PreTrainedModel, DSparkDrafter]:
    """Target and drafter of a fixture in float32, shared by all tests: leave them as they are."""
    drafter = DSparkDrafter.from_pretrained(
        FIXTURES / name, dtype=torch.float32, attn_implementation=attn_implementation
    )
    # Tests count drafts and rounds, which "auto" chooses by the clock.
    drafter.generation_config.num_assistant_tokens_schedule = "constant"
    return load_target(name), drafter.eval()


def embed(drafter: DSparkDrafter, target: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """`[1, S, H]` block embeddings: rows of the drafter's table, or of the target's where it has none."""
    table = drafter.embed_tokens if drafter.embed_tokens is not None else target.get_input_embeddings()
    return table.weight[torch.tensor([ids])] * (drafter.config.embedding_scale or 1.0)


def head_of(drafter: DSparkDrafter, target: PreTrainedModel) -> torch.nn.Module:
    """The drafter's own lm_head, or the target's."""
    return drafter.lm_head if drafter.lm_head is not None else target.get_output_embeddings()
