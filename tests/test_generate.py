"""What `generate` refuses and how, that no state outlives a call, and the other ways to the same code."""

import copy
import gc
import importlib.metadata
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import kit
import pytest
import torch
import transformers
from kit import BLOCK, POSITIONS, PROMPT, VOCAB, assert_lossless, continuation, drafter, inputs, knowing, target
from transformers import (
    BitsAndBytesConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
    TextIteratorStreamer,
)
from transformers.generation import MaxLengthCriteria
from transformers.generation.streamers import BaseStreamer

from dspark_hf import (
    AlignmentError,
    DSparkCandidateGenerator,
    DSparkDrafter,
    SpeculativeDecoding,
    UnsupportedGenerationError,
)
from dspark_hf._compat import CACHE_NAME
from dspark_hf.candidate_generator import _WaitingContext
from dspark_hf.target_taps import TargetTaps

GREEDY = {"max_new_tokens": 12, "do_sample": False}


def generate(model: PreTrainedModel, assistant: DSparkDrafter, **kwargs: Any) -> Any:
    return model.generate(**{**inputs(), **GREEDY, "assistant_model": assistant, **kwargs})


@contextmanager
def no_forward(model: PreTrainedModel) -> Iterator[None]:
    """Inside, the model must not be run: an error has to come before any work."""

    def fail(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the target ran before the error")

    handle = model.register_forward_pre_hook(fail)
    try:
        yield
    finally:
        handle.remove()


def refusal(error: type[Exception], model: PreTrainedModel, assistant: DSparkDrafter, **kwargs: Any) -> str:
    """The message with which a request is refused, before the target has run."""
    with no_forward(model), pytest.raises(error) as caught:
        generate(model, assistant, **kwargs)
    assert kit.hooks_of(model) == 0
    return str(caught.value)


NO_MODE = "A DSpark drafter speeds up greedy search and sampling, not {}. "
NO_MODE += "Leave out `assistant_model`, or the settings that ask for this mode."
RIVAL = "`{}` and a DSpark drafter both propose tokens: leave one of them out."
NUM_TOKENS = "`num_assistant_tokens` is {}, but it must be an integer from 1 to 4, what a block of this drafter gives."
THRESHOLD = "`assistant_confidence_threshold` is {}, expected a probability from 0 (off) to 1."
SCHEDULE = "`num_assistant_tokens_schedule` is 'sometimes', but a DSpark drafter follows 'auto', 'constant', "


class TestRefusals:
    """Each refused request gets one sentence of what is wrong and one of what to do, before the target runs."""

    @pytest.mark.parametrize(
        ("request_", "message"),
        [
            ({"num_beams": 2}, NO_MODE.format("beam search")),
            ({"num_beams": 2, "do_sample": True}, NO_MODE.format("beam sample")),
            (
                {"use_cache": False},
                "A DSpark drafter needs `use_cache=True`: verification continues from the target's cache.",
            ),
            ({"assistant_early_exit": 2}, RIVAL.format("assistant_early_exit")),
            (
                {"assistant_ensemble_weight": 0.5},
                "`assistant_ensemble_weight` changes the distribution of the output, which a DSpark drafter never "
                "does: leave it out.",
            ),
            ({"num_assistant_tokens": 0}, NUM_TOKENS.format(0)),
            ({"num_assistant_tokens": -1}, NUM_TOKENS.format(-1)),
            ({"num_assistant_tokens": BLOCK + 1}, NUM_TOKENS.format(BLOCK + 1)),
            ({"num_assistant_tokens": 2.5}, NUM_TOKENS.format(2.5)),
            ({"assistant_confidence_threshold": -0.1}, THRESHOLD.format(-0.1)),
            ({"assistant_confidence_threshold": 1.5}, THRESHOLD.format(1.5)),
            ({"assistant_confidence_threshold": float("nan")}, THRESHOLD.format("nan")),
            ({"assistant_confidence_threshold": "high"}, THRESHOLD.format("'high'")),
            ({"assistant_confidence_threshold": True}, THRESHOLD.format(True)),
            (
                {"custom_generate": lambda *args, **kwargs: None},
                "`assistant_model` is a DSpark drafter and `custom_generate` is given as well: leave one of them out.",
            ),
            (
                {"assistant_tokenizer": kit.tokenizer()},
                "`assistant_tokenizer` is given without `tokenizer`: pass both or neither.",
            ),
        ],
        ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
    )
    def test_requests(self, request_: dict[str, Any], message: str):
        found = refusal(UnsupportedGenerationError, kit.new_target(), drafter(), **request_)
        assert found.startswith(message)
        assert "num_assistant_tokens" not in request_ or found.endswith("Leave it out to use all of them.")

    @pytest.mark.parametrize("num_rows", [1, 2])
    @pytest.mark.parametrize("schedule", ["auto", "constant"])
    def test_a_length_criterion_of_the_users_own(self, num_rows, schedule):
        """It stands in the place of the one that `max_new_tokens` would make, in plain generation as well."""
        ids = torch.cat([kit.inputs()["input_ids"]] * num_rows)
        call = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 4}
        texts = []
        for options in ({}, {"assistant_model": kit.drafter(), "num_assistant_tokens_schedule": schedule}):
            criteria = StoppingCriteriaList([MaxLengthCriteria(60)])
            with kit.drafter().trace() as trace:
                texts.append(kit.target().generate(ids, **call, **options, stopping_criteria=criteria).tolist())
        assert len(texts[0][0]) == 60
        assert texts[0] == texts[1]
        if schedule == "constant":
            assert max(len(p) for one in trace.rounds[-4:-1] for p, _, _ in one.per_row()) > 0

    @pytest.mark.parametrize("do_sample", [False, True])
    @pytest.mark.parametrize("num_rows", [1, 2])
    def test_ids_of_32_bits(self, num_rows, do_sample):
        ids = torch.tensor([[5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6]] * num_rows, dtype=torch.int32)
        call = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": do_sample}
        ours = kit.target().generate(
            ids,
            **call,
            assistant_model=kit.drafter(),
            num_assistant_tokens_schedule="constant",
            prompt_lookup_num_tokens=8,
        )
        assert ours.dtype == torch.int64
        if not do_sample:
            assert ours.tolist() == kit.target().generate(ids, **call).tolist()

    def test_embeddings_in_place_of_ids(self):
        model = kit.new_target()
        embeddings = model.get_input_embeddings()(inputs()["input_ids"])
        message = refusal(UnsupportedGenerationError, model, drafter(), input_ids=None, inputs_embeds=embeddings)
        assert message == "A DSpark drafter needs to know the tokens: pass `input_ids` instead of `inputs_embeds`."

    def test_num_assistant_tokens_of_the_other_anchor_convention(self):
        assistant = drafter(sample_from_anchor=False)
        message = refusal(UnsupportedGenerationError, kit.new_target(), assistant, num_assistant_tokens=BLOCK)
        assert message.startswith(NUM_TOKENS.format(BLOCK).replace("1 to 4", "1 to 3"))

    def test_threshold_without_a_confidence_head(self):
        assistant = drafter(enable_confidence_head=False)
        message = refusal(UnsupportedGenerationError, kit.new_target(), assistant, assistant_confidence_threshold=0.5)
        assert message == (
            "`assistant_confidence_threshold` is 0.5, but this drafter has no confidence head. "
            "Set it to 0 or leave it out."
        )

    def test_unknown_schedule_of_the_drafter(self):
        assistant = kit.new_drafter()
        assistant.generation_config.num_assistant_tokens_schedule = "sometimes"
        message = refusal(UnsupportedGenerationError, kit.new_target(), assistant)
        assert message.startswith(SCHEDULE)
        assert "`drafter.generation_config`" in message

    def test_unknown_schedule_of_the_call(self):
        message = refusal(
            UnsupportedGenerationError, kit.new_target(), drafter(), num_assistant_tokens_schedule="sometimes"
        )
        assert message.startswith(SCHEDULE)

    def test_settings_of_the_drafter_are_checked_too(self):
        assistant = kit.new_drafter()
        assistant.generation_config.num_assistant_tokens = 9
        message = refusal(UnsupportedGenerationError, kit.new_target(), assistant)
        assert message.startswith(NUM_TOKENS.format(9))

    def test_wrong_hidden_size(self):
        message = refusal(AlignmentError, kit.new_target(hidden_size=48), drafter())
        assert message == (
            "This drafter cannot draft for this target: hidden_size is 48 in the target and 32 in the drafter. "
            "Use the drafter of this model."
        )

    def test_wrong_number_of_layers(self):
        message = refusal(AlignmentError, kit.new_target(num_hidden_layers=5), drafter())
        assert message == (
            "This drafter cannot draft for this target: the number of decoder layers is 5 in the target and 4 in the "
            "drafter. Use the drafter of this model."
        )

    def test_too_few_layers(self):
        message = refusal(AlignmentError, kit.new_target(num_hidden_layers=2), drafter(num_target_layers=None))
        assert "2 (`target_layer_ids` [-1, 0, 2])" in message

    def test_errors_are_value_errors(self):
        assert issubclass(UnsupportedGenerationError, ValueError)
        assert issubclass(AlignmentError, ValueError)


SMALL = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 4}
NO_IDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
HEADS = {"intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}


class TestRefusedTargets:
    """Targets that cannot take rejected tokens back are refused, by name."""

    @pytest.mark.parametrize(
        ("name", "settings"),
        [
            ("Mamba", {**SMALL, **NO_IDS, "state_size": 4}),
            (
                "Bamba",
                {
                    **SMALL,
                    **NO_IDS,
                    **HEADS,
                    "attn_layer_indices": [1, 3],
                    "mamba_n_heads": 8,
                    "mamba_d_head": 8,
                    "mamba_d_state": 8,
                },
            ),
            (
                "Qwen3Next",
                {
                    **SMALL,
                    **NO_IDS,
                    **HEADS,
                    "head_dim": 8,
                    "linear_key_head_dim": 8,
                    "linear_value_head_dim": 8,
                    "linear_num_key_heads": 2,
                    "linear_num_value_heads": 4,
                    "num_experts": 4,
                    "num_experts_per_tok": 2,
                    "moe_intermediate_size": 16,
                    "shared_expert_intermediate_size": 16,
                },
            ),
        ],
    )
    def test_recurrent_state(self, name: str, settings: dict[str, Any]):
        config = getattr(transformers, f"{name}Config")(**settings)
        model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
        kwargs = {"attention_mask": None} if name == "Mamba" else {}
        with pytest.raises(UnsupportedGenerationError) as caught:
            generate(model, drafter(), **kwargs)
        assert f"{name}ForCausalLM keeps " in str(caught.value)
        assert "for a model with a recurrent state, leave out `assistant_model`." in str(caught.value)
        assert kit.hooks_of(model) == 0

    def test_encoder_decoder(self):
        sizes = {"vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 4, "num_heads": 4}
        model = transformers.T5ForConditionalGeneration(
            transformers.T5Config(**sizes, decoder_start_token_id=0)
        ).eval()
        with no_forward(model), pytest.raises((UnsupportedGenerationError, AlignmentError)) as caught:
            generate(model, drafter())
        assert "encoder-decoder" in str(caught.value)


class Failure(Exception):
    """Raised by the user's own code in the middle of a call."""


def after(num_calls: int) -> Callable[..., None]:
    """Raises `Failure` at a later call."""
    count = 0

    def maybe_fail(*args: Any, **kwargs: Any) -> None:
        nonlocal count
        count += 1
        if count > num_calls:
            raise Failure

    return maybe_fail


class FailingProcessor(LogitsProcessor):
    def __init__(self):
        self.check = after(4)

    def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor) -> torch.Tensor:
        self.check()
        return scores


class FailingCriterion(StoppingCriteria):
    def __init__(self):
        self.check = after(4)

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.check()
        return torch.tensor([False])


class FailingStreamer(BaseStreamer):
    def __init__(self):
        self.check = after(4)

    def put(self, value: torch.Tensor) -> None:
        self.check()

    def end(self) -> None:
        raise AssertionError("a call that failed did not end well")


FAILURES = {
    "processor": lambda: {"logits_processor": [FailingProcessor()]},
    "criterion": lambda: {"stopping_criteria": [FailingCriterion()]},
    "streamer": lambda: {"streamer": FailingStreamer()},
    "first prefix": lambda: {"prefix_allowed_tokens_fn": after(0)},
}


def all_settings(*models: PreTrainedModel) -> list[Any]:
    return copy.deepcopy([(m.config.to_dict(), m.generation_config.to_dict(), m.training) for m in models])


class TestNothingStays:
    """A call leaves the target and the drafter as they were."""

    def test_after_a_call(self):
        model, assistant = kit.new_target("qwen3_moe"), kit.new_drafter()
        before, names = all_settings(model, assistant), [set(vars(m)) for m in (model, assistant)]
        generate(model, assistant, num_assistant_tokens=2, assistant_confidence_threshold=0.1, repetition_penalty=1.2)
        assert all_settings(model, assistant) == before
        assert [set(vars(m)) for m in (model, assistant)] == names
        assert kit.hooks_of(model) == kit.hooks_of(assistant) == 0

    @pytest.mark.parametrize("failure", FAILURES)
    def test_after_an_exception(self, failure: str):
        model, assistant = kit.new_target(), kit.new_drafter()
        before = all_settings(model, assistant)
        with pytest.raises(Failure), knowing(continuation(model)):
            generate(model, assistant, **FAILURES[failure]())
        assert all_settings(model, assistant) == before
        assert kit.hooks_of(model) == kit.hooks_of(assistant) == 0
        assert_lossless(model, assistant)

    def test_after_an_exception_in_the_target(self):
        model, assistant = kit.new_target(), kit.new_drafter()
        handle = model.model.layers[1].register_forward_hook(after(2))
        with pytest.raises(Failure), knowing(continuation(kit.target())):
            generate(model, assistant)
        handle.remove()
        assert kit.hooks_of(model) == 0
        assert_lossless(model, assistant)

    def test_a_generation_config_of_the_user(self):
        config = transformers.GenerationConfig(**GREEDY, num_assistant_tokens=2, stop_strings=["never"])
        before = copy.deepcopy(config)
        arguments = {**inputs(), "generation_config": config, "tokenizer": kit.tokenizer()}
        target().generate(**arguments, assistant_model=drafter())
        assert config == before

    def test_lists_of_the_user(self):
        processors, criteria = transformers.LogitsProcessorList(), transformers.StoppingCriteriaList()
        stop = {"stop_strings": ["never"], "tokenizer": kit.tokenizer(), "min_new_tokens": 3, "eos_token_id": 1}
        generate(target(), drafter(), logits_processor=processors, stopping_criteria=criteria, **stop)
        assert len(processors) == len(criteria) == 0

    def test_caches_are_freed(self):
        model, assistant, alive = kit.new_target(), kit.new_drafter(), []
        real_init = DSparkCandidateGenerator.__init__

        def init(self: DSparkCandidateGenerator, *args: Any, **kwargs: Any) -> None:
            real_init(self, *args, **kwargs)
            alive.extend((weakref.ref(self), weakref.ref(self.cache)))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(DSparkCandidateGenerator, "__init__", init)
            output = generate(model, assistant, return_dict_in_generate=True)
        alive.append(weakref.ref(output[CACHE_NAME]))
        del output
        gc.collect()
        assert [ref() for ref in alive] == [None] * 3

    def test_no_tensor_stays(self):
        model, assistant = kit.new_target(), kit.new_drafter()
        generate(model, assistant)

        def num_tensors() -> int:
            gc.collect()
            return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())

        before = num_tensors()
        for _ in range(3):
            generate(model, assistant)
            with pytest.raises(Failure):
                generate(model, assistant, **FAILURES["criterion"]())
        assert num_tensors() == before

    def test_two_calls_equal_two_fresh_ones(self):
        model, assistant = kit.new_target(), kit.new_drafter()
        for prompt in (PROMPT, PROMPT[3:], PROMPT):
            with assistant.trace() as trace:
                generate(model, assistant, **inputs(prompt))
            fresh = kit.new_drafter()
            with fresh.trace() as fresh_trace:
                generate(kit.new_target(), fresh, **inputs(prompt))
            assert [r.proposed for r in trace.rounds] == [r.proposed for r in fresh_trace.rounds]
            assert [r.confidence for r in trace.rounds] == [r.confidence for r in fresh_trace.rounds]


class TestThreads:
    """Two threads generate at once with one target and one drafter."""

    class Turns(StoppingCriteria):
        """Lets another thread run after every token."""

        def __init__(self, barrier: threading.Barrier):
            self.barrier = barrier

        def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            self.barrier.wait(timeout=60)
            return torch.tensor([False])

    def test_interleaved_calls(self):
        model, assistant, barrier = kit.new_target(), kit.new_drafter(), threading.Barrier(2)
        prompts = [PROMPT, PROMPT[4:]]
        results: list[Any] = [None, None]

        def alone(prompt: tuple[int, ...], **kwargs: Any) -> tuple[list[int], list[list[int]]]:
            with assistant.trace() as trace:
                output = generate(model, assistant, **inputs(prompt), **kwargs)
            return output[0].tolist(), [r.proposed for r in trace.rounds]

        def work(index: int) -> None:
            results[index] = alone(prompts[index], stopping_criteria=[self.Turns(barrier)])

        threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=120)
        assert results == [alone(prompt) for prompt in prompts]
        assert kit.hooks_of(model) == 0

    def test_calls_in_the_middle_of_another_are_not_heard(self):
        model, assistant, other = kit.new_target(), kit.new_drafter(), kit.new_drafter(target_layer_ids=[1])

        class Nested(StoppingCriteria):
            def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.Tensor:
                model.generate(**inputs(PROMPT[2:]), max_new_tokens=2, do_sample=False)
                generate(model, other, **inputs(PROMPT[5:]), max_new_tokens=4)
                return torch.tensor([False])

        def proposals(**kwargs: Any) -> list[list[int]]:
            with assistant.trace() as trace:
                generate(model, assistant, **kwargs)
            return [r.proposed for r in trace.rounds]

        assert proposals(stopping_criteria=[Nested()]) == proposals()


class TestTaps:
    """Only tapped layers are kept, however long the prompt."""

    def test_states_equal_the_layers_own(self):
        model = kit.new_target()
        states = model(**inputs(), output_hidden_states=True).hidden_states
        hooks = kit.hooks_of(model)
        taps = TargetTaps(model, [-1, 0, 2])
        with taps.listening():
            model(**inputs())
        (features,) = taps.take()
        taps.close()
        # hidden_states[0] is the embedding output, hidden_states[k + 1] the output of layer k.
        assert torch.equal(features, torch.cat([states[0], states[1], states[3]], dim=-1))
        assert kit.hooks_of(model) == hooks

    def test_deaf_outside_of_listening(self):
        taps = TargetTaps(target(), [0])
        target()(**inputs())
        assert not taps.has_passes
        taps.close()

    @pytest.mark.parametrize("chunk", [None, 200])
    def test_memory_of_a_long_prompt(self, chunk: int | None):
        model, assistant = kit.new_target(), kit.new_drafter(target_layer_ids=[1])
        prompt = torch.randint(0, VOCAB, (1, 400), generator=torch.Generator().manual_seed(0))
        call = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt), "prefill_chunk_size": chunk}

        def most_states_alive(**kwargs: Any) -> int:
            alive: list[int] = []

            def count(module: torch.nn.Module, args: Any) -> None:
                gc.collect()
                states = (o for o in gc.get_objects() if issubclass(type(o), torch.Tensor) and o.dim() == 3)
                alive.append(sum(s.shape[1] in (chunk, 400) and s.shape[2] == 32 for s in states))

            # When all layers have run.
            handle = model.model.norm.register_forward_pre_hook(count)
            model.generate(**call, max_new_tokens=1, do_sample=False, **kwargs)
            handle.remove()
            return max(alive)

        plain = most_states_alive()
        assert most_states_alive(assistant_model=assistant) <= plain + 1
        assert most_states_alive(return_dict_in_generate=True, output_hidden_states=True) >= plain + 3

    def test_chunks_are_absorbed_one_by_one(self):
        model, assistant, waiting = kit.new_target(), kit.new_drafter(), []
        real = _WaitingContext.keep_prompt

        def keep_prompt(self: _WaitingContext, features: torch.Tensor) -> None:
            waiting.append(self.num_waiting)
            real(self, features)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_WaitingContext, "keep_prompt", keep_prompt)
            generate(model, assistant, prefill_chunk_size=3, max_new_tokens=1)
        assert waiting == [0] * 4


class TestPrecisionAndPlacement:
    """Drafter and target may differ in dtype, and the target may be split or quantized."""

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_drafter_of_a_float32_target(self, dtype: torch.dtype):
        for own in (False, True):
            assistant = kit.new_drafter(own_embed_tokens=own, own_lm_head=own).to(dtype)
            assert_lossless(target(), assistant, wrong_at=POSITIONS)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("drafter_dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_half_target(self, dtype: torch.dtype, drafter_dtype: torch.dtype):
        # A block pass may round otherwise than single passes here, so only the prefix is compared.
        model = kit.new_target().to(dtype)
        assistant = kit.new_drafter(own_embed_tokens=True, own_lm_head=True).to(drafter_dtype)
        known = continuation(model)
        with assistant.trace() as trace, knowing(known, wrong_at=1):
            output = generate(model, assistant)
        assert output.shape[1] == len(PROMPT) + GREEDY["max_new_tokens"]
        assert output[0, len(PROMPT)].item() == known[0]
        kit.assert_drafted(trace)

    def test_half_target_lends_embedding_and_head(self):
        model, assistant = kit.new_target().to(torch.bfloat16), kit.new_drafter()
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            with assistant.to(dtype).trace() as trace, knowing(continuation(model)):
                generate(model, assistant)
            kit.assert_drafted(trace)

    def test_drafter_that_overflows_steps_aside(self):
        assistant = kit.new_drafter()
        with torch.no_grad():
            assistant.fc.weight.fill_(float("inf"))
        plain = target().generate(**inputs(), **GREEDY)
        with pytest.warns(UserWarning, match="overflow in torch.float32: it proposes nothing"):
            assert generate(target(), assistant).tolist() == plain.tolist()

    def test_split_by_accelerate(self):
        accelerate = pytest.importorskip("accelerate")
        model = kit.new_target()
        places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
        places |= {f"model.layers.{i}": "cpu" for i in range(4)}
        split = accelerate.dispatch_model(model, places, main_device="cpu", force_hooks=True)
        hooks = kit.hooks_of(split)
        assert_lossless(split, drafter(), wrong_at=POSITIONS)
        assert kit.hooks_of(split) == hooks

    def test_offloaded_by_accelerate(self, tmp_path: Path):
        accelerate = pytest.importorskip("accelerate")
        model = kit.new_target()
        places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
        places |= {f"model.layers.{i}": "disk" if i % 2 else "cpu" for i in range(4)}
        split = accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=tmp_path)
        assert_lossless(split, drafter())

    @pytest.mark.filterwarnings("ignore:You are calling .generate")
    @pytest.mark.parametrize("offloaded", ["model.embed_tokens", "lm_head"])
    def test_lent_modules_may_be_offloaded(self, tmp_path: Path, offloaded: str):
        accelerate = pytest.importorskip("accelerate")
        model = kit.new_target()
        places = {"model.embed_tokens": "cpu", "model.layers": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
        places |= {"lm_head": "cpu", offloaded: "disk"}
        split = accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=tmp_path)
        for scale in (None, 1.0):
            assert_lossless(split, kit.new_drafter(embedding_scale=scale))

    @pytest.mark.parametrize("bits", [4, 8])
    def test_bitsandbytes(self, tmp_path: Path, bits: int):
        try:
            importlib.metadata.version("bitsandbytes")
        except importlib.metadata.PackageNotFoundError:
            pytest.skip("bitsandbytes is not installed")
        kit.new_target(hidden_size=64, head_dim=16).save_pretrained(tmp_path)
        quantization = BitsAndBytesConfig(**{f"load_in_{bits}bit": True})
        try:
            model = LlamaForCausalLM.from_pretrained(
                tmp_path, quantization_config=quantization, device_map="cpu", dtype=torch.float32
            )
            plain = continuation(model, num_tokens=GREEDY["max_new_tokens"])
        except (ImportError, RuntimeError, ValueError, NotImplementedError) as error:
            pytest.skip(f"this bitsandbytes does not run on the CPU: {error}")
        assistant = kit.new_drafter(hidden_size=64)
        for wrong_at in (None, 1):
            with assistant.trace() as trace, knowing(plain, wrong_at=wrong_at):
                output = generate(model, assistant)
            kit.assert_drafted(trace)
            # Quantized kernels may differ between one token and a block, as in half precision.
            assert output.shape[1] == len(PROMPT) + len(plain)
            assert output[0, len(PROMPT)].item() == plain[0]


class TestOtherWays:
    """`custom_generate`, and transformers' own assisted loop, run the same drafter."""

    @pytest.mark.parametrize("wrong_at", POSITIONS)
    def test_custom_generate(self, wrong_at: int | None):
        known = continuation(target())
        with drafter().trace() as trace, knowing(known, wrong_at=wrong_at):
            output = target().generate(**inputs(), **GREEDY, custom_generate=SpeculativeDecoding(drafter()))
        assert output[0, len(PROMPT) :].tolist() == known[: GREEDY["max_new_tokens"]]
        kit.assert_drafted(trace, wrong_at)

    def test_custom_generate_with_settings_and_stops(self):
        known = continuation(target())
        stop = {"stopping_criteria": [StopStringCriteria(kit.tokenizer(), ["jk"])]}
        decoding = SpeculativeDecoding(drafter(), num_assistant_tokens=2)
        with drafter().trace() as trace, knowing(known):
            output = target().generate(**inputs(), **GREEDY, **stop, custom_generate=decoding)
        assert output[0, len(PROMPT) :].tolist() == known[: known.index(61) + 1]
        assert max(len(r.proposed) for r in trace.rounds) == 2

    def test_custom_generate_streams(self):
        known = continuation(target())
        streamer = TextIteratorStreamer(kit.tokenizer(), skip_prompt=True, timeout=60)
        decoding = SpeculativeDecoding(drafter(), streamer=streamer)
        with knowing(known, wrong_at=2):
            target().generate(**inputs(), **GREEDY, streamer=streamer, custom_generate=decoding)
        assert "".join(streamer) == kit.tokenizer().decode(known[: GREEDY["max_new_tokens"]])

    def test_settings_object_serves_many_calls(self):
        decoding = SpeculativeDecoding(drafter(), num_assistant_tokens=3)
        before = dict(vars(decoding))
        outputs = [target().generate(**inputs(), **GREEDY, custom_generate=decoding).tolist() for _ in range(2)]
        assert outputs[0] == outputs[1]
        assert dict(vars(decoding)) == before

    def test_bad_settings_fail_when_they_are_given(self):
        with pytest.raises(UnsupportedGenerationError, match="must be an integer from 1 to 4"):
            SpeculativeDecoding(drafter(), num_assistant_tokens=5)

    @pytest.mark.parametrize("family", ["llama", "gemma3"])
    @pytest.mark.parametrize("wrong_at", POSITIONS)
    def test_assisted_loop_of_transformers(self, family: str, wrong_at: int | None):
        known = continuation(target(family))
        drafts: list[int] = []
        with knowing(known, wrong_at=wrong_at):
            output = assisted_by_transformers(family, drafts, do_sample=False)
        assert output[0, len(PROMPT) :].tolist() == known[: GREEDY["max_new_tokens"]]
        # The first pass has no states to draft from yet.
        assert drafts[0] == 0
        assert sum(drafts) > 0

    def test_assisted_loop_of_transformers_samples(self):
        drafts: list[int] = []
        torch.manual_seed(0)
        output = assisted_by_transformers("llama", drafts, do_sample=True, temperature=1.5, top_k=20)
        assert output.shape[1] == len(PROMPT) + GREEDY["max_new_tokens"]
        assert sum(drafts) > 0

    def test_sampling_runs(self):
        for settings in ({}, {"temperature": 0.7}, {"top_k": 5, "top_p": 0.9}, {"min_p": 0.1}, {"typical_p": 0.8}):
            torch.manual_seed(0)
            with drafter().trace() as trace:
                output = generate(target(), drafter(), **{"do_sample": True, "top_k": 0, **settings})
            assert output.shape[1] == len(PROMPT) + GREEDY["max_new_tokens"]
            assert kit.num_drafted(trace.rounds) > 0


def assisted_by_transformers(family: str, drafts: list[int], **kwargs: Any) -> torch.LongTensor:
    """A generation by the host's own assisted loop, with our candidate generator in the place of an assistant's."""
    model, assistant = kit.new_target(family), drafter()
    limit = len(PROMPT) + GREEDY["max_new_tokens"]
    generators: list[DSparkCandidateGenerator] = []

    def factory(generation_config: Any, logits_processor: Any, **others: Any) -> DSparkCandidateGenerator:
        generators.append(
            DSparkCandidateGenerator(
                assistant,
                model,
                do_sample=generation_config.do_sample,
                logits_processor=logits_processor,
                max_length=limit,
            )
        )
        real = generators[0].get_candidates

        def get_candidates(input_ids: torch.LongTensor, **kwargs: Any) -> Any:
            candidates, scores = real(input_ids, **kwargs)
            drafts.append(candidates.shape[1] - input_ids.shape[1])
            return candidates, scores

        generators[0].get_candidates = get_candidates
        # The loop begins right after this, and nothing else of the target runs until it ends.
        generators[0].entered = generators[0].listening()
        generators[0].entered.__enter__()
        return generators[0]

    model._get_candidate_generator = factory
    arguments = {**inputs(), **GREEDY, **kwargs}
    output = model.generate(**arguments, assistant_model=kit.target("llama"))
    generators[0].entered.__exit__(None, None, None)
    generators[0].close()
    assert kit.hooks_of(model) == 0
    return output
