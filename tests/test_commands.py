"""The commands of the first ten minutes, on a tiny pair: generate, drafters, doctor, inspect, and their JSON."""

import io
import json
import sys
from types import SimpleNamespace
from unittest.mock import patch

import kit
import pytest
import torch
from conftest import FIXTURES
from huggingface_hub.errors import NotASafetensorsRepoError
from test_demo import CHAT_TEMPLATE, ascii_tokenizer
from transformers import AutoModelForCausalLM

from dspark_hf import DSparkDrafter, checkpoints, comparison, dispatch, doctor_run, inspect_run, registry
from dspark_hf.cli import COMMANDS, main
from dspark_hf.comparison import Pair, PairSettings, drafter_name, encode_prompt, load_drafter, load_pair
from dspark_hf.demo_weights import DRAFTER_FOLDER
from dspark_hf.errors import IncompleteCheckpointError, UnknownTargetError, UnsupportedCheckpointError
from dspark_hf.inspect_run import inspect_checkpoint, read_tensors
from dspark_hf.registry import SUPPORTED, KnownPair, known_pairs

FIXTURE = FIXTURES / "deepspec_qwen3_vanilla"


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory) -> str:
    """A tiny target that never ends by itself, with a tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("targets") / "Tiny-1B"
    target = AutoModelForCausalLM.from_pretrained(FIXTURE / "target")
    target.generation_config.eos_token_id = None
    target.save_pretrained(folder)
    ascii_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def known(monkeypatch) -> KnownPair:
    """The tiny target has a known drafter."""
    pair = KnownPair("org/Tiny-1B", str(FIXTURE), "DSpark", "DeepSpec", SUPPORTED, "https://example.org")
    monkeypatch.setattr(registry, "known_pairs", lambda: (pair,))
    return pair


def run(capsys, *arguments: str) -> SimpleNamespace:
    code = main([*arguments])
    return SimpleNamespace(code=code, **capsys.readouterr()._asdict())


class TestGenerate:
    @pytest.fixture
    def options(self, target_folder) -> list[str]:
        options = f"--model {target_folder} --drafter {FIXTURE} --dtype float32 --device cpu --max-new-tokens 12"
        return [*options.split(), "--do-sample", "false"]

    @pytest.fixture
    def plain(self, target_folder):
        """What the target says by itself."""
        settings = PairSettings(target_folder, dtype="float32", device="cpu", drafter=str(FIXTURE))
        pair = load_pair(settings)

        def answer(conversation: str, num_tokens: int = 12) -> str:
            inputs = pair.tokenizer(conversation, return_tensors="pt")
            output = pair.target.generate(**inputs, max_new_tokens=num_tokens, do_sample=False)
            return pair.tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])

        return answer

    def test_a_prompt(self, options, plain, capsys):
        done = run(capsys, "generate", "hello", *options)
        assert done.code == 0
        assert plain("<hello>:") in done.out
        assert "12 tokens, " in done.out
        assert "τ " in done.out

    def test_json_alone_on_standard_output(self, options, plain, capsys):
        done = run(capsys, "generate", "hello", *options, "--json")
        report = json.loads(done.out)
        (answer,) = report["answers"]
        assert answer["text"] == plain("<hello>:")
        assert answer["prompt"] == "hello"
        assert (answer["num_new_tokens"], report["total"]["num_new_tokens"]) == (12, 12)
        assert 1.0 <= answer["acceptance_length"] == report["total"]["acceptance_length"]
        assert answer["text"] in done.err

    @pytest.mark.parametrize("stream", ["--stream", "--no-stream"])
    def test_text_stands_once(self, options, plain, capsys, stream):
        done = run(capsys, "generate", "hello", *options, stream)
        assert done.out.count(plain("<hello>:")) == 1

    def test_a_file_is_the_prompt(self, options, plain, capsys, tmp_path):
        (tmp_path / "prompt.txt").write_text("two words")
        assert plain("<two words>:") in run(capsys, "generate", "--file", str(tmp_path / "prompt.txt"), *options).out

    def test_a_file_of_prompts(self, options, plain, capsys, tmp_path):
        (tmp_path / "prompts.jsonl").write_text('{"prompt": "one"}\n{"turns": ["two", "three"]}\n')
        done = run(capsys, "generate", "--file", str(tmp_path / "prompts.jsonl"), *options, "--json")
        report = json.loads(done.out)
        assert [answer["text"] for answer in report["answers"]] == [plain("<one>:"), plain("<two>:")]
        answers = report["answers"]
        rounds = [answer["num_rounds"] for answer in answers]
        weighted = sum(n * answer["acceptance_length"] for n, answer in zip(rounds, answers, strict=True))
        assert report["total"]["acceptance_length"] == pytest.approx(weighted / sum(rounds))
        assert "all answers: 24 tokens" in done.err

    def test_a_chat_remembers_until_it_starts_over(self, options, plain, capsys, monkeypatch):
        monkeypatch.setattr(sys, "stdin", io.StringIO("one\n\ntwo\n/new\nthree\n/exit\nfour\n"))
        report = json.loads(run(capsys, "generate", *options, "--system", "s", "--json").out)
        first = plain("<s><one>:")
        texts = [first, plain(f"<s><one><{first}><two>:"), plain("<s><three>:")]
        assert [answer["text"] for answer in report["answers"]] == texts

    def test_a_chat_ends_with_its_input(self, options, capsys, monkeypatch):
        monkeypatch.setattr(sys, "stdin", io.StringIO(""))
        report = json.loads(run(capsys, "generate", *options, "--json").out)
        assert report["answers"] == []
        assert report["total"]["tokens_per_second"] is None

    def test_sampling_from_a_seed(self, options, capsys):
        options = [*options[:-2], "--do-sample", "--temperature", "2.0", "--json"]
        # The default goes by the clock, so that a random number may meet another draft.
        options += ["--num-assistant-tokens-schedule", "constant"]
        texts = []
        for seed in ("1", "1", "2"):
            done = run(capsys, "generate", "hello", *options, "--seed", seed)
            texts.append(json.loads(done.out)["answers"][0]["text"])
        assert texts[0] == texts[1] != texts[2]

    def test_one_token_has_no_round(self, options, capsys):
        done = run(capsys, "generate", "hello", *options, "--max-new-tokens", "1")
        assert "1 tokens, " in done.out
        assert "τ" not in done.out

    def test_options_of_the_template(self, target_folder, options, plain, capsys, tmp_path):
        tokenizer = ascii_tokenizer()
        tokenizer.chat_template = "{% if enable_thinking %}deep{% else %}flat{% endif %}" + CHAT_TEMPLATE
        AutoModelForCausalLM.from_pretrained(target_folder).save_pretrained(tmp_path)
        tokenizer.save_pretrained(tmp_path)
        options[1] = str(tmp_path)
        for value, start in (("true", "deep"), ("false", "flat")):
            done = run(capsys, "generate", "hi", *options, "--enable-thinking", value, "--json")
            assert json.loads(done.out)["answers"][0]["text"] == plain(f"{start}<hi>:")

    def test_the_known_drafter_is_taken(self, target_folder, known, options, capsys):
        del options[2:4]
        with pytest.warns(UserWarning, match="is called like a known target"):
            done = run(capsys, "generate", "hello", *options)
        assert done.code == 0
        assert str(FIXTURE.name) in done.out.replace("\n", "")

    def test_an_unknown_target_is_one_line_before_any_loading(self, options, capsys, monkeypatch):
        monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
        del options[2:4]
        done = run(capsys, "generate", "hello", *options)
        assert done.code == 1
        assert "No drafter is known for" in done.err
        assert done.err.count("\n") == 1


class TestDefaultDrafter:
    def test_of_the_demo(self):
        settings = PairSettings(dtype="float32", device="cpu")
        assert drafter_name(settings) == f"dspark_hf/drafters/{DRAFTER_FOLDER.name}"
        assert load_drafter(settings).config.target_model_name_or_path == "HuggingFaceTB/SmolLM2-135M-Instruct"

    def test_of_a_known_target(self, known, target_folder):
        settings = PairSettings(target_folder, device="cpu")
        assert drafter_name(settings) == FIXTURE.name  # no path of this machine
        with pytest.warns(UserWarning, match="is called like a known target"):
            assert load_drafter(settings).dtype == torch.bfloat16

    def test_is_looked_up_once(self, known, target_folder):
        """Each time the Hub may be asked."""
        settings = PairSettings(target_folder, device="cpu")
        with patch.object(comparison, "find_drafter", wraps=comparison.find_drafter) as asked:
            comparison.check_sources(settings)
            drafter_name(settings)
            with pytest.warns(UserWarning, match="is called like a known target"):
                load_drafter(settings)
        assert asked.call_count == 1

    def test_of_an_unknown_one(self, target_folder):
        with pytest.raises(UnknownTargetError):
            load_pair(PairSettings(target_folder, device="cpu"))

    def test_a_random_drafter_needs_none(self, target_folder, capsys):
        options = [
            "--dtype",
            "float32",
            "--device",
            "cpu",
            "--drafter-layers",
            "1",
            "--num-prompts",
            "1",
            "--max-new-tokens",
            "4",
        ]
        done = run(capsys, "bench", "--target", target_folder, *options, "--methods", "plain", "dspark", "--json")
        assert done.code == 0
        assert json.loads(done.out)["environment"]["drafter"] == "random weights, draft layers: 1"

    def test_messages_without_a_template(self):
        tokenizer = ascii_tokenizer()
        tokenizer.chat_template = None
        pair = Pair(kit.target(), tokenizer, None)
        assert tokenizer.decode(encode_prompt(pair, "hi")["input_ids"][0]) == "hi"


class TestDrafters:
    def test_all(self, capsys):
        done = run(capsys, "drafters")
        assert done.code == 0
        for pair in known_pairs():
            assert pair.drafter in done.out

    def test_json(self, capsys, tmp_path):
        done = run(capsys, "drafters", "--json")
        assert [KnownPair(**entry) for entry in json.loads(done.out)] == [*known_pairs()]
        assert run(capsys, "drafters", "--json", str(tmp_path / "out.json")).code == 0
        assert (tmp_path / "out.json").read_text(encoding="utf-8") == done.out

    def test_of_a_target(self, capsys, known, target_folder):
        assert "deepseek-ai" not in run(capsys, "drafters", "org/Tiny-1B-FP8").out
        done = run(capsys, "drafters", target_folder, "--json")
        assert [entry["drafter"] for entry in json.loads(done.out)] == [str(FIXTURE)]
        assert "is called like a known target" in done.err.replace("\n", " ")

    def test_of_a_target_that_is_not_supported(self, capsys):
        done = run(capsys, "drafters", "Qwen/Qwen3.5-4B")
        assert done.code == 1
        assert "z-lab/Qwen3.5-4B-DFlash cannot be used for Qwen/Qwen3.5-4B yet: the target has a recurrent" in done.err


class TestDoctor:
    def test_a_healthy_machine(self, capsys):
        done = run(capsys, "doctor", "--json")
        report = json.loads(done.out)
        assert done.code == 0
        assert report["ok"]
        findings = {finding["topic"]: finding for finding in report["findings"]}
        assert findings["torch"]["text"] == torch.__version__
        assert "float32" in findings["cpu dtypes"]["text"]
        assert findings["cpu text"]["status"] == "ok"
        assert findings["generate"]["status"] == "ok"

    def test_the_tiny_pair_really_drafts(self):
        target, drafter = doctor_run.tiny_pair(torch.device("cpu"))
        with drafter.trace() as trace:
            target.generate(**kit.inputs((2, 3, 4)), max_new_tokens=16, do_sample=False, assistant_model=drafter)
        assert kit.num_drafted(trace.rounds) > 0

    def test_text_that_differs_is_a_problem(self, capsys, monkeypatch):
        target, drafter = doctor_run.tiny_pair(torch.device("cpu"))
        plain = target.generate

        def generate(input_ids, assistant_model=None, **kwargs):
            return plain(input_ids, **kwargs) + (assistant_model is not None)

        monkeypatch.setattr(target, "generate", generate)
        monkeypatch.setattr(doctor_run, "tiny_pair", lambda device: (target, drafter))
        done = run(capsys, "doctor", "--json")
        assert done.code == 1
        assert "drafted and plain text differ" in done.out

    def test_a_failure_of_the_tiny_pair_is_a_problem(self, capsys, monkeypatch):
        def fail(*args, **kwargs):
            raise RuntimeError("no kernel\nfor this")

        pair = doctor_run.tiny_pair(torch.device("cpu"))
        monkeypatch.setattr(pair[0], "generate", fail)
        monkeypatch.setattr(doctor_run, "tiny_pair", lambda device: pair)
        done = run(capsys, "doctor", "--json")
        assert done.code == 1
        assert "a tiny pair fails: no kernel for this" in done.out

    def test_versions_are_compared_with_what_the_package_needs(self, capsys, monkeypatch):
        needs = ["transformers<5,>=4", "torch>=2", "no-such-package>=1", 'matplotlib>=3; extra == "plot"']
        monkeypatch.setattr(doctor_run.importlib.metadata, "requires", lambda name: needs)
        monkeypatch.setattr(doctor_run, "_PACKAGES", ("transformers", "torch", "no-such-package"))
        done = run(capsys, "doctor", "--json")
        findings = {finding["topic"]: finding for finding in json.loads(done.out)["findings"]}
        assert done.code == 1
        assert findings["transformers"]["status"] == "problem"
        assert "expected <5,>=4: `pip install 'transformers<5,>=4'`" in findings["transformers"]["text"]
        assert findings["torch"]["status"] == "ok"
        assert findings["no-such-package"]["text"] == "is missing: `pip install 'no-such-package>=1'`"

    def test_a_wrapped_generate_is_a_note(self, capsys, monkeypatch):
        monkeypatch.setattr(dispatch, "is_installed", lambda: False)
        done = run(capsys, "doctor", "--json")
        findings = {finding["topic"]: finding for finding in json.loads(done.out)["findings"]}
        assert done.code == 0
        assert findings["generate"]["status"] == "note"
        assert "SpeculativeDecoding(drafter)" in findings["generate"]["text"]


class TestInspect:
    @pytest.mark.parametrize(
        ("name", "shared", "num_draft_tokens"),
        [
            ("deepspec_qwen3_vanilla", [], 7),
            ("speculators_dspark", ["embedding", "head"], 7),
            ("speculators_dspark_reduced", ["embedding"], 7),
            ("zlab_dflash", ["embedding", "head"], 7),
        ],
    )
    def test_numbers_are_those_of_the_loaded_drafter(self, name, shared, num_draft_tokens, capsys):
        report = json.loads(run(capsys, "inspect", str(FIXTURES / name), "--json").out)
        drafter = DSparkDrafter.from_pretrained(FIXTURES / name)
        state = drafter.state_dict()
        assert report["shared_with_target"] == shared
        assert report["block"]["num_draft_tokens"] == num_draft_tokens == drafter.config.num_draft_tokens
        assert report["format"] == drafter.config.source_format
        assert report["num_parameters"] == sum(tensor.numel() for tensor in state.values())
        assert {n: t["shape"] for n, t in report["tensors"].items() if n not in report["not_needed"]} == {
            n: [*tensor.shape] for n, tensor in state.items()
        }
        assert report["config"]["target_layer_ids"] == drafter.config.target_layer_ids

    def test_bytes_are_those_of_the_file(self):
        """A safetensors file is 8 bytes, a header of the length that they say, and the values."""
        file = (FIXTURES / "speculators_dspark_reduced" / "model.safetensors").read_bytes()
        header = int.from_bytes(file[:8], "little")
        report = inspect_checkpoint(str(FIXTURES / "speculators_dspark_reduced"))
        assert report["num_bytes"] == len(file) - 8 - header

    def test_as_tables(self, capsys):
        done = run(capsys, "inspect", str(FIXTURE))
        for text in (
            "deepspec dspark",
            "7 of a block of 7 (the anchor predicts)",
            "layers.*.mlp.up_proj.weight",
            "0, 1",
        ):
            assert text in done.out
        assert run(capsys, "inspect", str(DRAFTER_FOLDER)).code == 0

    def test_what_is_no_drafter_is_refused(self, capsys):
        done = run(capsys, "inspect", str(FIXTURE / "target"))
        assert done.code == 1
        assert "an ordinary language model" in done.err

    def test_a_lost_tensor_is_named(self, tmp_path):
        config = json.loads((FIXTURE / "config.json").read_text(encoding="utf-8"))
        (tmp_path / "config.json").write_text(json.dumps({**config, "markov_head_type": "gated"}))
        (tmp_path / "model.safetensors").write_bytes((FIXTURE / "model.safetensors").read_bytes())
        with pytest.raises(IncompleteCheckpointError, match=r"missing tensors: markov_head\.gate_proj"):
            inspect_checkpoint(str(tmp_path))

    def test_of_the_hub_only_headers_are_fetched(self, monkeypatch):
        tensors = {
            name: SimpleNamespace(shape=tensor.shape, dtype=tensor.dtype)
            for name, tensor in read_tensors(str(FIXTURE)).items()
        }
        asked = []

        def metadata(repo_id, revision=None):
            asked.append((repo_id, revision))
            return SimpleNamespace(files_metadata={"model.safetensors": SimpleNamespace(tensors=tensors)})

        config = json.loads((FIXTURE / "config.json").read_text(encoding="utf-8"))
        monkeypatch.setattr(checkpoints, "read_config_dict", lambda source, hub_kwargs: config)
        monkeypatch.setattr(checkpoints, "read_shapes", None)
        monkeypatch.setattr(inspect_run, "get_safetensors_metadata", metadata)
        monkeypatch.setattr(inspect_run, "optional_file", lambda *args, **kwargs: None)
        report = inspect_checkpoint("org/drafter", "v1")
        assert asked == [("org/drafter", "v1")]
        assert report == {**inspect_checkpoint(str(FIXTURE)), "source": "org/drafter"}

    def test_of_the_hub_offline_what_is_in_the_cache(self, monkeypatch):
        locations = []

        def files(source, location, variant=None):
            locations.append(location)
            return [str(FIXTURE / "model.safetensors")]

        monkeypatch.setattr(inspect_run, "is_offline_mode", lambda: True)
        monkeypatch.setattr(inspect_run, "get_safetensors_metadata", None)
        monkeypatch.setattr("dspark_hf.checkpoints.files.weight_files", files)
        assert read_tensors("org/drafter") == read_tensors(str(FIXTURE))
        assert locations[0]["local_files_only"]

    def test_of_the_hub_without_safetensors_what_there_is_instead_is_said(self, monkeypatch):
        def metadata(repo_id, revision=None):
            raise NotASafetensorsRepoError("none")

        monkeypatch.setattr(inspect_run, "get_safetensors_metadata", metadata)
        monkeypatch.setattr("dspark_hf.checkpoints.files.cached_file", lambda *args, **kwargs: None)
        monkeypatch.setattr("dspark_hf.checkpoints.files.list_repo_files", lambda *args, **kwargs: ["model.gguf"])
        with pytest.raises(UnsupportedCheckpointError, match="GGUF"):
            read_tensors("org/drafter")

    def test_refused_on_the_hub_before_its_headers(self, monkeypatch):
        monkeypatch.setattr(checkpoints, "read_config_dict", lambda source, hub_kwargs: {"model_type": "bert"})
        monkeypatch.setattr(inspect_run, "get_safetensors_metadata", None)
        with pytest.raises(UnsupportedCheckpointError):
            inspect_checkpoint("org/drafter")


class TestDemo:
    def test_json(self, target_folder, capsys):
        options = f"--target {target_folder} --drafter {FIXTURE} --dtype float32 --device cpu --max-new-tokens 8"
        done = run(capsys, "demo", *options.split(), "--prompt", "one", "two", "--json")
        report = json.loads(done.out)
        assert done.code == 0
        assert [prompt["name"] for prompt in report["prompts"]] == ["prompt 1", "prompt 2"]
        assert all(prompt["identical"] and prompt["within_rounding"] for prompt in report["prompts"])
        assert all(prompt["num_new_tokens"] == 8 for prompt in report["prompts"])
        assert "geometric mean" in done.err


class TestJson:
    """`--json` alone: nothing but JSON on standard output."""

    def test_every_command_has_it(self):
        lacking = [name for name, (settings, _) in COMMANDS.items() if "json" not in settings.__dataclass_fields__]
        assert lacking == []

    def test_profile(self, target_folder, tmp_path, capsys):
        pair = f"--target {target_folder} --drafter {FIXTURE} --dtype float32 --device cpu".split()
        output = tmp_path / "prices.json"
        done = run(
            capsys, "profile", *pair, "--repeats", "1", "--context-length", "16", "--output", str(output), "--json"
        )
        report = json.loads(done.out)
        assert report["file"] == str(output)
        assert report["contexts"] == json.loads(output.read_text())["contexts"]
        assert "milliseconds" in done.err

    def test_calibrate(self, target_folder, tmp_path, capsys):
        pair = f"--target {target_folder} --drafter {FIXTURE} --dtype float32 --device cpu".split()
        options = ["--num-prompts", "6", "--max-new-tokens", "12", "--output", str(tmp_path), "--json"]
        done = run(capsys, "calibrate", *pair, *options)
        report = json.loads(done.out)
        assert len(report["temperatures"]) == 7
        assert report["file"] == str(tmp_path / "dspark_calibration.json")
        assert "ECE" in done.err

    def test_convert(self, tmp_path, capsys):
        output = str(tmp_path / "there")
        done = run(capsys, "convert", str(FIXTURE), output, "--format", "speculators", "--launch", "--json")
        report = json.loads(done.out)
        assert (report["output"], report["format"], report["added"]) == (output, "speculators", [])
        assert any("vllm" in line for line in report["launch"])
        assert "wrote" in done.err

    def test_data_and_train(self, target_folder, tmp_path, capsys):
        prompts, rows = tmp_path / "prompts.jsonl", tmp_path / "rows.jsonl"
        prompts.write_text("".join(json.dumps({"index": i, "prompt": f"say {i}"}) + "\n" for i in range(6)))
        options = ["--dtype", "float32", "--device", "cpu", "--max-new-tokens", "12", "--json"]
        done = run(
            capsys, "data", "--target", target_folder, "--prompts", str(prompts), "--output", str(rows), *options
        )
        assert json.loads(done.out) == {"output": str(rows), "num_rows": 6}
        options = "--max-steps 2 --use-cpu True --num-hidden-layers 1 --block-size 3 --markov-rank 4 --mask-token-id 1"
        files = ["--data", str(rows), "--output-dir", str(tmp_path / "drafter"), "--target", target_folder]
        done = run(capsys, "train", *files, *options.split(), "--target-dtype", "float32", "--json")
        report = json.loads(done.out)
        assert (report["output_dir"], report["steps"]) == (str(tmp_path / "drafter"), 2)
        assert report["draft_tokens"] > 0
        assert report["eval_prompts_tau"] >= 1
        assert "τ greedy" in done.err
