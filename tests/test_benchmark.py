"""The benchmark: what it measures, what it says, and simulated acceptance. Offline, on tiny models."""

import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from types import SimpleNamespace
from typing import Any

import kit
import pytest
import torch
from rich.console import Console
from test_demo import FIXTURE, ascii_tokenizer
from transformers import AutoModelForCausalLM

from dspark_hf.benchmark import BenchmarkSettings, measuring, run_benchmark
from dspark_hf.benchmark.measuring import CaseMeasurer, CaseResult, Measurement, round_parts
from dspark_hf.benchmark.memory import MemoryGrowth
from dspark_hf.benchmark.methods import METHODS, Call, find_method
from dspark_hf.benchmark.models import Models, load_models
from dspark_hf.benchmark.prompts import make_cases
from dspark_hf.benchmark.random_models import random_drafter, random_target
from dspark_hf.benchmark.summary import compare_rivals, growth_against_context, spread, summarize
from dspark_hf.benchmark.tables import WIDTH, make_tables
from dspark_hf.comparison import Verdict
from dspark_hf.policies import SCHEDULES
from dspark_hf.prompt_files import COPY_PROMPTS_FILE, PROMPTS_FILE, Prompt, read_prompts
from dspark_hf.simulation import SimulatedDecoding, SimulatedProposals
from dspark_hf.trace import Round

BLOCK = 7


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> dict[str, str]:
    """Names a tiny random pair in float32, as `--target`, `--drafter` and `--dtype` would."""
    folder = tmp_path_factory.mktemp("target")
    target = AutoModelForCausalLM.from_pretrained(FIXTURE / "target")
    target.generation_config.eos_token_id = None  # random weights would end where they please
    target.generation_config.pad_token_id = 0
    target.save_pretrained(folder)
    ascii_tokenizer().save_pretrained(folder)
    return {"target": str(folder), "drafter": str(FIXTURE), "dtype": "float32", "device": "cpu"}


@pytest.fixture(scope="module")
def short_prompts(tmp_path_factory) -> str:
    """A prompts file: real prompts are long in a tokenizer of single letters."""
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    prompts = [{"dataset": dataset, "index": 0, "prompt": f"Say {dataset}"} for dataset in ("one", "two")]
    file.write_text("".join(f"{json.dumps(prompt)}\n" for prompt in prompts))
    return str(file)


def simulated(acceptance: float = 0.8, **settings: Any) -> BenchmarkSettings:
    """A benchmark on random weights, small enough for a test."""
    small = {"max_new_tokens": 17, "num_prompts": 1, "context_length": [16], "drafter_layers": 1, "device": "cpu"}
    return BenchmarkSettings(random_target="tiny", simulate_acceptance=acceptance, **{**small, **settings})


def run(settings: BenchmarkSettings) -> tuple[dict[str, Any], str]:
    """The report and what was printed."""
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    report = run_benchmark(settings, console)
    return report, console.export_text()


def lone_group(report: dict[str, Any]) -> dict[str, Any]:
    (methods,) = report["summary"].values()
    return methods


class TestMethodNames:
    def arguments(self, name: str) -> dict[str, Any]:
        return find_method(name).arguments(Call("the drafter", num_assistant_tokens=6))

    def test_every_schedule_is_a_method_with_a_length_or_a_threshold(self):
        for schedule in SCHEDULES:
            found = self.arguments(f"dspark-{schedule}")
            assert found["num_assistant_tokens_schedule"] == schedule
            assert found["num_assistant_tokens"] == 6
        assert self.arguments("dspark-constant:3")["num_assistant_tokens"] == 3
        assert self.arguments("dspark-confidence:0.25")["assistant_confidence_threshold"] == 0.25
        assert find_method("plain") is METHODS["plain"]

    @pytest.mark.parametrize("name", ["dspark-sometimes", "constant:3", "", "plain:3"])
    def test_others_are_refused_with_the_names(self, name):
        with pytest.raises(ValueError, match=r"which is none of plain, .*dspark-hardware"):
            find_method(name)
        with pytest.raises(ValueError, match="--methods names"):
            BenchmarkSettings(methods=[name])

    @pytest.mark.parametrize("name", ["dspark-constant:many", "dspark-confidence:0.x"])
    def test_a_value_that_is_no_number_is_named(self, name):
        with pytest.raises(ValueError, match="is no number of draft tokens and no threshold"):
            find_method(name)


class TestPrompts:
    def test_built_in_ones_are_held_out_and_come_in_turns(self):
        prompts = read_prompts(PROMPTS_FILE)
        datasets = ["gsm8k", "humaneval", "mt-bench"]
        assert [prompt.dataset for prompt in prompts] == datasets * 8
        assert all(prompt.index % 20 == 0 for prompt in prompts if prompt.dataset != "mt-bench")
        assert len({(prompt.dataset, prompt.index) for prompt in prompts}) == 24

    def test_the_copy_heavy_ones_are_long_and_a_dataset_of_their_own(self):
        prompts = read_prompts(COPY_PROMPTS_FILE)
        assert [(prompt.dataset, prompt.index) for prompt in prompts] == [("copy", i) for i in range(4)]
        assert all(len(prompt.prompt) > 400 for prompt in prompts)

    def test_own_prompts(self, tmp_path):
        file = tmp_path / "prompts.jsonl"
        file.write_text('{"dataset": "mine", "index": 4, "prompt": "Hello"}\n')
        assert read_prompts(file) == [Prompt("mine", 4, "Hello")]

    @pytest.mark.parametrize("line", ["no json", '{"dataset": "mine", "index": 4}', "[1]"])
    def test_a_wrong_line_is_named(self, tmp_path, line):
        file = tmp_path / "prompts.jsonl"
        file.write_text(f'{{"dataset": "mine", "index": 4, "prompt": "Hello"}}\n{line}\n')
        with pytest.raises(ValueError, match="line 2: expected a JSON object with `prompt` \\(or `turns`\\)"):
            read_prompts(file)

    def test_an_empty_file_is_refused(self, tmp_path):
        (tmp_path / "empty.jsonl").touch()
        with pytest.raises(ValueError, match="holds no prompt"):
            read_prompts(tmp_path / "empty.jsonl")

    def test_a_batch_holds_prompts_of_one_dataset_and_is_always_full(self, pair):
        settings = BenchmarkSettings(num_prompts=7, batch_size=2, with_copy=True, **pair)
        cases = make_cases(settings, load_models(settings, report=str))
        assert [case.names for case in cases] == [
            ["gsm8k 0", "gsm8k 20"],
            ["gsm8k 40", "gsm8k 0"],
            ["humaneval 0", "humaneval 20"],
            ["mt-bench 0", "mt-bench 10"],
            ["copy 0", "copy 1"],
            ["copy 2", "copy 3"],
        ]

    def test_short_prompts_are_padded_on_the_left(self, pair):
        settings = BenchmarkSettings(num_prompts=4, batch_size=2, **pair)
        case = make_cases(settings, load_models(settings, report=str))[0]
        inputs = case.inputs(pad_token_id=3, device=torch.device("cpu"))
        for row, ids in enumerate(case.prompt_ids):
            num_missing = inputs["input_ids"].shape[1] - len(ids)
            assert inputs["input_ids"][row].tolist() == [3] * num_missing + ids
            assert inputs["attention_mask"][row].tolist() == [0] * num_missing + [1] * len(ids)

    def test_a_context_length_cuts_and_extends_and_keeps_the_end(self, pair):
        settings = BenchmarkSettings(num_prompts=2, context_length=[40, 3000], **pair)
        models = load_models(settings, report=str)
        own = [case.prompt_ids[0] for case in make_cases(replace(settings, context_length=None), models)]
        cases = make_cases(settings, models)
        assert [case.group for case in cases] == ["40 tokens"] * 2 + ["3,000 tokens"] * 2
        for case, ids in zip(cases, own * 2, strict=True):
            length = 40 if case.group == "40 tokens" else 3000
            assert len(case.prompt_ids[0]) == length
            assert case.prompt_ids[0][-min(length, len(ids)) :] == ids[-length:]


class TestMethods:
    def test_each_one_on_each_prompt(self, pair, short_prompts, tmp_path):
        file = tmp_path / "numbers.json"
        settings = BenchmarkSettings(
            max_new_tokens=28,
            repeats=2,
            prompts=short_prompts,
            json=str(file),
            methods=[*METHODS],
            assistant=pair["target"],
            **pair,
        )
        report, printed = run(settings)
        assert json.loads(file.read_text()) == report
        assert [prompt["names"] for prompt in report["prompts"]] == [["one 0"], ["two 0"]]
        assert [*report["summary"]] == ["one", "two", "all"]
        for methods in report["summary"].values():
            assert [*methods] == [*METHODS]
            assert methods["plain"]["ratio_to_plain"] == 1.0
            assert methods["plain"]["acceptance_length"] == 1.0
            assert all(numbers["num_identical"] == numbers["num_prompts"] for numbers in methods.values())
            assert methods["assistant"]["acceptance_length"] > 1.5  # the target itself: always right
            assert methods["dspark-constant"]["round_parts"]["sources"].keys() <= {"drafter", "none"}
            assert methods["transformers-loop"]["round_parts"] is None
        assert report["environment"]["threads"] == torch.get_num_threads()
        assert report["simulated_acceptance"] is None
        assert "simulated" not in printed.lower()
        for name in METHODS:
            assert name in printed

    def test_by_default_those_that_take_the_batch(self):
        assert BenchmarkSettings().method_names == ["plain", "prompt-lookup", "dspark"]
        assert BenchmarkSettings(batch_size=2).method_names == ["plain", "dspark"]

    def test_plain_is_always_there_and_first(self):
        assert BenchmarkSettings(methods=["dspark", "plain", "dspark"]).method_names == ["plain", "dspark"]

    def test_transformers_loop_leaves_no_trace_even_after_an_error(self):
        target, drafter = kit.new_target(), kit.new_drafter()
        arguments = METHODS["transformers-loop"].arguments(Call(drafter))

        def fail(input_ids, scores):
            raise RuntimeError("a processor's fault")

        attributes, hooks = set(vars(target)), kit.hooks_of(target)
        with pytest.raises(RuntimeError, match="a processor's fault"):
            target.generate(**kit.inputs(), max_new_tokens=4, logits_processor=[fail], **arguments)
        assert set(vars(target)) == attributes
        assert kit.hooks_of(target) == hooks

    def test_sampling_compares_no_text(self, pair, short_prompts):
        methods = ["prompt-lookup", "transformers-loop", "dspark"]
        settings = BenchmarkSettings(
            max_new_tokens=6, num_prompts=1, do_sample=True, methods=methods, prompts=short_prompts, **pair
        )
        report, printed = run(settings)
        assert report["summary"]["one"]["dspark"]["num_identical"] is None
        assert report["prompts"][0]["measurements"]["dspark"]["verdicts"] == []
        assert "sampling, temperature 1, default top_k and top_p" in printed

    def test_sampling_starts_each_turn_from_the_seed(self, pair, short_prompts):
        settings = BenchmarkSettings(max_new_tokens=12, do_sample=True, temperature=3.0, prompts=short_prompts, **pair)
        measurer, inputs = measurer_and_inputs(settings)
        texts = [measurer.generate(METHODS["plain"], inputs, measurer._call(None), seed) for seed in (1, 1, 2)]
        assert texts[0] == texts[1] != texts[2]

    def test_threads_are_set(self, pair, short_prompts, monkeypatch):
        chosen = []
        monkeypatch.setattr(torch, "set_num_threads", chosen.append)
        run(BenchmarkSettings(max_new_tokens=2, num_prompts=1, threads=1, prompts=short_prompts, **pair))
        assert chosen == [1]


def measurer_and_inputs(settings: BenchmarkSettings) -> tuple[CaseMeasurer, Any]:
    models = load_models(settings, report=str)
    case = make_cases(settings, models)[0]
    return CaseMeasurer(settings, models), case.inputs(models.pad_token_id, models.target.device)


class TestBatches:
    def test_rows_are_judged_one_by_one_and_counted_together(self, pair):
        methods = ["dspark", "dspark-constant"]
        settings = BenchmarkSettings(max_new_tokens=8, num_prompts=4, batch_size=2, methods=methods, **pair)
        report, _ = run(settings)
        for prompt in report["prompts"]:
            for measurement in prompt["measurements"].values():
                assert measurement["identical"] == [True, True]
                assert measurement["num_new_tokens"] == 16
        assert report["summary"]["gsm8k"]["dspark"]["num_prompts"] == 2
        assert report["summary"]["all"]["dspark"]["num_prompts"] == 6

    def test_a_text_ends_with_its_first_stop(self, pair):
        settings = BenchmarkSettings(max_new_tokens=8, num_prompts=2, batch_size=2, **pair)
        measurer, _ = measurer_and_inputs(settings)
        measurer.models.target.generation_config.eos_token_id = [7, 9]
        assert measurer._until_end([1, 9, 7, 0, 0]) == [1, 9]
        assert measurer._until_end([1, 2]) == [1, 2]


class TestSimulation:
    LOOPS = ("transformers-loop", "dspark-constant")

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_a_drafter_that_is_always_right_or_never(self, dtype):
        for acceptance, num_passes in ((1.0, 2), (0.0, 16)):
            report, _ = run(simulated(acceptance, max_new_tokens=17, methods=[*self.LOOPS], dtype=dtype))
            for name in self.LOOPS:
                measurement = report["prompts"][0]["measurements"][name]
                assert measurement["num_passes"] == num_passes
                assert measurement["acceptance_length"] == pytest.approx(16 / num_passes)
                assert measurement["identical"] == [True]

    def test_every_loop_gets_the_same_proposals(self):
        report, _ = run(simulated(0.6, max_new_tokens=48, methods=[*self.LOOPS]))
        theirs, ours = (report["prompts"][0]["measurements"][name] for name in self.LOOPS)
        assert theirs["num_passes"] == ours["num_passes"]
        assert 1.2 < ours["acceptance_length"] < BLOCK

    def test_drafts_are_as_long_as_the_setting_says(self):
        report, _ = run(simulated(1.0, max_new_tokens=13, num_assistant_tokens=2, methods=[*self.LOOPS]))
        for name in self.LOOPS:
            assert report["prompts"][0]["measurements"][name]["acceptance_length"] == 3.0

    def test_in_a_batch(self):
        settings = simulated(0.5, batch_size=3, num_prompts=3, methods=["dspark-constant", "dspark"])
        report, _ = run(settings)
        measurement = report["prompts"][0]["measurements"]["dspark-constant"]
        assert measurement["identical"] == [True] * 3
        assert 1.2 < measurement["acceptance_length"] < BLOCK

    def test_every_output_says_so(self):
        report, printed = run(simulated(0.75, methods=["dspark-constant", "prompt-lookup"]))
        titles = [line for line in printed.splitlines() if "greedy" in line]
        assert len(titles) == 3
        assert all("SIMULATED acceptance 0.75" in title for title in titles)
        assert report["simulated_acceptance"] == 0.75
        assert lone_group(report)["dspark-constant"]["simulated_acceptance"] == 0.75
        assert lone_group(report)["prompt-lookup"]["simulated_acceptance"] is None
        for prompt in report["prompts"]:
            assert prompt["simulated_acceptance"] == 0.75
            assert prompt["measurements"]["dspark-constant"]["simulated_acceptance"] == 0.75

    def test_a_real_target(self, pair, short_prompts):
        settings = BenchmarkSettings(
            max_new_tokens=17, simulate_acceptance=1.0, methods=["dspark-constant"], prompts=short_prompts, **pair
        )
        report, _ = run(settings)
        block = load_models(settings, report=str).drafter.config.num_draft_tokens
        assert report["summary"]["all"]["dspark-constant"]["acceptance_length"] > 0.6 * (block + 1)

    def test_sampling_is_refused(self):
        proposals = SimulatedProposals(10, 1.0, kit.VOCAB)
        proposals.learn([[1, 2, 3]], torch.device("cpu"))
        with pytest.raises(ValueError, match="knows the greedy text only"):
            kit.target().generate(
                **kit.inputs(),
                do_sample=True,
                max_new_tokens=3,
                custom_generate=SimulatedDecoding(kit.drafter(), proposals=proposals),
            )


class TestProposals:
    TEXT = (5, 6, 7, 8, 9, 10, 11, 12)

    def proposals(self, acceptance: float, seed: int = 0) -> SimulatedProposals:
        made = SimulatedProposals(prompt_length=2, acceptance=acceptance, vocab_size=13, seed=seed)
        assert made.learn([self.TEXT, self.TEXT], torch.device("cpu"))
        return made

    @staticmethod
    def after(proposals: SimulatedProposals, text: tuple[int, ...], num_tokens: int, row: int = 0) -> list[int]:
        return proposals.after(row, torch.tensor([[0, 0, *text]]), num_tokens).tolist()

    def test_the_text_goes_on_and_zeros_follow_its_end(self):
        assert self.after(self.proposals(1.0), self.TEXT[:3], 3) == [8, 9, 10]
        assert self.after(self.proposals(1.0), self.TEXT[:6], 4) == [11, 12, 0, 0]

    def test_a_wrong_token_is_another_one_of_the_vocabulary(self):
        assert self.after(self.proposals(0.0), self.TEXT[:5], 3) == [11, 12, 0]

    def test_what_is_right_depends_on_seed_row_and_position_only(self):
        first, again, other = self.proposals(0.5), self.proposals(0.5), self.proposals(0.5, seed=1)
        everything = self.after(first, (), 8)
        assert self.after(again, (), 8) == everything
        assert self.after(first, self.TEXT[:3], 5) == everything[3:]
        assert self.after(other, (), 8) != everything
        assert self.after(first, (), 8, row=1) != everything

    def test_a_text_that_left_the_known_one_is_followed_once_it_is_known(self):
        proposals = self.proposals(1.0)
        parted = (5, 6, 1, 2, 3)
        assert self.after(proposals, parted[:3], 2) == [8, 9]
        assert proposals.learn([parted, self.TEXT], torch.device("cpu"))
        assert not proposals.learn([parted, self.TEXT], torch.device("cpu"))
        assert self.after(proposals, parted[:3], 2) == [2, 3]
        assert self.after(proposals, self.TEXT[:3], 2) == [8, 9]
        assert self.after(proposals, parted[:3], 2, row=1) == [8, 9]


class TestRandomModels:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_the_text_runs_through_the_vocabulary_with_wide_margins(self, dtype):
        target = random_target("tiny", dtype, "cpu")
        input_ids = torch.tensor([[3, 1, 4]])
        output = target.generate(input_ids, max_new_tokens=100, do_sample=False)
        text = output[0, 2:].tolist()
        assert len(set(text)) == len(text)
        with torch.inference_mode():
            best = target(output).logits[0].float().topk(2).values
        assert (best[:, 0] - best[:, 1]).min() > 0.2 * best[:, 0].max()

    def test_two_runs_are_the_same(self):
        one, other = (random_target("tiny", torch.float32, "cpu", seed=3) for _ in range(2))
        assert all(torch.equal(*pair) for pair in zip(one.parameters(), other.parameters(), strict=True))

    def test_a_config_in_a_folder_is_a_shape_too(self):
        target = random_target(str(FIXTURE / "target"), torch.float32, "cpu")
        assert target.config.hidden_size == AutoModelForCausalLM.from_pretrained(FIXTURE / "target").config.hidden_size
        assert target.get_output_embeddings().weight is not target.get_input_embeddings().weight

    def test_a_folder_that_is_not_there_is_named(self):
        with pytest.raises(OSError, match=r"\./nowhere is no folder on this machine"):
            random_target("./nowhere", torch.float32, "cpu")

    def test_the_drafter_has_the_published_shape(self):
        target = random_target("tiny", torch.bfloat16, "cpu")
        drafter = random_drafter(target, num_layers=5)
        config = drafter.config
        assert (config.num_hidden_layers, config.block_size, config.markov_rank) == (5, 7, 256)
        assert (config.num_draft_tokens, config.markov_head_type, config.enable_confidence_head) == (
            7,
            "vanilla",
            True,
        )
        assert drafter.dtype == torch.bfloat16
        assert not drafter.training

    def test_a_random_drafter_for_a_real_target(self, pair, short_prompts):
        settings = BenchmarkSettings(
            max_new_tokens=4, drafter_layers=1, prompts=short_prompts, **{**pair, "drafter": None}
        )
        report, _ = run(settings)
        assert report["environment"]["drafter"] == "random weights, draft layers: 1"
        assert report["summary"]["all"]["dspark"]["num_identical"] == 2


class TestMemory:
    @pytest.mark.skipif(sys.platform != "linux", reason="the kernel counts it under Linux only")
    def test_sees_the_peak_not_the_end(self):
        with MemoryGrowth(torch.device("cpu")) as memory:
            block = torch.ones(64 * 2**20, dtype=torch.uint8)
            del block
        if memory.num_bytes is None:
            pytest.skip("this kernel does not let a process reset its peak")
        assert 60 * 2**20 < memory.num_bytes < 100 * 2**20
        with MemoryGrowth(torch.device("cpu")) as memory:
            pass
        assert memory.num_bytes < 16 * 2**20

    def test_says_nothing_where_it_cannot_be_measured(self, monkeypatch):
        monkeypatch.setattr("dspark_hf.benchmark.memory._reset_peak", lambda: False)
        with MemoryGrowth(torch.device("cpu")) as memory:
            pass
        assert memory.num_bytes is None


class TestNumbers:
    def test_the_parts_of_a_round_add_up(self):
        times = {"draft_seconds": 0.003, "chain_seconds": 0.001, "verify_seconds": 0.006, "seconds": 0.010}
        rounds = [Round([1], 1, None, 2, source="drafter", **times), Round([], 0, None, 1, source="none", **times)]
        parts = round_parts(rounds)
        assert parts.median_ms == pytest.approx({"round": 10, "drafter": 2, "markov": 1, "target": 6, "overhead": 1})
        assert parts.seconds["overhead"] == pytest.approx(0.002)
        assert parts.sources == {"drafter": 1, "none": 1}

    def test_in_a_batch_each_row_has_its_source(self):
        batch = Round(
            [[1], []], [1, 0], None, [2, 1], source=["drafter", "none"], rows=[0, 1], is_batch=True, seconds=1
        )
        assert round_parts([batch]).sources == {"drafter": 1, "none": 1}

    def test_spread(self):
        assert spread([4.0, 1.0, 2.0, 3.0, 5.0]) == {"min": 1, "q1": 2, "median": 3, "q3": 4, "max": 5}
        assert spread([7.0]) == dict.fromkeys(("min", "q1", "median", "q3", "max"), 7.0)

    def test_all_leaves_the_copy_heavy_prompts_out(self):
        results = [result("gsm8k", dspark=2.0), result("mt-bench", dspark=0.5), result("copy", dspark=9.0)]
        summary = summarize(results, by_context=False)
        assert [*summary] == ["gsm8k", "mt-bench", "copy", "all"]
        assert summary["all"]["dspark"]["ratio_to_plain"] == pytest.approx(1.0)
        assert summary["all"]["dspark"]["worst"] == {"names": ["mt-bench 0"], "ratio_to_plain": 0.5}
        assert summary["all"]["dspark"]["ratio_spread"]["max"] == 2.0

    def test_contexts_are_not_mixed(self):
        results = [result("128 tokens", dspark=2.0), result("1,024 tokens", dspark=2.0)]
        assert [*summarize(results, by_context=True)] == ["128 tokens", "1,024 tokens"]

    def test_growth_against_the_shortest_context_and_against_plain(self):
        results = [result("128 tokens", dspark=2.0), result("1,024 tokens", pass_seconds=2.0, dspark=2.0)]
        results[1].measurements["dspark"] = measurement(2.0, pass_seconds=3.0)
        growth = growth_against_context(summarize(results, by_context=True))
        assert growth["1,024 tokens"]["plain"] == {"factor": 2.0, "relative_to_plain": 1.0}
        assert growth["1,024 tokens"]["dspark"] == {"factor": 3.0, "relative_to_plain": 1.5}

    def test_the_order_in_which_contexts_were_given_does_not_matter(self):
        assert BenchmarkSettings(context_length=[512, 64, 512]).context_length == [64, 512]

    def test_a_token_of_a_batch_costs_what_the_batch_took_for_it(self):
        """Two rows of 11 tokens, of which the first ones come with the prefill; rounds say nothing of that."""
        made = replace(result("gsm8k", dspark=2.0), names=["gsm8k 0", "gsm8k 1"])
        made.measurements["dspark"] = measurement(2.0, num_new_tokens=22, num_passes=8, acceptance_length=2.1)
        numbers = summarize([made], by_context=False)["gsm8k"]["dspark"]
        assert numbers["token_ms"] == pytest.approx(1000.0)
        assert numbers["num_prompts"] == 2

    def test_the_worst_text_of_all_repeats_is_judged(self, pair, monkeypatch):
        measurer = object.__new__(CaseMeasurer)
        measurer.models = SimpleNamespace(target=None)
        margins = {(1, 2): 0.0, (1, 3): 0.5, (1, 4): 9.0}
        verdict = lambda target, ids, plain, text: Verdict(  # noqa: E731
            None if text == plain else 1, margins[tuple(text)], 1.0, "bfloat16"
        )
        monkeypatch.setattr(measuring, "judge", verdict)
        assert measurer._worst_verdict([0], [1, 2], [[1, 2], [1, 2]]).identical
        assert measurer._worst_verdict([0], [1, 2], [[1, 2], [1, 3]]).margin == 0.5
        assert measurer._worst_verdict([0], [1, 2], [[1, 4], [1, 3], [1, 2]]).margin == 9.0

    def test_a_method_is_held_against_the_better_one_of_each_prompt(self):
        results = [
            result("gsm8k", **{"dspark": 1.8, "dspark-constant": 2.0, "prompt-lookup": 1.0}),
            result("copy", **{"dspark": 2.7, "dspark-constant": 1.0, "prompt-lookup": 3.0}),
        ]
        by_rivals = {tuple(c["rivals"]): c for c in compare_rivals(results)}
        assert [*by_rivals] == [("dspark-constant",), ("dspark-constant", "prompt-lookup")]
        both = by_rivals["dspark-constant", "prompt-lookup"]
        assert both["ratio"] == pytest.approx(0.9)
        assert by_rivals["dspark-constant",]["worst"] == {"names": ["gsm8k 0"], "ratio": pytest.approx(0.9)}


def measurement(ratio: float, pass_seconds: float = 1.0, **changes: Any) -> Measurement:
    made = Measurement(
        num_new_tokens=10,
        tokens_per_second=10.0 * ratio,
        ratio_to_plain=ratio,
        ratios=[ratio],
        seconds=[1.0 / ratio],
        first_token_seconds=0.1,
        decode_seconds=10 * pass_seconds,
        num_passes=10,
        acceptance_length=ratio,
        memory_growth=5_000_000,
        identical=[True],
        explained=[True],
        verdicts=["identical"],
    )
    return replace(made, **changes)


def result(group: str, pass_seconds: float = 1.0, **ratios: float) -> CaseResult:
    methods = {"plain": measurement(1.0, pass_seconds)}
    methods |= {name: measurement(ratio, pass_seconds) for name, ratio in ratios.items()}
    return CaseResult(group, [f"{group} 0"], [128], methods)


def test_the_tables_fit_their_width_with_the_longest_names_and_large_numbers():
    times = {"draft_seconds": 0.6, "chain_seconds": 0.2, "verify_seconds": 1.0, "seconds": 2.345}
    parts = round_parts([Round([1], 1, None, 2, source="drafter", **times)])
    ratios = dict.fromkeys(name for name in METHODS if name != "plain")
    results = [result(group, **dict.fromkeys(ratios, 12.34)) for group in ("humaneval", "32,768 tokens")]
    for each in results:
        for name in ratios:
            large = {"tokens_per_second": 12345.6, "memory_growth": 12 * 10**9, "round_parts": parts}
            each.measurements[name] = replace(each.measurements[name], **large)
    settings = BenchmarkSettings(context_length=[128, 1024], do_sample=True, temperature=0.85)
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    for table in make_tables(summarize(results, by_context=True), settings):
        console.print(table)
    printed = console.export_text()
    assert "…" not in printed
    assert max(map(len, printed.splitlines())) <= WIDTH
    assert "transformers-loop" in printed


def test_models_are_named_without_paths(pair):
    settings = simulated()
    models = load_models(settings, report=str)
    assert isinstance(models, Models)
    assert (models.target_name, models.drafter_name) == ("random weights, tiny", "random weights, draft layers: 1")
    assert models.tokenizer is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"methods": ["magic"]}, "--methods names magic, which is none of plain, prompt-lookup"),
        ({"methods": ["prompt-lookup"], "batch_size": 2}, "--methods names prompt-lookup, which takes no batch"),
        ({"methods": ["assistant"]}, "--assistant and the method assistant of --methods need each other"),
        ({"assistant": "a"}, "--assistant and the method assistant of --methods need each other"),
        ({"context_length": [128, 0]}, "--context-length is 0, it must be 1 or more"),
        ({"batch_size": 0}, "--batch-size is 0, it must be 1 or more"),
        ({"temperature": 0.0}, r"--temperature is 0.0, it must be above 0"),
        ({"simulate_acceptance": 1.5}, r"--simulate-acceptance is 1.5, it must lie between 0 and 1"),
        ({"simulate_acceptance": 0.5, "do_sample": True}, "--simulate-acceptance knows the greedy text only"),
        ({"random_target": "tiny"}, "--random-target writes no real text: it needs --simulate-acceptance"),
        ({"random_target": "tiny", "drafter": "a"}, "--random-target and --drafter exclude each other"),
        ({"random_target": "tiny", "with_copy": True}, "--random-target and --with-copy exclude each other"),
        ({"drafter_layers": 2, "drafter": "a"}, "--drafter-layers and --drafter exclude each other"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_before_any_work(settings, message):
    with pytest.raises(ValueError, match=message):
        BenchmarkSettings(**settings)


def test_built_in_files_are_in_the_package():
    assert all(Path(file).parent.name == "dspark_hf" for file in (PROMPTS_FILE, COPY_PROMPTS_FILE))


def test_reports_name_no_folder(pair, tmp_path):
    prompts = tmp_path / "mine.jsonl"
    prompts.write_text('{"prompt": "Add one"}\n')
    target = tmp_path / "secret" / "target"
    copytree(pair["target"], target)
    options = {**pair, "target": str(target), "drafter": str(pair["drafter"]), "prompts": str(prompts)}
    options |= {"methods": ["dspark"], "max_new_tokens": 4, "num_prompts": 1, "json": str(tmp_path / "o.json")}
    report = run_benchmark(BenchmarkSettings(**options))
    written = (tmp_path / "o.json").read_text()
    assert str(tmp_path) not in written
    assert str(Path(pair["drafter"]).parent) not in written
    assert report["settings"]["prompts"] == "mine.jsonl"
    assert report["settings"]["dtype"] == pair["dtype"]
