"""Known pairs: the shape of the file, what of it is shown by tests, and how a target is recognised."""

import json
import re
import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import kit
import pytest
import torch
import transformers
import yaml
from conftest import FIXTURES
from huggingface_hub.errors import OfflineModeIsEnabled
from transformers import AutoModelForCausalLM

from dspark_hf import DSparkDrafter, registry
from dspark_hf.checkpoints import read_checkpoint
from dspark_hf.demo_weights import DRAFTER_FOLDER, TARGET_ID
from dspark_hf.errors import AlignmentError, UnknownTargetError, UnsupportedCheckpointError, UnsupportedGenerationError
from dspark_hf.registry import NOT_YET, PAIRS_FILE, STATUSES, SUPPORTED, TESTED, KnownPair, find_drafter, known_pairs

HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
FIXTURE = FIXTURES / "deepspec_qwen3_vanilla"
PAIR = KnownPair("org/Tiny-1B", str(FIXTURE), "DSpark", "DeepSpec", SUPPORTED, "https://example.org")


@pytest.fixture(autouse=True)
def no_hub(monkeypatch) -> list[str]:
    """Nobody asks the Hub; the names that would have been asked for."""
    asked = []

    def model_info(self, name, **kwargs):
        asked.append(name)
        raise OfflineModeIsEnabled("no network in tests")

    monkeypatch.setattr(registry.HfApi, "model_info", model_info)
    return asked


@pytest.fixture
def known(monkeypatch):
    """Puts other pairs in the place of the file's."""

    def put(*pairs: KnownPair) -> None:
        monkeypatch.setattr(registry, "known_pairs", lambda: pairs)

    put(PAIR)
    return put


@pytest.fixture
def target_folder(tmp_path) -> Path:
    """A copy of a fixture's target, under a name that says nothing."""
    return Path(shutil.copytree(FIXTURE / "target", tmp_path / "mine"))


class TestFile:
    @pytest.mark.parametrize("pair", known_pairs(), ids=lambda pair: pair.drafter)
    def test_shape_of_a_line(self, pair):
        assert HUB_ID.fullmatch(pair.target)
        assert HUB_ID.fullmatch(pair.drafter) or pair.location.is_dir()
        assert pair.algorithm in ("DSpark", "DFlash", "DFlash 2")
        assert pair.status in STATUSES
        assert (pair.reason is not None) == (pair.status == NOT_YET)
        assert pair.source.startswith("https://") or pair.status == TESTED

    def test_no_drafter_stands_twice(self):
        drafters = [pair.drafter for pair in known_pairs()]
        assert len(set(drafters)) == len(drafters)

    def test_an_unknown_field_is_an_error(self):
        entry = yaml.safe_load(PAIRS_FILE.read_text(encoding="utf-8"))[0]
        with pytest.raises(TypeError, match="colour"):
            KnownPair(**entry, colour="blue")

    def test_only_what_tests_open_is_called_tested(self):
        assert [pair.location for pair in known_pairs() if pair.status == TESTED] == [DRAFTER_FOLDER]
        assert find_drafter(TARGET_ID).pair.location == DRAFTER_FOLDER
        config = DSparkDrafter.from_pretrained(DRAFTER_FOLDER).config
        assert config.target_model_name_or_path == TARGET_ID
        assert read_checkpoint(DRAFTER_FOLDER).format_name == find_drafter(TARGET_ID).pair.format

    def test_a_supported_format_is_one_that_a_fixture_has(self):
        written_by = {
            "DeepSpec": "deepspec_qwen3_vanilla",
            "z-lab": "zlab_dflash",
            "speculators": "speculators_dspark",
        }
        supported = {pair.format for pair in known_pairs() if pair.status == SUPPORTED}
        assert supported <= set(written_by)
        for name in written_by.values():
            assert DSparkDrafter.from_pretrained(FIXTURES / name).config.source_format

    def test_liquid_drafters_are_refused(self, tmp_path):
        formats = {pair.format for pair in known_pairs() if pair.drafter.startswith("LiquidAI/")}
        assert formats == {"Lfm2DSparkDraftModel"}
        (tmp_path / "config.json").write_text(json.dumps({"architectures": [*formats], "model_type": "qwen3"}))
        with pytest.raises(UnsupportedCheckpointError, match="Lfm2DSparkDraftModel"):
            DSparkDrafter.from_pretrained(tmp_path)


class TestReasons:
    """What makes a target unsupported is true of its family."""

    def test_a_recurrent_state_cannot_go_back(self):
        config = transformers.Qwen3_5TextConfig(
            **kit.SIZES,
            layer_types=["linear_attention", "full_attention"] * 2,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
        )
        model = transformers.Qwen3_5ForCausalLM(config).eval()
        with pytest.raises(UnsupportedGenerationError, match="cannot take back rejected draft tokens"):
            model.generate(**kit.inputs(), max_new_tokens=8, do_sample=False, assistant_model=kit.drafter())

    @pytest.mark.parametrize(
        ("family", "settings"),
        [
            ("Lfm2", {"layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False}),
            (
                "GptOss",
                {
                    "layer_types": ["sliding_attention", "full_attention"] * 2,
                    "sliding_window": kit.WINDOW,
                    "num_local_experts": 4,
                    "num_experts_per_tok": 2,
                    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
                },
            ),
        ],
    )
    def test_convolutions_and_sinks_are_no_reason(self, family, settings):
        config = getattr(transformers, f"{family}Config")(**kit.SIZES, **settings)
        config._attn_implementation = "eager"
        torch.manual_seed(0)
        model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
        kit.assert_lossless(model, kit.new_drafter())


class TestRecognising:
    @pytest.mark.parametrize(
        "name",
        [
            "Qwen/Qwen3-4B",
            "qwen/QWEN3-4b",
            "Qwen/Qwen3-4B-FP8",
            "Qwen/Qwen3-4B-AWQ",
            "Qwen/Qwen3-4B-GPTQ-Int4",
            "Qwen/Qwen3-4B-GGUF",
            "unsloth/Qwen3-4B-bnb-4bit",
            "unsloth/Qwen3-4B-unsloth-bnb-4bit",
            "RedHatAI/Qwen3-4B-FP8-dynamic",
            "RedHatAI/Qwen3-4B-quantized.w4a16",
            "nvidia/Qwen3-4B-NVFP4",
            "mlx-community/Qwen3-4B-8bit",
            "someone/Qwen3-4B-Q4_K_M-GGUF",
        ],
    )
    def test_quantized_copies(self, name, no_hub):
        match = find_drafter(name)
        assert match.pair.drafter == "deepseek-ai/dspark_qwen3_4b_block7"
        assert match.remark is None
        assert no_hub == []

    def test_a_namesake_is_a_guess(self):
        match = find_drafter("someone/qwen3-4b")
        assert match.pair.target == "Qwen/Qwen3-4B"
        assert "someone/qwen3-4b is called like Qwen/Qwen3-4B, so the drafter" in match.remark

    @pytest.mark.parametrize("name", ["Qwen/Qwen3-4B-Base", "Qwen/Qwen3-40B", "someone/Qwen3-4B-merged", "Qwen3"])
    def test_other_models_are_no_copies(self, name, no_hub):
        with pytest.raises(UnknownTargetError) as caught:
            find_drafter(name)
        for way in ("--drafter", "dspark-hf drafters", f"dspark-hf train --target {name}"):
            assert way in str(caught.value)
        assert no_hub == [name]

    def test_a_drafter_that_can_be_used_comes_first(self, known):
        not_yet = replace(PAIR, drafter="org/other", status=NOT_YET, reason="it is green")
        known(not_yet, PAIR)
        assert find_drafter("org/Tiny-1B").pair == PAIR
        known(not_yet)
        with pytest.raises(UnknownTargetError, match=r"org/other cannot be used for org/Tiny-1B yet: it is green\."):
            find_drafter("org/Tiny-1B")

    def test_a_folder_of_the_cache_is_the_repository(self, known, target_folder, tmp_path):
        folder = tmp_path / "models--org--Tiny-1B" / "snapshots" / "abc"
        shutil.copytree(target_folder, folder)
        assert find_drafter(folder).remark is None

    def test_the_name_of_a_folder_is_a_guess(self, known, target_folder):
        folder = target_folder.rename(target_folder.parent / "tiny-1b-awq")
        match = find_drafter(folder)
        assert match.pair == PAIR
        assert f"The folder {folder} is called like a known target" in match.remark

    def test_the_model_that_the_config_names(self, known, target_folder):
        name_base(target_folder, "org/Tiny-1B-FP8")
        match = find_drafter(target_folder)
        assert match.pair == PAIR
        assert f"{target_folder} was made from org/Tiny-1B-FP8" in match.remark

    @pytest.mark.parametrize("base", ["org/Tiny-1B", ["someone/else", "org/Tiny-1B"]])
    def test_the_base_model_of_the_card(self, known, target_folder, base):
        (target_folder / "README.md").write_text(f"---\n{yaml.safe_dump({'base_model': base})}---\n# Mine\n")
        assert "was made from org/Tiny-1B" in find_drafter(target_folder).remark

    def test_a_copy_of_a_copy(self, known, target_folder, tmp_path):
        middle = shutil.copytree(target_folder, tmp_path / "middle")
        name_base(target_folder, str(middle))
        name_base(middle, "org/Tiny-1B")
        assert find_drafter(target_folder).pair == PAIR

    def test_a_circle_ends(self, known, target_folder):
        name_base(target_folder, str(target_folder))
        with pytest.raises(UnknownTargetError):
            find_drafter(target_folder)

    @pytest.mark.parametrize("card", ["---\nbase_model: [\n---\n", "no metadata", "---\nbase_model: 7\n---\n"])
    def test_a_card_that_says_nothing(self, known, target_folder, card):
        (target_folder / "README.md").write_text(card)
        with pytest.raises(UnknownTargetError):
            find_drafter(target_folder)

    def test_a_missing_folder_is_no_unknown_model(self):
        with pytest.raises(OSError, match="is no folder on this machine"):
            find_drafter("./nowhere")

    def test_a_model_without_a_name(self):
        with pytest.raises(UnknownTargetError, match="This model has no name"):
            find_drafter(kit.target())


class TestForTarget:
    def test_a_loaded_model_gives_dtype_and_device(self, known, target_folder):
        folder = target_folder.rename(target_folder.parent / "Tiny-1B")
        target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        with pytest.warns(UserWarning, match="is called like a known target"):
            drafter = DSparkDrafter.for_target(target)
        assert (drafter.dtype, drafter.device) == (torch.bfloat16, target.device)
        with pytest.warns(UserWarning, match="is called like a known target"):
            assert DSparkDrafter.for_target(target, dtype=torch.float32).dtype == torch.float32

    def test_text_is_the_targets(self, known, target_folder):
        target = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32)
        target.config._name_or_path = "org/Tiny-1B"
        target.generation_config.eos_token_id = None
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            drafter = DSparkDrafter.for_target(target)
        prompt = {**kit.inputs(), "max_new_tokens": 24, "do_sample": False}
        with drafter.trace() as trace:
            drafted = target.generate(**prompt, assistant_model=drafter)
        assert kit.num_drafted(trace.rounds) > 0
        assert drafted.tolist() == target.generate(**prompt).tolist()

    def test_an_id(self, known):
        assert isinstance(DSparkDrafter.for_target("org/Tiny-1B", local_files_only=True), DSparkDrafter)

    def test_loading_information_is_handed_through(self, known):
        drafter, info = DSparkDrafter.for_target("org/Tiny-1B", output_loading_info=True, local_files_only=True)
        assert isinstance(drafter, DSparkDrafter)
        assert "missing_keys" in info

    @pytest.mark.parametrize("as_folder", [True, False])
    def test_a_wrong_guess_is_refused(self, known, target_folder, as_folder):
        """A folder that calls itself a copy of the target, and is another model."""
        other = kit.new_target("qwen3")
        other.save_pretrained(target_folder)
        name_base(target_folder, "org/Tiny-1B")
        given = target_folder if as_folder else AutoModelForCausalLM.from_pretrained(target_folder)
        with pytest.raises(AlignmentError, match="the number of decoder layers is 4 in the target and 6"):
            DSparkDrafter.for_target(given)


def name_base(folder: Path, base: str) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), "_name_or_path": base}))
