"""Rejected tokens leave no trace in any kind of cache of the target; where they would, a sentence says so."""

from collections.abc import Callable
from typing import Any

import kit
import pytest
import torch
from kit import POSITIONS, PROMPT, WINDOW, assert_lossless, drafter, inputs, target
from transformers import Cache, DynamicCache, LogitsProcessor, PreTrainedModel, StaticCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, QuantizedLayer

from dspark_hf import UnsupportedGenerationError
from dspark_hf._compat import CACHE_NAME

SLIDING = ["mistral", "gemma3", "gemma4", "gemma4_shared_kv"]


def assert_refused(model: PreTrainedModel, layer: str, **kwargs: Any) -> None:
    """An error that names the kind of cache, and what to do; plain generation goes on to work."""
    call = {**inputs(), "max_new_tokens": 12, "do_sample": False}
    with pytest.raises(UnsupportedGenerationError, match="which cannot take back rejected draft tokens") as caught:
        model.generate(**call, assistant_model=drafter(), **kwargs)
    assert layer in str(caught.value)
    assert "Use the default (dynamic) cache" in str(caught.value)
    assert " at 0x" not in str(caught.value)


class TestByName:
    """`cache_implementation`."""

    @pytest.mark.parametrize("family", ["llama", *SLIDING])
    @pytest.mark.parametrize("kind", ["dynamic", "hybrid"])
    def test_dynamic(self, family: str, kind: str):
        assert_lossless(target(family), drafter(), wrong_at=POSITIONS, cache_implementation=kind)

    @pytest.mark.parametrize("prompt", [PROMPT, PROMPT * 3], ids=["10", "30"])
    def test_static(self, prompt: tuple[int, ...]):
        settings = {"prompt": prompt, "cache_implementation": "static"}
        assert_lossless(target(), drafter(), wrong_at=POSITIONS, **settings)

    def test_static_with_outputs(self):
        model = kit.new_target(attn_implementation="eager", initializer_range=0.05)
        call = {**inputs(), "max_new_tokens": 10, "do_sample": False, "cache_implementation": "static"}
        call |= {"return_dict_in_generate": True, "output_attentions": True, "output_scores": True}
        plain = model.generate(**call)
        with kit.knowing(plain.sequences[0, len(PROMPT) :].tolist(), wrong_at=1):
            ours = model.generate(**call, assistant_model=drafter())
        for name in ("scores", "attentions"):
            torch.testing.assert_close(getattr(ours, name), getattr(plain, name), rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("family", SLIDING)
    def test_static_sliding_window(self, family: str):
        assert_lossless(target(family), drafter(), wrong_at=POSITIONS, cache_implementation="static")

    def test_static_and_padded(self):
        ids = torch.tensor([[0] * 5 + list(PROMPT)])
        padded = {"input_ids": ids, "attention_mask": (torch.arange(len(ids[0])) >= 5).long()[None]}
        assert_lossless(target(), drafter(), wrong_at=POSITIONS, num_unseen=5, cache_implementation="static", **padded)

    @pytest.mark.parametrize("kind", ["offloaded", "offloaded_static"])
    def test_offloaded(self, kind: str):
        if not torch.cuda.is_available():
            pytest.skip("offloaded caches need an accelerator")
        assert_lossless(kit.new_target().to("cuda"), kit.new_drafter().to("cuda"), cache_implementation=kind)


class RoundingLayer(QuantizedLayer):
    """A quantized layer without a library: 8 bits and one scale for all."""

    def _quantize(self, tensor: torch.Tensor, axis: int) -> tuple[torch.Tensor, torch.Tensor]:
        scale = tensor.abs().amax() / 127
        return (tensor / scale).round().to(torch.int8), scale

    def _dequantize(self, quantized: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return quantized[0] * quantized[1]


CACHES: dict[str, Callable[[PreTrainedModel], Cache]] = {
    "with config": lambda model: DynamicCache(config=model.config),
    "without config": lambda model: DynamicCache(),
}


class TestByObject:
    """A cache that the user made."""

    @pytest.mark.parametrize("kind", CACHES)
    @pytest.mark.parametrize("family", ["llama", *SLIDING])
    def test_dynamic(self, family: str, kind: str):
        model = target(family)
        assert_lossless(model, drafter(), wrong_at=POSITIONS, arguments=lambda: {CACHE_NAME: CACHES[kind](model)})

    def test_static(self):
        def arguments() -> dict[str, Any]:
            return {CACHE_NAME: StaticCache(config=target().config, max_cache_len=64)}

        assert_lossless(target(), drafter(), wrong_at=POSITIONS, arguments=arguments)

    def test_static_used_again_after_a_reset(self):
        model, past = target(), StaticCache(config=target().config, max_cache_len=64)
        call = {**inputs(), "max_new_tokens": 12, "do_sample": False}
        plain = model.generate(**call)
        for wrong_at in (0, 2):
            past.reset()
            with kit.knowing(plain[0, len(PROMPT) :].tolist(), wrong_at=wrong_at):
                ours = model.generate(**call, assistant_model=drafter(), **{CACHE_NAME: past})
            assert ours.tolist() == plain.tolist()

    @pytest.mark.parametrize("residual_length", [4, 128])
    def test_quantized(self, residual_length: int):
        past = Cache(layers=[RoundingLayer(residual_length=residual_length) for _ in range(4)])
        assert_refused(target(), "RoundingLayer", **{CACHE_NAME: past})
        # Refused before it is filled: it can be used without the drafter.
        assert past.get_seq_length() == 0

    def test_a_layer_that_cannot_crop(self):
        class Stubborn(DynamicLayer):
            is_croppable = False

        layers: list[CacheLayerMixin] = [DynamicLayer(), Stubborn(), DynamicLayer(), DynamicLayer()]
        assert_refused(target(), "Stubborn", **{CACHE_NAME: Cache(layers=layers)})


class Interruption(Exception):
    pass


class Interrupt(LogitsProcessor):
    """Raises at a given length."""

    def __init__(self, length: int):
        self.length = length

    def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] == self.length:
            raise Interruption
        return scores


class TestAfterwards:
    """What is in the user's cache after a call."""

    @pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
    def test_an_interrupted_call_leaves_committed_positions_only(self, family: str):
        model, known = target(family), kit.continuation(target(family))

        def cache_after(num_tokens: int, **kwargs: Any) -> Cache:
            past = DynamicCache(config=model.config)
            call = {**inputs(), "max_new_tokens": 12, "do_sample": False, CACHE_NAME: past}
            with pytest.raises(Interruption), kit.knowing(known):
                model.generate(**call, logits_processor=[Interrupt(len(PROMPT) + num_tokens)], **kwargs)
            return past

        for num_tokens in range(1, WINDOW + 2):
            plain, ours = cache_after(num_tokens), cache_after(num_tokens, assistant_model=drafter())
            # The positions of the round that was interrupted may be taken back, and no others.
            assert plain.get_seq_length() - ours.get_seq_length() in range(kit.BLOCK + 2)
            ids = torch.tensor([[*PROMPT, *known[: num_tokens + 1]]])
            going_on = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "do_sample": False}
            rest = model.generate(**going_on, max_new_tokens=4, **{CACHE_NAME: ours})
            assert rest[0, len(PROMPT) :].tolist() == known[: num_tokens + 5]
