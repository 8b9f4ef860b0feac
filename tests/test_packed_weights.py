"""Packed linear layers give the same result, faster, and leave a model as it was when they are taken off."""

import copy
import pickle

import kit
import pytest
import torch
from kit import assert_lossless, drafter, inputs
from torch import nn

from dspark_hf import pack_weights, unpack_weights
from dspark_hf.packed_weights import PackedLinear

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")


def packed_layers(model: nn.Module) -> int:
    return sum(isinstance(layer, PackedLinear) for layer in model.modules())


@pytest.mark.parametrize("width", [1, 2, 3, 7, 16, 40])
@pytest.mark.parametrize("has_bias", [False, True])
@torch.no_grad()
def test_results_are_those_of_the_layer(width: int, has_bias: bool):
    torch.manual_seed(0)
    layer = nn.Linear(48, 80, bias=has_bias)
    states = torch.randn(2, width, 48)
    expected = layer(states)
    assert pack_weights(layer) == 1
    torch.testing.assert_close(layer(states), expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_the_packed_copy_is_read(monkeypatch):
    layer, calls = nn.Linear(8, 8), []
    pack_weights(layer)
    real = torch.ops.mkldnn._linear_pointwise
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", lambda *args: calls.append(1) or real(*args))
    layer(torch.randn(2, 8))
    assert calls == [1]
    with torch.enable_grad():
        layer(torch.randn(2, 8)).sum().backward()
    assert calls == [1]
    assert layer.weight.grad is not None


def test_generation_stays_lossless():
    model, assistant = kit.new_target(), kit.new_drafter()
    assert pack_weights(model) == packed_layers(model) > 0
    assert pack_weights(assistant) > 0
    assert_lossless(model, assistant, wrong_at=kit.POSITIONS)


@torch.no_grad()
def test_a_changed_weight_is_not_ignored():
    layer = nn.Linear(8, 8, bias=False)
    pack_weights(layer)
    layer.weight.mul_(2)
    states = torch.randn(3, 8)
    torch.testing.assert_close(layer(states), states @ layer.weight.T)
    layer.weight.data.mul_(3)
    pack_weights(layer)
    torch.testing.assert_close(layer(states), states @ layer.weight.T)
    layer.weight = nn.Parameter(torch.eye(8))
    torch.testing.assert_close(layer(states), states)


def test_only_plain_layers_are_packed():
    class Own(nn.Linear):
        pass

    model = nn.ModuleList([nn.Linear(4, 4), Own(4, 4), nn.Linear(4, 4).to(torch.float64), nn.Linear(4, 4).to("meta")])
    assert pack_weights(model) == 1
    assert [type(layer) for layer in model] == [PackedLinear, Own, nn.Linear, nn.Linear]
    unpack_weights(model)
    assert type(model[0]) is nn.Linear


def test_packing_twice_is_packing_once():
    model = kit.new_target()
    assert pack_weights(model) == pack_weights(model) == packed_layers(model)
    unpack_weights(model)
    unpack_weights(model)
    assert packed_layers(model) == 0


@torch.no_grad()
def test_copies_and_state_dicts_know_nothing_of_it():
    model = kit.new_target()
    names = list(model.state_dict())
    pack_weights(model)
    assert list(model.state_dict()) == names
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(twin(**inputs()).logits, model(**inputs()).logits, rtol=1e-4, atol=1e-4)


def test_a_drafter_of_a_packed_target_borrows_its_head():
    model = kit.new_target()
    pack_weights(model)
    assert_lossless(model, drafter())
