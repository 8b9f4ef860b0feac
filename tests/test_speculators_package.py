"""The speculators package itself opens what `convert` writes for it (extra `speculators`; skipped without)."""

from pathlib import Path
from typing import Any

import kit
import pytest
import torch
from conftest import FIXTURES
from safetensors.torch import load_file

from dspark_hf.conversion import convert_drafter

# What its dependencies say at import, and it of itself, is not ours to judge.
pytestmark = pytest.mark.filterwarnings("ignore")

NO_HEADS = {"markov_head_type": "none", "enable_confidence_head": False}
OWN = {
    "vanilla": {},
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn", "confidence_head_with_markov": False},
    "reduced vocabulary": {"draft_vocab_size": 40, "own_lm_head": True},
    "sliding": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8},
    "without heads": NO_HEADS,
    "dflash": {**NO_HEADS, "sample_from_anchor": False},
}


@pytest.fixture(scope="module")
def package() -> Any:
    return pytest.importorskip("speculators", exc_type=ImportError)


def opened(package: Any, folder: Path) -> Any:
    """The model as the package loads it, with the target's tables in place."""
    return package.SpeculatorModel.from_pretrained(str(folder)).eval()


def assert_holds(model: Any, folder: Path) -> None:
    """Every tensor of the file is in the model, and none there is left as it was made."""
    state, stored = model.state_dict(), load_file(folder / "model.safetensors")
    assert all(torch.equal(state[name], tensor) for name, tensor in stored.items())
    others = {name.split(".")[0] for name in state.keys() - stored}
    assert others <= {"embed_tokens", "lm_head", "verifier_lm_head", "verifier_norm"}
    assert not any(tensor.isnan().any() for tensor in state.values() if tensor.is_floating_point())


@pytest.mark.parametrize("kind", OWN)
@pytest.mark.parametrize("tied", [True, False])
def test_a_drafter_of_ours(package, kind, tied, tmp_path):
    target = kit.new_target("qwen3", tie_word_embeddings=tied)
    target.save_pretrained(tmp_path / "target")
    drafter = kit.new_drafter(**OWN[kind])
    if drafter.config.has_reduced_vocabulary:
        drafter.d2t.copy_(torch.arange(len(drafter.d2t)) + 1)
    drafter.save_pretrained(tmp_path / "own")
    convert_drafter(tmp_path / "own", tmp_path / "there", "speculators", target=str(tmp_path / "target"))
    model = opened(package, tmp_path / "there")
    assert_holds(model, tmp_path / "there")
    assert torch.equal(model.embed_tokens.weight, target.get_input_embeddings().weight)
    config, ours = model.config, drafter.config
    assert config.speculators_model_type == ("dflash" if kind == "dflash" else "dspark")
    assert config.aux_hidden_state_layer_ids == [layer_id + 1 for layer_id in ours.target_layer_ids]
    for name in ("block_size", "mask_token_id", "sample_from_anchor", "draft_vocab_size"):
        assert getattr(config, name) == getattr(ours, name)
    assert config.speculators_config.proposal_methods[0].speculative_tokens == ours.num_draft_tokens
    assert config.speculators_config.verifier.name_or_path == str(tmp_path / "target")
    for name in ("hidden_size", "head_dim", "rope_parameters", "layer_types", "rms_norm_eps"):
        assert getattr(config.transformer_layer_config, name) == getattr(ours, name)
    if ours.has_markov_head:
        assert config.markov_head_type == ours.markov_head_type
        assert config.markov_rank == ours.markov_rank


@pytest.mark.parametrize("name", ["vanilla", "gated", "rnn", "nomarkov"])
def test_a_drafter_of_deepspec(package, name, tmp_path):
    source = FIXTURES / f"deepspec_qwen3_{name}"
    convert_drafter(source, tmp_path / "there", "speculators", target=str(source / "target"))
    model, stored = opened(package, tmp_path / "there"), load_file(tmp_path / "there" / "model.safetensors")
    # The package reads embedding and head from the target, whatever the file has.
    own = {"embed_tokens.weight", "lm_head.weight"}
    state = model.state_dict()
    assert all(torch.equal(state[key], tensor) for key, tensor in stored.items() if key not in own)
    assert model.config.converted_from["deepspec"]["num_anchors"] == 8


def test_it_opens_what_it_wrote_itself(package, tmp_path, monkeypatch):
    """Our conversion from its format to its format loses nothing that it reads."""
    source = FIXTURES / "speculators_dspark_reduced"
    convert_drafter(source, tmp_path / "there", "speculators")
    monkeypatch.chdir(source)
    assert_holds(opened(package, tmp_path / "there"), tmp_path / "there")
