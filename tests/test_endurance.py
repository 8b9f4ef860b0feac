"""Long runs, several calls at once, and calls that fail: nothing grows, nothing is mixed up, nothing stays behind."""

import copy
import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import kit
import pytest
import torch
from kit import BLOCK, inputs
from test_batches import NUM_TOKENS, PAD, STOPS, answers, assert_same_cache, batch, grown, ours, prompts, until
from transformers import DynamicCache, LogitsProcessor, PreTrainedModel, StoppingCriteria
from transformers.generation.streamers import BaseStreamer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dspark_hf import DSparkDrafter
from dspark_hf._compat import CACHE_NAME
from dspark_hf.candidate_generator import Draft, DSparkCandidateGenerator

GREEDY = {"max_new_tokens": NUM_TOKENS, "do_sample": False}


@contextmanager
def knowing_texts(
    texts: Sequence[Sequence[int]],
    wrong_at: Sequence[int | None] = (0, None, 2),
    before: Callable[..., None] | None = None,
) -> Iterator[None]:
    """Inside, all drafters of all threads propose what the text says whose beginning a row has.

    Args:
        texts: prompt and answer of every row of every call, without padding.
        wrong_at: position of a wrong token in one draft after the other, over again; `None`: all tokens are right.
        before: called before each draft, with the rows' prefixes.
    """
    real_draft = DSparkCandidateGenerator.draft
    texts = [list(text) for text in texts]

    def draft(
        self: DSparkCandidateGenerator, prefixes: Sequence[torch.Tensor], limits: Any, gate: Any = None
    ) -> Draft:
        if before is not None:
            before(prefixes)
        real = real_draft(self, prefixes, limits, gate)
        token_ids = real.token_ids.clone()
        for index, (prefix, length) in enumerate(zip(prefixes, real.row_lengths, strict=True)):
            ids = prefix.flatten().tolist()
            ids = ids[next(i for i, token in enumerate(ids) if token != PAD) :]
            text = next((text for text in texts if text[: len(ids)] == ids), ids)
            tokens = [*text[len(ids) : len(ids) + length]]
            tokens += [1] * (length - len(tokens))
            position = wrong_at[len(ids) % len(wrong_at)]
            if position is not None and position < length:
                tokens[position] = (tokens[position] + 1) % kit.VOCAB
            token_ids[index, :length] = token_ids.new_tensor(tokens)
        return replace(real, token_ids=token_ids)

    with patch.object(DSparkCandidateGenerator, "draft", draft):
        yield


def full_texts(num_rows: int = 8) -> list[list[int]]:
    return [[*prompt, *answer] for prompt, answer in zip(prompts(num_rows), answers(num_rows), strict=True)]


def said(output: Any, rows: Sequence[Sequence[int]]) -> list[list[int]]:
    """The new tokens of a call's output, row by row."""
    return kit.sequences(output)[:, max(map(len, rows)) :].tolist()


class Failure(Exception):
    """Raised by the user's own code in the middle of a call."""


class Calling(LogitsProcessor):
    """A processor that changes nothing and calls a function instead."""

    def __init__(self, function: Callable[[], None] = lambda: None):
        self.function = function

    def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor) -> torch.Tensor:
        self.function()
        return scores


class CallingCriterion(StoppingCriteria):
    """A criterion that stops nothing and calls a function instead."""

    def __init__(self, function: Callable[[], None] = lambda: None):
        self.function = function

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.function()
        return torch.zeros(len(input_ids), dtype=torch.bool)


class CallingStreamer(BaseStreamer):
    """A streamer that calls a function for each token, not for the prompt."""

    def __init__(self, function: Callable[[], None] = lambda: None):
        self.function = function
        self.has_prompt = False

    def put(self, value: torch.Tensor) -> None:
        if self.has_prompt:
            self.function()
        self.has_prompt = True

    def end(self) -> None:
        pass


# Where a user's own code runs in the middle of a call.
PLACES: dict[str, Callable[[Callable[[], None]], dict[str, Any]]] = {
    "processor": lambda function: {"logits_processor": [Calling(function)]},
    "criterion": lambda function: {"stopping_criteria": [CallingCriterion(function)]},
    "streamer": lambda function: {"streamer": CallingStreamer(function)},
    "prefix function": lambda function: {
        "prefix_allowed_tokens_fn": lambda batch_id, prefix: function() or list(range(kit.VOCAB))
    },
}


def calls() -> list[dict[str, Any]]:
    """Arguments of calls of every kind."""
    stops = {"eos_token_id": STOPS, "pad_token_id": PAD}
    every_output = {"return_dict_in_generate": True, "output_hidden_states": True, "output_scores": True}
    kinds = [
        {**inputs()},
        {**batch(prompts(3))},
        {**batch(prompts(8)), **stops},
        {**batch(prompts(3)), **PLACES["processor"](lambda: None), **stops},
        {**batch(prompts(3)), **every_output},
        {**batch(prompts(2)), "do_sample": True, "num_return_sequences": 2},
        {**batch(prompts(3)), "prefill_chunk_size": 16, "assistant_confidence_threshold": 0.5},
        {**inputs(), "do_sample": True, "repetition_penalty": 1.2, **stops},
        {**batch(prompts(3)), "cache_implementation": "static"},
    ]
    return [{**GREEDY, **kind} for kind in kinds]


def live_tensors() -> tuple[int, int]:
    """Number of tensors that are alive, and bytes of their storages."""
    tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return len(tensors), sum(storages.values())


@contextmanager
def no_garbage_collector() -> Iterator[None]:
    """Inside, only reference counts free anything, so that what only the collector would free adds up."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class TestMemory:
    """What a call needed is free as soon as it returns."""

    def test_flat_over_200_calls(self):
        model, assistant = kit.new_target(), kit.new_drafter()

        def call(index: int) -> None:
            kinds = calls()
            schedule = ours(assistant) if index % 2 else {"assistant_model": assistant}
            model.generate(**{**kinds[index % len(kinds)], "max_new_tokens": 8}, **schedule)

        with knowing_texts(full_texts()):
            for index in range(2 * len(calls())):
                call(index)
            with no_garbage_collector():
                before, measured = live_tensors(), []
                for index in range(200):
                    call(index)
                    if index % 20 == 19:
                        measured.append(live_tensors())
        assert measured == [before] * 10

    @pytest.mark.parametrize("index", range(len(calls())))
    def test_every_state_dies_with_the_call(self, index: int):
        model, assistant, alive = kit.new_target(), kit.new_drafter(), []
        real_init = DSparkCandidateGenerator.__init__

        def init(self: DSparkCandidateGenerator, *args: Any, **kwargs: Any) -> None:
            real_init(self, *args, **kwargs)
            alive.extend((weakref.ref(self), weakref.ref(self.cache)))

        with no_garbage_collector(), patch.object(DSparkCandidateGenerator, "__init__", init):
            output = model.generate(**{**calls()[index], "return_dict_in_generate": True}, **ours(assistant))
            alive.append(weakref.ref(output[CACHE_NAME]))
            alive.extend(weakref.ref(layer) for layer in output[CACHE_NAME].layers)
            del output
            assert [ref() for ref in alive] == [None] * len(alive)
        assert len(alive) >= 7

    @pytest.mark.parametrize("place", PLACES)
    def test_every_state_dies_with_a_call_that_fails(self, place: str):
        model, assistant = kit.new_target(), kit.new_drafter()

        def fail_once() -> None:
            try:
                model.generate(**batch(prompts(3)), **GREEDY, **failing(place, 4), **ours(assistant))
            except Failure:
                pass
            else:
                raise AssertionError("the call did not fail")

        for _ in range(2):
            fail_once()
        gc.collect()
        before = live_tensors()
        for _ in range(5):
            fail_once()
        gc.collect()
        assert live_tensors() == before

    @pytest.mark.slow
    @pytest.mark.parametrize("family", ["llama", "gemma3"])
    @pytest.mark.parametrize("num_rows", [1, 2])
    def test_grows_with_the_caches_only_over_4000_tokens(self, family: str, num_rows: int):
        model, assistant = kit.new_target(family, max_position_embeddings=8192), kit.new_drafter()
        call = {**batch(prompts(num_rows)), "max_new_tokens": 4000, "do_sample": False}
        plain = model.generate(**call)
        texts = [row[row.index(prompt[0]) :] for row, prompt in zip(plain.tolist(), prompts(num_rows), strict=True)]
        measured: list[tuple[int, int, int]] = []

        def measure(prefixes: Sequence[torch.Tensor]) -> None:
            length = max(prefix.numel() for prefix in prefixes)
            if len(prefixes) == num_rows and length >= 400 * (len(measured) + 1):
                gc.collect()
                measured.append((length, *live_tensors()))

        with knowing_texts(texts, wrong_at=(None, 0, 2), before=measure):
            output = model.generate(**call, **ours(assistant))
        assert output.tolist() == plain.tolist()
        assert len(measured) >= 9
        # As many tensors at the end as at the beginning, and bytes as the positions that the caches have room for.
        lengths, counts, sizes = zip(*measured, strict=True)
        assert max(counts) <= counts[0] + 4
        states = [p.k_proj.out_features + p.v_proj.out_features for p in map(attention_of, model.model.layers)]
        states += [2 * assistant.config.num_key_value_heads * assistant.config.head_dim] * 2
        for length, size in zip(lengths[1:], sizes[1:], strict=True):
            added = 2 * length * num_rows * (4 * sum(states) + 64)
            assert size - sizes[0] <= added


def attention_of(layer: torch.nn.Module) -> Any:
    return layer.self_attn


def failing(place: str, num_calls: int, error: type[BaseException] = Failure) -> dict[str, Any]:
    """Arguments with a user's own code that raises after some calls of it."""
    count = 0

    def maybe_fail() -> None:
        nonlocal count
        count += 1
        if count > num_calls:
            raise error

    return PLACES[place](maybe_fail)


def attention_functions() -> list[dict[str, Any]]:
    """What every model of transformers computes attention and its masks with."""
    registries = (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS)
    return [{name: registry[name] for name in registry} for registry in registries]


def all_settings(*models: PreTrainedModel) -> list[Any]:
    return copy.deepcopy(
        [
            (m.config.to_dict(), m.config._attn_implementation, m.generation_config.to_dict(), m.training)
            for m in models
        ]
    )


class TestFailures:
    """After an exception in the user's own code, everything is as it was, and the next call is right."""

    @pytest.mark.parametrize("error", [Failure, KeyboardInterrupt])
    @pytest.mark.parametrize("num_calls", [0, 1, 4, 9])
    @pytest.mark.parametrize("num_rows", [1, 3, 8])
    @pytest.mark.parametrize("place", PLACES)
    def test_the_next_call_is_right(self, place: str, num_rows: int, num_calls: int, error: type[BaseException]):
        # Some rows of eight have ended by then.
        stops = {"eos_token_id": STOPS, "pad_token_id": PAD} if num_rows == 8 else {}
        model, assistant, rows = kit.new_target(), kit.new_drafter(), prompts(num_rows)
        before, functions = all_settings(model, assistant), attention_functions()
        with knowing_texts(full_texts()):
            with pytest.raises(error):
                model.generate(**batch(rows), **GREEDY, **stops, **failing(place, num_calls, error), **ours(assistant))
            assert kit.hooks_of(model) == kit.hooks_of(assistant) == 0
            assert attention_functions() == functions
            assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward
            assert all_settings(model, assistant) == before
            output = model.generate(**batch(rows), **GREEDY, **ours(assistant))
        assert said(output, rows) == answers(num_rows)

    @pytest.mark.parametrize("num_rows", [1, 3])
    @pytest.mark.parametrize("num_passes", [0, 1, 3])
    def test_an_exception_in_the_target(self, num_rows: int, num_passes: int):
        model, assistant, rows, passes = kit.new_target(), kit.new_drafter(), prompts(num_rows), []

        def hook(module: torch.nn.Module, args: Any, output: Any) -> None:
            passes.append(None)
            if len(passes) > num_passes:
                raise Failure

        functions = attention_functions()
        handle = model.model.layers[1].register_forward_hook(hook)
        with knowing_texts(full_texts()):
            with pytest.raises(Failure):
                model.generate(**batch(rows), **GREEDY, **ours(assistant))
            handle.remove()
            assert kit.hooks_of(model) == 0
            assert attention_functions() == functions
            assert said(model.generate(**batch(rows), **GREEDY, **ours(assistant)), rows) == answers(num_rows)

    def test_a_call_that_ends_well(self):
        model, assistant = kit.new_target(), kit.new_drafter()
        for call in calls():
            model.generate(**call)
        # The first call that returns hidden states hooks the layers for good, with a drafter or without.
        num_hooks = kit.hooks_of(model)
        before, functions = all_settings(model, assistant), attention_functions()
        for call in calls():
            model.generate(**call, **ours(assistant))
            assert kit.hooks_of(model) == num_hooks
            assert kit.hooks_of(assistant) == 0
            assert attention_functions() == functions
            assert all_settings(model, assistant) == before

    @pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
    @pytest.mark.parametrize("place", ["processor", "criterion", "streamer"])
    def test_the_users_cache_holds_committed_positions_only(self, family: str, place: str):
        model, rows, known = kit.target(family), prompts(3), answers(3, family)
        texts = [[*prompt, *answer] for prompt, answer in zip(rows, known, strict=True)]

        def cache_after(num_calls: int, **kwargs: Any) -> DynamicCache:
            past = DynamicCache(config=model.config)
            with pytest.raises(Failure), knowing_texts(texts):
                model.generate(**batch(rows), **GREEDY, **failing(place, num_calls), **{CACHE_NAME: past}, **kwargs)
            return past

        for num_calls in (1, 2, 5, 9):
            plain, past = cache_after(num_calls), cache_after(num_calls, **ours(kit.drafter()))
            # The positions of the round that was interrupted may be taken back, and no others.
            num_back = int(plain.get_seq_length()) - int(past.get_seq_length())
            assert num_back in range(BLOCK + 2)
            num_said = num_calls + 1
            ids = torch.cat((batch(rows)["input_ids"], torch.tensor(known)[:, :num_said]), dim=-1)
            mask = grown(batch(rows)["attention_mask"], num_said)
            going_on = {"input_ids": ids, "attention_mask": mask, "do_sample": False, "max_new_tokens": 6}
            for more in ({}, ours(kit.drafter())):
                rest = model.generate(**going_on, **{CACHE_NAME: copy.deepcopy(past)}, **more)
                assert rest[:, 40:].tolist() == [answer[: num_said + 6] for answer in known]

    def test_the_users_cache_after_a_failure_in_the_prefill(self):
        model, past = kit.new_target(), DynamicCache()

        def fail(module: torch.nn.Module, args: Any, output: Any) -> None:
            raise Failure

        handle = model.lm_head.register_forward_hook(fail)
        with pytest.raises(Failure):
            model.generate(**batch(prompts(3)), **GREEDY, **{CACHE_NAME: past}, **ours(kit.drafter()))
        handle.remove()
        assert type(past.layers[0]).__module__.startswith("transformers.")


class TestThreads:
    """Calls in several threads, with one target and one drafter, go as they go alone."""

    def together(self, *works: Callable[[threading.Barrier], Any]) -> list[Any]:
        """Results of functions that run in threads of their own and meet at a barrier; the last one runs on alone."""
        barrier, results = threading.Barrier(len(works)), [None] * len(works)

        def run(index: int) -> None:
            try:
                results[index] = works[index](barrier)
            finally:
                barrier.abort()

        threads = [threading.Thread(target=run, args=(index,)) for index in range(len(works))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=120)
        return results

    @staticmethod
    def meet(barrier: threading.Barrier) -> None:
        with suppress(threading.BrokenBarrierError):
            barrier.wait(timeout=60)

    @pytest.mark.parametrize("stops", [{}, {"eos_token_id": STOPS, "pad_token_id": PAD}], ids=["", "early ends"])
    def test_two_batches_that_take_turns_draft_by_draft(self, stops: dict[str, Any]):
        model, assistant, functions = kit.new_target(), kit.new_drafter(), attention_functions()
        current = threading.local()

        def work(rows: slice) -> Callable[[threading.Barrier], tuple[Any, Any]]:
            def run(barrier: threading.Barrier | None) -> tuple[Any, Any]:
                current.barrier = barrier
                with assistant.trace() as trace:
                    output = model.generate(**batch(prompts(8)[rows]), **GREEDY, **stops, **ours(assistant))
                return output.tolist(), [(r.rows, r.proposed, r.accepted) for r in trace.rounds]

            return run

        def before(prefixes: Sequence[torch.Tensor]) -> None:
            if current.barrier is not None:
                self.meet(current.barrier)

        works = [work(slice(0, 3)), work(slice(3, 8))]
        with knowing_texts(full_texts(), before=before):
            results = self.together(*works)
            assert results == [run(None) for run in works]
        for rows, (output, rounds) in zip((slice(0, 3), slice(3, 8)), results, strict=True):
            texts = [until(answer, stops.get("eos_token_id", [])) for answer in answers(8)[rows]]
            width = max(map(len, prompts(8)[rows]))
            assert [row[width : width + len(text)] for row, text in zip(output, texts, strict=True)] == texts
            assert rounds
        assert kit.hooks_of(model) == 0
        assert attention_functions() == functions

    @pytest.mark.parametrize("place", ["processor", "criterion", "streamer"])
    def test_two_batches_that_take_turns_token_by_token(self, place: str):
        model, assistant = kit.new_target(), kit.new_drafter()

        def work(rows: slice) -> Callable[[threading.Barrier], list[list[int]]]:
            def run(barrier: threading.Barrier) -> list[list[int]]:
                own = PLACES[place](lambda: self.meet(barrier))
                output = model.generate(**batch(prompts(8)[rows]), **GREEDY, **own, **ours(assistant))
                return said(output, prompts(8)[rows])

            return run

        with knowing_texts(full_texts()):
            results = self.together(work(slice(0, 3)), work(slice(3, 8)))
        assert results == [answers(8)[:3], answers(8)[3:]]
        assert kit.hooks_of(model) == 0

    def test_plain_generation_beside_a_drafted_batch(self):
        model, assistant = kit.new_target(), kit.new_drafter()

        def run(more: dict[str, Any]) -> Callable[[threading.Barrier], list[list[int]]]:
            def work(barrier: threading.Barrier) -> list[list[int]]:
                own = PLACES["processor"](lambda: self.meet(barrier))
                return said(model.generate(**batch(prompts(5)), **GREEDY, **own, **more), prompts(5))

            return work

        with knowing_texts(full_texts()):
            assert self.together(run({}), run(ours(assistant))) == [answers(5)] * 2


class TestInterleaved:
    """A call may run in the middle of another one, on the same target with the same drafter."""

    def calls_in_the_middle(self, model: PreTrainedModel, assistant: DSparkDrafter) -> Callable[[], None]:
        """A function that makes a plain call and two drafted ones, and checks what they say."""

        def make_calls() -> None:
            call = {"max_new_tokens": 7, "do_sample": False}
            known = answers(8)
            assert said(model.generate(**batch(prompts(2)), **call), prompts(2)) == [a[:7] for a in known[:2]]
            output = model.generate(**batch(prompts(8)[5:]), **call, **ours(assistant))
            assert said(output, prompts(8)[5:]) == [a[:7] for a in known[5:]]
            output = model.generate(**inputs(prompts(5)[4]), **call, **ours(assistant))
            assert said(output, [prompts(5)[4]]) == [known[4][:7]]

        return make_calls

    @pytest.mark.parametrize("num_rows", [1, 3])
    @pytest.mark.parametrize("place", PLACES)
    def test_calls_in_the_middle_of_a_call(self, place: str, num_rows: int):
        model, assistant, rows = kit.new_target(), kit.new_drafter(), prompts(num_rows)
        with knowing_texts(full_texts()):
            own = PLACES[place](self.calls_in_the_middle(model, assistant))
            with assistant.trace() as trace:
                output = model.generate(**batch(rows), **GREEDY, **own, **ours(assistant))
        assert said(output, rows) == answers(num_rows)
        assert len(trace.rounds) > 4 * NUM_TOKENS
        assert kit.hooks_of(model) == 0

    @pytest.mark.parametrize("num_rows", [1, 3])
    def test_a_call_in_the_middle_of_drafting(self, num_rows: int):
        model, assistant, rows = kit.new_target(), kit.new_drafter(), prompts(num_rows)
        plain, depth = {"max_new_tokens": 3, "do_sample": False}, 0

        def before(prefixes: Sequence[torch.Tensor]) -> None:
            nonlocal depth
            if depth == 0:
                depth += 1
                assert said(model.generate(**batch(prompts(2)), **plain), prompts(2)) == [a[:3] for a in answers(2)]
                output = model.generate(**batch(prompts(8)[5:]), **plain, **ours(assistant))
                assert said(output, prompts(8)[5:]) == [a[:3] for a in answers(8)[5:]]
                depth -= 1

        with knowing_texts(full_texts(), before=before):
            output = model.generate(**batch(rows), **GREEDY, **ours(assistant))
        assert said(output, rows) == answers(num_rows)

    def test_turns_on_two_caches(self):
        # Two conversations with one target and one drafter, a turn of the one after a turn of the other.
        model, assistant = kit.new_target(), kit.new_drafter()
        groups = (prompts(8)[:3], prompts(8)[3:])

        def talk(**kwargs: Any) -> list[Any]:
            state = [(batch(rows)["input_ids"], batch(rows)["attention_mask"], {}) for rows in groups]
            for _ in range(3):
                for index, (ids, mask, past) in enumerate(state):
                    call = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 5, "do_sample": False, **past}
                    output = model.generate(**call, return_dict_in_generate=True, **kwargs)
                    state[index] = output.sequences, grown(mask, 5), {CACHE_NAME: output[CACHE_NAME]}
            return state

        plain = talk()
        with knowing_texts(full_texts()):
            drafted = talk(**ours(assistant))
        for (ids, mask, past), (plain_ids, _, plain_past) in zip(drafted, plain, strict=True):
            assert ids.tolist() == plain_ids.tolist()
            assert_same_cache(past[CACHE_NAME], plain_past[CACHE_NAME], mask[:, :-1], tolerance=1e-3)

    def test_calls_one_after_the_other_are_as_fresh_ones(self):
        model, assistant = kit.new_target(), kit.new_drafter()

        def rounds(call: dict[str, Any], target: PreTrainedModel, drafter: DSparkDrafter) -> Any:
            torch.manual_seed(0)
            with drafter.trace() as trace:
                output = target.generate(**call, **ours(drafter))
            return kit.sequences(output).tolist(), [(r.rows, r.proposed, r.accepted) for r in trace.rounds]

        for one, fresh in zip(calls(), calls(), strict=True):
            assert rounds(one, model, assistant) == rounds(fresh, kit.new_target(), kit.new_drafter())
