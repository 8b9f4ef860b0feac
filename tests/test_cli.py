"""The command line: its options, its exit codes, and one line for each error."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from dspark_hf import cli
from dspark_hf.alignment import MUST_NOT_RUN, WILL_RUN_BADLY, AlignmentReport, Finding
from dspark_hf.benchmark import BenchmarkSettings
from dspark_hf.cli import main
from dspark_hf.demo import DemoSettings
from dspark_hf.demo_weights import DRAFTER_FOLDER
from dspark_hf.errors import AlignmentError
from dspark_hf.generate_run import GenerateSettings
from dspark_hf.inspect_run import InspectSettings
from dspark_hf.training.objective import ObjectiveWeights

PAIR = SimpleNamespace(target="the target", drafter="the drafter", tokenizer=None)


@pytest.fixture
def seen(monkeypatch) -> list:
    """The settings that reach a command; nothing runs."""
    received = []
    for name, (settings_class, _) in cli.COMMANDS.items():
        monkeypatch.setitem(cli.COMMANDS, name, (settings_class, lambda settings: received.append(settings) or 0))
    return received


def failing_demo(monkeypatch, error: BaseException) -> None:
    def fail(settings):
        raise error

    monkeypatch.setitem(cli.COMMANDS, "demo", (DemoSettings, fail))


def test_options_are_the_fields_of_the_settings(seen):
    assert main(["demo"]) == 0
    arguments = "demo --target a --drafter b --dtype float32 --max-new-tokens 7 --no-stream --prompt x y"
    assert main(arguments.split()) == 0
    assert seen[0] == DemoSettings()
    assert seen[1] == DemoSettings(
        target="a", drafter="b", dtype="float32", max_new_tokens=7, stream=False, prompt=["x", "y"]
    )


def test_bench_options(seen, tmp_path):
    file = str(tmp_path / "out.json")
    prompts = tmp_path / "p.jsonl"
    prompts.touch()
    arguments = ["--num-prompts", "3", "--repeats", "2", "--threads", "1", "--prompts", str(prompts), "--json", file]
    assert main(["bench", *arguments]) == 0
    assert seen == [BenchmarkSettings(num_prompts=3, repeats=2, threads=1, prompts=str(prompts), json=file)]


def test_bench_options_of_several_words(seen):
    arguments = "bench --methods plain dspark --context-length 128 1024 --with-copy --batch-size 8"
    assert main(arguments.split()) == 0
    assert main(["bench", "--random-target", "tiny", "--simulate-acceptance", "0.8", "--drafter-layers", "3"]) == 0
    assert seen == [
        BenchmarkSettings(methods=["plain", "dspark"], context_length=[128, 1024], with_copy=True, batch_size=8),
        BenchmarkSettings(random_target="tiny", simulate_acceptance=0.8, drafter_layers=3),
    ]


def test_options_from_a_yaml_file_and_the_command_line_comes_first(seen, tmp_path):
    path = tmp_path / "options.yaml"
    path.write_text("max-new-tokens: 9\nstream: false\nprompt: [a b, c]\ndtype: float32\ntarget: null\n")
    assert main(["demo", "--dtype", "bfloat16", "--config", str(path)]) == 0
    assert seen == [DemoSettings(max_new_tokens=9, stream=False, prompt=["a b", "c"], dtype="bfloat16")]


@pytest.fixture
def rows(tmp_path, monkeypatch) -> list[str]:
    """Two files, by names in the current folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("a.jsonl", "b.jsonl"):
        Path(name).touch()
    return ["a.jsonl", "b.jsonl"]


def test_a_list_of_the_config_ends_before_the_words_of_the_command_line(seen, tmp_path):
    path = tmp_path / "options.yaml"
    path.write_text("license: mit\ntags: [x, y]\n")
    assert main(["push", "./drafter", "you/name", "--config", str(path)]) == 0
    (settings,) = seen
    assert (settings.drafter, settings.repo_id, settings.tags) == ("./drafter", "you/name", ["x", "y"])


def test_a_list_may_be_empty(seen, rows, tmp_path):
    arguments = ["train", "--output-dir", "o", "--data", *rows]
    assert main([*arguments, "--held-out-datasets"]) == 0
    Path("options.yaml").write_text("held_out_datasets: []\n")
    assert main([*arguments, "--config", "options.yaml"]) == 0
    assert [settings.held_out_datasets for settings in seen] == [[], []]


def test_train_options(seen, rows, tmp_path):
    arguments = ["train", "--output-dir", str(tmp_path), "--data", *rows, "--max-seconds", "60"]
    assert main([*arguments, "--algorithm", "dflash", "--target-layer-ids", "1", "5"]) == 0
    (settings,) = seen
    assert settings.data == ["a.jsonl", "b.jsonl"]
    assert settings.objective == ObjectiveWeights(cross_entropy=1.0, distance=0.0, confidence=0.0)
    assert settings.shape == {
        "num_hidden_layers": 2,
        "target_layer_ids": [1, 5],
        "markov_head_type": "none",
        "sample_from_anchor": False,
        "enable_confidence_head": False,
    }


@pytest.mark.parametrize("command", [*cli.COMMANDS])
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert "(default: None)" not in capsys.readouterr().out


ONLY_CONFIDENCE = ["train", "--data", "a", "--output-dir", "o", "--confidence-only", "True"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "--prompts", "no.jsonl"], "--prompts is no.jsonl, which is no file"),
        (["sing"], "invalid choice: 'sing'"),
        (["demo", "--dtype", "int3"], "argument --dtype: invalid choice: 'int3'"),
        (["demo", "--max-new-tokens", "many"], "invalid int value: 'many'"),
        (["demo", "--max-new-tokens", "0"], "--max-new-tokens is 0, it must be 1 or more"),
        (["demo", "--gguf-file", "a.gguf"], "--gguf-file names a file in --target, which is missing"),
        (["demo", "--targe", "a"], "unrecognized arguments: --targe a"),
        (["demo", "--config", "no.yaml"], "--config: cannot read no.yaml"),
        (["train", "--output-dir", "o"], "--data is missing: files with responses of the target"),
        (["train", "--data", "a"], "--output-dir is missing: the folder for the drafter"),
        (["train", "--data", "a", "--output-dir", "o", "--num-anchors", "0"], "--num-anchors is 0, it must be 1 or"),
        (["train", "--data", "a.jsonl", "--output-dir", "o"], "--data names a.jsonl, which is no file"),
        (
            ["train", "--data", "a", "--output-dir", "o", "--algorithm", "dflash", "--distance-weight", "0.5"],
            "--distance-weight is 0.5, but --algorithm dflash means 0.0: leave one out",
        ),
        (
            ["train", "--data", "a", "--output-dir", "o", "--algorithm", "dflash", "--sample-positions", "True"],
            "--algorithm dflash has no confidence head: leave out --sample-positions and --confidence-only",
        ),
        (
            ONLY_CONFIDENCE,
            "--confidence-only leaves the drafts of a drafter as they are: name it by --drafter, without",
        ),
        (
            [*ONLY_CONFIDENCE, "--drafter", "d", "--num-hidden-layers", "3"],
            "name it by --drafter, without --num-hidden-layers",
        ),
        (["bench", "--top-k", "-1"], "--top-k is -1, it must be 0 or more"),
        (["eval", "--top-p", "0"], "--top-p is 0.0, it must lie between 0 and 1"),
        (["train", "--data", "a", "--output-dir", "o", "--position-decay", "0"], "--position-decay is 0.0, it must"),
        (
            ["train", "--data", "a", "--output-dir", "o", "--drafter", "d", "--markov-rank", "4"],
            "--markov-rank is of a new drafter, but --drafter names one to start from",
        ),
        (["inspect"], "drafter is missing: a folder or a hub id"),
        (["generate", "Hi", "--file", "a.txt"], "--file and a prompt exclude each other"),
        (
            ["generate", "--num-assistant-tokens-schedule", "x"],
            "--num-assistant-tokens-schedule is x, expected",
        ),
        (["generate", "--file", "no.txt"], "--file is no.txt, which is no file"),
        (["generate", "--json", "/no/such/folder/out.json"], "--json is /no/such/folder/out.json, whose folder does"),
        (["bench", "--repeats", "-1"], "--repeats is -1, it must be 1 or more"),
        (["bench", "--methods", "magic"], "--methods names magic, which is none of plain, prompt-lookup"),
        (["bench", "--json", "/no/such/folder/out.json"], "--json is /no/such/folder/out.json, whose folder does not"),
    ],
)
def test_a_wrong_argument_is_one_line_and_code_2(arguments, message, seen, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    error = capsys.readouterr().err
    assert caught.value.code == 2
    assert message in error
    assert error.count("\n") == 1
    assert seen == []


@pytest.mark.parametrize(
    ("text", "message"),
    [("melody: 3", "names melody, which is no option of demo"), ("- 3", "holds list, expected option names")],
)
def test_a_wrong_config_is_one_line_and_code_2(text, message, seen, tmp_path, capsys):
    path = tmp_path / "options.yaml"
    path.write_text(text)
    with pytest.raises(SystemExit) as caught:
        main(["demo", "--config", str(path)])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
    assert seen == []


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OSError("no such\n  model"), "dspark-hf: no such model\n"),
        (ValueError("two\nlines"), "dspark-hf: two lines\n"),
        (ImportError("pip install gguf"), "dspark-hf: pip install gguf\n"),
        (
            AlignmentError("hidden_size", 8, 16, "Take its own target."),
            "dspark-hf: This drafter cannot draft for this target: hidden_size is 8 in the target "
            "and 16 in the drafter. Take its own target.\n",
        ),
    ],
)
def test_an_error_at_work_is_one_line_and_code_1(error, line, monkeypatch, capsys):
    failing_demo(monkeypatch, error)
    assert main(["demo"]) == 1
    assert capsys.readouterr().err == line


def test_debug_shows_the_traceback(monkeypatch):
    failing_demo(monkeypatch, ValueError("deep inside"))
    with pytest.raises(ValueError, match="deep inside"):
        main(["demo", "--debug"])


def test_a_fault_of_ours_is_not_hidden(monkeypatch):
    failing_demo(monkeypatch, TypeError("a fault"))
    with pytest.raises(TypeError, match="a fault"):
        main(["demo"])


def test_interruption_is_quiet(monkeypatch, capsys):
    failing_demo(monkeypatch, KeyboardInterrupt())
    assert main(["demo"]) == 130
    assert capsys.readouterr().err == ""


def test_a_text_beyond_rounding_is_code_1(monkeypatch):
    monkeypatch.setattr(cli, "run_demo", lambda settings: False)
    assert main(["demo"]) == 1


@pytest.mark.parametrize(("verdict", "code"), [(WILL_RUN_BADLY, 0), (MUST_NOT_RUN, 1)])
def test_check_prints_the_report(verdict, code, monkeypatch, capsys):
    finding = Finding(verdict, "hidden_size", 8, 16, "Take its own target.")
    monkeypatch.setattr(cli, "load_pair", lambda settings, report: PAIR)
    monkeypatch.setattr(cli, "check_alignment", lambda *pair, **options: AlignmentReport([finding]))
    assert main(["check"]) == code
    assert capsys.readouterr().out == f"{finding}\n"
    assert main(["check", "--json"]) == code
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {
        "ok": code == 0,
        "findings": [
            {
                "verdict": verdict,
                "field": "hidden_size",
                "target_value": "8",
                "drafter_value": "16",
                "remedy": "Take its own target.",
            }
        ],
    }
    assert str(finding) in printed.err


def test_check_reports_a_known_drafter_that_must_not_run(monkeypatch, capsys):
    def refuse(settings, report):
        raise AlignmentError("hidden_size", 8, 16, "Take its own target.")

    monkeypatch.setattr(cli, "load_pair", refuse)
    assert main(["check", "--json"]) == 1
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert finding["verdict"] == MUST_NOT_RUN
    assert (finding["field"], finding["target_value"], finding["drafter_value"]) == ("hidden_size", "8", "16")


def test_version_names_what_a_report_needs(capsys):
    assert main(["version"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names == ["dspark-hf", "transformers", "torch", "python"]


def test_version_as_json(capsys, tmp_path):
    assert main(["version", "--json"]) == 0
    printed = capsys.readouterr()
    versions = json.loads(printed.out)
    assert [*versions] == ["dspark-hf", "transformers", "torch", "python"]
    assert f"torch {versions['torch']}" in printed.err
    assert main(["version", "--json", str(tmp_path / "versions.json")]) == 0
    assert json.loads((tmp_path / "versions.json").read_text(encoding="utf-8")) == versions
    assert f"torch {versions['torch']}" in capsys.readouterr().out


def test_a_word_without_an_option(seen, tmp_path):
    assert main(["inspect", "org/drafter", "--json"]) == 0
    assert main(["inspect", "--revision", "v1", "org/drafter"]) == 0
    assert main(["inspect", "--drafter", "org/drafter"]) == 0
    assert main(["generate", "--model", "org/target", "Hello there", "--do-sample"]) == 0
    assert main(["generate"]) == 0
    path = tmp_path / "options.yaml"
    path.write_text("prompt: Hello there\ntarget: org/target\n")
    assert main(["generate", "--config", str(path)]) == 0
    assert seen == [
        InspectSettings("org/drafter", json="-"),
        InspectSettings("org/drafter", revision="v1"),
        InspectSettings("org/drafter"),
        GenerateSettings("org/target", prompt="Hello there", do_sample=True),
        GenerateSettings(),
        GenerateSettings("org/target", prompt="Hello there"),
    ]


def test_no_command_prints_the_help(capsys):
    assert main([]) == 2
    assert "usage: dspark-hf" in capsys.readouterr().out


def test_version_as_an_option(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("dspark-hf ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--target", "/no/such/folder"], "--target: /no/such/folder is no folder on this machine"),
        (["--drafter", "./nowhere"], "--drafter: ./nowhere is no folder on this machine"),
        (["--device", "xpu:7"], "--device is xpu:7, but this torch can use"),
        (["--target", str(DRAFTER_FOLDER)], "holds a drafter. Pass it as --drafter"),
    ],
    ids=["target", "drafter", "device", "swapped"],
)
def test_a_slip_costs_no_loading(options, message, capsys):
    assert main(["check", *options]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
