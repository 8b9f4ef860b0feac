"""Reading published drafters: every fixture field by field, every refusal, every field that must not be guessed."""

import json
import math
import shutil
from pathlib import Path

import kit
import pytest
import torch
from safetensors.torch import load_file, save_file

from dspark_hf import DSparkDrafter, checkpoints
from dspark_hf.checkpoints import Checkpoint, files, read_checkpoint
from dspark_hf.errors import CheckpointFieldError, IncompleteCheckpointError, UnsupportedCheckpointError

FIXTURES = Path(__file__).parent / "fixtures"
DRAFTERS = Path(checkpoints.__file__).parents[1] / "drafters"

WITH_WEIGHTS = sorted(path.parent.name for path in FIXTURES.glob("*/model.safetensors") if "eagle" not in str(path))

QWEN3 = {
    "vocab_size": 128,
    "draft_vocab_size": 128,
    "hidden_size": 32,
    "target_hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "backbone": "qwen3",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_k_eq_v": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "max_position_embeddings": 512,
    "layer_types": ["full_attention", "full_attention"],
    "sliding_window": None,
    "mask_token_id": 127,
    "target_layer_ids": [0, 2, 4],
    "logits_multiplier": 1.0,
    "final_logit_softcapping": None,
    "target_model_revision": None,
    "tie_word_embeddings": False,
    "model_type": "dspark",
}
FULL_HEADS = {
    "markov_head_type": "vanilla",
    "markov_rank": 8,
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
NO_HEADS = {
    "markov_head_type": "none",
    "markov_rank": 0,
    "enable_confidence_head": False,
    "confidence_head_with_markov": False,
}
DEEPSPEC = {
    **QWEN3,
    **FULL_HEADS,
    "block_size": 7,
    "sample_from_anchor": True,
    "num_target_layers": 6,
    "own_embed_tokens": True,
    "own_lm_head": True,
    "embedding_scale": 1.0,
    "target_model_name_or_path": None,
    "source_format": "deepspec dspark",
}
GEMMA4 = {
    **DEEPSPEC,
    "backbone": "gemma4",
    "hidden_act": "gelu_pytorch_tanh",
    "head_dim": 16,
    "num_key_value_heads": 1,
    "attention_k_eq_v": True,
    "rope_parameters": {"rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.25},
    "embedding_scale": math.sqrt(32),
    "final_logit_softcapping": 15.0,
}
ZLAB = {
    **QWEN3,
    **NO_HEADS,
    "block_size": 8,
    "sample_from_anchor": False,
    "num_target_layers": 6,
    "own_embed_tokens": False,
    "own_lm_head": False,
    "embedding_scale": None,
    "target_model_name_or_path": None,
    "source_format": "z-lab dflash",
}
SPECULATORS = {
    **QWEN3,
    **FULL_HEADS,
    "block_size": 7,
    "sample_from_anchor": True,
    "num_target_layers": None,
    "own_embed_tokens": False,
    "own_lm_head": False,
    "embedding_scale": 1.0,
    "target_model_name_or_path": "./target",
    "source_format": "speculators dspark 0.9.0",
}
RESOLVED = {
    "deepspec_qwen3_vanilla": DEEPSPEC,
    "deepspec_qwen3_gated": {**DEEPSPEC, "markov_head_type": "gated", "target_layer_ids": [-1, 1, 3]},
    "deepspec_qwen3_rnn": {**DEEPSPEC, "markov_head_type": "rnn", "target_layer_ids": [1, 2, 4]},
    "deepspec_qwen3_nomarkov": {**DEEPSPEC, **NO_HEADS},
    "deepspec_gemma4": GEMMA4,
    "zlab_dflash": ZLAB,
    "speculators_dspark": SPECULATORS,
    "speculators_dspark_noanchor": {**SPECULATORS, "sample_from_anchor": False},
    "speculators_dspark_reduced": {
        **SPECULATORS,
        "markov_head_type": "gated",
        "draft_vocab_size": 64,
        "own_lm_head": True,
    },
    "speculators_dspark_swa": {
        **SPECULATORS,
        "markov_head_type": "rnn",
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 6,
        "sliding_window_origin": "anchor",
        "sliding_block_causal": True,
    },
}


@pytest.fixture
def edited(tmp_path):
    """Copy a fixture's drafter and change its `config.json`: `None` removes a (dotted) key, all else sets it."""

    def edit(name: str, changes: dict | None = None) -> Path:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        shutil.copy(FIXTURES / name / "model.safetensors", folder)
        config = json.loads((FIXTURES / name / "config.json").read_text())
        for dotted, value in (changes or {}).items():
            *sections, key = dotted.split(".")
            section = config
            for part in sections:
                section = section.setdefault(part, {})
            if value is None:
                section.pop(key)
            else:
                section[key] = value
        return write_config(folder, config)

    return edit


def write_config(folder: Path, config: dict) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def read_config(name: str) -> dict:
    return json.loads((FIXTURES / name / "config.json").read_text())


def field_error(folder: Path) -> CheckpointFieldError:
    """The error that reading gives; it always starts with the folder and the name of the field."""
    with pytest.raises(CheckpointFieldError) as caught:
        read_checkpoint(folder)
    assert str(caught.value).startswith(f"{folder}: `{caught.value.field}` ")
    return caught.value


def refusal(folder: Path) -> UnsupportedCheckpointError:
    """The refusal that reading gives; it is always one line that names the folder, the kind and a remedy."""
    with pytest.raises(UnsupportedCheckpointError) as caught:
        read_checkpoint(folder)
    text = str(caught.value)
    assert text.startswith(f"{folder} holds {caught.value.found}") and text.endswith(caught.value.remedy)
    assert "\n" not in text and caught.value.remedy.endswith(".")
    return caught.value


class TestResolvedConfig:
    @pytest.mark.parametrize("name", sorted(RESOLVED))
    def test_every_fixture_field_by_field(self, name):
        config = read_checkpoint(FIXTURES / name).config
        assert {field: getattr(config, field) for field in RESOLVED[name]} == RESOLVED[name]

    def test_no_fixture_is_forgotten(self):
        expected = set(RESOLVED) | {"deepspec_eagle3"}
        assert {path.parent.name for path in FIXTURES.glob("*/model.safetensors")} <= expected | {
            "deepspec_gemma4_kv",
            "deepspec_qwen3_conf_nomarkov",
            "zlab_dflash_swa",
        }
        assert expected <= {path.parent.name for path in FIXTURES.glob("*/model.safetensors")}

    @pytest.mark.parametrize(
        ("name", "num_draft_tokens"),
        [("deepspec_qwen3_nomarkov", 7), ("zlab_dflash", 7), ("speculators_dspark_noanchor", 6)],
    )
    def test_the_anchor_convention_decides_the_length_of_a_draft(self, name, num_draft_tokens):
        assert read_checkpoint(FIXTURES / name).config.num_draft_tokens == num_draft_tokens

    def test_source_is_the_name_as_given(self):
        path = FIXTURES / "zlab_dflash"
        assert read_checkpoint(path).source == read_checkpoint(str(path)).source == str(path)

    def test_a_real_drafter(self):
        checkpoint = read_checkpoint(DRAFTERS / "smollm2-135m-dspark")
        config = checkpoint.config
        assert config.target_layer_ids == [1, 7, 13, 20, 26]
        assert (config.block_size, config.num_draft_tokens, config.mask_token_id) == (8, 8, 3)
        assert (config.vocab_size, config.draft_vocab_size, config.has_reduced_vocabulary) == (49152, 16384, True)
        assert (config.hidden_size, config.num_attention_heads, config.num_key_value_heads) == (576, 9, 3)
        assert config.rope_parameters == {"rope_type": "default", "rope_theta": 100000.0}
        assert (config.own_embed_tokens, config.own_lm_head) == (False, False)
        assert config.target_model_name_or_path == "HuggingFaceTB/SmolLM2-135M-Instruct"
        assert config.dtype in ("bfloat16", torch.bfloat16)
        assert checkpoint.tensors["markov_head.markov_w1.weight"] == [49152, 64]
        assert checkpoint.tensors["d2t"] == [16384]
        assert checkpoint.ignored == frozenset()


class TestOneDrafterWrittenManyWays:
    DRAFTING = (
        "block_size",
        "mask_token_id",
        "target_layer_ids",
        "markov_rank",
        "markov_head_type",
        "enable_confidence_head",
        "confidence_head_with_markov",
        "num_target_layers",
    )

    @pytest.mark.parametrize("section", ["dspark_config", "dflash_config"])
    def test_drafting_fields_in_a_section(self, edited, section):
        config = read_config("deepspec_qwen3_vanilla")
        flat = edited("deepspec_qwen3_vanilla")
        expected = read_checkpoint(flat).config.to_dict()
        nested = {key: config.pop(key) for key in self.DRAFTING}
        assert read_checkpoint(write_config(flat, {**config, section: nested})).config.to_dict() == expected

    def test_backbone_fields_in_a_section(self, edited):
        config = read_config("deepspec_qwen3_vanilla")
        flat = edited("deepspec_qwen3_vanilla")
        expected = read_checkpoint(flat).config.to_dict()
        kept = {key: config[key] for key in (*self.DRAFTING, "architectures", "dtype")}
        nested = {key: value for key, value in config.items() if key not in kept}
        written = write_config(flat, {**kept, "transformer_layer_config": nested})
        assert read_checkpoint(written).config.to_dict() == expected

    def test_the_same_value_in_every_place(self, edited):
        config = read_config("zlab_dflash")
        folder = edited("zlab_dflash")
        expected = read_checkpoint(folder).config.to_dict()
        section = {"block_size": 8, **config["dflash_config"]}
        written = write_config(folder, {**config, **section, "dflash_config": section, "dspark_config": section})
        assert read_checkpoint(written).config.to_dict() == expected

    def test_formats_agree_on_what_they_share(self):
        deepspec = read_checkpoint(FIXTURES / "deepspec_qwen3_vanilla").config.to_dict()
        speculators = read_checkpoint(FIXTURES / "speculators_dspark").config.to_dict()
        differing = {key for key in deepspec if deepspec[key] != speculators[key]}
        stated = {"num_target_layers", "own_embed_tokens", "own_lm_head", "target_model_name_or_path"}
        stated |= {"bos_token_id", "eos_token_id"}
        assert differing == stated | {"source_format"}

    def test_our_own_format_keeps_every_field(self, tmp_path):
        original = read_checkpoint(FIXTURES / "speculators_dspark_reduced")
        original.config.save_pretrained(tmp_path)
        shutil.copy(FIXTURES / "speculators_dspark_reduced" / "model.safetensors", tmp_path)
        again = read_checkpoint(tmp_path)
        skipped = {"_name_or_path"}
        assert {k: v for k, v in again.config.to_dict().items() if k not in skipped} == {
            k: v for k, v in original.config.to_dict().items() if k not in skipped
        }
        assert again.ignored == frozenset()

    @pytest.mark.parametrize(
        ("first", "second"),
        [("mask_token_id", "dflash_config.mask_token_id"), ("block_size", "dflash_config.block_size")],
    )
    def test_two_places_that_disagree(self, edited, first, second):
        value = read_config("zlab_dflash").get(first, 127)
        folder = edited("zlab_dflash", {first: value - 1, second: value})
        error = field_error(folder)
        assert error.field == first
        assert str(error) == (
            f"{folder}: `{first}` is {value - 1}, but `{second}` is {value}. "
            "Keep the one that the drafter was trained with."
        )


class TestDialects:
    """What the fixtures with weights do not show."""

    def test_transformers_4_rope(self, edited):
        scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
        config = read_checkpoint(edited("zlab_dflash", {"rope_theta": 5e5, "rope_scaling": scaling})).config
        assert config.rope_parameters["rope_theta"] == 5e5
        assert config.rope_parameters["rope_type"] == "yarn"
        assert config.rope_parameters["factor"] == 4.0

    def test_rope_written_twice(self, edited):
        error = field_error(edited("deepspec_qwen3_rnn", {"rope_theta": 5e5}))
        assert (error.field, error.problem) == (
            "rope_theta",
            "is 500000.0, but `rope_parameters.rope_theta` is 10000.0. "
            "Keep the one that the drafter was trained with.",
        )

    def test_deepspec_layers_are_full_attention_whatever_the_file_says(self, edited):
        changes = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 16, "use_sliding_window": True}
        config = read_checkpoint(edited("deepspec_qwen3_vanilla", changes)).config
        assert (config.layer_types, config.sliding_window) == (["full_attention"] * 2, None)

    @pytest.mark.parametrize(("stated", "causal"), [({}, True), ({"is_causal": False}, False)])
    def test_zlab_sliding_layers(self, edited, stated, causal):
        changes = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 12}
        config = read_checkpoint(edited("zlab_dflash", {**changes, "use_sliding_window": True, **stated})).config
        assert config.layer_types == ["sliding_attention", "full_attention"]
        assert (config.sliding_window, config.sliding_window_origin) == (12, "query")
        assert config.sliding_block_causal is causal

    def test_zlab_scales(self, edited):
        scales = {"input_embedding_scale": 8.0, "output_multiplier": 0.5, "final_logit_softcapping": 30.0}
        config = read_checkpoint(edited("zlab_dflash", {f"dflash_config.{k}": v for k, v in scales.items()})).config
        assert (config.embedding_scale, config.logits_multiplier, config.final_logit_softcapping) == (8.0, 0.5, 30.0)

    def test_gemma4_with_values_of_its_own(self, edited):
        config = read_checkpoint(edited("deepspec_gemma4", {"attention_k_eq_v": False})).config
        assert (config.attention_k_eq_v, config.num_key_value_heads) == (False, 2)

    def test_speculators_block_without_causal_order(self, edited):
        config = read_checkpoint(edited("speculators_dspark_swa", {"sliding_window_non_causal": True})).config
        assert config.sliding_block_causal is False

    def test_speculators_anchor_samples_unless_it_says_otherwise(self, edited):
        assert read_checkpoint(edited("speculators_dspark", {"sample_from_anchor": None})).config.sample_from_anchor

    def test_speculators_dspark_without_a_markov_head(self, edited):
        changes = {"markov_rank": 0, "confidence_head_with_markov": False}
        config = read_checkpoint(edited("speculators_dspark", changes)).config
        assert (config.markov_head_type, config.markov_rank, config.enable_confidence_head) == ("none", 0, True)

    def test_speculators_dflash_has_no_heads_and_no_anchor_sampling(self, edited):
        head_fields = dict.fromkeys((*FULL_HEADS, "sample_from_anchor"))
        config = read_checkpoint(
            edited("speculators_dspark", {"speculators_model_type": "dflash", **head_fields})
        ).config
        assert config.source_format == "speculators dflash 0.9.0"
        assert config.sample_from_anchor is False
        assert {field: getattr(config, field) for field in NO_HEADS} == NO_HEADS

    def test_speculators_layers_are_written_as_a_difference_to_qwen3(self, edited):
        absent = (
            "rms_norm_eps",
            "hidden_act",
            "attention_bias",
            "layer_types",
            "use_sliding_window",
            "rope_parameters",
        )
        folder = edited("speculators_dspark", {f"transformer_layer_config.{key}": None for key in absent})
        config = read_checkpoint(folder).config
        assert {field: getattr(config, field) for field in SPECULATORS} == SPECULATORS

    def test_speculators_target_of_another_width(self, edited):
        error = field_error(edited("speculators_dspark", {"target_hidden_size": 48}))
        assert "`hidden_size` (32) must equal `target_hidden_size` (48)" in error.problem


class TestFieldsThatAreNeverGuessed:
    MISSING = "is missing and cannot be guessed. Write the value that the drafter was trained with there."

    @pytest.mark.parametrize(
        ("name", "field"),
        [
            ("deepspec_qwen3_vanilla", "block_size"),
            ("deepspec_qwen3_vanilla", "mask_token_id"),
            ("deepspec_qwen3_vanilla", "target_layer_ids"),
            ("deepspec_qwen3_vanilla", "markov_rank"),
            ("deepspec_qwen3_vanilla", "markov_head_type"),
            ("deepspec_qwen3_vanilla", "enable_confidence_head"),
            ("deepspec_qwen3_vanilla", "confidence_head_with_markov"),
            ("deepspec_gemma4", "global_head_dim"),
            ("deepspec_gemma4", "num_global_key_value_heads"),
            ("deepspec_gemma4", "hidden_size"),
            ("deepspec_gemma4", "hidden_activation"),
            ("deepspec_gemma4", "attention_k_eq_v"),
            ("deepspec_gemma4", "rope_parameters"),
            ("zlab_dflash", "block_size"),
            ("zlab_dflash", "dflash_config.mask_token_id"),
            ("zlab_dflash", "dflash_config.target_layer_ids"),
            ("speculators_dspark", "block_size"),
            ("speculators_dspark", "mask_token_id"),
            ("speculators_dspark", "aux_hidden_state_layer_ids"),
            ("speculators_dspark", "draft_vocab_size"),
        ],
    )
    def test_missing(self, edited, name, field):
        error = field_error(edited(name, {field: None}))
        assert error.field.removeprefix("dflash_config.") == field.removeprefix("dflash_config.")
        assert error.problem == self.MISSING

    def test_missing_zlab_fields_are_named_where_zlab_writes_them(self, edited):
        assert field_error(edited("zlab_dflash", {"dflash_config": None})).field.startswith("dflash_config.")

    @pytest.mark.parametrize("field", ["block_size", "mask_token_id", "target_layer_ids", "vocab_size"])
    def test_missing_in_our_own_format(self, tmp_path, field):
        config = read_checkpoint(FIXTURES / "deepspec_qwen3_vanilla").config.to_dict()
        del config[field]
        error = field_error(write_config(tmp_path, config))
        assert (error.field, error.problem) == (field, self.MISSING)

    @pytest.mark.parametrize("mask_token_id", [-1, 128, 3.0, "127", True])
    @pytest.mark.parametrize(
        ("name", "field"),
        [
            ("deepspec_gemma4", "mask_token_id"),
            ("zlab_dflash", "dflash_config.mask_token_id"),
            ("speculators_dspark", "mask_token_id"),
        ],
    )
    def test_mask_token_outside_the_vocabulary(self, edited, name, field, mask_token_id):
        error = field_error(edited(name, {field: mask_token_id}))
        assert error.field == field
        assert error.problem == (
            f"must lie in the vocabulary of 128 ids, got {mask_token_id!r}. Write the id that the drafter was trained "
            "with there; another token (pad, for instance) is no substitute."
        )

    @pytest.mark.parametrize(("name", "smallest"), [("deepspec_qwen3_vanilla", 1), ("zlab_dflash", 2)])
    def test_block_too_small_to_draft(self, edited, name, smallest):
        error = field_error(edited(name, {"block_size": smallest - 1}))
        assert (error.field, error.problem) == (
            "block_size",
            f"must be an integer of at least {smallest}, got {smallest - 1}.",
        )

    TAPS = (
        ("deepspec_qwen3_vanilla", "target_layer_ids"),
        ("zlab_dflash", "dflash_config.target_layer_ids"),
        ("speculators_dspark", "aux_hidden_state_layer_ids"),
    )

    @pytest.mark.parametrize(("name", "field"), TAPS)
    @pytest.mark.parametrize("layer_ids", [[2, 1, 4], [1, 1, 4]])
    def test_taps_out_of_order_or_repeated(self, edited, name, field, layer_ids):
        error = field_error(edited(name, {field: layer_ids}))
        assert error.field == field
        assert error.problem.startswith(f"must be ascending and without repetition, got {layer_ids}: ")

    @pytest.mark.parametrize(("name", "field"), TAPS)
    @pytest.mark.parametrize("layer_ids", [[], "1,3", [1.0], [True]])
    def test_taps_that_are_no_list_of_layers(self, edited, name, field, layer_ids):
        error = field_error(edited(name, {field: layer_ids}))
        assert (error.field, error.problem) == (field, f"must be a non-empty list of integers, got {layer_ids!r}.")

    @pytest.mark.parametrize(("name", "field", "lowest"), [(*TAPS[0], -1), (*TAPS[1], -1), (*TAPS[2], 0)])
    def test_taps_before_the_embedding(self, edited, name, field, lowest):
        accepted = read_checkpoint(edited(name, {field: [lowest, 3, 4]})).config.target_layer_ids
        assert accepted[0] == -1
        error = field_error(edited(name, {field: [lowest - 1, 3, 4]}))
        assert (error.field, error.problem) == (
            field,
            f"must be {lowest} (the embedding output) or larger, got {[lowest - 1, 3, 4]}.",
        )

    @pytest.mark.parametrize(("name", "field", "highest"), [(*TAPS[0], 4), (*TAPS[1], 4), (*TAPS[2], 5)])
    def test_tap_on_the_last_layer_or_beyond(self, edited, name, field, highest):
        assert read_checkpoint(edited(name, {field: [highest], "num_target_layers": 6})).config.target_layer_ids == [4]
        error = field_error(edited(name, {field: [0, highest + 1], "num_target_layers": 6}))
        assert error.field == field
        assert error.problem == (
            f"must not exceed {highest} for a target of 6 layers, got [0, {highest + 1}]: the output of the last "
            "layer cannot be tapped, because transformers hands it out final-normed. Check that the config belongs to "
            "this drafter."
        )

    def test_sliding_layers_without_a_clear_window(self, edited):
        sliding = {"layer_types": ["sliding_attention", "full_attention"]}
        error = field_error(edited("zlab_dflash", {**sliding, "sliding_window": 12}))
        assert error.field == "use_sliding_window"
        assert error.problem.startswith("is not true, but `layer_types` is ['sliding_attention', 'full_attention']: ")
        error = field_error(edited("zlab_dflash", {**sliding, "use_sliding_window": True}))
        assert (error.field.split(".")[-1], error.problem) == ("sliding_window", self.MISSING)

    def test_zlab_causal_full_layers(self, edited):
        error = field_error(edited("zlab_dflash", {"is_causal": True}))
        assert error.field == "is_causal"
        assert "a causal layer with full attention cannot be built" in error.problem

    def test_layer_types_of_another_length(self, edited):
        error = field_error(edited("speculators_dspark", {"transformer_layer_config.layer_types": ["full_attention"]}))
        assert "layer_types" in str(error)

    @pytest.mark.parametrize(
        ("name", "field", "value", "problem"),
        [
            ("zlab_dflash", "hidden_size", "32", "must be an integer of at least 1, got '32'."),
            ("zlab_dflash", "dflash_config", [127], "must be a JSON object, got [127]."),
            ("zlab_dflash", "dflash_config.output_multiplier", "2", "must be a number, got '2'."),
            ("zlab_dflash", "rope_parameters", 5, "must be a JSON object, got 5."),
            ("speculators_dspark", "sample_from_anchor", "no", "must be true or false, got 'no'."),
            ("deepspec_qwen3_vanilla", "markov_rank", -1, "must be an integer of at least 0, got -1."),
            ("deepspec_qwen3_vanilla", "num_target_layers", 0, "must be an integer of at least 1, got 0."),
        ],
    )
    def test_values_of_the_wrong_kind(self, edited, name, field, value, problem):
        error = field_error(edited(name, {field: value}))
        assert (error.field, error.problem) == (field, problem)

    def test_gemma4_rotation_of_full_attention_is_the_one_that_counts(self, edited):
        error = field_error(edited("deepspec_gemma4", {"rope_parameters.full_attention": None}))
        assert error.field == "rope_parameters"
        assert error.problem.startswith(
            "must have an object `full_attention` with `rope_type` and `rope_theta`, got {"
        )

    def test_a_backbone_that_transformers_rejects(self, edited):
        error = field_error(edited("zlab_dflash", {"hidden_act": 7}))
        assert error.field == "config.json"
        assert error.problem.startswith("is no Qwen3 backbone: ") and "hidden_act" in error.problem

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"markov_head_type": "cubic"}, "`markov_head_type` must be one of"),
            ({"markov_rank": 0}, "`confidence_head_with_markov` is true, but the drafter has no Markov head"),
            ({"num_key_value_heads": 3}, "must be a multiple of `num_key_value_heads`"),
        ],
    )
    def test_fields_that_contradict_each_other(self, edited, changes, reason):
        error = field_error(edited("deepspec_qwen3_vanilla", changes))
        assert error.field == "config.json"
        assert error.problem.startswith("contradicts itself: ") and reason in error.problem


class TestRefusals:
    def test_eagle3_of_deepspec(self):
        error = refusal(FIXTURES / "deepspec_eagle3")
        assert error.found == "an EAGLE-3 head (Qwen3Eagle3Model)"

    @pytest.mark.parametrize(
        ("config", "found"),
        [
            (
                {"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"]},
                "an EAGLE-3 head (Eagle3Speculator)",
            ),
            ({"architectures": ["EagleModel"]}, "an EAGLE head (EagleModel)"),
            ({"architectures": ["LlamaForCausalLMEagle3"]}, "an EAGLE-3 head (LlamaForCausalLMEagle3)"),
            ({"architectures": ["DFlash2DraftModel"], "dflash_config": {}}, "a DFlash 2 drafter"),
            ({"architectures": ["DFlashDraftModel"], "dflash_config": {"version": 2}}, "a DFlash 2 drafter"),
            ({"architectures": ["DFlashDraftModel"], "dflash_config": {"version": "2.1"}}, "a DFlash 2 drafter"),
            ({"architectures": ["DFlashDraftModel"], "dflash_config": {"selector_rank": 256}}, "a DFlash 2 drafter"),
            ({"speculators_model_type": "dflash2"}, "a DFlash 2 drafter"),
            (
                {"architectures": ["DSparkDraftModel"], "dflash_config": {"projector_type": "dspark"}},
                'a SpecForge package (projector_type "dspark")',
            ),
            (
                {"speculators_model_type": "dflash", "projector_type": "domino"},
                "a drafter with another projector (projector_type 'domino')",
            ),
            (
                {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
                "an ordinary language model (Qwen3ForCausalLM)",
            ),
            (
                {"architectures": ["DeepseekV4ForCausalLM"], "dspark_config": {"block_size": 5}},
                "a whole language model with a drafter inside (DeepseekV4ForCausalLM)",
            ),
            (
                {"architectures": ["GlmForConditionalGeneration"], "text_config": {"dspark_block_size": 5}},
                "a whole language model with a drafter inside (GlmForConditionalGeneration)",
            ),
            (
                {"architectures": ["DeepseekV4DSparkModel"], "model_type": "deepseek_v4"},
                "a mixture-of-experts drafter of the DeepSeek kind",
            ),
            (
                {"speculators_model_type": "dspark", "transformer_layer_config": {"n_routed_experts": 64}},
                "a mixture-of-experts drafter of the DeepSeek kind",
            ),
            (
                {"speculators_model_type": "dspark", "transformer_layer_config": {"model_type": "llama"}},
                "a speculators dspark drafter with llama layers",
            ),
            ({"speculators_model_type": "mtp"}, "a speculator of the type 'mtp'"),
            (
                {"architectures": ["DFlashDraftModel"], "quantization": {"group_size": 64, "bits": 4}},
                "MLX-quantized weights",
            ),
            (
                {"architectures": ["DFlashDraftModel"], "quantization_config": {"quant_method": "awq"}},
                "quantized weights (quant_method 'awq')",
            ),
            (
                {"architectures": ["BertModel"], "model_type": "bert"},
                "an unknown kind of model (architectures ['BertModel'], model_type 'bert')",
            ),
            (
                {"hidden_size": 8},
                "an unknown kind of model (architectures None, model_type None)",
            ),
        ],
    )
    def test_by_the_config(self, tmp_path, config, found):
        assert refusal(write_config(tmp_path, config)).found == found

    @pytest.mark.parametrize("name", ["enable_moe_block", "hidden_size_per_layer_input", "num_kv_shared_layers"])
    def test_gemma4_variants(self, edited, name):
        value = True if name == "enable_moe_block" else 8
        assert refusal(edited("deepspec_gemma4", {name: value})).found == f"a Gemma4 variant with `{name}` {value}"

    def test_a_target_is_told_from_a_drafter(self):
        error = refusal(FIXTURES / "zlab_dflash" / "target")
        assert error.remedy == "It can be the target; the drafter is another folder or repository."

    @pytest.mark.parametrize("with_config", [True, False])
    @pytest.mark.parametrize(
        ("file", "found"),
        [
            ("model-Q4_K_M.gguf", "GGUF files (model-Q4_K_M.gguf)"),
            ("pytorch_model.bin", "only pickled weights (pytorch_model.bin)"),
            ("drafter.pt", "only pickled weights (drafter.pt)"),
        ],
    )
    def test_by_the_files(self, tmp_path, with_config, file, found):
        if with_config:
            write_config(tmp_path, read_config("zlab_dflash"))
        (tmp_path / file).write_bytes(b"never opened")
        assert refusal(tmp_path).found == found

    def test_supported_formats_are_listed_to_who_brings_an_unknown_one(self, tmp_path):
        remedy = refusal(write_config(tmp_path, {"architectures": ["BertModel"]})).remedy
        for name in ("Qwen3DSparkModel", "Gemma4DSparkModel", "DFlashDraftModel", "dspark"):
            assert name in remedy


class TestTensorAccounting:
    @pytest.mark.parametrize("name", WITH_WEIGHTS)
    def test_names_and_shapes_are_those_of_the_file(self, name):
        checkpoint = read_checkpoint(FIXTURES / name)
        stored = load_file(FIXTURES / name / "model.safetensors")
        assert checkpoint.tensors == {key: list(tensor.shape) for key, tensor in stored.items()}
        checkpoint.require({key: shape for key, shape in checkpoint.tensors.items() if key not in checkpoint.ignored})

    def test_verifier_copies_and_the_inverse_map_are_not_needed(self, edited):
        folder = edited("speculators_dspark_reduced")
        tensors = load_file(folder / "model.safetensors")
        expected = {key: list(tensor.shape) for key, tensor in tensors.items() if key != "t2d"}
        spare = {"verifier_lm_head.weight": torch.zeros(64, 32), "verifier_norm.weight": torch.zeros(32)}
        save_file({**tensors, **spare}, folder / "model.safetensors")
        checkpoint = read_checkpoint(folder)
        assert checkpoint.ignored == {"t2d", *spare}
        checkpoint.require(expected)

    def test_only_speculators_may_carry_them(self, edited):
        folder = edited("zlab_dflash")
        tensors = load_file(folder / "model.safetensors")
        save_file({**tensors, "t2d": torch.zeros(128)}, folder / "model.safetensors")
        assert read_checkpoint(folder).ignored == frozenset()

    @pytest.fixture
    def checkpoint(self):
        return read_checkpoint(FIXTURES / "zlab_dflash")

    def test_a_missing_tensor(self, checkpoint):
        with pytest.raises(IncompleteCheckpointError) as caught:
            checkpoint.require({**checkpoint.tensors, "markov_head.markov_w1.weight": [128, 8]})
        assert caught.value.missing == ["markov_head.markov_w1.weight"]
        assert (caught.value.unexpected, caught.value.mismatched) == ([], [])
        assert "missing tensors: markov_head.markov_w1.weight" in str(caught.value)

    def test_an_unexpected_tensor(self, checkpoint):
        expected = {name: shape for name, shape in checkpoint.tensors.items() if name != "fc.weight"}
        with pytest.raises(IncompleteCheckpointError) as caught:
            checkpoint.require(expected)
        assert (caught.value.missing, caught.value.unexpected) == ([], ["fc.weight"])
        assert "tensors without a place: fc.weight" in str(caught.value)

    def test_a_renamed_tensor(self, checkpoint):
        expected = {name.replace("hidden_norm", "context_norm"): shape for name, shape in checkpoint.tensors.items()}
        with pytest.raises(IncompleteCheckpointError) as caught:
            checkpoint.require(expected)
        assert (caught.value.missing, caught.value.unexpected) == (["context_norm.weight"], ["hidden_norm.weight"])

    def test_a_wrong_shape(self, checkpoint):
        with pytest.raises(IncompleteCheckpointError) as caught:
            checkpoint.require({**checkpoint.tensors, "fc.weight": torch.Size([32, 128])})
        assert caught.value.mismatched == [("fc.weight", [32, 96], [32, 128])]
        assert "fc.weight is [32, 96], expected [32, 128]" in str(caught.value)

    def test_an_unknown_shape_is_not_compared(self, checkpoint):
        unknown = {**checkpoint.tensors, "fc.weight": None}
        Checkpoint(checkpoint.source, checkpoint.config, unknown, frozenset()).require(checkpoint.tensors)

    @pytest.mark.parametrize("lost", ["lm_head.weight", "embed_tokens.weight"])
    def test_deepspec_without_one_of_its_own_parts_is_incomplete(self, edited, lost):
        folder = edited("deepspec_qwen3_vanilla")
        tensors = load_file(folder / "model.safetensors")
        expected = {name: list(tensor.shape) for name, tensor in tensors.items()}
        del tensors[lost]
        save_file(tensors, folder / "model.safetensors")
        checkpoint = read_checkpoint(folder)
        assert (checkpoint.config.own_embed_tokens, checkpoint.config.own_lm_head) == (True, True)
        with pytest.raises(IncompleteCheckpointError, match=f"missing tensors: {lost}"):
            checkpoint.require(expected)

    def test_deepspec_without_both_borrows_both(self, edited):
        folder = edited("deepspec_qwen3_vanilla")
        tensors = load_file(folder / "model.safetensors")
        kept = {name: tensors[name] for name in tensors if name not in ("lm_head.weight", "embed_tokens.weight")}
        save_file(kept, folder / "model.safetensors")
        config = read_checkpoint(folder).config
        assert (config.own_embed_tokens, config.own_lm_head) == (False, False)

    def test_a_reduced_vocabulary_without_its_head_is_incomplete(self, edited):
        folder = edited("speculators_dspark_reduced")
        tensors = load_file(folder / "model.safetensors")
        expected = {name: list(tensor.shape) for name, tensor in tensors.items() if name != "t2d"}
        del tensors["lm_head.weight"]
        save_file(tensors, folder / "model.safetensors")
        with pytest.raises(IncompleteCheckpointError, match=r"missing tensors: lm_head\.weight"):
            read_checkpoint(folder).require(expected)


class TestFiles:
    def shard(self, folder: Path) -> None:
        """Split the weights of a folder into two shards and an index."""
        tensors = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        names = sorted(tensors)
        shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
        for file, members in shards.items():
            save_file({name: tensors[name] for name in members}, folder / file)
        weight_map = {name: file for file, members in shards.items() for name in members}
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    def test_shards_are_read_as_one(self, edited):
        folder = edited("deepspec_qwen3_rnn")
        whole = read_checkpoint(folder)
        self.shard(folder)
        sharded = read_checkpoint(folder)
        assert sharded.tensors == whole.tensors
        assert sharded.config.to_dict() == whole.config.to_dict()

    def test_a_missing_shard_is_named(self, edited):
        folder = edited("deepspec_qwen3_rnn")
        self.shard(folder)
        (folder / "model-00002-of-00002.safetensors").unlink()
        with pytest.raises(OSError, match=r"does not appear to have a file named model-00002-of-00002\.safetensors"):
            read_checkpoint(folder)

    def test_subfolder(self, edited, tmp_path):
        edited("zlab_dflash")
        checkpoint = read_checkpoint(tmp_path, subfolder="zlab_dflash")
        assert checkpoint.source == str(tmp_path)
        assert checkpoint.tensors == read_checkpoint(FIXTURES / "zlab_dflash").tensors

    def test_a_subfolder_without_a_drafter(self, tmp_path):
        with pytest.raises(OSError, match=r"drafter does not appear to have a file named config\.json\."):
            read_checkpoint(tmp_path, subfolder="drafter")

    def test_no_weights(self, tmp_path):
        write_config(tmp_path, read_config("zlab_dflash"))
        with pytest.raises(OSError, match=r"does not appear to have a file named model\.safetensors"):
            read_checkpoint(tmp_path)

    def test_no_such_folder(self, tmp_path):
        with pytest.raises(OSError, match=r"nowhere is no folder on this machine. Check the path"):
            read_checkpoint(tmp_path / "nowhere")

    @pytest.mark.parametrize("source", ["./drafters/mine", "../mine", "~/mine", "runs/dspark/best"])
    def test_what_can_only_be_a_folder_is_not_looked_for_on_the_hub(self, source, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        with pytest.raises(OSError, match="is no folder on this machine"):
            read_checkpoint(source)

    def test_config_that_is_no_json(self, tmp_path):
        (tmp_path / "config.json").write_text("{")
        with pytest.raises(OSError, match="is not a valid JSON file"):
            read_checkpoint(tmp_path)

    def test_damaged_weights(self, edited):
        folder = edited("zlab_dflash")
        (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
        with pytest.raises(OSError, match=r"model\.safetensors is not a readable safetensors file .* fetch it again"):
            read_checkpoint(folder)

    def test_a_refused_drafter_is_not_downloaded(self, edited, monkeypatch):
        def download(*args, **kwargs):
            raise AssertionError("the weights were asked for")

        monkeypatch.setattr(files, "cached_file", download)
        field_error(edited("zlab_dflash", {"block_size": None}))


class TestHub:
    """Repositories of the Hub, from a cache that looks as if they had been downloaded."""

    COMMIT = "0" * 40

    @pytest.fixture
    def hub(self, tmp_path):
        repository = tmp_path / "hub" / "models--someone--drafter"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text(self.COMMIT)
        snapshot = repository / "snapshots" / self.COMMIT
        snapshot.mkdir(parents=True)
        return snapshot

    def read(self, hub: Path, **kwargs):
        return read_checkpoint("someone/drafter", cache_dir=hub.parents[2], local_files_only=True, **kwargs)

    @pytest.mark.parametrize("revision", [None, "main", COMMIT])
    def test_a_cached_repository(self, hub, revision):
        for file in ("config.json", "model.safetensors"):
            shutil.copy(FIXTURES / "zlab_dflash" / file, hub)
        checkpoint = self.read(hub, revision=revision)
        local = read_checkpoint(FIXTURES / "zlab_dflash")
        assert checkpoint.source == "someone/drafter"
        assert checkpoint.tensors == local.tensors
        assert checkpoint.config.to_dict() == local.config.to_dict()

    def test_a_repository_that_is_not_cached(self, hub):
        with pytest.raises(OSError, match="cached files"):
            read_checkpoint("someone/else", cache_dir=hub.parents[2], local_files_only=True)

    def test_without_a_cached_config(self, hub):
        with pytest.raises(OSError, match=r"config\.json|cached files"):
            self.read(hub)

    def test_without_cached_weights(self, hub):
        shutil.copy(FIXTURES / "zlab_dflash" / "config.json", hub)
        with pytest.raises(OSError, match="cached files"):
            self.read(hub)

    def test_pickles_only(self, monkeypatch):
        config = read_config("zlab_dflash")
        monkeypatch.setattr(files.PreTrainedConfig, "get_config_dict", lambda *args, **kwargs: (config, {}))
        monkeypatch.setattr(files, "cached_file", lambda *args, **kwargs: None)
        monkeypatch.setattr(files, "list_repo_files", lambda *args, **kwargs: ["config.json", "old/a.bin", "b.bin"])
        with pytest.raises(UnsupportedCheckpointError) as caught:
            read_checkpoint("someone/drafter")
        assert caught.value.found == "only pickled weights (b.bin)"

    def test_a_misspelt_option_is_not_swallowed(self, hub):
        with pytest.raises(TypeError, match="revison"):
            self.read(hub, revison="main")


@pytest.mark.parametrize("text", ["{}", "[]", "no json"])
def test_an_index_that_is_none_is_named(text, tmp_path):
    kit.new_drafter().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(OSError, match=r"model.safetensors.index.json is not an index of weights"):
        DSparkDrafter.from_pretrained(tmp_path)
