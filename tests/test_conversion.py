"""From format to format and back: tensors bit by bit, configs word for word; and what is refused instead."""

import json
import shutil
from pathlib import Path
from typing import Any

import kit
import pytest
import torch
import transformers
from conftest import FIXTURES
from safetensors.torch import load_file, save_file

from dspark_hf import CheckpointFieldError, DSparkDrafter, IncompleteCheckpointError, check_alignment
from dspark_hf.checkpoints import read_checkpoint
from dspark_hf.cli import main
from dspark_hf.conversion import convert_drafter
from dspark_hf.serving import launch_lines

DEEPSPEC = [
    "deepspec_qwen3_vanilla",
    "deepspec_qwen3_gated",
    "deepspec_qwen3_rnn",
    "deepspec_qwen3_nomarkov",
    "deepspec_gemma4",
]
SPECULATORS = [
    "speculators_dspark",
    "speculators_dspark_noanchor",
    "speculators_dspark_reduced",
    "speculators_dspark_swa",
]
OF_QWEN3 = [name for name in DEEPSPEC if "gemma4" not in name]


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor for path in sorted(folder.glob("model*.safetensors")) for name, tensor in load_file(path).items()
    }


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def assert_same_tensors(one: Path, other: Path) -> None:
    first, second = tensors_of(one), tensors_of(other)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype
        assert torch.equal(tensor, second[name]), name


def assert_same_drafter(one: Path, other: Path) -> None:
    assert config_of(one) == config_of(other)
    assert_same_tensors(one, other)


@pytest.fixture
def saved(tmp_path):
    """Saves a random drafter, and gives its folder."""

    def save(name: str = "own", **settings: Any) -> Path:
        drafter = kit.new_drafter(**settings)
        if drafter.config.has_reduced_vocabulary:
            # Every other id, from 1 on.
            drafter.d2t.copy_(torch.arange(len(drafter.d2t)) + 1)
        drafter.save_pretrained(tmp_path / name)
        return tmp_path / name

    return save


@pytest.fixture
def target(tmp_path):
    """Saves a random target, and gives its folder."""

    def save(**settings: Any) -> Path:
        kit.new_target("qwen3", **settings).save_pretrained(tmp_path / "target")
        return tmp_path / "target"

    return save


class TestThereAndBack:
    """A -> B -> A: the files of A again."""

    @pytest.mark.parametrize(
        ("name", "through"),
        [
            *((name, "dspark_hf") for name in [*DEEPSPEC, *SPECULATORS, "zlab_dflash"]),
            *((name, "speculators") for name in OF_QWEN3),
        ],
    )
    def test_of_a_published_checkpoint(self, name, through, tmp_path):
        origin = name.split("_")[0]
        convert_drafter(FIXTURES / name, tmp_path / "there", through)
        convert_drafter(tmp_path / "there", tmp_path / "back", origin)
        assert_same_drafter(FIXTURES / name, tmp_path / "back")

    def test_of_a_head_that_is_borrowed_in_part(self, saved, target, tmp_path):
        own, of = saved(draft_vocab_size=40), target()
        with pytest.raises(CheckpointFieldError, match=r"own_lm_head.*stores `lm_head.weight`\. Name the target"):
            convert_drafter(own, tmp_path / "there", "speculators")
        done = convert_drafter(own, tmp_path / "there", "speculators", target=of)
        assert done.added == ["lm_head.weight", "t2d"]
        ids = torch.arange(40) * 2 + 1
        assert torch.equal(tensors_of(done.output)["lm_head.weight"], tensors_of(of)["lm_head.weight"][ids])
        with_head = convert_drafter(done.output, tmp_path / "with head", "dspark_hf")
        assert with_head.config.own_lm_head
        # With its target at hand, what is the target's is left out again.
        back = convert_drafter(done.output, tmp_path / "back", "dspark_hf", target=of)
        assert back.left_out == ["lm_head.weight", "t2d"]
        assert_same_tensors(own, back.output)
        assert not back.config.own_lm_head

    @pytest.mark.parametrize("name", OF_QWEN3)
    def test_by_a_detour(self, name, tmp_path):
        for number, format_name in enumerate(["speculators", "dspark_hf", "speculators", "deepspec"]):
            source = tmp_path / str(number - 1) if number else FIXTURES / name
            convert_drafter(source, tmp_path / str(number), format_name)
        assert_same_drafter(FIXTURES / name, tmp_path / "3")
        assert_same_drafter(tmp_path / "0", tmp_path / "2")

    @pytest.mark.parametrize("has_confidence", [True, False])
    @pytest.mark.parametrize("head", ["none", "vanilla", "gated", "rnn"])
    @pytest.mark.parametrize("tied", [True, False])
    @pytest.mark.parametrize("through", ["deepspec", "speculators"])
    def test_of_our_own_format(self, through, tied, head, has_confidence, saved, target, tmp_path):
        """Without embedding and head, which DeepSpec's format stores: from the target, and left out again."""
        target_folder = str(target(tie_word_embeddings=tied))
        own = saved(
            markov_head_type=head,
            enable_confidence_head=has_confidence,
            target_model_name_or_path=target_folder,
            target_model_revision="main",
            eos_token_id=[1, 2],
        )
        convert_drafter(own, tmp_path / "there", through, target=target_folder)
        assert ("lm_head.weight" in tensors_of(tmp_path / "there")) == (through == "deepspec")
        convert_drafter(tmp_path / "there", tmp_path / "back", "dspark_hf", target=target_folder)
        assert_same_drafter(own, tmp_path / "back")

    @pytest.mark.parametrize("head", ["none", "vanilla", "gated", "rnn"])
    @pytest.mark.parametrize("has_confidence", [True, False])
    def test_of_a_reduced_vocabulary(self, head, has_confidence, saved, tmp_path):
        settings = {"draft_vocab_size": 40, "own_lm_head": True, "embedding_scale": 1.0}
        own = saved(markov_head_type=head, enable_confidence_head=has_confidence, **settings)
        convert_drafter(own, tmp_path / "there", "speculators")
        there = tensors_of(tmp_path / "there")
        assert there["t2d"].dtype == torch.bool
        assert there["t2d"].nonzero().flatten().tolist() == list(range(1, 80, 2))
        convert_drafter(tmp_path / "there", tmp_path / "back", "dspark_hf")
        assert_same_drafter(own, tmp_path / "back")

    def test_of_a_sliding_drafter(self, saved, tmp_path):
        layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8, "embedding_scale": 1.0}
        own = saved(**layers, sliding_block_causal=False)
        convert_drafter(own, tmp_path / "there", "speculators")
        convert_drafter(tmp_path / "there", tmp_path / "back", "dspark_hf")
        assert_same_drafter(own, tmp_path / "back")

    def test_of_a_drafter_like_dflash(self, saved, tmp_path):
        own = saved(
            sample_from_anchor=False, markov_head_type="none", enable_confidence_head=False, embedding_scale=1.0
        )
        convert_drafter(own, tmp_path / "zlab", "zlab")
        convert_drafter(tmp_path / "zlab", tmp_path / "speculators", "speculators")
        assert config_of(tmp_path / "speculators")["speculators_model_type"] == "dflash"
        convert_drafter(tmp_path / "speculators", tmp_path / "back", "dspark_hf")
        assert_same_drafter(own, tmp_path / "back")

    def test_a_target_is_learned_on_the_way(self, saved, target, tmp_path):
        target_folder = str(target())
        convert_drafter(saved(), tmp_path / "there", "speculators", target=target_folder)
        convert_drafter(tmp_path / "there", tmp_path / "back", "dspark_hf")
        assert config_of(tmp_path / "back")["target_model_name_or_path"] == target_folder

    @pytest.mark.parametrize("value", ["org/model", {"format": "bin"}])
    def test_a_field_of_that_name_of_somebody_else(self, value, tmp_path):
        shutil.copytree(FIXTURES / "speculators_dspark", tmp_path / "theirs")
        config = {**config_of(tmp_path / "theirs"), "converted_from": value}
        (tmp_path / "theirs" / "config.json").write_text(json.dumps(config))
        convert_drafter(tmp_path / "theirs", tmp_path / "there", "dspark_hf")
        convert_drafter(tmp_path / "there", tmp_path / "back", "speculators")
        assert config_of(tmp_path / "back") == config

    def test_of_one_that_has_changed_since(self, tmp_path):
        """What changed wins over the remembered file."""
        convert_drafter(FIXTURES / "deepspec_qwen3_vanilla", tmp_path / "there", "dspark_hf")
        drafter = DSparkDrafter.from_pretrained(tmp_path / "there", eos_token_id=7)
        drafter.save_pretrained(tmp_path / "changed")
        convert_drafter(tmp_path / "changed", tmp_path / "back", "deepspec")
        assert config_of(tmp_path / "back")["eos_token_id"] == 7
        assert read_checkpoint(tmp_path / "back").config.eos_token_id == 7


class TestWhatIsWritten:
    def test_converted_drafters_draft_alike(self, tmp_path):
        convert_drafter(FIXTURES / "deepspec_qwen3_rnn", tmp_path / "speculators", "speculators")
        context = torch.randn(1, 5, 96, generator=torch.Generator().manual_seed(0))
        blocks = torch.randn(1, 7, 32, generator=torch.Generator().manual_seed(1))
        outputs = []
        for folder in (FIXTURES / "deepspec_qwen3_rnn", tmp_path / "speculators"):
            drafter = DSparkDrafter.from_pretrained(folder).eval()
            with torch.inference_mode():
                hidden = drafter(blocks, context).last_hidden_state
                bias, _ = drafter.markov_head(torch.tensor([3]), hidden[:, 0], drafter.markov_head.initial_state(1))
                outputs.append(drafter.base_logits(hidden, drafter.lm_head)[:, 0] + bias)
        assert torch.equal(*outputs)

    def test_stored_dtypes_stay(self, saved, target, tmp_path):
        own = saved()
        save_file({name: tensor.bfloat16() for name, tensor in tensors_of(own).items()}, own / "model.safetensors")
        convert_drafter(own, tmp_path / "there", "deepspec", target=str(target()))
        tensors = tensors_of(tmp_path / "there")
        assert tensors["fc.weight"].dtype == torch.bfloat16
        assert tensors["lm_head.weight"].dtype == torch.float32

    def test_the_tables_of_the_target(self, saved, target, tmp_path):
        own, target_folder = saved(), target()
        done = convert_drafter(own, tmp_path / "there", "deepspec", target=str(target_folder))
        assert done.added == ["embed_tokens.weight", "lm_head.weight"]
        tensors, model = tensors_of(tmp_path / "there"), load_file(target_folder / "model.safetensors")
        assert torch.equal(tensors["embed_tokens.weight"], model["model.embed_tokens.weight"])
        assert torch.equal(tensors["lm_head.weight"], model["lm_head.weight"])

    def test_tables_of_its_own_stay(self, tmp_path):
        """They differ from the target's in this fixture, so they are no copies."""
        name = FIXTURES / "deepspec_qwen3_gated"
        done = convert_drafter(name, tmp_path / "there", "speculators", target=str(name / "target"))
        assert done.left_out == []
        assert_same_tensors(name, tmp_path / "there")

    def test_companions_come_along(self, saved, tmp_path):
        own = saved(embedding_scale=1.0)
        kit.tokenizer().save_pretrained(own)
        (own / "dspark_calibration.json").write_text("{}")
        (own / "notes.txt").write_text("mine")
        convert_drafter(own, tmp_path / "there", "speculators")
        there = {path.name for path in (tmp_path / "there").iterdir()}
        assert {
            "tokenizer.json",
            "tokenizer_config.json",
            "generation_config.json",
            "dspark_calibration.json",
        } <= there
        assert "notes.txt" not in there

    def test_large_weights_are_sharded(self, tmp_path):
        done = convert_drafter(
            FIXTURES / "deepspec_qwen3_rnn", tmp_path / "there", "speculators", max_shard_size=40_000
        )
        assert len(list(done.output.glob("model-*-of-*.safetensors"))) > 1
        assert (done.output / "model.safetensors.index.json").exists()
        assert_same_tensors(FIXTURES / "deepspec_qwen3_rnn", done.output)
        DSparkDrafter.from_pretrained(done.output)

    def test_the_target_is_named(self, saved, target, tmp_path):
        done = convert_drafter(saved(), tmp_path / "there", "speculators", target=str(target()))
        verifier = config_of(done.output)["speculators_config"]["verifier"]
        assert verifier == {"name_or_path": str(tmp_path / "target"), "architectures": ["Qwen3ForCausalLM"]}
        drafter = DSparkDrafter.from_pretrained(done.output)
        assert check_alignment(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "target"), drafter)

    @pytest.mark.parametrize("format_name", ["speculators", "deepspec"])
    def test_the_scale_of_gemmas_embedding(self, format_name, saved, tmp_path):
        """`None` means what the target's embedding does, which here is no 1."""
        kit.new_target("gemma3").save_pretrained(tmp_path / "target")
        with pytest.raises(CheckpointFieldError, match=r"`embedding_scale` is 5\.65.* would be 1\.0"):
            convert_drafter(saved(), tmp_path / "there", format_name, target=str(tmp_path / "target"))

    def test_the_scale_of_gemmas_embedding_in_a_drafter_like_gemma(self, saved, tmp_path):
        kit.new_target("gemma3").save_pretrained(tmp_path / "target")
        own = saved(backbone="gemma4", hidden_act="gelu_pytorch_tanh")
        done = convert_drafter(own, tmp_path / "there", "deepspec", target=str(tmp_path / "target"))
        assert done.config.embedding_scale == pytest.approx(32**0.5)
        convert_drafter(done.output, tmp_path / "back", "dspark_hf", target=str(tmp_path / "target"))
        assert_same_tensors(own, tmp_path / "back")
        assert read_checkpoint(tmp_path / "back").config.embedding_scale == pytest.approx(32**0.5)


class TestRefusals:
    def refused(self, source: Path, format_name: str, tmp_path: Path, **kwargs: Any) -> CheckpointFieldError:
        before = sorted(tmp_path.iterdir())
        with pytest.raises(CheckpointFieldError) as caught:
            convert_drafter(source, tmp_path / "refused", format_name, **kwargs)
        assert sorted(tmp_path.iterdir()) == before
        return caught.value

    @pytest.mark.parametrize(
        ("settings", "format_name"),
        [
            ({"draft_vocab_size": 40, "own_lm_head": True, "own_embed_tokens": True}, "deepspec"),
            ({"sample_from_anchor": False}, "deepspec"),
            ({"target_hidden_size": 48}, "deepspec"),
            ({"context_window": 64}, "deepspec"),
            ({"logits_multiplier": 2.0}, "deepspec"),
            ({"final_logit_softcapping": 15.0}, "deepspec"),
            ({"embedding_scale": 2.0}, "deepspec"),
            ({"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}, "deepspec"),
            ({"backbone": "gemma4"}, "speculators"),
            ({"context_window": 64}, "speculators"),
            ({"final_logit_softcapping": 15.0}, "speculators"),
            ({"sample_from_anchor": True}, "zlab"),
            ({"markov_head_type": "gated"}, "zlab"),
        ],
    )
    def test_a_field_that_the_format_cannot_hold(self, settings, format_name, saved, tmp_path):
        # With everything else as the format has it.
        owned = {"own_embed_tokens": format_name != "zlab", "own_lm_head": format_name != "zlab"}
        error = self.refused(saved(**{"embedding_scale": 1.0, **owned, **settings}), format_name, tmp_path)
        assert error.field in settings or any(f"`{name}`" in error.problem for name in settings)
        assert f"the {format_name} format cannot hold" in str(error)

    def test_a_window_of_another_rule(self, saved, tmp_path):
        layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
        own = saved(**layers, sliding_window_origin="query", embedding_scale=1.0)
        assert self.refused(own, "speculators", tmp_path).field == "sliding_window_origin"

    def test_a_borrowed_table_without_its_target(self, saved, tmp_path):
        error = self.refused(saved(), "deepspec", tmp_path)
        assert error.field == "own_embed_tokens"
        assert "Name the target" in str(error)

    def test_a_scale_that_only_the_target_knows(self, saved, tmp_path):
        error = self.refused(saved(), "speculators", tmp_path)
        assert error.field == "embedding_scale"
        assert "Name the target" in str(error)

    def test_a_table_of_its_own_in_a_format_without(self, tmp_path, saved):
        own = saved(own_lm_head=True, sample_from_anchor=False, markov_head_type="none", enable_confidence_head=False)
        assert self.refused(own, "zlab", tmp_path).field == "own_lm_head"

    def test_another_target(self, saved, target, tmp_path):
        with pytest.raises(ValueError, match=r"`embed_tokens\.weight` of the target is \[90, 32\]"):
            convert_drafter(saved(), tmp_path / "there", "deepspec", target=str(target(vocab_size=90)))
        assert not (tmp_path / "there").exists()

    def test_nothing_is_overwritten(self, tmp_path):
        (tmp_path / "there").mkdir()
        with pytest.raises(FileExistsError, match="nothing is overwritten"):
            convert_drafter(FIXTURES / "zlab_dflash", tmp_path / "there", "dspark_hf")

    def test_an_unknown_format(self, tmp_path):
        with pytest.raises(ValueError, match="`format_name` must be one of dspark_hf, deepspec, speculators, zlab"):
            convert_drafter(FIXTURES / "zlab_dflash", tmp_path / "there", "gguf")

    def test_weights_that_do_not_fit(self, saved, tmp_path):
        own = saved(embedding_scale=1.0)
        tensors = tensors_of(own)
        del tensors["fc.weight"]
        save_file(tensors, own / "model.safetensors")
        with pytest.raises(IncompleteCheckpointError, match=r"missing tensors: fc\.weight"):
            convert_drafter(own, tmp_path / "there", "speculators")


class TestLaunchLines:
    # Without a default in the readers of config.json of vLLM and SGLang.
    READ = {  # noqa: RUF012
        "deepspec": [
            *("architectures", "model_type", "block_size", "mask_token_id", "target_layer_ids", "vocab_size"),
            *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
            *("head_dim", "rms_norm_eps", "rope_parameters", "max_position_embeddings", "layer_types"),
            *("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"),
        ],
        "speculators": [
            *("speculators_model_type", "aux_hidden_state_layer_ids", "mask_token_id", "block_size"),
            *("draft_vocab_size", "sample_from_anchor", "markov_rank", "markov_head_type", "enable_confidence_head"),
            *("transformer_layer_config.model_type", "transformer_layer_config.vocab_size"),
            *("speculators_config.proposal_methods", "speculators_config.verifier.name_or_path"),
        ],
        "zlab": ["architectures", "block_size", "dflash_config.mask_token_id", "dflash_config.target_layer_ids"],
    }

    @pytest.mark.parametrize("format_name", READ)
    def test_engines_find_what_they_read(self, format_name, saved, target, tmp_path):
        like_dflash = {"sample_from_anchor": False, "markov_head_type": "none", "enable_confidence_head": False}
        own = saved(**(like_dflash if format_name == "zlab" else {}))
        done = convert_drafter(own, tmp_path / "there", format_name, target=str(target()))
        for path in self.READ[format_name]:
            value: Any = config_of(done.output)
            for name in path.split("."):
                value = value[name]
            assert value is not None, path

    def lines(self, name: str, format_name: str, tmp_path: Path) -> dict[str, Any]:
        done = convert_drafter(FIXTURES / name, tmp_path / "out", format_name)
        lines = launch_lines(done.config, format_name, str(done.output), "org/target")
        return {launch.engine: launch for launch in lines}

    def test_deepspec(self, tmp_path):
        lines = self.lines("deepspec_qwen3_vanilla", "deepspec", tmp_path)
        out = tmp_path / "out"
        assert lines["vLLM"].command == (
            "vllm serve org/target --speculative-config "
            f'\'{{"method": "dspark", "model": "{out}", "num_speculative_tokens": 7}}\''
        )
        assert lines["SGLang"].command == (
            "python -m sglang.launch_server --model-path org/target --speculative-algorithm DSPARK "
            f"--speculative-draft-model-path {out} --speculative-dspark-block-size 7"
        )

    @pytest.mark.parametrize(
        ("name", "format_name", "vllm", "sglang"),
        [
            ("deepspec_qwen3_gated", "deepspec", "vanilla Markov heads only", "embedding output"),
            ("deepspec_qwen3_nomarkov", "deepspec", "without a Markov head", "without a Markov head"),
            ("deepspec_gemma4", "deepspec", None, "Qwen3 kind only"),
            ("deepspec_qwen3_rnn", "deepspec", "vanilla Markov heads only", None),
            ("speculators_dspark", "speculators", None, "convert to deepspec"),
            ("speculators_dspark_swa", "speculators", "vanilla", "convert to deepspec"),
            ("zlab_dflash", "zlab", None, None),
            ("zlab_dflash", "speculators", None, "to zlab"),
            ("zlab_dflash", "dspark_hf", "does not read this format", "does not read this format"),
        ],
    )
    def test_of_each_format(self, name, format_name, vllm, sglang, tmp_path):
        if (name, format_name) == ("zlab_dflash", "speculators"):
            with pytest.raises(CheckpointFieldError, match="embedding_scale"):
                self.lines(name, format_name, tmp_path)
            return
        lines = self.lines(name, format_name, tmp_path)
        for launch, reason in ((lines["vLLM"], vllm), (lines["SGLang"], sglang)):
            assert (launch.command is None) == (reason is not None)
            assert reason is None or reason in launch.reason


class TestCommand:
    def test_converts_and_says_so(self, tmp_path, capsys):
        output = tmp_path / "there"
        code = main(
            ["convert", str(FIXTURES / "deepspec_qwen3_vanilla"), str(output), "--format", "speculators", "--launch"]
        )
        printed = capsys.readouterr().out
        assert code == 0
        assert f"wrote {output}, a drafter in the speculators format" in printed
        assert "vLLM: vllm serve TARGET" in printed
        assert "SGLang: refuses" in printed

    def test_says_what_is_refused(self, tmp_path, capsys):
        code = main(["convert", str(FIXTURES / "deepspec_gemma4"), str(tmp_path / "there")])
        assert code == 1
        assert "cannot hold" in capsys.readouterr().err

    def test_needs_both_folders(self, capsys):
        with pytest.raises(SystemExit) as caught:
            main(["convert", "somewhere"])
        assert caught.value.code == 2
        assert "output" in capsys.readouterr().err
