"""The evaluation: rounds counted by hand, two drafters side by side, the audit, its files and options."""

import io
import json
import sys
from typing import Any

import kit
import pytest
from rich.console import Console
from test_benchmark import pair  # noqa: F401  (a fixture)
from transformers import GenerationMixin

from dspark_hf import DSparkDrafter
from dspark_hf.benchmark.measuring import CaseMeasurer
from dspark_hf.cli import main
from dspark_hf.evaluation import EvaluationSettings, run_evaluation
from dspark_hf.evaluation.counting import AuditNumbers, count_drafts, count_speed, count_texts
from dspark_hf.evaluation.measuring import FULL
from dspark_hf.evaluation.prompts import read_datasets
from dspark_hf.evaluation.running import _names
from dspark_hf.prompt_files import evenly_spread
from dspark_hf.trace import Round

NUM_TOKENS = 9
PNG = b"\x89PNG"


def write_rows(path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> list[str]:
    """Two datasets: three prompts as `turns`, two as `prompt` and as `messages`."""
    folder = tmp_path_factory.mktemp("prompts")
    sums = [{"index": index, "turns": [f"Add {index}", "And again?"]} for index in (0, 5, 10)]
    chats = [{"index": 0, "prompt": "Say one"}, {"index": 7, "messages": [{"role": "user", "content": "Say two"}]}]
    return [write_rows(folder / "sums.jsonl", sums), write_rows(folder / "chats.jsonl", chats)]


@pytest.fixture(scope="module")
def drafters(pair, tmp_path_factory) -> list[str]:  # noqa: F811
    """Folders of a drafter with a confidence head, and of the same one without."""
    folder = tmp_path_factory.mktemp("drafters")
    headed = DSparkDrafter.from_pretrained(pair["drafter"])
    headed.save_pretrained(folder / "headed")
    config = type(headed.config)(**{**headed.config.to_dict(), "enable_confidence_head": False})
    headless = DSparkDrafter(config)
    headless.load_state_dict(headed.state_dict(), strict=False)
    headless.save_pretrained(folder / "headless")
    return [str(folder / "headed"), str(folder / "headless")]


def run(settings: EvaluationSettings) -> tuple[dict[str, Any], str]:
    console = Console(record=True, width=160, file=io.StringIO())
    return run_evaluation(settings, console), console.export_text()


@pytest.fixture(scope="module")
def options(pair, files) -> dict[str, Any]:  # noqa: F811
    of_target = {name: pair[name] for name in ("target", "dtype", "device")}
    return {**of_target, "prompts": files, "max_new_tokens": NUM_TOKENS}


@pytest.fixture(scope="module")
def result(options, drafters, tmp_path_factory):
    """A greedy run with both drafters, two schedules, and all files."""
    pytest.importorskip("matplotlib")
    folder = tmp_path_factory.mktemp("evaluation")
    settings = EvaluationSettings(
        **options,
        drafter=drafters,
        schedules=["auto", "constant:2"],
        batch_size=2,
        json=str(folder / "numbers.json"),
        markdown=str(folder / "card.md"),
        plot=str(folder / "figures"),
    )
    return *run(settings), folder


class TestRun:
    def test_drafters_stand_side_by_side(self, result):
        report, text, _ = result
        assert [*report["drafters"]] == ["headed", "headless"]
        for datasets in report["drafters"].values():
            assert {name: numbers["num_prompts"] for name, numbers in datasets.items()} == {
                "sums": 3,
                "chats": 2,
                "all": 5,
            }
            assert all([*numbers["speed"]] == ["auto", "constant:2"] for numbers in datasets.values())
        assert "headed" in text and "headless" in text and "constant:2" in text

    def test_no_prompt_counts_twice_and_totals_are_those_of_the_texts(self, result):
        report = result[0]
        assert [call["indices"] for call in report["calls"]] == [[0, 5], [10], [0, 7]]
        for datasets in report["drafters"].values():
            for numbers in datasets.values():
                drafts = numbers["drafts"]
                # One token of each text comes from the prefill. Nothing ends early.
                assert drafts["num_new_tokens"] == (NUM_TOKENS - 1) * numbers["num_prompts"]
                assert drafts["num_rounds"] + drafts["accepted"] == drafts["num_new_tokens"]
                assert drafts["acceptance_length"] == drafts["num_new_tokens"] / drafts["num_rounds"]
                assert drafts["verify_rate"] == drafts["accepted"] / drafts["verified"]
            for name in ("num_rounds", "verified", "accepted"):
                parts = [datasets[dataset]["drafts"][name] for dataset in ("sums", "chats")]
                assert datasets["all"]["drafts"][name] == sum(parts)

    def test_only_a_confidence_head_has_confidences(self, result):
        headed, headless = (datasets["all"]["drafts"] for datasets in result[0]["drafters"].values())
        assert headed["confidence"]["num_drafts"] > 0
        assert len(headed["confidence"]["positions"]) == len(headed["acceptance_rate_per_position"])
        assert headless["confidence"] is None
        # The same weights draft the same tokens.
        assert headless["acceptance_rate_per_position"] == headed["acceptance_rate_per_position"]

    def test_every_greedy_text_is_audited(self, result):
        report, text, _ = result
        # Full drafts and two schedules, each with five prompts.
        for datasets in report["drafters"].values():
            audit = {"num_texts": 15, "num_identical": 15, "num_within_rounding": 0, "num_beyond_rounding": 0}
            assert datasets["all"]["audit"] == audit
        assert report["differences"] == []
        assert "Lossless audit: 30 of 30 texts identical, 0 beyond rounding" in text

    def test_speed_is_that_of_the_calls(self, result):
        report = result[0]
        calls = [call for call in report["calls"] if call["dataset"] == "chats"]
        (call,) = calls
        speed = report["drafters"]["headless"]["chats"]["speed"]["constant:2"]
        turn = call["drafters"]["headless"]["constant:2"]
        assert speed["tokens_per_second"] == pytest.approx(turn["num_new_tokens"] / turn["seconds"])
        assert speed["ratio_to_plain"] == pytest.approx(call["plain"]["seconds"] / turn["seconds"])
        assert speed["worst"]["names"] == ["chats 0", "chats 7"]

    def test_figures(self, result):
        figures = sorted((result[2] / "figures").iterdir())
        assert [figure.name for figure in figures] == ["acceptance_by_position.png", "acceptance_length.png"]
        assert all(figure.read_bytes().startswith(PNG) for figure in figures)

    def test_the_file_of_numbers_names_no_folder(self, result):
        report, _, folder = result
        written = (folder / "numbers.json").read_text()
        assert json.loads(written) == report
        assert str(folder) not in written
        assert report["settings"]["drafter"] == ["headed", "headless"]
        assert report["settings"]["prompts"] == ["sums.jsonl", "chats.jsonl"]

    def test_markdown_and_numbers_agree(self, result):
        report, _, folder = result
        tables = tables_of((folder / "card.md").read_text())
        assert [*tables] == [
            "Acceptance of full drafts",
            "Speed",
            "Confidence",
            "Greedy texts against plain generation",
        ]
        for row in tables["Acceptance of full drafts"]:
            drafts = report["drafters"][row["drafter"]][row["dataset"]]["drafts"]
            assert row["rounds"] == str(drafts["num_rounds"])
            assert row["τ"] == f"{drafts['acceptance_length']:.2f}"
            for position, rate in enumerate(drafts["acceptance_rate_per_position"], 1):
                assert row[str(position)] == ("" if rate is None else f"{100 * rate:.0f}")
        measured = [row for row in tables["Speed"] if row["schedule"] != "plain"]
        assert len(measured) == 3 * 2 * 2
        for row in measured:
            speed = report["drafters"][row["drafter"]][row["dataset"]]["speed"][row["schedule"]]
            assert row["to plain"] == f"× {speed['ratio_to_plain']:.2f}"
        for row in tables["Greedy texts against plain generation"]:
            assert row["identical"] == str(
                report["drafters"][row["drafter"]][row["dataset"]]["audit"]["num_identical"]
            )
        errors = {(row["dataset"], row["drafter"]): row["ECE %"] for row in tables["Confidence"]}
        ece = report["drafters"]["headed"]["all"]["drafts"]["confidence"]["ece"]
        assert errors["all", "headed"] == f"{100 * ece:.1f}"
        assert errors["all", "headless"] == ""

    def test_sampled_texts_are_not_compared(self, options, drafters):
        report, text = run(EvaluationSettings(**options, drafter=drafters[:1], temperature=1.0, seed=3))
        assert all(numbers["audit"] is None for numbers in report["drafters"]["headed"].values())
        assert "Sampled texts are not compared" in text and "Lossless audit" not in text
        again, _ = run(EvaluationSettings(**options, drafter=drafters[:1], temperature=1.0, seed=3))
        first, second = (each["drafters"]["headed"]["all"]["drafts"] for each in (report, again))
        assert first == second


@pytest.mark.parametrize(
    ("given", "drawn", "said"),
    [
        ({}, {"top_k": 50}, "temperature 0.7, default top_k and top_p"),
        ({"top_k": 0, "top_p": 1.0}, {"top_k": 0, "top_p": 1.0}, "temperature 0.7, top_k 0, top_p 1"),
    ],
)
def test_what_is_sampled_from_is_said_and_done(given, drawn, said, options, drafters, monkeypatch):
    seen = []
    real = GenerationMixin._get_logits_processor

    def spy(self, generation_config, *args, **kwargs):
        seen.append({name: getattr(generation_config, name) for name in drawn})
        return real(self, generation_config, *args, **kwargs)

    monkeypatch.setattr(GenerationMixin, "_get_logits_processor", spy)
    _, text = run(EvaluationSettings(**options, drafter=drafters[:1], temperature=0.7, **given))
    assert said in text
    assert seen
    assert all(each == drawn for each in seen)


def test_drafters_of_one_name_are_told_apart_by_as_few_folders_as_that_takes(tmp_path):
    folders = [tmp_path / name / "step" / "bfloat16" for name in ("a", "b")]
    for folder in folders:
        folder.mkdir(parents=True)
    assert _names([*map(str, folders)]) == ["a/step/bfloat16", "b/step/bfloat16"]
    assert _names([str(folders[0]), "hub/bfloat16"]) == ["bfloat16", "hub/bfloat16"]


def tables_of(markdown: str) -> dict[str, list[dict[str, str]]]:
    """By title, the rows of each table by the names of its columns."""
    tables = {}
    for part in markdown.split("### ")[1:]:
        lines = [line for line in part.splitlines() if line.startswith("|")]
        head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
        tables[part.splitlines()[0]] = [dict(zip(head, row, strict=True)) for row in rows]
    return tables


def test_drafts_that_know_the_answer_are_counted_as_by_hand(options, drafters, tmp_path):
    prompts = [write_rows(tmp_path / "one.jsonl", [{"index": 3, "prompt": "Say one"}])]
    drafter = DSparkDrafter.from_pretrained(drafters[0])
    depth = drafter.config.num_draft_tokens
    num_tokens = 1 + 2 * (depth + 1)
    settings = EvaluationSettings(
        **{**options, "prompts": prompts, "max_new_tokens": num_tokens}, drafter=drafters[:1]
    )
    answers = []
    real = CaseMeasurer.generate

    def watched(self, method, inputs, *args, **kwargs):
        texts = real(self, method, inputs, *args, **kwargs)
        answers.append((texts[0], inputs["input_ids"].shape[1]))
        return texts

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CaseMeasurer, "generate", watched)
        run(settings)
    answer, prompt_length = max(answers, key=lambda one: len(one[0]))
    with kit.knowing(answer, prompt_length, num_unseen=None):
        drafts = run(settings)[0]["drafters"]["headed"]["one"]["drafts"]
    # The prefill gives one token, and two rounds a full draft and a bonus each.
    assert (drafts["num_rounds"], drafts["verified"], drafts["accepted"]) == (2, 2 * depth, 2 * depth)
    assert (drafts["acceptance_length"], drafts["verify_rate"]) == (depth + 1, 1.0)
    assert drafts["acceptance_rate_per_position"] == [1.0] * depth
    assert drafts["judged_per_position"] == [2] * depth


class TestAudit:
    def test_a_planted_difference_is_found_and_is_exit_code_1(self, options, drafters, monkeypatch, tmp_path):
        real = CaseMeasurer.generate

        def forged(self, method, inputs, call, *args, **kwargs):
            texts = real(self, method, inputs, call, *args, **kwargs)
            if method.drafts and not call.drafter.config.enable_confidence_head and len(texts[0]) == NUM_TOKENS:
                texts[0][3] = (texts[0][3] + 1) % 128
            return texts

        arguments = ["--target", options["target"], "--dtype", "float32", "--device", "cpu", "--num-prompts", "1"]
        arguments += ["--drafter", *drafters, "--max-new-tokens", str(NUM_TOKENS), "--prompts", *options["prompts"]]
        file = tmp_path / "numbers.json"
        assert main(["eval", *arguments]) == 0
        monkeypatch.setattr(CaseMeasurer, "generate", forged)
        assert main(["eval", *arguments, "--json", str(file), "--markdown", str(tmp_path / "card.md")]) == 1
        report = json.loads(file.read_text())
        found = [(d["drafter"], d["schedule"], d["dataset"], d["index"]) for d in report["differences"]]
        assert found == [("headless", name, dataset, 0) for dataset in ("sums", "chats") for name in (FULL, "auto")]
        for difference in report["differences"]:
            assert difference["position"] == 3
            assert difference["margin"] > difference["rounding"] > 0
            assert not difference["within_rounding"]
        assert report["drafters"]["headless"]["all"]["audit"]["num_beyond_rounding"] == 4
        assert report["drafters"]["headed"]["all"]["audit"]["num_identical"] == 4
        assert "- sums 0, headless, full drafts: differs from token 4 on, margin" in (tmp_path / "card.md").read_text()

    def test_a_text_that_ends_early_has_no_margin(self, options, drafters, monkeypatch):
        real = CaseMeasurer.generate

        def cut(self, method, *args, **kwargs):
            return [row[: 4 if method.drafts else None] for row in real(self, method, *args, **kwargs)]

        monkeypatch.setattr(CaseMeasurer, "generate", cut)
        report, text = run(EvaluationSettings(**options, drafter=drafters[:1], num_prompts=1))
        assert all(d["margin"] is None and not d["within_rounding"] for d in report["differences"])
        assert len(report["differences"]) == 4
        assert "differs from token 5 on, where one text ends: BEYOND ROUNDING" in text


class TestCounting:
    def test_acceptance_by_position_is_conditional(self):
        rounds = [
            Round([1, 2, 3], 3, [0.9, 0.8, 0.7], 4),
            Round([1, 2, 3], 0, [0.1, 0.8, 0.7], 1),
            Round([1, 2, 3], 2, [0.9, 0.8, 0.1], 3),
            Round([1], 1, [0.9], 2),  # room for one more only
        ]
        drafts = count_drafts(rounds, 3)
        assert (drafts.num_rounds, drafts.num_new_tokens, drafts.acceptance_length) == (4, 10, 2.5)
        assert (drafts.verified, drafts.accepted, drafts.verify_rate) == (10, 6, 0.6)
        assert drafts.judged_per_position == [4, 2, 2]
        assert drafts.acceptance_rate_per_position == [0.75, 1.0, 0.5]
        assert drafts.confidence.num_drafts == 3

    def test_a_stop_says_nothing_of_the_position_behind_it(self):
        # The second draft token ended the text: the third one was never judged.
        drafts = count_drafts([Round([1, 2, 3], 2, [0.9, 0.9, 0.9], 2)], 3)
        assert drafts.judged_per_position == [1, 1, 0]
        assert drafts.acceptance_rate_per_position == [1.0, 1.0, None]
        assert drafts.confidence is None

    def test_rows_of_a_batch_count_each(self):
        batch = Round([[1, 2], [1, 2]], [2, 0], [[0.5, 0.5], [0.5, 0.5]], [3, 1], rows=[0, 1], is_batch=True)
        drafts = count_drafts([batch], 2)
        assert (drafts.num_rounds, drafts.acceptance_length) == (2, 2.0)
        assert drafts.acceptance_rate_per_position == [0.5, 1.0]

    def test_confidences_are_held_against_survival(self):
        rounds = [Round([1, 2], 2, [0.8, 0.5], 3), Round([1, 2], 0, [0.4, 0.5], 1)]
        confidence = count_drafts(rounds, 2).confidence
        first, second = confidence.positions
        # Survival up to 1: 0.8 and 0.4, of which the first came true; up to 2: 0.4 and 0.2.
        assert (first.survival_rate, second.survival_rate) == (0.5, 0.5)
        assert first.ece == pytest.approx((0.2 + 0.4) / 2)
        assert first.brier == pytest.approx((0.2**2 + 0.4**2) / 2)
        assert second.ece == pytest.approx((0.6 + 0.2) / 2)
        assert (first.auc, second.auc) == (1.0, None)
        assert confidence.ece == pytest.approx((first.ece + second.ece) / 2)
        assert confidence.auc == 1.0

    def test_nothing_drafted(self):
        drafts = count_drafts([], 2)
        assert (drafts.acceptance_length, drafts.verify_rate, drafts.confidence) == (None, None, None)
        assert drafts.acceptance_rate_per_position == [None, None]

    def test_speed(self):
        speed = count_speed([["a 0"], ["a 1"]], [20.0, 5.0], [10.0, 10.0])
        assert speed.tokens_per_second == pytest.approx(10.0)
        assert speed.ratio_to_plain == pytest.approx(1.0)
        assert speed.worst == {"names": ["a 1"], "ratio_to_plain": 0.5}

    def test_texts(self):
        verdicts = [(True, True), (False, True), (False, False), (False, True)]
        assert count_texts(verdicts) == AuditNumbers(4, 1, 2, 1)


class TestPrompts:
    def test_held_out_and_evenly_spread_within_each_dataset(self, files, tmp_path):
        rows = [{"dataset": name, "index": i, "prompt": f"{name} {i}"} for i in range(41) for name in ("a", "b")]
        mixed = write_rows(tmp_path / "mixed.jsonl", rows)
        datasets = read_datasets(EvaluationSettings(prompts=[mixed], held_out=10, num_prompts=2))
        assert {name: [s.index for s in members] for name, members in datasets.items()} == {"a": [0, 20], "b": [0, 20]}
        assert [len(members) for members in read_datasets(EvaluationSettings(prompts=files)).values()] == [3, 2]

    def test_evenly_spread(self):
        assert evenly_spread(range(10), 4) == [0, 2, 5, 7]
        assert evenly_spread(range(3), 4) == evenly_spread(range(3), None) == [0, 1, 2]

    @pytest.mark.parametrize(
        ("row", "held_out", "message"),
        [
            ({"index": 1, "text of": "x"}, None, r"odd.jsonl, line 1: expected text in one of `messages`"),
            ({"index": 1, "prompt": "x"}, 20, "--held-out is 20, but odd has no prompt with such an index"),
            ({"dataset": "all", "prompt": "x"}, None, "a dataset called 'all'"),
        ],
    )
    def test_what_cannot_be_evaluated_is_said_before_anything_is_loaded(self, tmp_path, row, held_out, message):
        file = write_rows(tmp_path / "odd.jsonl", [row])
        with pytest.raises(ValueError, match=message):
            run_evaluation(EvaluationSettings(target="no/model", prompts=[file], held_out=held_out))

    def test_an_index_that_comes_twice_is_refused(self, tmp_path):
        file = write_rows(tmp_path / "twice.jsonl", [{"index": 1, "prompt": "x"}, {"index": 1, "prompt": "y"}])
        with pytest.raises(ValueError, match="index 1 are those of"):
            read_datasets(EvaluationSettings(prompts=[file]))


class TestOptions:
    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"num_prompts": 0}, "--num-prompts is 0, it must be 1 or more"),
            ({"held_out": 0}, "--held-out is 0, it must be 1 or more"),
            ({"batch_size": 0}, "--batch-size is 0"),
            ({"max_new_tokens": 0}, "--max-new-tokens is 0"),
            ({"temperature": -1.0}, "--temperature is -1.0, it must be 0"),
            ({"schedules": ["fastest"]}, "--schedules names fastest, expected one of"),
            ({"schedules": []}, "--schedules is empty"),
            ({"schedules": ["auto", "auto"]}, "--schedules names auto twice"),
            ({"drafter": ["a", "b", "a"]}, "--drafter names a twice"),
            ({"prompts": ["no.jsonl"]}, "--prompts names no.jsonl, which is no file"),
            ({"json": "nowhere/else/x.json"}, "--json is nowhere/else/x.json, whose folder does not exist"),
            ({"markdown": "nowhere/else/x.md"}, "--markdown is nowhere"),
            ({"markdown": "."}, "--markdown is ., which is a folder"),
            ({"plot": __file__}, "--plot is .*, which is no folder"),
        ],
    )
    def test_wrong_ones_are_named(self, settings, message):
        with pytest.raises(ValueError, match=message):
            EvaluationSettings(**settings)

    def test_a_schedule_that_a_drafter_cannot_follow_names_the_drafter(self, options, drafters):
        with pytest.raises(ValueError, match=r"headless: .*has no confidence head"):
            run(EvaluationSettings(**options, drafter=drafters, schedules=["hardware"]))

    def test_without_matplotlib_nothing_is_loaded(self, options, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        monkeypatch.setattr("dspark_hf.evaluation.running.load_target", lambda *_: pytest.fail("loaded"))
        with pytest.raises(ImportError, match=r"pip install \"dspark-hf\[plot\]\""):
            run_evaluation(EvaluationSettings(**options, plot=str(tmp_path / "figures")))

    def test_a_drafter_that_is_not_there_costs_no_loading(self, options, monkeypatch, drafters):
        monkeypatch.setattr("dspark_hf.evaluation.running.load_target", lambda *_: pytest.fail("loaded"))
        with pytest.raises(OSError, match=r"--drafter: \./nowhere is no folder"):
            run_evaluation(EvaluationSettings(**options, drafter=[drafters[0], "./nowhere"]))
