"""Greedy generation with a drafter gives what plain generation gives: ids, order of events, outputs, caches.

In float32, where a pass over a block and passes over single tokens agree to rounding. Oracles and saboteurs come from
`kit`, which also checks in every round that the draft cache holds exactly the committed context.
"""

import itertools
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from threading import Thread
from typing import Any

import kit
import pytest
import torch
from kit import (
    BLOCK,
    POSITIONS,
    PROMPT,
    VOCAB,
    WINDOW,
    assert_lossless,
    continuation,
    drafter,
    inputs,
    knowing,
    target,
)
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
    TextIteratorStreamer,
)
from transformers.generation import MaxTimeCriteria
from transformers.generation.streamers import BaseStreamer

from dspark_hf import DSparkDrafter, UnsupportedGenerationError
from dspark_hf._compat import CACHE_NAME

FIXTURES = Path(__file__).parent / "fixtures"


@cache
def answer(family: str = "llama") -> tuple[int, ...]:
    return tuple(continuation(target(family)))


class TestFamilies:
    """Every kind of target, with a draft that is wrong nowhere, or at any one position."""

    @pytest.mark.parametrize("family", kit.FAMILIES)
    def test_same_ids(self, family: str):
        assert_lossless(target(family), drafter(), wrong_at=POSITIONS, max_new_tokens=2 * WINDOW + 4)

    @pytest.mark.parametrize("family", kit.SLIDING_FAMILIES)
    def test_a_window_that_fills_up_during_generation(self, family: str):
        for length in (WINDOW - 3, WINDOW - 1, WINDOW, WINDOW + 1):
            known = continuation(target(family), PROMPT[:length], num_tokens=12)
            settings = {"prompt": PROMPT[:length], "answer": known, "max_new_tokens": 12}
            assert_lossless(target(family), drafter(), wrong_at=POSITIONS, **settings)

    def test_shared_keys_and_values_do_not_hide_the_prompt_from_the_drafter(self):
        # Gemma 4 leaves prompt positions out of the layers that reuse keys and values of others.
        assert_lossless(target("gemma4_shared_kv"), drafter(target_layer_ids=(2,)))

    def test_published_gemma4_layout(self):
        folder = FIXTURES / "deepspec_gemma4"
        model = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32).eval()
        assistant = DSparkDrafter.from_pretrained(folder)
        assert_lossless(model, assistant, wrong_at=POSITIONS, eos_token_id=None)

    @pytest.mark.parametrize("prompt", [PROMPT[:1], PROMPT[:2], PROMPT * 6], ids=["1", "2", "60"])
    def test_prompt_lengths(self, prompt: tuple[int, ...]):
        assert_lossless(target("gemma3"), drafter(), prompt=prompt)

    @pytest.mark.parametrize("backbone", ["qwen3", "gemma4"])
    @pytest.mark.parametrize("own", [False, True])
    def test_drafter_layouts(self, backbone: str, own: bool):
        kind = {"backbone": backbone, "own_embed_tokens": own, "own_lm_head": own}
        windows = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 6}
        assert_lossless(target(), drafter(**kind, **windows))


HEADS = [
    (markov, confidence)
    for markov in ("none", "vanilla", "gated", "rnn")
    for confidence in ("none", "hidden", "markov")
    if not (markov == "none" and confidence == "markov")
]


def head_settings(markov: str, confidence: str) -> dict[str, Any]:
    return {
        "markov_head_type": markov,
        "enable_confidence_head": confidence != "none",
        "confidence_head_with_markov": confidence == "markov",
    }


def drafter_cases() -> Iterator[tuple]:
    """Every drafter with every setting that it takes."""
    blocks = itertools.product((True, False), range(1, 9), range(1, 9))
    for (anchor, block_size, num_tokens), heads in itertools.product(blocks, HEADS):
        if num_tokens <= (block_size if anchor else block_size - 1):
            for threshold in (0.0, 0.5, 1.0) if heads[1] != "none" else (0.0,):
                yield heads, anchor, block_size, num_tokens, threshold


def covering_pairs(cases: list[tuple]) -> list[tuple]:
    """A small part of the cases in which each pair of settings occurs that occurs in all of them."""
    chosen: list[tuple] = []
    seen: set[tuple] = set()
    for num_new in range(10, 0, -1):
        for case in cases:
            pairs = set(itertools.combinations(enumerate(case), 2)) - seen
            if len(pairs) >= num_new:
                chosen.append(case)
                seen |= pairs
    return chosen


class TestDrafters:
    """Every kind of drafter and every setting of it."""

    @pytest.mark.parametrize(
        ("heads", "anchor", "block_size", "num_tokens", "threshold"), covering_pairs(list(drafter_cases()))
    )
    def test_same_ids(self, heads: tuple[str, str], anchor: bool, block_size: int, num_tokens: int, threshold: float):
        family = ("llama", "gemma3", "qwen3")[block_size % 3]
        assistant = drafter(**head_settings(*heads), sample_from_anchor=anchor, block_size=block_size)
        settings = {"num_assistant_tokens": num_tokens}
        if threshold:
            settings["assistant_confidence_threshold"] = threshold
        for wrong_at in (None, num_tokens - 1):
            trace = check_known(family, assistant, wrong_at, drafted=threshold == 0.0, **settings)
            longest = max((len(r.proposed) for r in trace.rounds), default=0)
            assert longest <= (0 if threshold == 1.0 else num_tokens)
            assert longest == num_tokens or threshold > 0

    def test_a_threshold_shortens_drafts_round_by_round(self):
        trace = check_known("llama", drafter(), None, assistant_confidence_threshold=0.5)
        lengths = {len(r.proposed) for r in trace.rounds}
        assert 0 in lengths
        assert lengths - {0, BLOCK}
        for done in trace.rounds[:-2]:
            assert all(c >= 0.5 for c in done.confidence[: len(done.proposed)])
            assert len(done.proposed) == BLOCK or done.confidence[len(done.proposed)] < 0.5

    def test_a_threshold_makes_the_pass_of_the_target_narrower(self):
        model, widths = kit.new_target(), []
        model.register_forward_pre_hook(
            lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
        )
        with drafter().trace() as trace, knowing(answer()):
            model.generate(
                **inputs(),
                max_new_tokens=20,
                do_sample=False,
                assistant_model=drafter(),
                assistant_confidence_threshold=0.5,
            )
        assert widths == [len(PROMPT), *(1 + len(r.proposed) for r in trace.rounds)]


def check_known(family: str, assistant: DSparkDrafter, wrong_at: int | None, drafted: bool = True, **kwargs: Any):
    """`assert_lossless` against the answer that is known already, without running plain generation again."""
    with assistant.trace() as trace, knowing(answer(family), wrong_at=wrong_at):
        output = target(family).generate(
            **inputs(), max_new_tokens=20, do_sample=False, assistant_model=assistant, **kwargs
        )
    assert output[0, len(PROMPT) :].tolist() == list(answer(family)[:20])
    if drafted:
        kit.assert_drafted(trace, wrong_at)
    return trace


class TestSettings:
    """A setting may come with the call, in its generation config, or with the drafter; the nearest one counts."""

    @staticmethod
    def longest_draft(assistant: DSparkDrafter, **kwargs: Any) -> int:
        with assistant.trace() as trace, knowing(answer()):
            target().generate(**inputs(), assistant_model=assistant, **kwargs)
        return max(len(r.proposed) for r in trace.rounds)

    def test_num_assistant_tokens(self):
        assistant = kit.new_drafter()
        call = {"max_new_tokens": 12, "do_sample": False}
        config = GenerationConfig(**call, num_assistant_tokens=2)
        assert self.longest_draft(assistant, **call) == BLOCK
        assistant.generation_config.num_assistant_tokens = 3
        assert self.longest_draft(assistant, **call) == 3
        assert self.longest_draft(assistant, generation_config=config) == 2
        assert self.longest_draft(assistant, generation_config=config, num_assistant_tokens=1) == 1
        assert self.longest_draft(assistant, **call, num_assistant_tokens=4) == 4

    def test_assistant_confidence_threshold(self):
        assistant = kit.new_drafter()
        call = {"max_new_tokens": 12, "do_sample": False}
        config = GenerationConfig(**call, assistant_confidence_threshold=1.0)
        assert self.longest_draft(assistant, **call) == BLOCK
        assert self.longest_draft(assistant, generation_config=config) == 0
        assert self.longest_draft(assistant, generation_config=config, assistant_confidence_threshold=0.0) == BLOCK
        assistant.generation_config.assistant_confidence_threshold = 1.0
        assert self.longest_draft(assistant, **call) == 0
        assert self.longest_draft(assistant, **call, assistant_confidence_threshold=0.0) == BLOCK

    def test_generation_config_given_by_position(self):
        config = GenerationConfig(max_new_tokens=12, do_sample=False, num_assistant_tokens=2)
        with drafter().trace() as trace, knowing(answer()):
            output = target().generate(inputs()["input_ids"], config, assistant_model=drafter())
        assert output[0, len(PROMPT) :].tolist() == list(answer()[:12])
        assert max(len(r.proposed) for r in trace.rounds) == 2

    def test_generation_config_object(self):
        config = GenerationConfig(max_new_tokens=20, do_sample=False, repetition_penalty=1.3, eos_token_id=answer()[7])
        assert_lossless(target(), drafter(), generation_config=config, drafted=False)

    def test_settings_of_the_target(self):
        model = kit.new_target()
        model.generation_config.repetition_penalty = 1.3
        model.generation_config.eos_token_id = continuation(model)[9]
        assert_lossless(model, drafter())


class TestEnds:
    """Generation ends at the same token as plain generation, wherever in a block that is."""

    @pytest.mark.parametrize("max_new_tokens", range(1, 11))
    def test_max_new_tokens(self, max_new_tokens: int):
        # The last token of the budget needs no draft, so two tokens leave room for none.
        settings = {"answer": answer(), "max_new_tokens": max_new_tokens, "drafted": False}
        trace = assert_lossless(target(), drafter(), wrong_at=POSITIONS, **settings)
        assert (kit.num_drafted(trace.rounds) > 0) == (max_new_tokens > 2)

    @pytest.mark.parametrize("max_length", range(len(PROMPT) + 3, len(PROMPT) + 9))
    def test_max_length(self, max_length: int):
        config = GenerationConfig(max_length=max_length, do_sample=False)
        assert_lossless(target(), drafter(), answer=answer(), wrong_at=(None,), generation_config=config)

    @pytest.mark.parametrize("kwargs", [{"max_length": 10}, {"max_length": 4}, {"max_new_tokens": 0}])
    def test_prompt_at_the_limit(self, kwargs: dict[str, int]):
        def outcome(**more: Any):
            try:
                return target().generate(**inputs(), do_sample=False, **kwargs, **more).tolist()
            except ValueError as error:
                return str(error)

        assert outcome(assistant_model=drafter()) == outcome()

    @pytest.mark.parametrize("offset", range(3 * BLOCK))
    def test_eos_at_every_offset(self, offset: int):
        eos = answer()[offset]
        settings = {"answer": answer(), "eos_token_id": eos, "drafted": offset > 2}
        trace = assert_lossless(target(), drafter(), **settings)
        assert trace.num_new_tokens == answer().index(eos) + 1

    def test_eos_lists(self):
        for some in itertools.combinations(answer()[3:8], 2):
            assert_lossless(target(), drafter(), answer=answer(), wrong_at=(None,), eos_token_id=list(some))

    @pytest.mark.parametrize("min_new_tokens", [1, 5, 6, 9])
    def test_min_new_tokens_holds_eos_back(self, min_new_tokens: int):
        settings = {"eos_token_id": answer()[5], "min_new_tokens": min_new_tokens}
        assert_lossless(target(), drafter(), wrong_at=POSITIONS, **settings)

    @pytest.mark.parametrize("offset", range(3, 3 * BLOCK))
    def test_stop_string_ends_inside_a_token_or_with_it(self, offset: int):
        text = kit.tokenizer().decode(answer())
        end = len(kit.tokenizer().decode(answer()[:offset]))
        for stop in (text[end - 2 : end], text[end - 1 : end + 1], text[end - 3 : end + 2]):
            settings = {"stop_strings": [stop, "never said"], "tokenizer": kit.tokenizer()}
            assert_lossless(target(), drafter(), answer=answer(), drafted=False, **settings)

    def test_stop_strings_stop_inside_a_block(self):
        settings = {"stop_strings": "jk", "tokenizer": kit.tokenizer()}
        trace = assert_lossless(target(), drafter(), answer=answer(), wrong_at=(None,), **settings)
        assert trace.num_new_tokens == answer().index(61) + 1
        assert trace.rounds[-1].num_new_tokens < 1 + len(trace.rounds[-1].proposed)

    def test_stop_strings_of_a_generation_config(self):
        config = GenerationConfig(max_new_tokens=20, do_sample=False, stop_strings=["jk"])
        settings = {"generation_config": config, "tokenizer": kit.tokenizer()}
        trace = assert_lossless(target(), drafter(), answer=answer(), drafted=False, **settings)
        assert trace.num_new_tokens == answer().index(61) + 1
        assert config.stop_strings == ["jk"]

    def test_stop_strings_of_the_target(self):
        model = kit.new_target()
        model.generation_config.stop_strings = ["jk"]
        trace = assert_lossless(model, drafter(), answer=answer(), tokenizer=kit.tokenizer(), drafted=False)
        assert trace.num_new_tokens == answer().index(61) + 1

    def test_stop_strings_next_to_a_criterion_of_the_same_kind(self):
        def criteria() -> dict[str, Any]:
            return {"stopping_criteria": StoppingCriteriaList([StopStringCriteria(kit.tokenizer(), ["fr"])])}

        settings = {"stop_strings": ["jk"], "tokenizer": kit.tokenizer()}
        assert_lossless(target(), drafter(), answer=answer(), arguments=criteria, drafted=False, **settings)

    def test_stop_strings_without_a_tokenizer_fail_as_in_plain_generation(self):
        def message(**kwargs: Any) -> str:
            with pytest.raises(ValueError) as caught:
                target().generate(**inputs(), max_new_tokens=5, do_sample=False, stop_strings=["jk"], **kwargs)
            return str(caught.value)

        assert message(assistant_model=drafter()) == message()

    @pytest.mark.parametrize("num_tokens", range(1, 3 * BLOCK))
    def test_custom_criterion_at_every_offset(self, num_tokens: int):
        criteria: list[AtLength] = []

        def arguments() -> dict[str, Any]:
            criteria.append(AtLength(len(PROMPT) + num_tokens))
            return {"stopping_criteria": StoppingCriteriaList(criteria[-1:])}

        assert_lossless(target(), drafter(), answer=answer(), arguments=arguments, drafted=False)
        plain, *ours = criteria
        assert all(criterion.seen == plain.seen for criterion in ours)

    @pytest.mark.parametrize("offset", range(3 * BLOCK))
    def test_criterion_that_reads_scores(self, offset: int):
        settings = {"return_dict_in_generate": True, "output_scores": True}
        scores = target().generate(**inputs(), max_new_tokens=20, do_sample=False, **settings).scores
        limit = float(scores[offset].max())

        def arguments() -> dict[str, Any]:
            return {"stopping_criteria": StoppingCriteriaList([WhenSure(limit - 1e-3)])}

        assert_lossless(target(), drafter(), answer=answer(), arguments=arguments, drafted=False, **settings)

    @pytest.mark.parametrize("max_time", [1e-9, 1e9])
    def test_max_time(self, max_time: float):
        trace = assert_lossless(target(), drafter(), answer=answer(), max_time=max_time, drafted=max_time > 1)
        assert trace.num_new_tokens == (1 if max_time < 1 else 20)

    def test_max_time_stops_inside_a_block(self):
        class Clock(MaxTimeCriteria):
            def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.Tensor:
                self.initial_timestamp -= 1.0
                return super().__call__(input_ids, scores, **kwargs)

        def arguments() -> dict[str, Any]:
            return {"stopping_criteria": StoppingCriteriaList([Clock(6.5)])}

        trace = assert_lossless(target(), drafter(), answer=answer(), wrong_at=(None,), arguments=arguments)
        assert trace.num_new_tokens == 7


class AtLength(StoppingCriteria):
    """Stops at a total length, and writes down what it was asked about."""

    def __init__(self, length: int):
        self.length = length
        self.seen: list[list[int]] = []

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.seen.append(input_ids[0].tolist())
        return torch.tensor([input_ids.shape[1] >= self.length])


class WhenSure(StoppingCriteria):
    """Stops when the score of a token reaches a limit; there must be one entry per new token."""

    def __init__(self, limit: float):
        self.limit = limit

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        assert len(scores) == input_ids.shape[1] - len(PROMPT)
        return torch.tensor([bool(scores[-1].max() >= self.limit)])


class Diary(LogitsProcessor):
    """A processor with a memory: what it does depends on how often it was asked."""

    def __init__(self):
        self.seen: list[list[int]] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor) -> torch.Tensor:
        self.seen.append(input_ids[0].tolist())
        scores = scores.clone()
        scores[:, (7 * len(self.seen)) % VOCAB] += 30.0 * (len(self.seen) % 3 == 0)
        return scores


class TestProcessors:
    """Processors see the prefixes of plain generation and nothing else."""

    @pytest.mark.parametrize(
        "settings",
        [
            {"repetition_penalty": 1.4},
            {"no_repeat_ngram_size": 2},
            {"bad_words_ids": [[40], [17, 61], [81]]},
            {"repetition_penalty": 0.7, "suppress_tokens": [94]},
            {"sequence_bias": {(17,): -9.0, (3,): 4.0}, "begin_suppress_tokens": [21, 94]},
            {"exponential_decay_length_penalty": (10, 1.3), "eos_token_id": 33},
            {"forced_eos_token_id": 33, "eos_token_id": 33, "remove_invalid_values": True},
        ],
        ids=lambda settings: next(iter(settings)),
    )
    def test_built_in_processors(self, settings: dict[str, Any]):
        assert_lossless(target(), drafter(), wrong_at=POSITIONS, **settings)

    def test_a_processor_with_a_memory_sees_each_committed_prefix_once_and_in_order(self):
        diaries: list[Diary] = []

        def arguments() -> dict[str, Any]:
            diaries.append(Diary())
            return {"logits_processor": LogitsProcessorList(diaries[-1:])}

        assert_lossless(target(), drafter(), wrong_at=POSITIONS, arguments=arguments)
        plain, *ours = diaries
        assert [len(prefix) for prefix in plain.seen] == list(range(len(PROMPT), len(PROMPT) + 20))
        assert all(diary.seen == plain.seen for diary in ours)

    def test_prefix_allowed_tokens(self):
        asked: list[list[int]] = []

        def allowed(batch_id: int, prefix: torch.LongTensor) -> list[int]:
            asked.append(prefix.tolist())
            return [token for token in range(VOCAB) if (token + prefix[-1].item()) % 3]

        assert_lossless(target(), drafter(), wrong_at=(2,), prefix_allowed_tokens_fn=allowed)
        assert asked[: len(asked) // 2] == asked[len(asked) // 2 :]

    @pytest.mark.parametrize("family", ["llama", "gemma3"])
    def test_classifier_free_guidance(self, family: str):
        # Its processor runs the target as well: those passes are no context of the drafter.
        settings = {"guidance_scale": 1.5, "negative_prompt_ids": torch.tensor([[44, 2, 81]])}
        assert_lossless(target(family), drafter(), wrong_at=POSITIONS, **settings)

    def test_renormalized_scores(self):
        settings = {"renormalize_logits": True, "return_dict_in_generate": True, "output_scores": True}
        assert_lossless(target(), drafter(), **settings)


class Listener(BaseStreamer):
    """A streamer that writes down its calls."""

    def __init__(self):
        self.calls: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.calls.append((tuple(value.shape), value.flatten().tolist()))

    def end(self) -> None:
        self.calls.append("end")


class TestStreamers:
    """A streamer hears what it hears from plain generation."""

    @pytest.mark.parametrize(
        "stop",
        [{}, {"eos_token_id": 40}, {"max_new_tokens": 1}, {"stop_strings": ["jk"], "tokenizer": kit.tokenizer()}],
        ids=["length", "eos", "first token", "stop string"],
    )
    def test_same_calls(self, stop: dict[str, Any]):
        listeners: list[Listener] = []

        def arguments() -> dict[str, Any]:
            listeners.append(Listener())
            return {"streamer": listeners[-1]}

        settings = {"answer": answer(), "arguments": arguments, "drafted": not stop, **stop}
        assert_lossless(target(), drafter(), wrong_at=POSITIONS, **settings)
        plain, *ours = listeners
        assert plain.calls.count("end") == 1
        assert all(listener.calls == plain.calls for listener in ours)

    def test_each_token_is_streamed_before_the_criteria_are_asked(self):
        def events(**kwargs: Any) -> list[str]:
            heard: list[str] = []

            class Order(Listener):
                def put(self, value: torch.Tensor) -> None:
                    heard.append(f"put {value.flatten().tolist()}")

            class Asked(StoppingCriteria):
                def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.Tensor:
                    heard.append(f"asked {input_ids.shape[1]}")
                    return torch.tensor([False])

            with knowing(answer()):
                target().generate(
                    **inputs(),
                    max_new_tokens=8,
                    do_sample=False,
                    streamer=Order(),
                    stopping_criteria=[Asked()],
                    **kwargs,
                )
            return heard

        assert events(assistant_model=drafter()) == events()

    def test_text_iterator_streamer(self):
        def text(**kwargs: Any) -> str:
            streamer = TextIteratorStreamer(kit.tokenizer(), skip_prompt=True, timeout=60)
            call = {**inputs(), "max_new_tokens": 20, "do_sample": False, "streamer": streamer, **kwargs}
            thread = Thread(target=target().generate, kwargs=call)
            thread.start()
            pieces = "".join(streamer)
            thread.join()
            return pieces

        with knowing(answer(), wrong_at=1):
            assert text(assistant_model=drafter()) == text() == kit.tokenizer().decode(answer()[:20])


def padded(num_padding: int, prompt: tuple[int, ...] = PROMPT, pad: int = 0) -> dict[str, torch.Tensor]:
    input_ids = torch.tensor([[pad] * num_padding + list(prompt)])
    mask = torch.tensor([[0] * num_padding + [1] * len(prompt)])
    return {"input_ids": input_ids, "attention_mask": mask}


def turns(model: PreTrainedModel, second: list[int]) -> tuple[Any, list[int]]:
    """The cache after a first turn of plain generation, and the conversation with the second prompt behind it."""
    first = model.generate(**inputs(), max_new_tokens=7, do_sample=False, return_dict_in_generate=True)
    return first[CACHE_NAME], [*first.sequences[0].tolist(), *second]


class TestPromptsAndCaches:
    """Padding, chunks, conversations: where the prompt comes from does not matter."""

    @pytest.mark.parametrize("family", kit.FAMILIES)
    @pytest.mark.parametrize("num_padding", [1, 5, WINDOW + 1])
    def test_left_padding(self, family: str, num_padding: int):
        settings = {"num_unseen": num_padding, **padded(num_padding)}
        assert_lossless(target(family), drafter(), **settings)

    def test_padding_does_not_change_drafts(self):
        def proposals(**prompt: torch.Tensor) -> list[list[int]]:
            with drafter().trace() as trace:
                target().generate(**prompt, max_new_tokens=12, do_sample=False, assistant_model=drafter())
            return [r.proposed for r in trace.rounds]

        assert proposals(**padded(5)) == proposals(**inputs())

    @pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "gemma4", "gemma4_shared_kv"])
    @pytest.mark.parametrize("chunk", [1, 3, 10, 64])
    def test_prefill_in_chunks(self, family: str, chunk: int):
        assert_lossless(target(family), drafter(), prefill_chunk_size=chunk)

    def test_prefill_in_chunks_with_padding(self):
        assert_lossless(target(), drafter(), num_unseen=5, prefill_chunk_size=4, **padded(5))

    def test_chunks_do_not_change_drafts(self):
        def proposals(**kwargs: Any) -> list[list[int]]:
            with drafter().trace() as trace:
                target().generate(**inputs(), max_new_tokens=12, do_sample=False, assistant_model=drafter(), **kwargs)
            return [r.proposed for r in trace.rounds]

        assert proposals(prefill_chunk_size=3) == proposals()

    @pytest.mark.parametrize("family", kit.FAMILIES)
    @pytest.mark.parametrize("second", [[8], [8, 44, 31, 90]])
    @pytest.mark.parametrize("only_new_ids", [False, True], ids=["whole conversation", "new ids only"])
    def test_part_filled_cache(self, family: str, second: list[int], only_new_ids: bool):
        def arguments() -> dict[str, Any]:
            past, conversation = turns(target(family), second)
            call = {CACHE_NAME: past, **inputs(conversation)}
            if only_new_ids:
                call["input_ids"] = call["input_ids"][:, past.get_seq_length() :]
            return call

        check_turn(target(family), arguments)

    @pytest.mark.parametrize("only_new_ids", [False, True], ids=["whole conversation", "new ids only"])
    @pytest.mark.parametrize("family", ["llama", "gemma3"])
    def test_part_filled_cache_behind_padding(self, family: str, only_new_ids: bool):
        model = target(family)

        def arguments() -> dict[str, Any]:
            call = {"max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True}
            first = model.generate(**padded(3), **call)
            past = first[CACHE_NAME]
            ids = torch.cat((first.sequences, torch.tensor([[8, 44]])), dim=-1)
            mask = torch.ones_like(ids)
            mask[:, :3] = 0
            if only_new_ids:
                ids = ids[:, past.get_seq_length() :]
            return {CACHE_NAME: past, "input_ids": ids, "attention_mask": mask}

        check_turn(model, arguments)

    @pytest.mark.skipif(CACHE_NAME != "cache", reason="plain generation runs the cached part again in this version")
    def test_part_filled_cache_in_chunks(self):
        def arguments() -> dict[str, Any]:
            past, conversation = turns(target(), [8, 44, 31, 90, 2])
            return {CACHE_NAME: past, **inputs(conversation), "prefill_chunk_size": 2}

        check_turn(target(), arguments)

    def test_empty_cache_of_the_user(self):
        def arguments() -> dict[str, Any]:
            return {CACHE_NAME: DynamicCache(config=target("gemma3").config)}

        assert_lossless(target("gemma3"), drafter(), arguments=arguments)

    @pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "gemma4", "gemma4_shared_kv"])
    def test_returned_cache_equals_plain(self, family: str):
        model = target(family)
        for max_new_tokens in (1, 2, 9):
            call = {"max_new_tokens": max_new_tokens, "do_sample": False, "return_dict_in_generate": True}
            plain = model.generate(**inputs(), **call)[CACHE_NAME]
            for wrong_at in POSITIONS:
                with knowing(answer(family), wrong_at=wrong_at):
                    ours = model.generate(**inputs(), **call, assistant_model=drafter())[CACHE_NAME]
                assert_same_cache(ours, plain)

    @pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
    def test_conversation_over_many_turns(self, family: str):
        model = target(family)

        def talk(**kwargs: Any) -> tuple[list[int], Any]:
            said, past = [], None
            for question in (list(PROMPT), [8, 44, 31], [90], [2, 2, 2, 2, 2, 2, 2, 2, 2, 2]):
                said += question
                call = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True}
                output = model.generate(**inputs(said), **call, **kwargs, **({CACHE_NAME: past} if past else {}))
                said, past = output.sequences[0].tolist(), output[CACHE_NAME]
            return said, past

        plain, plain_cache = talk()
        with drafter().trace() as trace, knowing(plain, prompt_length=0, num_unseen=None):
            ours, our_cache = talk(assistant_model=drafter())
        assert ours == plain
        assert kit.num_accepted(trace.rounds) > 0
        assert_same_cache(our_cache, plain_cache)


def check_turn(model: PreTrainedModel, arguments: Callable[[], dict[str, Any]]) -> None:
    """A turn on a cache, which `arguments` fills anew for each run."""
    call = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}
    filled = arguments()
    plain = model.generate(**filled, **call)
    length = filled["input_ids"].shape[1]
    for wrong_at in (None, 1):
        filled = arguments()
        # The drafter sees no position of the cache; where the ids begin behind it, they are all its own.
        num_unseen = filled[CACHE_NAME].get_seq_length() - (filled["attention_mask"].shape[1] - length)
        with drafter().trace() as trace, knowing(plain.sequences[0, length:].tolist(), length, wrong_at, num_unseen):
            ours = model.generate(**filled, **call, assistant_model=drafter())
        assert ours.sequences.tolist() == plain.sequences.tolist()
        kit.assert_drafted(trace, wrong_at)
        assert_same_cache(ours[CACHE_NAME], plain[CACHE_NAME])


def assert_same_cache(ours: Any, plain: Any) -> None:
    assert type(ours) is type(plain)
    assert ours.get_seq_length() == plain.get_seq_length()
    assert len(ours.layers) == len(plain.layers)
    for our_layer, plain_layer in zip(ours.layers, plain.layers, strict=True):
        assert getattr(our_layer, "record_past", False) == getattr(plain_layer, "record_past", False)
        if plain_layer.keys is None:
            assert our_layer.keys is None
            continue
        torch.testing.assert_close(our_layer.keys, plain_layer.keys, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(our_layer.values, plain_layer.values, rtol=1e-5, atol=1e-5)


@cache
def calm_target(family: str) -> PreTrainedModel:
    """A target of smaller numbers, so that 1e-5 is far above rounding."""
    return kit.new_target(family, attn_implementation="eager", initializer_range=0.05)


class TestOutputs:
    """`return_dict_in_generate` gives one entry per new token, as plain generation does."""

    FIELDS = ("scores", "logits", "hidden_states", "attentions")

    @pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "gemma4", "gemma4_shared_kv", "qwen3_moe"])
    @pytest.mark.parametrize("prompt", [PROMPT[:3], PROMPT, PROMPT * 2], ids=["3", "10", "20"])
    def test_outputs_equal_plain(self, family: str, prompt: tuple[int, ...]):
        model = calm_target(family)
        call = {**inputs(prompt), "max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}
        call |= {f"output_{name}": True for name in self.FIELDS}
        plain = model.generate(**call)
        known = plain.sequences[0, len(prompt) :].tolist()
        for wrong_at in POSITIONS:
            with drafter().trace() as trace, knowing(known, len(prompt), wrong_at):
                ours = model.generate(**call, assistant_model=drafter())
            kit.assert_drafted(trace, wrong_at)
            assert ours.sequences.tolist() == plain.sequences.tolist()
            assert type(ours) is type(plain)
            for name in self.FIELDS:
                assert_same_tree(getattr(ours, name), getattr(plain, name), name)

    def test_outputs_end_with_the_text(self):
        model = calm_target("llama")
        known = continuation(model)
        call = {**inputs(), "do_sample": False, "return_dict_in_generate": True, "eos_token_id": known[6]}
        call |= {f"output_{name}": True for name in self.FIELDS}
        plain = model.generate(**call, max_new_tokens=20)
        with knowing(known):
            ours = model.generate(**call, max_new_tokens=20, assistant_model=drafter())
        assert len(ours.scores) == ours.sequences.shape[1] - len(PROMPT)
        for name in self.FIELDS:
            assert_same_tree(getattr(ours, name), getattr(plain, name), name)

    def test_scores_are_processed_and_logits_raw(self):
        call = {**inputs(), "do_sample": False, "max_new_tokens": 8, "return_dict_in_generate": True}
        call |= {"output_scores": True, "output_logits": True, "repetition_penalty": 1.5}
        plain = calm_target("llama").generate(**call)
        with knowing(plain.sequences[0, len(PROMPT) :].tolist()):
            ours = calm_target("llama").generate(**call, assistant_model=drafter())
        assert not torch.equal(ours.scores[0], ours.logits[0])
        assert_same_tree(ours.scores, plain.scores, "scores")
        assert_same_tree(ours.logits, plain.logits, "logits")

    def test_taps_do_not_leak_into_the_outputs(self):
        call = {**inputs(), "do_sample": False, "max_new_tokens": 8, "return_dict_in_generate": True}
        ours = calm_target("llama").generate(**call, assistant_model=drafter())
        assert set(ours) == {"sequences", CACHE_NAME}

    def test_some_hidden_states_only(self):
        call = {**inputs(), "do_sample": False, "max_new_tokens": 8, "return_dict_in_generate": True}
        call["output_hidden_states"] = [1, 2]
        plain = calm_target("llama").generate(**call)
        with knowing(plain.sequences[0, len(PROMPT) :].tolist(), wrong_at=1):
            ours = calm_target("llama").generate(**call, assistant_model=drafter())
        assert_same_tree(ours.hidden_states, plain.hidden_states, "hidden_states")


def assert_same_tree(ours: Any, plain: Any, path: str) -> None:
    """Nested tuples of tensors: same lengths, shapes and dtypes, values to 1e-5."""
    assert type(ours) is type(plain), path
    if isinstance(plain, torch.Tensor):
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5, msg=lambda m: f"{path}: {m}")
    elif plain is not None:
        assert len(ours) == len(plain), path
        for index, (a, b) in enumerate(zip(ours, plain, strict=True)):
            assert_same_tree(a, b, f"{path}[{index}]")


class TestDraftInvariance:
    """With `draft_invariant`, half-precision text depends on the target alone: not on drafts and their lengths."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("num_rows", [1, 3])
    @pytest.mark.parametrize("cache", ["dynamic", "static"])
    def test_one_text_whatever_is_drafted(self, cache: str, num_rows: int, dtype: torch.dtype):
        model = kit.new_target().to(dtype)
        rows = [PROMPT[: len(PROMPT) - 3 * row] for row in range(num_rows)]
        call = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0, "cache_implementation": cache}
        call["input_ids"] = torch.tensor([[0] * (len(PROMPT) - len(row)) + [*row] for row in rows])
        call["attention_mask"] = torch.tensor([[0] * (len(PROMPT) - len(row)) + [1] * len(row) for row in rows])
        known = [row[len(PROMPT) :].tolist() for row in model.generate(**call)]
        texts = []
        for wrong_at, num_tokens in itertools.product((None, 0, 2), (1, 2, 4)):
            assistant = kit.new_drafter().to(dtype)
            with knowing(known, wrong_at=wrong_at, num_unseen=None), assistant.trace() as trace:
                settings = {"draft_invariant": True, "num_assistant_tokens": num_tokens}
                texts.append(model.generate(**call, assistant_model=assistant, **settings).tolist())
            assert kit.num_drafted(trace.rounds) > 0
        assert all(text == texts[0] for text in texts)

    def test_eager_attention_is_refused(self):
        model = kit.new_target(attn_implementation="eager")
        with pytest.raises(UnsupportedGenerationError, match="needs a target with `attn_implementation='sdpa'`"):
            model.generate(**inputs(), max_new_tokens=4, assistant_model=drafter(), draft_invariant=True)
