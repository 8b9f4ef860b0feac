"""Our drafter in transformers' own path for DFlash drafters: the same text there."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import kit
import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.generation import candidate_generator

from dspark_hf import DSparkDrafter
from dspark_hf._compat import CACHE_NAME

FOLDER = Path(__file__).parent / "fixtures" / "zlab_dflash"
PROMPT = (5, 17, 3, 60, 22, 41, 9, 33, 70, 12)

pytestmark = pytest.mark.skipif(
    not hasattr(candidate_generator, "DFlashTokenCandidateGenerator"),
    reason="this version of transformers has no native path for DFlash drafters",
)


@cache
def target() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(FOLDER / "target", dtype=torch.float32).eval()


def fixture_drafter() -> DSparkDrafter:
    drafter = DSparkDrafter.from_pretrained(FOLDER)
    drafter.generation_config.num_assistant_tokens_schedule = "constant"
    return drafter


def native(model: PreTrainedModel, assistant: DSparkDrafter, **kwargs: Any) -> torch.LongTensor:
    return model.generate(**kit.inputs(PROMPT), assistant_model=assistant, speculation_type="dflash", **kwargs)


@pytest.fixture
def widths() -> Iterator[list[int]]:
    """Positions of each pass of the target."""
    seen: list[int] = []
    handle = target().register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    yield seen
    handle.remove()


GREEDY = {"max_new_tokens": 24, "do_sample": False}


def test_same_text_as_plain_and_as_ours():
    plain = target().generate(**kit.inputs(PROMPT), **GREEDY)
    ours = target().generate(**kit.inputs(PROMPT), **GREEDY, assistant_model=fixture_drafter())
    theirs = native(target(), fixture_drafter(), **GREEDY)
    assert ours.tolist() == plain.tolist()
    assert theirs.tolist() == plain.tolist()


@pytest.mark.skipif(CACHE_NAME != "cache", reason="the native path reads layer ids in another way in this version")
def test_same_proposals_as_ours(monkeypatch: pytest.MonkeyPatch):
    assistant, proposed = fixture_drafter(), []
    real = candidate_generator.DFlashTokenCandidateGenerator.get_candidates

    def get_candidates(self: Any, input_ids: torch.LongTensor, *args: Any, **kwargs: Any) -> Any:
        candidates, scores = real(self, input_ids, *args, **kwargs)
        if candidates.shape[1] > input_ids.shape[1]:
            proposed.append(candidates[0, input_ids.shape[1] :].tolist())
        return candidates, scores

    monkeypatch.setattr(candidate_generator.DFlashTokenCandidateGenerator, "get_candidates", get_candidates)
    native(target(), assistant, **GREEDY, num_assistant_tokens=assistant.config.num_draft_tokens)
    with assistant.trace() as trace:
        target().generate(**kit.inputs(PROMPT), **GREEDY, assistant_model=assistant)
    ours = [r.proposed for r in trace.rounds if r.proposed]
    # Near the limit each loop shortens its drafts in its own way.
    common = min(len(ours), len(proposed)) - 1
    assert common > 0
    assert proposed[:common] == ours[:common]


def test_an_oracle_is_accepted(widths: list[int], monkeypatch: pytest.MonkeyPatch):
    plain = target().generate(**kit.inputs(PROMPT), **GREEDY)
    widths.clear()
    real = candidate_generator.DFlashTokenCandidateGenerator.get_candidates

    def get_candidates(self: Any, input_ids: torch.LongTensor, *args: Any, **kwargs: Any) -> Any:
        candidates, _ = real(self, input_ids, *args, **kwargs)
        return plain[:, : candidates.shape[1]], None

    monkeypatch.setattr(candidate_generator.DFlashTokenCandidateGenerator, "get_candidates", get_candidates)
    assert native(target(), fixture_drafter(), **GREEDY).tolist() == plain.tolist()
    assert len(widths) < GREEDY["max_new_tokens"] / 2
    assert max(widths[1:]) > 1


def test_settings_in_a_generation_config():
    config = GenerationConfig(**GREEDY, speculation_type="dflash")
    plain = target().generate(**kit.inputs(PROMPT), **GREEDY)
    theirs = target().generate(**kit.inputs(PROMPT), generation_config=config, assistant_model=fixture_drafter())
    assert theirs.tolist() == plain.tolist()


@pytest.mark.parametrize("layers", [("full_attention", "full_attention"), ("sliding_attention", "full_attention")])
def test_random_drafters_of_ours(layers: tuple[str, str]):
    # Without heads and with the DFlash anchor, a drafter of any layout runs there.
    windows = {"layer_types": layers, "sliding_window": 6}
    assistant = kit.new_drafter(
        sample_from_anchor=False,
        markov_head_type="none",
        enable_confidence_head=False,
        target_layer_ids=[0, 2],
        **windows,
    )
    model = kit.new_target("qwen3")
    assert native(model, assistant, **GREEDY)[0, len(PROMPT) :].tolist() == kit.continuation(model, PROMPT, 24)
