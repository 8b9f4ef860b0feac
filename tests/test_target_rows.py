"""Buffers of the target's keys and values: what they cost, what they keep for rows that have left, what comes back."""

import math
from typing import Any

import kit
import pytest
import torch
from kit import PROMPT, drafter, inputs, knowing, target
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from dspark_hf import UnsupportedGenerationError, generation, target_rows
from dspark_hf._compat import CACHE_NAME
from dspark_hf.auto_schedule import AutoSchedule
from dspark_hf.cost_model import CostModel, Prices, place_of
from dspark_hf.costs import RoundCosts

ROWS = [PROMPT, PROMPT[3:]]


def batch() -> dict[str, torch.Tensor]:
    ids = torch.tensor([[0] * (len(PROMPT) - len(row)) + [*row] for row in ROWS])
    mask = torch.tensor([[0] * (len(PROMPT) - len(row)) + [1] * len(row) for row in ROWS])
    return {"input_ids": ids, "attention_mask": mask}


def own_cache(family: str) -> DynamicCache:
    return DynamicCache(config=target(family).config)


@pytest.mark.parametrize("is_kept", [True, False], ids=["end token seen", "end token masked"])
@pytest.mark.parametrize("pace", ["row by row", "in step"])
@pytest.mark.parametrize(("family", "num_tokens"), [("llama", 40), ("gemma3", 40), ("gemma3", 120), ("mistral", 120)])
def test_a_second_turn_after_rows_that_ended_early(family: str, num_tokens: int, pace: str, is_kept: bool):
    """Where a window slides on without them, early rows keep what their last token sees."""
    model, length = target(family), len(PROMPT)
    long = {**batch(), "do_sample": False, "max_new_tokens": num_tokens}
    texts = [row[length:].tolist() for row in model.generate(**long)]
    end = next(token for token in texts[0][2:9] if token not in texts[1] and texts[0].index(token) >= 2)
    call = {**long, "eos_token_id": end, "pad_token_id": 0}
    second = []
    for assistant in (None, drafter(block_size=12)):
        cache = own_cache(family)
        arguments: dict[str, Any] = {CACHE_NAME: cache}
        if pace == "in step":
            arguments["logits_processor"] = [lambda ids, scores: scores]
        with knowing(texts, wrong_at=1, num_unseen=None):
            first = model.generate(**call, **arguments, assistant_model=assistant)
        mask = torch.cat((call["attention_mask"], torch.ones(2, first.shape[1] - length, dtype=torch.long)), dim=1)
        stop = length + texts[0].index(end)
        mask[0, stop + is_kept :] = 0
        question = torch.tensor([[7, 8, 9], [5, 4, 3]])
        ids, mask = torch.cat((first, question), dim=1), torch.cat((mask, torch.ones_like(question)), dim=1)
        turn = {"do_sample": False, "max_new_tokens": 12, CACHE_NAME: cache}
        second.append(model.generate(ids, attention_mask=mask, **turn)[:, ids.shape[1] :].tolist())
    assert second[0] == second[1]


@pytest.mark.parametrize("window", [4096, 1 << 18])
def test_buffers_do_not_outgrow_the_call(window: int, monkeypatch):
    capacities, real = [], target_rows._grown
    monkeypatch.setattr(target_rows, "_grown", lambda s, capacity: capacities.append(capacity) or real(s, capacity))
    model = kit.new_target("mistral", sliding_window=window, max_position_embeddings=2 * window)
    model.generate(**inputs(), max_new_tokens=5, do_sample=False, assistant_model=drafter())
    assert max(capacities) <= len(PROMPT) + 5 + 2 * 16


@pytest.mark.parametrize("window", [8, 64])
def test_a_static_cache_shorter_or_longer_than_the_window(window: int):
    model = kit.new_target("mistral", sliding_window=window)
    call = {**batch(), "max_new_tokens": 14, "do_sample": False, "cache_implementation": "static"}
    assert model.generate(**call, assistant_model=drafter()).tolist() == model.generate(**call).tolist()


class Own(DynamicLayer):
    pass


def test_a_batch_with_a_strange_cache_is_refused_before_any_work():
    cache = DynamicCache()
    cache.layers = [Own() for _ in range(4)]
    with pytest.raises(UnsupportedGenerationError, match=r"takes batches with a dynamic or a static cache.*Own"):
        target().generate(**batch(), max_new_tokens=5, assistant_model=drafter(), **{CACHE_NAME: cache})


def test_the_prices_are_those_of_the_real_passes(monkeypatch):
    model, seen, learned = kit.new_target(), [], []
    real = RoundCosts.observe

    def observe(self: RoundCosts, **kwargs: Any) -> None:
        learned.append((kwargs["num_rows"], kwargs["size"]))
        real(self, **kwargs)

    monkeypatch.setattr(RoundCosts, "observe", observe)
    monkeypatch.setattr(generation, "new_schedule", AutoSchedule)
    model.model.layers[0].register_forward_pre_hook(
        lambda module, args, kwargs: seen.append((args[0] if args else kwargs["hidden_states"]).shape[:2]),
        with_kwargs=True,
    )
    assistant = kit.new_drafter(block_size=8)
    # Prices that a busy machine does not change: drafts pay, however slow they are here.
    passes = {num_rows: {0: 0.05, 8 * num_rows: 0.051} for num_rows in (1, 2, 3)}
    assistant.cost_model = CostModel(place_of(model, assistant), {30: Prices(passes, {1: {1: 0.001, 8: 0.001}})})
    for call in (inputs(), batch()):
        seen.clear()
        learned.clear()
        model.generate(**call, max_new_tokens=30, do_sample=False, assistant_model=assistant)
        assert [num_rows + size for num_rows, size in learned] == [math.prod(shape) for shape in seen[1:]]
        assert max(size for _, size in learned) > 0
