"""Prices in a file: measured by real rounds, refused elsewhere, and no clock in the decisions made by them."""

import json
import random
import warnings
from dataclasses import replace
from pathlib import Path

import kit
import pytest
import torch
from conftest import FIXTURES
from transformers import AutoModelForCausalLM

from dspark_hf import DSparkDrafter, cost_model, generation
from dspark_hf.candidate_generator import DSparkCandidateGenerator
from dspark_hf.cli import main
from dspark_hf.cost_model import CostModel, Prices, place_of, profile_costs
from dspark_hf.costs import CostTable, RoundCosts
from dspark_hf.packed_weights import pack_weights
from dspark_hf.profile_run import ProfileSettings, advice

PASSES = {1: {0: 0.05, 1: 0.051, 2: 0.06, 3: 0.075, 4: 0.08}, 2: {0: 0.06, 4: 0.09}}
DRAFTS = {1: {1: 0.005, 4: 0.008}}


def model_of(target=None, drafter=None) -> CostModel:
    return CostModel(place_of(target or kit.target(), drafter or kit.drafter()), {32: Prices(PASSES, DRAFTS)})


class TestTable:
    def test_prices_are_those_of_the_file(self):
        costs = RoundCosts(model_of().table())
        assert costs.pass_seconds(1, 4) == pytest.approx(list(PASSES[1].values()))
        assert costs.num_plain(1) > 0 and costs.is_measured(1, 3)
        assert costs.pass_seconds(2, 4)[::4] == pytest.approx([0.06, 0.09], rel=0.05)
        base, slope = costs.draft_seconds(1)
        assert base + slope == pytest.approx(0.005, rel=0.2) and base + 4 * slope == pytest.approx(0.008, rel=0.1)

    def test_prices_between_two_contexts_are_in_proportion(self):
        far = Prices({n: {k: 3 * s for k, s in of.items()} for n, of in PASSES.items()}, DRAFTS)
        model = CostModel({}, {100: Prices(PASSES, DRAFTS), 300: far})
        assert model.prices() == model.prices(100) == model.prices(7) == model.contexts[100]
        assert model.prices(300) == model.prices(9000) == far
        for num_rows, of in PASSES.items():
            assert model.prices(200).passes[num_rows] == pytest.approx({n: 2 * seconds for n, seconds in of.items()})
        assert model.prices(200).drafts[1] == pytest.approx(DRAFTS[1])
        near, mid = Prices({1: {0: 0.04, 1: 0.05}}, {1: {1: 0.01}}), Prices({1: {0: 0.08, 1: 0.09}}, {1: {1: 0.01}})
        model = CostModel({}, {100: near, 300: mid})
        assert model.speed_ups(1, 0.5) == pytest.approx([1, 1.5 * 0.04 / 0.06])
        assert model.speed_ups(1, 0.5, 200) == pytest.approx([1, 1.5 * 0.06 / 0.08])

    def test_nothing_is_learned_into_it(self):
        table = model_of().table()
        costs = RoundCosts(table)
        for _ in range(100):
            costs.observe(1, 0, 0, 0, 9.0, None)
            table.count_acceptance("drafter", [(0, True)])
            table.count_ends(1, 1)
        assert costs.pass_seconds(1, 4) == pytest.approx(list(PASSES[1].values()))
        assert table.acceptance("drafter", 0) == (0, 0)
        assert table.end_rate == CostTable().end_rate


class TestFile:
    def test_it_comes_back_as_it_was(self, tmp_path):
        model = model_of()
        assert CostModel.load(model.save(tmp_path / "costs.json")) == model

    def test_the_cache_knows_pair_and_place(self, tmp_path, monkeypatch):
        monkeypatch.setattr(cost_model, "HF_HOME", str(tmp_path))
        target, drafter = kit.target(), kit.drafter()
        assert CostModel.cached(target, drafter) is None
        path = model_of().save()
        assert Path(tmp_path) in path.parents
        assert CostModel.cached(target, drafter) == model_of()
        assert CostModel.cached(target, kit.new_drafter(block_size=2)) is None
        assert [path] == [*path.parent.iterdir()], "nothing half written is left beside it"

    @pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"{}"])
    def test_a_broken_file_in_the_cache_is_reported_and_does_not_stop_a_call(self, tmp_path, monkeypatch, content):
        monkeypatch.setattr(cost_model, "HF_HOME", str(tmp_path))
        # A pair looks into the cache once.
        target, drafter = kit.target(), kit.new_drafter()
        CostModel(cost_model.place_of(target, drafter), model_of().contexts).save().write_bytes(content)
        input_ids = torch.tensor([[1, 2, 3]])
        plain = target.generate(input_ids, max_new_tokens=6, do_sample=False)
        with pytest.warns(UserWarning, match="learns its own prices"):
            assert CostModel.cached(target, drafter) is None
        with pytest.warns(UserWarning, match="learns its own prices"):
            output = target.generate(input_ids, max_new_tokens=6, do_sample=False, assistant_model=drafter)
        assert output.tolist() == plain.tolist()

    @pytest.mark.parametrize(
        "text",
        [
            "no json",
            "[]",
            "{}",
            json.dumps({"place": {}, "contexts": {}}),
            json.dumps({"place": {}, "contexts": {"1": {"passes": {}}}}),
        ],
    )
    def test_something_else_is_refused(self, tmp_path, text):
        (tmp_path / "costs.json").write_text(text)
        with pytest.raises(OSError, match=r"costs.json holds no prices .*profile_costs"):
            CostModel.load(tmp_path / "costs.json")

    @pytest.mark.parametrize("curve", [{"1": 0.05}, {"0": 0.0}, {"0": -1}])
    def test_impossible_prices_are_refused(self, tmp_path, curve):
        fields = {"place": {}, "contexts": {"1": {"passes": {"1": curve}, "drafts": {}}}}
        (tmp_path / "costs.json").write_text(json.dumps(fields))
        with pytest.raises(OSError, match="a price is missing or not positive"):
            CostModel.load(tmp_path / "costs.json")


class TestUse:
    def generate(self, drafter, **settings):
        torch.manual_seed(0)
        call = {**kit.inputs(), "max_new_tokens": 24, "do_sample": True, "assistant_model": drafter}
        with drafter.trace() as trace:
            output = kit.target().generate(**call, **settings)
        return output.tolist(), [(r.reason, r.proposed, r.accepted) for r in trace.rounds]

    @pytest.mark.parametrize("schedule", ["auto", "hardware", "hardware-decoupled", "acceptance"])
    def test_the_same_seed_gives_the_same_rounds_whatever_the_clock_says(self, schedule, monkeypatch):
        drafter = kit.new_drafter()
        drafter.cost_model = model_of(drafter=drafter)
        settings = {"num_assistant_tokens_schedule": schedule}
        first = self.generate(drafter, **settings)
        real, rng = RoundCosts.observe, random.Random(0)

        def observe(self: RoundCosts, **kwargs):
            real(self, **{**kwargs, "seconds": rng.uniform(0, 9), "draft_seconds": rng.uniform(0, 9)})

        monkeypatch.setattr(RoundCosts, "observe", observe)
        assert self.generate(drafter, **settings) == first
        assert len({len(proposed) for _, proposed, _ in first[1]}) > 1

    def test_prices_of_another_place_are_refused_with_a_warning(self):
        drafter = kit.new_drafter()
        model = model_of(drafter=drafter)
        drafter.cost_model = replace(model, place={**model.place, "threads": 77})
        with pytest.warns(UserWarning, match=r"measured elsewhere \(threads: 77 there, .*profile_costs"):
            self.generate(drafter)

    def test_no_hook_is_left_where_a_cost_model_is_none_or_a_warning_an_error(self):
        drafter, target = kit.new_drafter(), kit.new_target()
        model = model_of(target, drafter)
        for given in ("prices.json", replace(model, place={**model.place, "threads": 77})):
            drafter.cost_model = given
            with warnings.catch_warnings(), pytest.raises((AttributeError, UserWarning)):
                warnings.simplefilter("error")
                target.generate(**kit.inputs(), max_new_tokens=4, do_sample=False, assistant_model=drafter)
            assert kit.hooks_of(target) == 0

    def test_packed_weights_are_another_place(self):
        target, drafter = kit.new_target(), kit.new_drafter()
        before = place_of(target, drafter)
        assert pack_weights(target) > 0
        assert place_of(target, drafter) != before

    @pytest.mark.filterwarnings("ignore:The drafter does not seem to fit")
    @pytest.mark.parametrize("num_rows", [1, 3, 5])
    def test_fixed_prices_serve_any_number_of_rows(self, num_rows):
        target, drafter = kit.target(), kit.new_drafter()
        drafter.generation_config.num_assistant_tokens_schedule = "auto"
        passes = {1: dict.fromkeys(range(5), 0.01), 16: {16 * n: 0.01 for n in range(5)}}
        drafts = {rows: dict.fromkeys(range(1, 5), 1e-4) for rows in (1, 16)}
        drafter.cost_model = CostModel(place_of(target, drafter), {32: Prices(passes, drafts)})
        ids = torch.randint(1, 90, (num_rows, 6), generator=torch.Generator().manual_seed(3))
        with drafter.trace() as trace:
            target.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, do_sample=False, assistant_model=drafter
            )
        assert {one.reason for one in trace.rounds}.isdisjoint({"measuring"})
        assert any(any(proposed for proposed, _, _ in one.per_row()) for one in trace.rounds)

    def test_calls_start_from_what_a_profile_left_in_the_cache_and_learn_on(self, tmp_path, monkeypatch):
        monkeypatch.setattr(cost_model, "HF_HOME", str(tmp_path))
        target, drafter = kit.new_target(), kit.new_drafter()
        model_of(target, drafter).save()
        call = {**kit.inputs(), "max_new_tokens": 24, "do_sample": False, "assistant_model": drafter}
        with drafter.trace() as trace:
            target.generate(**call, num_assistant_tokens_schedule="auto")
        # Nothing has to be measured first, and nothing is a guess.
        assert trace.rounds[0].reason == "best"
        assert generation._cost_tables[drafter][target].popitem()[1]._num_rounds == len(trace.rounds)


def test_greedy_and_sampled_calls_keep_records_of_their_own():
    target, drafter = kit.target(), kit.new_drafter()
    for do_sample in (False, True, False):
        target.generate(**kit.inputs(), max_new_tokens=8, do_sample=do_sample, assistant_model=drafter)
    assert len(generation._cost_tables[drafter][target]) == 2


class TestProfile:
    def test_a_drafter_that_is_always_right_is_measured_at_every_length(self):
        folder = FIXTURES / "deepspec_qwen3_vanilla"
        target = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32)
        drafter = DSparkDrafter.from_pretrained(folder, dtype=torch.float32)
        with drafter.trace() as trace:
            model = profile_costs(target, drafter, context_lengths=(20,), repeats=1)
        assert trace.summary().acceptance_length > 3
        assert [*model.contexts[20].passes[1]] == [*range(8)]
        assert [*model.contexts[20].drafts[1]] == [*range(1, 8)]

    @pytest.mark.parametrize("num_draft_tokens", [1, 4])
    def test_every_length_is_measured(self, num_draft_tokens):
        drafter = kit.new_drafter(block_size=num_draft_tokens)
        model = profile_costs(kit.target(), drafter, batch_sizes=(1, 3), context_lengths=(20,), repeats=2)
        prices = model.prices()
        for num_rows in (1, 3):
            assert sorted(prices.passes[num_rows]) == [num_rows * n for n in range(num_draft_tokens + 1)]
            assert sorted(prices.drafts[num_rows]) == list(range(1, num_draft_tokens + 1))
            assert all(0 < seconds < 5 for seconds in prices.passes[num_rows].values())
        assert model.differences(kit.target(), drafter) == {}
        assert "block_size" in model.differences(kit.target(), kit.new_drafter(block_size=2))

    def test_drafts_are_priced_as_greedy_calls_draw_them_though_every_token_would_end_the_text(self, monkeypatch):
        seen, original = [], DSparkCandidateGenerator.draft

        def draft(self, *args, **kwargs):
            seen.append((list(self._processors), self.do_sample))
            return original(self, *args, **kwargs)

        monkeypatch.setattr(DSparkCandidateGenerator, "draft", draft)
        target = kit.target()
        monkeypatch.setattr(target.generation_config, "eos_token_id", list(range(target.config.vocab_size)))
        model = profile_costs(target, kit.new_drafter(block_size=2), context_lengths=(20,), repeats=1)
        assert [*model.prices().passes[1]] == [0, 1, 2]
        assert seen and all(each == ([], False) for each in seen)

    @pytest.mark.filterwarnings("ignore:The drafter's numbers overflow")
    def test_a_drafter_that_proposes_nothing_is_an_error(self):
        drafter = kit.new_drafter(block_size=2)
        with torch.no_grad():
            drafter.norm.weight.fill_(float("nan"))
        with pytest.raises(ValueError, match="no drafts of 1, 2 tokens for 1 rows"):
            profile_costs(kit.target(), drafter, context_lengths=(20,), repeats=1)

    def test_it_can_be_used_at_once(self):
        drafter = kit.new_drafter()
        drafter.cost_model = profile_costs(kit.target(), drafter, context_lengths=(20,), repeats=1)
        answer = kit.continuation(kit.target(), kit.PROMPT, 12)
        output = kit.target().generate(
            **kit.inputs(),
            max_new_tokens=12,
            do_sample=False,
            assistant_model=drafter,
            num_assistant_tokens_schedule="hardware",
        )
        assert output[0, len(kit.PROMPT) :].tolist() == answer

    @pytest.mark.parametrize(
        "settings",
        [
            {"batch_sizes": ()},
            {"batch_sizes": (0,)},
            {"context_lengths": (0,)},
            {"context_lengths": ()},
            {"repeats": 0},
        ],
    )
    def test_wrong_settings(self, settings):
        with pytest.raises(ValueError, match="numbers from 1 on"):
            profile_costs(kit.target(), kit.drafter(), **settings)


class TestPlanner:
    def test_speeds_are_tokens_over_seconds(self):
        model = CostModel({}, {1: Prices({1: {0: 0.04, 1: 0.05, 2: 0.06}}, {1: {1: 0.01, 2: 0.01}})})
        plain, one, two = model.speed_ups(1, 0.5)
        assert plain == 1.0
        assert one == pytest.approx(1.5 * 0.04 / 0.06)
        assert two == pytest.approx(1.75 * 0.04 / 0.07)

    def test_rows_of_a_batch_each_get_a_draft(self):
        model = CostModel({}, {1: Prices({4: {0: 0.04, 4: 0.05}}, {4: {1: 0.01}})})
        assert model.speed_ups(4, 1.0) == pytest.approx([1.0, 2 * 0.04 / 0.06])

    @pytest.mark.parametrize(("num_rows", "acceptance"), [(3, 0.5), (1, 1.5), (1, -0.1)])
    def test_what_is_not_known_or_no_chance_is_refused(self, num_rows, acceptance):
        with pytest.raises(ValueError, match=r"No prices for 3 rows, only for 1, 2|expected a chance"):
            model_of().speed_ups(num_rows, acceptance)

    def test_advice(self):
        model = CostModel({}, {1: Prices({1: {0: 0.04, 1: 0.05}}, {1: {1: 0.02}})})
        assert advice(model, 1, 0.3) == "acceptance 0.3: no draft pays, decode plainly"
        assert advice(model, 1, 0.9) == "acceptance 0.9: drafts of 1, expected speed x 1.09 of plain decoding"

    def test_command(self, tmp_path, capsys):
        model = kit.new_target()
        model.generation_config.pad_token_id = 0
        model.save_pretrained(tmp_path / "target")
        kit.tokenizer().save_pretrained(tmp_path / "target")
        kit.new_drafter().save_pretrained(tmp_path / "drafter")
        file = tmp_path / "costs.json"
        arguments = f"--target {tmp_path}/target --drafter {tmp_path}/drafter --dtype float32 --device cpu"
        assert (
            main(
                [
                    "profile",
                    *arguments.split(),
                    "--batch-size",
                    "1",
                    "2",
                    "--context-length",
                    "12",
                    "--repeats",
                    "1",
                    "--output",
                    str(file),
                ]
            )
            == 0
        )
        assert sorted(CostModel.load(file).prices().passes) == [1, 2]
        assert "acceptance 0.9: " in capsys.readouterr().out

    @pytest.mark.parametrize(
        "settings", [{"batch_size": [0]}, {"repeats": 0}, {"context_length": [0]}, {"acceptance": [2]}]
    )
    def test_wrong_options(self, settings):
        with pytest.raises(ValueError, match=r"^--"):
            ProfileSettings(**settings)


@pytest.mark.parametrize("settings", [{"num_assistant_tokens": 2}, {"assistant_confidence_threshold": 0.9}])
def test_prices_are_measured_whatever_the_drafters_own_settings_are(settings):
    drafter = kit.new_drafter()
    for name, value in settings.items():
        setattr(drafter.generation_config, name, value)
    model = profile_costs(kit.target(), drafter, context_lengths=(8,), repeats=1)
    (prices,) = model.contexts.values()
    assert set(prices.drafts[1]) == set(range(1, 1 + drafter.config.num_draft_tokens))
