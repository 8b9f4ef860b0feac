"""The one hook on transformers: it changes nothing for anyone else, and it can be taken off."""

import inspect
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import kit
import pytest
import torch
from kit import PROMPT, continuation, drafter, inputs, knowing, target
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import GenerationMixin

from dspark_hf import DSparkDrafter, SpeculativeDecoding, UnsupportedGenerationError, dispatch

GREEDY = {"max_new_tokens": 12, "do_sample": False}


@pytest.fixture
def uninstalled() -> Iterator[None]:
    """The hook is off, and comes back afterwards."""
    dispatch.uninstall()
    yield
    dispatch.install()


@pytest.fixture
def received(uninstalled: None, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A hook on a stand-in for `generate`: what the original is called with."""
    calls: list[dict[str, Any]] = []
    signature = inspect.signature(GenerationMixin.generate)

    def original(self: PreTrainedModel, *args: Any, **kwargs: Any) -> str:
        calls.append({"args": args, "kwargs": kwargs, "bound": signature.bind(self, *args, **kwargs).arguments})
        return "the original's answer"

    original.__signature__ = signature
    monkeypatch.setattr(GenerationMixin, "generate", original)
    dispatch.install()
    return calls


def plain_dflash(**settings: Any) -> DSparkDrafter:
    """A drafter that transformers' own path can run: no heads, and only mask positions predict."""
    plain = {"sample_from_anchor": False, "markov_head_type": "none", "enable_confidence_head": False}
    return drafter(**{**plain, **settings})


class TestInstallation:
    """Installing is idempotent, and removing it leaves no trace."""

    def test_importing_the_package_installs_it(self):
        script = (
            "from transformers.generation import GenerationMixin; before = GenerationMixin.generate; "
            "import dspark_hf; after = GenerationMixin.generate; assert after is not before; "
            "import dspark_hf.dispatch; dspark_hf.dispatch.install(); assert GenerationMixin.generate is after; "
            "dspark_hf.dispatch.uninstall(); assert GenerationMixin.generate is before"
        )
        subprocess.run([sys.executable, "-c", script], check=True, timeout=120)

    def test_install_twice_wraps_once(self):
        wrapped = GenerationMixin.generate
        dispatch.install()
        assert GenerationMixin.generate is wrapped

    def test_uninstall_gives_the_very_function_back(self, uninstalled: None):
        original = GenerationMixin.generate
        dispatch.uninstall()
        assert GenerationMixin.generate is original
        dispatch.install()
        assert GenerationMixin.generate is not original
        dispatch.uninstall()
        assert GenerationMixin.generate is original

    def test_reinstalled_hook_works(self, uninstalled: None):
        dispatch.install()
        kit.assert_lossless(target(), drafter())

    def test_custom_generate_needs_no_hook(self, uninstalled: None):
        with knowing(continuation(target())):
            output = target().generate(**inputs(), **GREEDY, custom_generate=SpeculativeDecoding(drafter()))
        assert output[0, len(PROMPT) :].tolist() == continuation(target(), num_tokens=12)

    def test_without_the_hook_a_drafter_is_no_assistant(self, uninstalled: None):
        with pytest.raises(Exception):  # noqa: B017 (whatever transformers says)
            target().generate(**inputs(), **GREEDY, assistant_model=drafter())

    def test_signature_name_and_doc_stay(self, uninstalled: None):
        original = GenerationMixin.generate
        dispatch.install()
        for read in (inspect.signature, lambda f: f.__name__, lambda f: f.__doc__, lambda f: f.__qualname__):
            assert read(GenerationMixin.generate) == read(original)


def assistant() -> PreTrainedModel:
    """An ordinary assistant model: a target of another random draw, often wrong."""
    return kit.new_target("qwen3", num_hidden_layers=2)


OTHER_MODES: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "sampling": lambda: {"do_sample": True, "top_k": 5},
    "beams": lambda: {"num_beams": 3},
    "assistant": lambda: {"assistant_model": assistant()},
    "sampled assistant": lambda: {"assistant_model": assistant(), "do_sample": True},
    "assistant with settings": lambda: {"assistant_model": assistant(), "num_assistant_tokens": 2},
    "assistant that is the target": lambda: {"assistant_model": target()},
    "no assistant": lambda: {"assistant_model": None},
    "prompt lookup": lambda: {"prompt_lookup_num_tokens": 3},
    "early exit": lambda: {"assistant_early_exit": 2},
    "custom": lambda: {"custom_generate": lambda model, input_ids, *args, **kwargs: input_ids + 1},
    "batch": lambda: inputs() and {"input_ids": torch.tensor([PROMPT, PROMPT[::-1]]), "attention_mask": None},
}


class TestOthers:
    """Every other way to call `generate` behaves as if this package had not been imported."""

    @pytest.mark.parametrize("mode", OTHER_MODES)
    def test_same_output(self, mode: str):
        def run() -> Any:
            torch.manual_seed(0)
            return target().generate(**{**inputs(), **GREEDY, **OTHER_MODES[mode]()}).tolist()

        hooked = run()
        dispatch.uninstall()
        try:
            assert hooked == run()
        finally:
            dispatch.install()

    @pytest.mark.parametrize("mode", OTHER_MODES)
    def test_same_arguments(self, mode: str, received: list[dict[str, Any]]):
        kwargs = {**inputs(), **GREEDY, **OTHER_MODES[mode]()}
        assert target().generate(**kwargs) == "the original's answer"
        (call,) = received
        assert call["args"] == ()
        assert list(call["kwargs"]) == list(kwargs)
        assert all(call["kwargs"][name] is value for name, value in kwargs.items())

    def test_same_positional_arguments(self, received: list[dict[str, Any]]):
        ids, config, other = inputs()["input_ids"], GenerationConfig(**GREEDY), assistant()
        target().generate(ids, config, None, None, None, None, other)
        (call,) = received
        assert all(a is b for a, b in zip(call["args"], (ids, config, None, None, None, None, other), strict=True))
        assert call["kwargs"] == {}

    @pytest.mark.parametrize("where", ["call", "config", "positional config"])
    def test_native_path_for_drafters_stays_reachable(self, where: str, received: list[dict[str, Any]]):
        config = GenerationConfig(**GREEDY)
        config.speculation_type = "dflash"
        ids = inputs()["input_ids"]
        if where == "call":
            target().generate(ids, assistant_model=plain_dflash(), speculation_type="dflash")
        elif where == "config":
            target().generate(ids, generation_config=config, assistant_model=plain_dflash())
        else:
            target().generate(ids, config, assistant_model=plain_dflash())
        assert received[0]["bound"]["assistant_model"] is plain_dflash()
        assert "custom_generate" not in received[0]["bound"]

    @pytest.mark.parametrize(
        "settings",
        [
            {"sample_from_anchor": True},
            {"markov_head_type": "vanilla"},
            {"enable_confidence_head": True},
            {"own_lm_head": True},
        ],
        ids=lambda settings: next(iter(settings)),
    )
    def test_the_native_path_is_refused_where_it_would_draft_badly(self, settings: dict[str, Any]):
        with pytest.raises(UnsupportedGenerationError, match="it would draft badly with this drafter"):
            target().generate(**inputs(), assistant_model=plain_dflash(**settings), speculation_type="dflash")

    def test_errors_of_wrong_calls_stay(self, uninstalled: None):
        def message() -> str:
            with pytest.raises(TypeError) as caught:
                target().generate(inputs()["input_ids"], inputs=inputs()["input_ids"])
            return str(caught.value)

        plain = message()
        dispatch.install()
        assert message() == plain


class TestDrafters:
    """A drafter finds its way to our loop however it is handed over."""

    def test_by_position(self):
        ids, config = inputs()["input_ids"], GenerationConfig(**GREEDY)
        known = continuation(target())
        with drafter().trace() as trace, knowing(known):
            output = target().generate(ids, config, None, None, None, None, drafter())
        assert output[0, len(PROMPT) :].tolist() == known[:12]
        kit.assert_drafted(trace)

    def test_ids_by_position(self):
        known = continuation(target())
        with drafter().trace() as trace, knowing(known):
            output = target().generate(inputs()["input_ids"], **GREEDY, assistant_model=drafter())
        assert output[0, len(PROMPT) :].tolist() == known[:12]
        kit.assert_drafted(trace)

    def test_ids_by_the_name_inputs(self):
        known = continuation(target())
        with drafter().trace() as trace, knowing(known):
            output = target().generate(inputs=inputs()["input_ids"], **GREEDY, assistant_model=drafter())
        assert output[0, len(PROMPT) :].tolist() == known[:12]
        kit.assert_drafted(trace)

    def test_no_argument_gets_lost(self, received: list[dict[str, Any]]):
        ids, config, processors = inputs()["input_ids"], GenerationConfig(**GREEDY), []
        others = {"attention_mask": None, "use_model_defaults": True}
        target().generate(ids, config, processors, assistant_model=drafter(), **others)
        bound = received[0]["bound"]
        assert bound["inputs"] is ids
        assert bound["generation_config"] is config
        assert bound["logits_processor"] is processors
        assert isinstance(bound["custom_generate"], SpeculativeDecoding)
        assert bound["custom_generate"].drafter is drafter()
        assert "assistant_model" not in bound
        assert bound["kwargs"] == others

    def test_streamer_and_synced_gpus_reach_the_loop(self, received: list[dict[str, Any]]):
        streamer = object()
        target().generate(**inputs(), streamer=streamer, synced_gpus=True, assistant_model=drafter())
        decoding = received[0]["bound"]["custom_generate"]
        assert decoding.streamer is streamer
        assert decoding.synced_gpus is True

    def test_synced_gpus(self):
        kit.assert_lossless(target(), drafter(), synced_gpus=False)
