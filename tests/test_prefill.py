"""Prompts of different lengths in passes of their own: the same states, without the padding."""

import itertools
from typing import Any
from unittest.mock import patch

import kit
import pytest
import torch
from test_batches import batch, prompts
from transformers import DynamicCache, GenerationConfig

from dspark_hf import SpeculativeDecoding, generation, prefill
from dspark_hf._compat import CACHE_NAME
from dspark_hf.prefill import group_by_length, prefill_apart, rows_to_part

FAMILIES = [family for family in kit.FAMILIES if family != "gemma4_shared_kv"]


def cost(groups: list[list[int]], lengths: list[int]) -> int:
    return sum(prefill._PASS + len(rows) * max(lengths[row] for row in rows) for rows in groups)


def partitions(rows: list[int]) -> list[list[list[int]]]:
    if not rows:
        return [[]]
    first, rest = rows[0], rows[1:]
    found = []
    for n in range(len(rest) + 1):
        for others in itertools.combinations(rest, n):
            left = [row for row in rest if row not in others]
            found += [[[first, *others], *groups] for groups in partitions(left)]
    return found


class TestGroups:
    @pytest.mark.parametrize("seed", range(8))
    def test_cost_the_least_of_all_partitions(self, seed: int):
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(1, 300, (6,), generator=generator).tolist()
        least = min(cost(groups, lengths) for groups in partitions(list(range(6))))
        found, whole = group_by_length(lengths), [list(range(6))]
        assert sorted(itertools.chain(*found)) == list(range(6))
        if least <= 0.9 * cost(whole, lengths):
            assert cost(found, lengths) == least
        else:
            assert found == whole

    @pytest.mark.parametrize("lengths", [[70], [50, 50, 50], [50, 53, 49], [1, 2, 3, 4], [9, 30]])
    def test_stay_together_where_little_is_saved(self, lengths: list[int]):
        assert group_by_length(lengths) == [list(range(len(lengths)))]

    def test_a_long_one_among_short_ones(self):
        assert sorted(group_by_length([20, 400, 22, 21])) == [[0, 2, 3], [1]]


def call(num_rows: int, family: str = "llama") -> tuple[torch.Tensor, dict[str, Any]]:
    """Ids, and what `generate` prepares for their prefill."""
    inputs = batch(prompts(num_rows))
    mask = inputs["attention_mask"]
    kwargs = {
        "attention_mask": mask,
        "position_ids": (mask.cumsum(dim=1) - 1).clamp(min=0),
        CACHE_NAME: DynamicCache(config=kit.target(family).config),
        "use_cache": True,
        "logits_to_keep": 1,
    }
    return inputs["input_ids"], kwargs


class TestStates:
    @pytest.mark.parametrize("groups", [[[1], [6, 2], [0, 3, 4, 5, 7]], [[n] for n in range(8)]], ids=str)
    @pytest.mark.parametrize("family", FAMILIES)
    @torch.no_grad()
    def test_are_those_of_one_pass(self, family: str, groups: list[list[int]]):
        model, config = kit.target(family), GenerationConfig()
        ids, kwargs = call(8, family)
        expected = model._prefill(ids, config, kwargs)
        ids, kwargs = call(8, family)
        outputs = prefill_apart(model, ids, config, kwargs, groups)
        torch.testing.assert_close(outputs.logits, expected.logits, atol=1e-4, rtol=1e-4)
        assert outputs[CACHE_NAME] is kwargs[CACHE_NAME]
        assert outputs[CACHE_NAME].get_seq_length() == 40
        real = kwargs["attention_mask"] != 0
        for ours, theirs in zip(outputs[CACHE_NAME].layers, expected[CACHE_NAME].layers, strict=True):
            assert type(ours) is type(theirs) and ours.keys.shape == theirs.keys.shape
            seen = real[:, -ours.keys.shape[2] :]
            for mine, other in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
                torch.testing.assert_close(
                    mine.transpose(1, 2)[seen], other.transpose(1, 2)[seen], atol=1e-4, rtol=1e-4
                )

    @pytest.mark.parametrize("family", ["llama", "gemma3"])
    def test_of_the_drafter_too(self, family: str):
        """What it proposes shows what it knows of the prompts."""
        proposals = []
        for apart in (True, False):
            drafter = kit.new_drafter()
            with (
                drafter.trace() as trace,
                patch.object(generation, "rows_to_part", rows_to_part if apart else lambda *args: None),
                patch.object(generation, "prefill_apart", wraps=prefill_apart) as ran,
            ):
                kit.target(family).generate(
                    **batch(prompts(8)),
                    assistant_model=drafter,
                    do_sample=False,
                    max_new_tokens=8,
                    num_assistant_tokens_schedule="constant",
                )
            assert ran.call_count == apart
            proposals.append([one.proposed for one in trace.rounds])
        assert proposals[0] == proposals[1]


class TestWhere:
    def groups(self, config: GenerationConfig | None = None, family: str = "llama", **changed: Any):
        _, kwargs = call(8, family)
        return rows_to_part(kit.target(family), {**kwargs, **changed}, config or GenerationConfig())

    def test_rows_differ(self):
        assert len(self.groups()) > 1
        assert len(self.groups(position_ids=None)) > 1
        assert len(self.groups(token_type_ids=None)) > 1

    @pytest.mark.parametrize(
        "changed",
        [
            {"attention_mask": None},
            {"attention_mask": torch.ones(8, 40, dtype=torch.long)},
            {"attention_mask": batch(prompts(8))["attention_mask"].flip(1)},
            {"attention_mask": torch.ones(8, 1, 40, 40)},
            {"position_ids": torch.zeros(3, 8, 40, dtype=torch.long)},
            {"token_type_ids": torch.zeros(8, 40, dtype=torch.long)},
            {"inputs_embeds": torch.zeros(8, 40, 32)},
            {CACHE_NAME: None},
        ],
        ids=[
            "no mask",
            "no padding",
            "padding behind",
            "4d mask",
            "three positions",
            "types",
            "embeds",
            "no cache",
        ],
    )
    def test_one_pass_where_nobody_knows_better(self, changed: dict[str, Any]):
        assert self.groups(**changed) is None

    def test_one_pass_with_a_hole_in_a_prompt(self):
        mask = batch(prompts(8))["attention_mask"].clone()
        mask[1, 20] = 0
        assert self.groups(attention_mask=mask) is None

    def test_one_pass_over_a_cache_that_holds_something(self):
        cache = DynamicCache(config=kit.target().config)
        cache.update(torch.zeros(8, 2, 3, 8), torch.zeros(8, 2, 3, 8), 0)
        assert self.groups(**{CACHE_NAME: cache}) is None

    def test_chunks_as_the_caller_wants_them(self):
        assert self.groups(GenerationConfig(prefill_chunk_size=16)) is None

    def test_one_pass_where_layers_share_keys(self):
        assert self.groups(family="gemma4_shared_kv") is None

    def test_one_pass_where_other_processes_count_on_it(self):
        """They gather parameters together, and each has other prompts."""
        model = kit.target()
        decoding = SpeculativeDecoding(kit.drafter(), synced_gpus=True)
        with (
            patch.object(model, "_has_unfinished_sequences", lambda is_done, *args, **kwargs: not is_done),
            patch.object(generation, "prefill_apart") as ran,
        ):
            model.generate(**batch(prompts(8)), custom_generate=decoding, do_sample=False, max_new_tokens=4)
        ran.assert_not_called()

    @pytest.mark.parametrize("setting", [{"return_dict_in_generate": True}, {"draft_invariant": True}])
    def test_one_pass_where_it_would_be_seen(self, setting: dict[str, Any]):
        with patch.object(generation, "prefill_apart") as ran:
            kit.target().generate(
                **batch(prompts(8)), assistant_model=kit.drafter(), do_sample=False, max_new_tokens=4, **setting
            )
        ran.assert_not_called()
