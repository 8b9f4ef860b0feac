"""Batches: each row says what it says alone, what plain generation of the batch says, and no row waits for another.

In float32, where passes of different shapes agree to rounding. Rows stand left-padded next to much longer ones, and an
oracle (`knowing_rows`) lets them accept different lengths, so that they are at different places after the first round.
"""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import kit
import pytest
import torch
from kit import BLOCK, MASK, POSITIONS, VOCAB, WINDOW, continuation, drafter, target
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    StaticCache,
    StoppingCriteria,
    TextStreamer,
    pipeline,
)
from transformers.generation import MaxTimeCriteria
from transformers.generation.streamers import BaseStreamer

from dspark_hf import (
    DSparkDrafter,
    SpeculativeDecoding,
    Trace,
    candidate_generator,
    committing,
    generation,
    policies,
)
from dspark_hf._compat import CACHE_NAME
from dspark_hf.candidate_generator import Draft, DSparkCandidateGenerator
from dspark_hf.cost_model import CostModel, Prices, place_of
from dspark_hf.policies import ConstantSchedule
from dspark_hf.scheduling import Gate, Plan, RowPlan
from dspark_hf.vocabulary import DraftVocabularyMap

PAD = 0
NUM_TOKENS = 24
NOT_SLIDING = [family for family in kit.FAMILIES if family not in (*kit.SLIDING_FAMILIES, "gemma4_shared_kv")]
SLIDING = [*kit.SLIDING_FAMILIES, "gemma4_shared_kv"]

# One run each: the position at which each row's drafts are wrong, row after row, over again.
STAGGERED = ((None,), (0, None, 2, 1, 3))
EVERYWHERE = tuple((position,) for position in POSITIONS)


def prompts(num_rows: int) -> list[list[int]]:
    """Prompts of very different lengths; none has the padding token."""
    generator = torch.Generator().manual_seed(283)
    lengths = [1, 40, 10, 3, 8, 9, 25, 2]
    return [torch.randint(PAD + 1, MASK, (n,), generator=generator).tolist() for n in lengths][:num_rows]


def batch(rows: Sequence[Sequence[int]], pad: int = PAD) -> dict[str, torch.Tensor]:
    """What a tokenizer would give for several texts, padded on the left."""
    width = max(map(len, rows))
    ids = torch.tensor([[pad] * (width - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


@cache
def answers(num_rows: int, family: str = "llama", attention: str | None = None) -> list[list[int]]:
    """What each row says alone, by plain generation without padding and without stops."""
    return [continuation(target(family, attention), prompt, NUM_TOKENS) for prompt in prompts(num_rows)]


# Said by every row sooner or later, by some soon.
STOPS = [37, 44, 72, 96]


def until(answer: Sequence[int], eos: Sequence[int]) -> list[int]:
    """An answer up to its first token of `eos`, that token included."""
    end = next((i + 1 for i, token in enumerate(answer) if token in eos), len(answer))
    return list(answer[:end])


def padded(texts: Sequence[Sequence[int]]) -> list[list[int]]:
    """What a batch returns behind its prompts: the rows that ended are filled up with padding."""
    width = max(map(len, texts))
    return [[*text, *[PAD] * (width - len(text))] for text in texts]


def unsaid(texts: Sequence[Sequence[int]]) -> int:
    """A token that no row says."""
    return min(set(range(1, VOCAB)) - set(itertools.chain(*texts)))


@contextmanager
def knowing_rows(
    rows: Sequence[Sequence[int]], texts: Sequence[Sequence[int]], wrong_at: Sequence[int | None] = (None,)
) -> Iterator[dict[int, list[list[int]]]]:
    """Inside, every drafter proposes for each row of a batch what `texts` says comes next.

    Also checks what no text can show: that each row's draft starts from that row's own committed tokens.

    Args:
        rows: the prompts, without padding.
        texts: what follows; beyond an end, proposals are made up.
        wrong_at: position of a row's draft that is wrong, in every other draft of that row that is long enough, its
            first one included; row after row, over again.

    Yields:
        For each row, what the real drafter had proposed, draft by draft.
    """
    real_draft = DSparkCandidateGenerator.draft
    heard: dict[int, list[list[int]]] = {row: [] for row in range(len(rows))}
    num_long_enough = [0] * len(rows)

    def propose(row: int, prefix: list[int], length: int) -> list[int]:
        prompt = list(rows[row])
        # The prefix may come with its padding.
        num_padding = next(i for i in range(len(prefix)) if prefix[i : i + len(prompt)] == prompt)
        said = prefix[num_padding + len(prompt) :]
        assert said == list(texts[row][: len(said)]), f"this is not what row {row} says"
        tokens = [*texts[row][len(said) : len(said) + length]]
        tokens += [(len(said) + i) % VOCAB for i in range(len(tokens), length)]
        position = wrong_at[row % len(wrong_at)]
        if position is not None and position < length:
            num_long_enough[row] += 1
            if num_long_enough[row] % 2:
                tokens[position] = (tokens[position] + 1) % VOCAB
        return tokens

    def draft(
        self: DSparkCandidateGenerator,
        prefixes: Sequence[torch.Tensor],
        limits: int | Sequence[int],
        gate: Gate | None = None,
    ) -> Draft:
        real = real_draft(self, prefixes, limits, gate)
        limits = [limits] * len(prefixes) if isinstance(limits, int) else limits
        assert len(self.rows) == len(prefixes) == len(limits) == len(real.row_lengths) == real.token_ids.shape[0]
        assert all(length <= max(limit, 0) for length, limit in zip(real.row_lengths, limits, strict=True))
        token_ids = real.token_ids.clone()
        for index, (row, prefix, length) in enumerate(zip(self.rows, prefixes, real.row_lengths, strict=True)):
            if limits[index] > 0:
                heard[row].append(real.token_ids[index, :length].tolist())
            tokens = propose(row, prefix.flatten().tolist(), length)
            token_ids[index, :length] = token_ids.new_tensor(tokens)
        if real.scores is None:
            return dataclasses.replace(real, token_ids=token_ids)
        real = real.over_vocabulary(self.vocab_size)
        certain = torch.full_like(real.scores, float("-inf")).scatter(
            -1, token_ids[..., None].to(real.scores.device), 0
        )
        return dataclasses.replace(real, token_ids=token_ids, scores=certain)

    with patch.object(DSparkCandidateGenerator, "draft", draft):
        yield heard


def ours(assistant: DSparkDrafter) -> dict[str, Any]:
    """The arguments that make `generate` use the drafter in every round, whatever that costs."""
    return {"assistant_model": assistant, "num_assistant_tokens_schedule": "constant"}


def per_row(trace: Trace, field: str, row: int) -> list[Any]:
    """A field of each round that the row was part of."""
    rounds = [r for r in trace.rounds if row in r.rows]
    return [getattr(r, field) and getattr(r, field)[r.rows.index(row)] for r in rounds]


def assert_drafted(trace: Trace, num_rows: int, wrong_at: Sequence[int | None], in_step: bool = False) -> None:
    """Every row was drafted for, accepted something and, where it was sabotaged, rejected something.

    Where rows go `in_step`, the first one that rejects hides the errors behind that place from the others.
    """
    num_sabotaged = sum(wrong_at[row % len(wrong_at)] is not None for row in range(num_rows))
    num_rejecting = 0
    for row in range(num_rows):
        if num_rows == 1 and not isinstance(trace.rounds[0].accepted, list):
            kit.assert_drafted(trace, wrong_at[0])
            continue
        proposed, accepted = per_row(trace, "proposed", row), per_row(trace, "accepted", row)
        new = per_row(trace, "num_new_tokens", row)
        assert sum(map(len, proposed)) > 0
        assert sum(accepted) > 0
        rejected = [a < len(p) and n > a for p, a, n in zip(proposed, accepted, new, strict=True)]
        num_rejecting += any(rejected)
        assert in_step or wrong_at[row % len(wrong_at)] is None or any(rejected)
    assert num_rejecting > 0 or num_sabotaged == 0 or num_rows == 1


def assert_lossless(
    model: PreTrainedModel,
    rows: Sequence[Sequence[int]],
    *,
    assistant: DSparkDrafter | None = None,
    alone: Sequence[Sequence[int]] | None = None,
    saboteurs: Sequence[Sequence[int | None]] = STAGGERED,
    arguments: Callable[[], dict[str, Any]] = dict,
    drafted: bool = True,
    in_step: bool = False,
    **kwargs: Any,
) -> Trace:
    """Generating a batch with an oracle, and with each saboteur, gives the very ids of plain greedy generation.

    Args:
        alone: what each row says alone, up to its end, where that is known to be what it says in a batch.
        saboteurs: one run each, as `wrong_at` of `knowing_rows`.
        arguments: makes arguments of `generate` that cannot be used twice (processors, criteria, streamers, caches).
        drafted: whether every row must have been drafted for.
        in_step: as for `assert_drafted`.
        kwargs: arguments of `generate`.

    Returns:
        The trace of the last run.
    """
    assistant = assistant or drafter()
    call = {**batch(rows), "do_sample": False, **kwargs}
    if "generation_config" in call:
        del call["do_sample"]
    else:
        call.setdefault("max_new_tokens", NUM_TOKENS)
    width = call["input_ids"].shape[1]
    plain = kit.sequences(model.generate(**call, **arguments()))
    if alone is not None:
        assert plain[:, width:].tolist() == padded(alone)
    for wrong_at in saboteurs:
        with assistant.trace() as trace, knowing_rows(rows, plain[:, width:].tolist(), wrong_at):
            output = kit.sequences(model.generate(**call, **arguments(), **ours(assistant)))
        assert output.tolist() == plain.tolist()
        assert output.dtype == plain.dtype
        if drafted:
            assert_drafted(trace, len(rows), wrong_at, in_step)
    return trace


class TestRows:
    """Rows of a batch, of any length and at any distance from each other."""

    @pytest.mark.parametrize("attention", [None, "eager"], ids=["default", "eager"])
    @pytest.mark.parametrize("family", kit.FAMILIES)
    def test_eight_rows_of_every_family(self, family: str, attention: str | None):
        settings = {"alone": answers(8, family, attention), "saboteurs": (*STAGGERED, (3, 2, 1, 0))}
        assert_lossless(target(family, attention), prompts(8), **settings)

    @pytest.mark.parametrize("family", kit.FAMILIES)
    def test_wrong_at_every_position(self, family: str):
        assert_lossless(target(family), prompts(3), alone=answers(3, family), saboteurs=EVERYWHERE)

    @pytest.mark.parametrize("family", SLIDING)
    def test_blocks_as_long_as_the_window(self, family: str):
        saboteurs = tuple((p, None, WINDOW - 1 - p) for p in range(WINDOW))
        wide = {"assistant": drafter(block_size=WINDOW + 1), "saboteurs": saboteurs}
        assert_lossless(target(family), prompts(4), alone=answers(4, family), **wide)

    @pytest.mark.parametrize("family", SLIDING)
    @pytest.mark.parametrize("length", [WINDOW - 2, WINDOW - 1, WINDOW, WINDOW + 1])
    def test_rows_that_reach_the_window_one_after_the_other(self, family: str, length: int):
        rows = [prompts(2)[1][:n] for n in (length, length - 3, length - 5)]
        alone = [continuation(target(family), row, 12) for row in rows]
        assert_lossless(target(family), rows, alone=alone, max_new_tokens=12, saboteurs=(*STAGGERED, (1, 0, 3)))

    @pytest.mark.parametrize("num_rows", [1, 2, 3, 8])
    def test_sizes(self, num_rows: int):
        assert_lossless(target(), prompts(num_rows), alone=answers(num_rows))

    @pytest.mark.parametrize("family", kit.FAMILIES)
    def test_static_cache(self, family: str):
        settings = {"cache_implementation": "static", "saboteurs": (*EVERYWHERE, *STAGGERED)}
        assert_lossless(target(family), prompts(3), alone=answers(3, family), **settings)

    @pytest.mark.parametrize("family", ["llama", *SLIDING])
    @pytest.mark.parametrize("kind", ["dynamic", "hybrid"])
    def test_dynamic_caches_by_name(self, family: str, kind: str):
        assert_lossless(target(family), prompts(3), alone=answers(3, family), cache_implementation=kind)

    @pytest.mark.parametrize("family", ["llama", "gemma3"])
    def test_long_answers(self, family: str):
        # Long enough for every buffer to grow, and for rows to be far apart.
        rows = prompts(3)
        alone = [continuation(target(family), row, 150) for row in rows]
        assert_lossless(target(family), rows, alone=alone, max_new_tokens=150, saboteurs=((0, None, 3),))

    def test_equal_rows(self):
        rows = prompts(3)[2:] * 3
        assert_lossless(target(), rows, alone=answers(3)[2:] * 3, saboteurs=(*STAGGERED, (None, 0, 0)))

    def test_a_batch_without_padding(self):
        row = prompts(2)[1]
        rows = [row[:10], row[10:20], row[20:30]]
        alone = [continuation(target(), r, NUM_TOKENS) for r in rows]
        assert_lossless(target(), rows, alone=alone)
        assert_lossless(target(), rows, alone=alone, attention_mask=None)

    def test_padding_on_every_row(self):
        rows = prompts(3)
        ids = torch.nn.functional.pad(batch(rows)["input_ids"], (7, 0), value=PAD)
        mask = torch.nn.functional.pad(batch(rows)["attention_mask"], (7, 0))
        assert_lossless(target(), rows, alone=answers(3), input_ids=ids, attention_mask=mask)

    @pytest.mark.parametrize("family", ["llama", "gemma3", "gemma4"])
    def test_holes_in_the_mask(self, family: str):
        # As where a batch of conversations goes on after answers of different lengths.
        rows = prompts(4)[1:]
        call = batch(rows)
        for row, hole in enumerate((range(5, 9), range(36, 37), range(0))):
            call["input_ids"][row, hole], call["attention_mask"][row, hole] = PAD, 0
        shown = [ids[mask.argmax() :].tolist() for ids, mask in zip(*call.values(), strict=True)]
        without = [ids[mask != 0].tolist() for ids, mask in zip(*call.values(), strict=True)]
        settings = {"max_new_tokens": NUM_TOKENS, "do_sample": False}
        plain = target(family).generate(**call, **settings)
        texts = plain[:, 40:].tolist()
        with drafter().trace() as trace, knowing_rows(shown, texts, (1, None, 3)) as heard:
            output = target(family).generate(**call, **settings, **ours(drafter()))
        assert output.tolist() == plain.tolist()
        assert_drafted(trace, 3, (1, None, 3))
        if family == "llama":  # the others count holes into their windows
            # Padding never reaches the drafter, wherever it stands.
            with knowing_rows(without, texts, (1, None, 3)) as heard_without:
                target(family).generate(**batch(without), **settings, **ours(drafter()))
            assert heard == heard_without

    def test_positions_of_the_user(self):
        call = batch(prompts(3))
        call["position_ids"] = (call["attention_mask"].cumsum(dim=-1) - 1).clamp_min(0) + torch.tensor([[0], [5], [2]])
        assert_lossless(target(), prompts(3), **call)

    @pytest.mark.parametrize("kwargs", [{"max_new_tokens": n} for n in range(1, 8)] + [{"max_length": 46}], ids=str)
    def test_lengths(self, kwargs: dict[str, int]):
        num_tokens = kwargs.get("max_new_tokens", 6)
        alone = [answer[:num_tokens] for answer in answers(3)]
        config = GenerationConfig(**kwargs, do_sample=False)
        trace = assert_lossless(
            target(), prompts(3), alone=alone, generation_config=config, drafted=False, saboteurs=((None, 0, 1),)
        )
        assert sum(map(len, itertools.chain(*(r.proposed for r in trace.rounds)))) > 0 or num_tokens < 3
        assert trace.num_new_tokens == 3 * num_tokens

    def test_a_prompt_token_that_is_also_the_padding(self):
        rows = prompts(3)
        rows[2][4] = rows[1][0] = PAD
        alone = [continuation(target(), row, NUM_TOKENS) for row in rows]
        assert_lossless(target(), rows, alone=alone, pad_token_id=PAD, eos_token_id=unsaid(alone))

    @pytest.mark.parametrize("wrong_at", [(None,), (0, None, 2)])
    def test_custom_generate(self, wrong_at: tuple[int | None, ...]):
        decoding = SpeculativeDecoding(drafter(), num_assistant_tokens_schedule="constant")
        call = {**batch(prompts(3)), "do_sample": False, "max_new_tokens": NUM_TOKENS, "custom_generate": decoding}
        with knowing_rows(prompts(3), answers(3), wrong_at):
            output = target().generate(**call)
        assert output[:, 40:].tolist() == answers(3)

    def test_the_default_schedule(self):
        call = {**batch(prompts(8)), "do_sample": False, "max_new_tokens": NUM_TOKENS}
        with knowing_rows(prompts(8), answers(8), (0, None, 2, 1, 3)):
            output = target().generate(**call, assistant_model=drafter())
        assert output[:, 40:].tolist() == answers(8)

    def test_a_bad_drafter(self):
        call = {**batch(prompts(8)), "do_sample": False, "max_new_tokens": NUM_TOKENS}
        assert target().generate(**call, **ours(drafter()))[:, 40:].tolist() == answers(8)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_precision(self, dtype: torch.dtype):
        # Passes of different shapes round otherwise here, so only the first token is compared.
        model = kit.new_target().to(dtype)
        call = {**batch(prompts(3)), "do_sample": False, "max_new_tokens": NUM_TOKENS}
        plain = model.generate(**call)
        with drafter().trace() as trace:
            output = model.generate(**call, **ours(drafter()))
        assert output.shape == plain.shape
        assert output[:, :41].tolist() == plain[:, :41].tolist()
        assert any(itertools.chain(*(r.proposed for r in trace.rounds)))

    def test_a_pipeline(self):
        names = kit.tokenizer()
        words = {"tokenizer_object": names.backend_tokenizer, "clean_up_tokenization_spaces": False}
        tokenizer = PreTrainedTokenizerFast(**words, pad_token=kit.word_of(PAD), padding_side="left")
        model, assistant = kit.new_target(pad_token_id=PAD), kit.new_drafter(pad_token_id=PAD)
        texts = ["".join(map(kit.word_of, row)) for row in prompts(4)]
        config = GenerationConfig(max_new_tokens=8, do_sample=False)
        settings = {"model": model, "tokenizer": tokenizer, "batch_size": 4}
        plain = pipeline("text-generation", **settings)(texts, generation_config=config)
        with assistant.trace() as trace:
            drafted = pipeline("text-generation", **settings, assistant_model=assistant)(
                texts, generation_config=config
            )
        assert drafted == plain
        assert len(trace.rounds[0].rows) == 4


def ending(texts: Sequence[Sequence[int]], *ends: int | None) -> list[int]:
    """Stop tokens with which row i ends after `ends[i]` tokens, or never."""
    eos = [text[end - 1] for text, end in zip(texts, ends, strict=True) if end is not None]
    expected = [len(text) if end is None else end for text, end in zip(texts, ends, strict=True)]
    assert [len(until(text, eos)) for text in texts] == expected, "these rows share tokens: choose other ends"
    return eos


# After how many tokens each row ends; `None`: not before the last one.
ENDS = [
    (1, None, None),
    (None, 1, None),
    (None, 3, 2),
    (4, 5, 6),
    (9, 9, 9),
    (3, None, 14),
    (None, 12, 1),
    (2, 11, 17),
    (None, None, 24),
]


class TestEnds:
    """Rows end where they end alone, one after the other, and are padded from there on."""

    @pytest.mark.parametrize("ends", ENDS, ids=str)
    def test_rows_that_end_at_different_times(self, ends: tuple[int | None, ...]):
        eos = ending(answers(3), *ends)
        settings = {"eos_token_id": eos, "pad_token_id": PAD, "alone": [until(a, eos) for a in answers(3)]}
        trace = assert_lossless(target(), prompts(3), drafted=False, saboteurs=(*EVERYWHERE, *STAGGERED), **settings)
        assert trace.num_new_tokens == sum(map(len, settings["alone"]))

    @pytest.mark.parametrize("family", kit.FAMILIES)
    def test_every_family(self, family: str):
        known = answers(8, family)
        eos = [known[row][end] for row, end in ((0, 0), (2, 3), (3, 7), (5, 10), (6, 13))]
        alone = [until(answer, eos) for answer in known]
        assert len(set(map(len, alone))) > 2
        settings = {"eos_token_id": eos, "pad_token_id": PAD, "alone": alone}
        assert_lossless(target(family), prompts(8), drafted=False, **settings)

    @pytest.mark.parametrize("family", NOT_SLIDING)
    def test_static_cache(self, family: str):
        known = answers(3, family)
        eos = [known[0][2], known[2][9]]
        settings = {"eos_token_id": eos, "pad_token_id": PAD, "alone": [until(answer, eos) for answer in known]}
        assert_lossless(target(family), prompts(3), drafted=False, cache_implementation="static", **settings)

    @pytest.mark.parametrize("end", range(3 * BLOCK))
    def test_a_row_that_ends_anywhere_in_a_block(self, end: int):
        eos = [answers(3)[1][end]]
        settings = {"eos_token_id": eos, "pad_token_id": PAD, "alone": [until(a, eos) for a in answers(3)]}
        assert_lossless(target(), prompts(3), drafted=False, saboteurs=((None,), (None, 1, 0)), **settings)

    def test_all_rows_end_with_their_first_token(self):
        eos = [answer[0] for answer in answers(3)]
        settings = {"eos_token_id": eos, "pad_token_id": PAD, "alone": [answer[:1] for answer in answers(3)]}
        trace = assert_lossless(target(), prompts(3), drafted=False, **settings)
        assert trace.rounds == []
        assert trace.num_new_tokens == 3

    @pytest.mark.parametrize("end", [1, 2, 5, 6])
    def test_all_rows_end_at_once(self, end: int):
        rows, known = prompts(3)[2:] * 4, answers(3)[2]
        settings = {"eos_token_id": ending([known], end), "pad_token_id": PAD, "alone": [known[:end]] * 4}
        assert_lossless(target(), rows, drafted=False, **settings)

    def test_the_padding_token_is_the_stop_token(self):
        eos = ending(answers(3), 3, None, 9)
        texts = [until(answer, eos) for answer in answers(3)]
        call = {**batch(prompts(3)), "do_sample": False, "max_new_tokens": NUM_TOKENS, "eos_token_id": eos}
        for pad in ({"pad_token_id": eos[0]}, {}):
            plain = target().generate(**call, **pad)
            assert plain[0, 43:].tolist() == [eos[0]] * 21
            with knowing_rows(prompts(3), texts, (1, 0, None)):
                assert target().generate(**call, **pad, **ours(drafter())).tolist() == plain.tolist()

    def test_settings_of_the_target(self):
        model, known = kit.new_target(), answers(3)
        model.generation_config.eos_token_id = ending(known, 4, None, 2)
        model.generation_config.pad_token_id = PAD
        alone = [until(answer, model.generation_config.eos_token_id) for answer in known]
        assert_lossless(model, prompts(3), alone=alone, drafted=False)

    @pytest.mark.parametrize("min_new_tokens", [1, 5, 9])
    def test_min_new_tokens_holds_rows_back(self, min_new_tokens: int):
        settings = {"eos_token_id": ending(answers(3), 4, None, 8), "pad_token_id": PAD}
        assert_lossless(target(), prompts(3), min_new_tokens=min_new_tokens, drafted=False, **settings)

    @pytest.mark.parametrize("stops_padding", [True, False], ids=["padded", "never padded"])
    @pytest.mark.parametrize("ends", [(1, 5, 9), (7, 3, 8), (4, 4, 4)], ids=str)
    def test_stop_strings(self, ends: tuple[int, ...], stops_padding: bool):
        # Without a stop token, plain generation goes on with a row that met its stop string.
        said = [answer[max(0, end - 2) : end] for answer, end in zip(answers(3), ends, strict=True)]
        stops = [kit.tokenizer().decode(tokens) for tokens in said]
        settings: dict[str, Any] = {"stop_strings": stops, "tokenizer": kit.tokenizer()}
        if stops_padding:
            settings |= {"eos_token_id": unsaid(answers(3)), "pad_token_id": PAD}
        assert_lossless(target(), prompts(3), drafted=False, **settings)

    def test_stop_strings_end_rows_where_they_end_alone(self):
        known = answers(3)
        stops = [kit.tokenizer().decode(known[row][end - 2 : end]) for row, end in ((0, 5), (2, 9))]
        settings = {"stop_strings": stops, "tokenizer": kit.tokenizer(), "eos_token_id": unsaid(known)}
        alone = [continuation(target(), row, NUM_TOKENS, **settings) for row in prompts(3)]
        assert len(set(map(len, alone))) > 1
        assert_lossless(target(), prompts(3), alone=alone, pad_token_id=PAD, drafted=False, **settings)

    @pytest.mark.parametrize("max_time", [1e-9, 1e9])
    def test_max_time(self, max_time: float):
        trace = assert_lossless(target(), prompts(3), max_time=max_time, drafted=max_time > 1, in_step=True)
        assert trace.num_new_tokens == (3 if max_time < 1 else 3 * NUM_TOKENS)

    def test_max_time_in_the_middle(self, monkeypatch: pytest.MonkeyPatch):
        # How far a row has come by then is its own affair; what it has said so far is not.
        ticks = itertools.count()
        monkeypatch.setattr(time, "time", lambda: float(next(ticks)))
        call = {**batch(prompts(3)), "do_sample": False, "max_new_tokens": NUM_TOKENS, "max_time": 3.5}
        call |= {"eos_token_id": unsaid(answers(3)), "pad_token_id": PAD}
        with knowing_rows(prompts(3), answers(3), (0, None, 2)):
            output = target().generate(**call, **ours(drafter()))[:, 40:]
        assert 1 < output.shape[1] < NUM_TOKENS
        for said, answer in zip(output.tolist(), answers(3), strict=True):
            said = said[: said.index(PAD)] if PAD in said else said
            assert said
            assert said == answer[: len(said)]

    def test_a_clock_of_the_user(self):
        class Clock(MaxTimeCriteria):
            def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.Tensor:
                self.initial_timestamp -= 1.0
                return super().__call__(input_ids, scores, **kwargs)

        alone = [answer[:7] for answer in answers(3)]
        arguments = {"arguments": lambda: {"stopping_criteria": [Clock(6.5)]}, "in_step": True}
        assert_lossless(target(), prompts(3), alone=alone, **arguments)


@contextmanager
def passes_of(model: PreTrainedModel) -> Iterator[list[tuple[int, int]]]:
    """Rows and positions of each pass of the target that is made inside."""
    seen: list[tuple[int, int]] = []

    def note(module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        states = args[0] if args else kwargs["hidden_states"]
        seen.append(tuple(states.shape[:2]))

    handle = model.model.layers[1].register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


def shape_of_pass(widths: list[int]) -> tuple[int, int]:
    """Rows of different widths go through the model as one, without padding."""
    return (len(widths), widths[0]) if len(set(widths)) == 1 else (1, sum(widths))


class TestWork:
    """A round computes the rows that are not finished, each with its own draft, and nothing else."""

    def run(self, wrong_at: Sequence[int | None], ends: Sequence[int | None], **kwargs: Any):
        model, eos = kit.new_target(), ending(answers(3), *ends)
        texts = [until(answer, eos) for answer in answers(3)]
        call = {**batch(prompts(3)), "do_sample": False, "max_new_tokens": NUM_TOKENS}
        call |= {"eos_token_id": eos or unsaid(texts), "pad_token_id": PAD}
        with drafter().trace() as trace, passes_of(model) as passes, knowing_rows(prompts(3), texts, wrong_at):
            output = model.generate(**call, **ours(drafter()), **kwargs)
        assert output[:, 40:].tolist() == padded(texts)
        return trace, passes, texts

    def assert_no_waste(self, trace: Trace, passes: list[tuple[int, int]], texts: list[list[int]]) -> None:
        # The prompts are of 1, 40 and 10 tokens.
        assert passes[:2] == [(1, 40), (2, 10)]
        assert passes[2:] == [shape_of_pass([1 + len(ids) for ids in r.proposed]) for r in trace.rounds]
        num_said = [1] * len(texts)
        for r in trace.rounds:
            unfinished = [row for row, text in enumerate(texts) if num_said[row] < len(text)]
            assert r.rows == unfinished
            for row, num_new in zip(r.rows, r.num_new_tokens, strict=True):
                num_said[row] += num_new
        assert num_said == [len(text) for text in texts]

    @pytest.mark.parametrize("wrong_at", [(None,), (0, None, 2), (3, 0, 0)], ids=str)
    @pytest.mark.parametrize("ends", [(None, None, None), *ENDS], ids=str)
    def test_a_finished_row_leaves(self, ends: tuple[int | None, ...], wrong_at: tuple[int | None, ...]):
        self.assert_no_waste(*self.run(wrong_at, ends))

    @pytest.mark.parametrize("ends", [(3, None, 14), (2, 11, 17)], ids=str)
    def test_a_finished_row_leaves_where_rows_go_in_step(self, ends: tuple[int | None, ...]):
        class Nothing(LogitsProcessor):
            def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor) -> torch.Tensor:
                return scores

        self.assert_no_waste(*self.run((0, None, 2), ends, logits_processor=[Nothing()]))

    def test_a_row_does_not_wait_for_a_worse_one(self):
        # With right drafts a row needs one round for each five tokens, whatever happens to the rows beside it.
        trace, _, _ = self.run((None, 0, None), (None, None, None))
        rounds = [len(per_row(trace, "accepted", row)) for row in range(3)]
        assert rounds[0] == rounds[2] == -(-(NUM_TOKENS - 1) // (BLOCK + 1))
        assert rounds[1] > rounds[0]

    def test_a_threshold_makes_the_pass_narrower(self):
        model = kit.new_target()
        call = {**batch(prompts(3)), "do_sample": False, "max_new_tokens": NUM_TOKENS}
        with drafter().trace() as trace, passes_of(model) as passes, knowing_rows(prompts(3), answers(3)):
            output = model.generate(**call, **ours(drafter()), assistant_confidence_threshold=0.5)
        assert output[:, 40:].tolist() == answers(3)
        assert passes[2:] == [shape_of_pass([1 + len(ids) for ids in r.proposed]) for r in trace.rounds]
        assert len({width for _, width in passes[2:]}) > 1
        assert any(len(set(map(len, r.proposed))) > 1 for r in trace.rounds), "no round with drafts of two lengths"


@pytest.mark.parametrize("num_tokens", [1, 2, BLOCK])
@pytest.mark.parametrize(
    "rows", [prompts(4), [prompts(4)[1]] * 4, prompts(4)[1:2]], ids=["uneven", "even", "a single one"]
)
def test_linear_layers_read_whole_rows(rows: list[list[int]], num_tokens: int):
    """Of parts of rows, PyTorch multiplies each row by itself on a CPU, with a copy of the weight: a draft of one
    token took fifteen times as long as one of all."""
    model, own = kit.new_target(), kit.new_drafter()
    seen, handles = set(), []
    for name, layer in (("head", model.lm_head), ("fc", own.fc)):

        def note(module: torch.nn.Module, args: tuple, name: str = name) -> None:
            seen.add(name)
            # A matrix may have any distance between its rows; of a stack of them, PyTorch minds it even if it is one.
            *stack, num_states, width = args[0].shape
            whole = args[0].stride() == (num_states * width, width, 1)
            assert not stack or whole, f"{name}: {list(args[0].shape)}, strides {args[0].stride()}"

        handles.append(layer.register_forward_pre_hook(note))
    call = {**batch(rows), "do_sample": False, "max_new_tokens": NUM_TOKENS}
    model.generate(**call, **ours(own), num_assistant_tokens=num_tokens)
    assert seen == {"head", "fc"}


class TestPadded:
    """Models that attend in ways of their own, and GPUs, get rows of different widths padded to the longest draft."""

    @pytest.fixture(autouse=True)
    def padded(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(generation, "takes_unpadded", lambda target: False)

    @pytest.mark.parametrize("num_rows", [3, 8])
    @pytest.mark.parametrize("settings", [{}, {"assistant_confidence_threshold": 0.5}], ids=str)
    def test_drafts_of_different_lengths(self, num_rows: int, settings: dict[str, Any]):
        with mixed_widths() as widths:
            assert_lossless(target(), prompts(num_rows), alone=answers(num_rows), drafted=False, **settings)
        assert any(len(set(of_rows)) > 1 for of_rows in widths)

    def test_the_pass_is_as_wide_as_the_longest_draft(self):
        model = kit.new_target()
        call = {**batch(prompts(3)), "do_sample": False, "max_new_tokens": NUM_TOKENS}
        with mixed_widths() as widths, passes_of(model) as passes:
            model.generate(**call, **ours(drafter()))
        assert passes[1:] == [(len(of_rows), max(of_rows)) for of_rows in widths]


@contextmanager
def mixed_widths() -> Iterator[list[list[int]]]:
    """Inside, the rows of a batch may draft none, one, two, ... tokens, another number in each round.

    Yields:
        The widths of each pass.
    """
    seen: list[list[int]] = []
    plan, verify = ConstantSchedule.plan, generation._Decoding.verify

    def uneven(self: ConstantSchedule, rows: Sequence[Any]) -> Plan:
        whole = plan(self, rows)
        cut = [
            min(of_row.num_tokens, (len(seen) + 2 * row.row) % (BLOCK + 1))
            for row, of_row in zip(rows, whole.rows, strict=True)
        ]
        return Plan([RowPlan("drafter" if n else "none", n) for n in cut], "constant")

    def note(self: Any, draft: Draft) -> Any:
        seen.append([1 + length for length in draft.row_lengths])
        return verify(self, draft)

    with patch.object(ConstantSchedule, "plan", uneven), patch.object(generation._Decoding, "verify", note):
        yield seen


class TestUneven:
    """Rows that draft, each in its own rounds, beside rows that do not: the drafter runs for the former only."""

    @pytest.mark.parametrize("family", kit.FAMILIES)
    def test_families(self, family: str):
        model = kit.target(family)
        with mixed_widths() as widths:
            assert_lossless(model, prompts(3), drafted=False)
        assert any(1 in of_rows and max(of_rows) > 1 for of_rows in widths)

    @pytest.mark.parametrize("ends", ENDS, ids=str)
    def test_rows_that_end_at_different_times(self, ends: tuple[int | None, ...]):
        eos = ending(answers(3), *ends)
        settings = {"eos_token_id": eos, "pad_token_id": PAD, "alone": [until(a, eos) for a in answers(3)]}
        with mixed_widths():
            assert_lossless(target(), prompts(3), drafted=False, **settings)

    def test_a_row_drafts_what_it_drafts_alone(self):
        """However long its states have waited, and whatever happens to the rows beside it."""
        model, assistant = target(), drafter()
        call = {"do_sample": False, "max_new_tokens": NUM_TOKENS}
        with mixed_widths(), assistant.trace() as trace:
            model.generate(**batch(prompts(3)), **call, **ours(assistant))
        for row, prompt in enumerate(prompts(3)):
            with assistant.trace() as alone:
                model.generate(torch.tensor([prompt]), **call, **ours(assistant), num_assistant_tokens=BLOCK)
            # What was drafted at a place of the text, by the number of tokens before it.
            by_place, place = {}, 1
            for r in alone.rounds:
                by_place[place], place = r.proposed, place + r.num_new_tokens
            place, num_compared = 1, 0
            for proposed, new in zip(
                per_row(trace, "proposed", row), per_row(trace, "num_new_tokens", row), strict=True
            ):
                if proposed and place in by_place:
                    assert by_place[place][: len(proposed)] == proposed[: len(by_place[place])]
                    num_compared += 1
                place += new
            assert num_compared > 1


class TestPolicies:
    """Every schedule, for one row and for many, padded or not: the text stays, drafts are accepted and rejected."""

    def assistant(self, num_rows: int) -> DSparkDrafter:
        """A drafter with prices that do not go by the clock: a full draft for every row costs a fifth more."""
        assistant = kit.new_drafter()
        passes, drafts = {num_rows: {0: 0.05, num_rows * BLOCK: 0.06}}, {num_rows: {1: 0.002, BLOCK: 0.003}}
        assistant.cost_model = CostModel(place_of(target(), assistant), {40: Prices(passes, drafts)})
        return assistant

    @pytest.mark.parametrize("is_padded", [False, True], ids=["unpadded", "padded"])
    @pytest.mark.parametrize("num_rows", [1, 3, 8])
    @pytest.mark.parametrize("policy", policies.SCHEDULES)
    def test_texts(self, policy: str, num_rows: int, is_padded: bool, monkeypatch: pytest.MonkeyPatch):
        if is_padded:
            monkeypatch.setattr(generation, "takes_unpadded", lambda target: False)
        rows, texts, assistant = prompts(num_rows), answers(num_rows), self.assistant(num_rows)
        call = {**batch(rows), "do_sample": False, "max_new_tokens": NUM_TOKENS, "prompt_lookup_num_tokens": 0}
        accepted = rejected = 0
        for wrong_at in STAGGERED:
            with assistant.trace() as trace, knowing_rows(rows, texts, wrong_at):
                settings = {"assistant_model": assistant, "num_assistant_tokens_schedule": policy}
                if policy == "entropy":
                    settings["assistant_confidence_threshold"] = 0.03  # a random drafter is never sure
                output = target().generate(**call, **settings)
            assert output[:, call["input_ids"].shape[1] :].tolist() == texts
            for r in trace.rounds:
                for proposed, kept, new in r.per_row():
                    assert len(proposed) <= BLOCK
                    accepted, rejected = accepted + kept, rejected + (new == kept + 1 <= len(proposed))
        assert accepted > 0
        assert rejected > 0

    @pytest.mark.parametrize("policy", ["confidence", "hardware"])
    def test_rows_stop_where_they_are_unsure(self, policy: str):
        call = {**batch(prompts(3)), "do_sample": False, "max_new_tokens": NUM_TOKENS}
        assistant = self.assistant(3)
        with assistant.trace() as trace, knowing_rows(prompts(3), answers(3)):
            target().generate(**call, assistant_model=assistant, num_assistant_tokens_schedule=policy)
        assert any(len(set(map(len, r.proposed))) > 1 for r in trace.rounds)


class TestAtOnce:
    """On an accelerator a round decides about all positions together, so that it waits for the device once.

    Here the CPU is made to do the same.
    """

    @pytest.fixture(autouse=True)
    def at_once(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(committing, "decides_at_once", lambda device: True)

    @pytest.mark.parametrize("num_rows", [1, 3, 8])
    def test_sizes(self, num_rows: int):
        settings = {"alone": answers(num_rows), "saboteurs": (*EVERYWHERE, *STAGGERED)}
        assert_lossless(target(), prompts(num_rows), **settings)

    @pytest.mark.parametrize("settings", [{"suppress_tokens": [85]}, {"max_new_tokens": 2}, {"max_new_tokens": 7}])
    def test_settings(self, settings: dict[str, Any]):
        assert_lossless(target(), prompts(3), drafted=False, **settings)

    @pytest.mark.parametrize("ends", ENDS, ids=str)
    def test_rows_that_end_at_different_times(self, ends: tuple[int | None, ...]):
        eos = ending(answers(3), *ends)
        settings = {"eos_token_id": eos, "pad_token_id": PAD, "alone": [until(a, eos) for a in answers(3)]}
        trace = assert_lossless(target(), prompts(3), drafted=False, saboteurs=(*EVERYWHERE, *STAGGERED), **settings)
        assert trace.num_new_tokens == sum(map(len, settings["alone"]))

    @pytest.mark.parametrize("num_rows", [1, 3])
    @pytest.mark.parametrize("end", range(3 * BLOCK))
    def test_stop_tokens_and_strings_anywhere_in_a_block(self, end: int, num_rows: int):
        row = num_rows - 1
        eos = {"eos_token_id": answers(3)[row][end], "pad_token_id": PAD}
        assert_lossless(target(), prompts(num_rows), drafted=False, saboteurs=((None,), (1,)), **eos)
        words = kit.tokenizer().decode(answers(3)[row][max(0, end - 1) : end + 1])
        stop = {"stop_strings": words, "tokenizer": kit.tokenizer(), "eos_token_id": unsaid(answers(3))}
        assert_lossless(
            target(), prompts(num_rows), drafted=False, saboteurs=((None,), (1,)), pad_token_id=PAD, **stop
        )

    def test_sampling_that_leaves_no_choice(self):
        call = {**batch(prompts(3)), "do_sample": True, "top_k": 1, "max_new_tokens": NUM_TOKENS}
        for wrong_at in (*EVERYWHERE, *STAGGERED):
            with drafter().trace() as trace, knowing_rows(prompts(3), answers(3), wrong_at):
                output = target().generate(**call, **ours(drafter()))
            assert output[:, 40:].tolist() == answers(3)
            assert_drafted(trace, 3, wrong_at)


class TestTrace:
    """In a batch, the fields of a round hold one entry per row."""

    @pytest.mark.parametrize("ends", [(None, None, None), (3, None, 14)], ids=str)
    @pytest.mark.parametrize("wrong_at", [(None,), (0, None, 2)], ids=str)
    def test_rounds(self, ends: tuple[int | None, ...], wrong_at: tuple[int | None, ...]):
        eos = ending(answers(3), *ends)
        texts = [until(answer, eos) for answer in answers(3)]
        call = {**batch(prompts(3)), "do_sample": False, "max_new_tokens": NUM_TOKENS}
        call |= {"eos_token_id": eos or unsaid(texts), "pad_token_id": PAD}
        with drafter().trace() as trace, knowing_rows(prompts(3), texts, wrong_at):
            target().generate(**call, **ours(drafter()))
        for r in trace.rounds:
            confidences = r.confidence or [[]] * len(r.rows)
            assert len(r.rows) == len(r.proposed) == len(r.accepted) == len(r.num_new_tokens) == len(confidences)
            assert r.rows == sorted(set(r.rows))
            for proposed, accepted, confidence in zip(r.proposed, r.accepted, confidences, strict=True):
                assert 0 <= accepted <= len(proposed) <= BLOCK
                assert len(confidence or []) == len(proposed)
            assert r.draft_seconds >= 0
            assert r.verify_seconds > 0
        for row, text in enumerate(texts):
            said = text[:1]
            for r in trace.rounds:
                if row in r.rows:
                    index = r.rows.index(row)
                    accepted, num_new = r.accepted[index], r.num_new_tokens[index]
                    assert r.proposed[index][:accepted] == text[len(said) : len(said) + accepted]
                    assert num_new == accepted + 1 or (num_new == accepted and len(said) + num_new == len(text))
                    said += text[len(said) : len(said) + num_new]
            assert said == text
        summary = trace.summary()
        assert trace.num_new_tokens == summary.num_new_tokens == sum(map(len, texts))
        assert summary.num_rounds == len(trace.rounds)
        assert all(0 <= rate <= 1 for rate in summary.acceptance_rate_per_position)

    def test_the_acceptance_of_a_batch_is_the_mean_of_its_rows(self):
        def summary(rows: slice) -> Any:
            call = {**batch(prompts(3)[rows]), "do_sample": False, "max_new_tokens": 21}
            with drafter().trace() as trace, knowing_rows(prompts(3)[rows], answers(3)[rows], (1,)):
                target().generate(**call, **ours(drafter()))
            return trace.summary()

        # All rows are wrong at the same places, so each has the rounds of every other.
        alone, together = summary(slice(1)), summary(slice(3))
        assert together.acceptance_length == pytest.approx(alone.acceptance_length)
        assert together.acceptance_rate_per_position == pytest.approx(alone.acceptance_rate_per_position)


class Diary(LogitsProcessor):
    """A processor with a memory: what it does depends on how often it was asked."""

    def __init__(self):
        self.seen: list[list[list[int]]] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor) -> torch.Tensor:
        assert scores.shape == (input_ids.shape[0], VOCAB)
        self.seen.append(input_ids.tolist())
        scores = scores.clone()
        scores[:, (7 * len(self.seen)) % VOCAB] += 30.0 * (len(self.seen) % 3 == 0)
        return scores


class Witness(StoppingCriteria):
    """Stops each row at a length of its own, and writes down what it was asked about."""

    def __init__(self, *lengths: int):
        self.lengths = torch.tensor(lengths)
        self.seen: list[list[list[int]]] = []

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.seen.append(input_ids.tolist())
        # True once only: a row that was stopped stays stopped.
        return self.lengths == input_ids.shape[1]


class TestProcessors:
    """Processors and criteria get, row for row and step by step, what plain generation shows them."""

    @pytest.mark.parametrize(
        "settings",
        [
            {"repetition_penalty": 1.4},
            {"no_repeat_ngram_size": 2},
            {"bad_words_ids": [[85], [68, 54], [44, 17]]},
            {"repetition_penalty": 0.7, "suppress_tokens": [85]},
            {"sequence_bias": {(85,): -9.0, (3,): 4.0}, "begin_suppress_tokens": [68, 67]},
            {"exponential_decay_length_penalty": (10, 1.3), "eos_token_id": 33, "pad_token_id": PAD},
            {"forced_eos_token_id": 33, "eos_token_id": 33, "pad_token_id": PAD, "remove_invalid_values": True},
            {"min_new_tokens": 7, "eos_token_id": STOPS, "pad_token_id": PAD},
            {"repetition_penalty": 1.3, "eos_token_id": STOPS, "pad_token_id": PAD},
            {"no_repeat_ngram_size": 1, "eos_token_id": STOPS, "pad_token_id": PAD},
        ],
        ids=lambda settings: " ".join(settings),
    )
    def test_built_in_processors(self, settings: dict[str, Any]):
        assert_lossless(target(), prompts(3), drafted=False, saboteurs=(*EVERYWHERE, *STAGGERED), **settings)

    @pytest.mark.parametrize("ends", [{}, {"eos_token_id": STOPS, "pad_token_id": PAD}], ids=["", "early ends"])
    def test_a_processor_with_a_memory(self, ends: dict[str, Any]):
        diaries: list[Diary] = []

        def arguments() -> dict[str, Any]:
            diaries.append(Diary())
            return {"logits_processor": diaries[-1:]}

        assert_lossless(
            target(),
            prompts(3),
            arguments=arguments,
            drafted=not ends,
            in_step=True,
            saboteurs=(*EVERYWHERE, *STAGGERED),
            **ends,
        )
        plain, *others = diaries
        assert [len(seen[0]) for seen in plain.seen] == list(range(40, 40 + len(plain.seen)))
        assert all(diary.seen == plain.seen for diary in others)

    @pytest.mark.parametrize("is_padded", [False, True], ids=["never padded", "padded"])
    @pytest.mark.parametrize("lengths", [(43, 50, 46), (41, 41, 41), (57, 41, 45), (99, 44, 99)], ids=str)
    def test_a_criterion_that_stops_rows(self, lengths: tuple[int, ...], is_padded: bool):
        witnesses: list[Witness] = []

        def arguments() -> dict[str, Any]:
            witnesses.append(Witness(*lengths))
            return {"stopping_criteria": witnesses[-1:]}

        stop = {"eos_token_id": unsaid(answers(3)), "pad_token_id": PAD} if is_padded else {}
        assert_lossless(target(), prompts(3), arguments=arguments, drafted=False, saboteurs=EVERYWHERE, **stop)
        plain, *others = witnesses
        assert all(witness.seen == plain.seen for witness in others)

    def test_a_criterion_that_reads_scores(self):
        class WhenSure(StoppingCriteria):
            def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.Tensor:
                assert len(scores) == input_ids.shape[1] - 40
                assert scores[-1].shape == (3, VOCAB)
                return scores[-1].amax(dim=-1) > limit

        call = {**batch(prompts(3)), "do_sample": False, "max_new_tokens": NUM_TOKENS}
        settings = {"return_dict_in_generate": True, "output_scores": True, "pad_token_id": PAD}
        settings["eos_token_id"] = unsaid(answers(3))
        peaks = torch.stack(target().generate(**call, **settings).scores).amax(dim=-1)
        # Between the second and the third highest of all: two rows, or one, stop somewhere in the middle.
        limit = float(peaks.flatten().topk(3).values[1:].mean())
        arguments = {"arguments": lambda: {"stopping_criteria": [WhenSure()]}, "drafted": False}
        trace = assert_lossless(target(), prompts(3), **arguments, **settings)
        assert trace.num_new_tokens < 3 * NUM_TOKENS

    @pytest.mark.parametrize("ends", [{}, {"eos_token_id": STOPS, "pad_token_id": PAD}], ids=["", "early ends"])
    def test_prefix_allowed_tokens_knows_the_row(self, ends: dict[str, Any]):
        asked: list[dict[int, list[list[int]]]] = []

        def arguments() -> dict[str, Any]:
            asked.append({row: [] for row in range(4)})
            calls = asked[-1]

            def allowed(batch_id: int, prefix: torch.LongTensor) -> list[int]:
                calls[batch_id].append(prefix.tolist())
                return [token for token in range(VOCAB) if (token + batch_id + prefix[-1].item()) % 3]

            return {"prefix_allowed_tokens_fn": allowed}

        assert_lossless(
            target(),
            prompts(4),
            arguments=arguments,
            drafted=not ends,
            in_step=True,
            saboteurs=(*EVERYWHERE, *STAGGERED),
            **ends,
        )
        plain, *others = asked
        stops = [until(calls[-1][40:], ends.get("eos_token_id", [])) for calls in plain.values()]
        if ends:
            assert len(set(map(len, stops))) > 1
        for calls in others:
            for row in range(4):
                # Of a finished row nothing needs to be asked.
                assert calls[row][: len(stops[row])] == plain[row][: len(stops[row])]

    def test_classifier_free_guidance(self):
        settings = {"guidance_scale": 1.5, "negative_prompt_ids": torch.tensor([[44, 2, 81]] * 3)}
        rows = [row * 10 for row in prompts(1)] + prompts(3)[2:] + [prompts(2)[1][:10]]
        assert_lossless(target(), rows, in_step=True, saboteurs=(*EVERYWHERE, *STAGGERED), **settings)

    def test_processors_and_criteria_together(self):
        diaries: list[tuple[Diary, Witness]] = []

        def arguments() -> dict[str, Any]:
            diaries.append((Diary(), Witness(99, 44, 50)))
            return {"logits_processor": [diaries[-1][0]], "stopping_criteria": [diaries[-1][1]]}

        settings = {"repetition_penalty": 1.2, "eos_token_id": STOPS, "pad_token_id": PAD}
        assert_lossless(target(), prompts(3), arguments=arguments, drafted=False, **settings)
        plain, *others = diaries
        assert all([d.seen for d in pair] == [d.seen for d in plain] for pair in others)


class Listener(BaseStreamer):
    """A streamer that takes batches, and writes down its calls."""

    def __init__(self):
        self.calls: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.calls.append(value.tolist())

    def end(self) -> None:
        self.calls.append("end")


class TestStreamers:
    """A streamer hears what it hears from plain generation."""

    @pytest.mark.parametrize(
        "stop",
        [
            {},
            {"max_new_tokens": 1},
            {"eos_token_id": STOPS, "pad_token_id": PAD},
            {"stop_strings": [kit.word_of(83)], "tokenizer": kit.tokenizer()},
        ],
        ids=["length", "first token", "eos", "stop string"],
    )
    def test_same_calls(self, stop: dict[str, Any]):
        listeners: list[Listener] = []

        def arguments() -> dict[str, Any]:
            listeners.append(Listener())
            return {"streamer": listeners[-1]}

        assert_lossless(
            target(), prompts(3), arguments=arguments, drafted=not stop, in_step=True, saboteurs=EVERYWHERE, **stop
        )
        plain, *others = listeners
        assert plain.calls[0] == batch(prompts(3))["input_ids"].tolist()
        assert plain.calls.count("end") == 1
        assert all(listener.calls == plain.calls for listener in others)

    def test_text_streamers_refuse_batches_as_in_plain_generation(self):
        def message(**kwargs: Any) -> str:
            with pytest.raises(ValueError) as caught:
                target().generate(
                    **batch(prompts(2)), max_new_tokens=4, streamer=TextStreamer(kit.tokenizer()), **kwargs
                )
            return str(caught.value)

        assert message(**ours(drafter())) == message()
        assert kit.hooks_of(target()) == 0


@cache
def calm_target(family: str, attention: str | None = "eager") -> PreTrainedModel:
    """A target of smaller numbers, so that the tolerances are far above rounding."""
    return kit.new_target(family, attn_implementation=attention, initializer_range=0.05)


class TestOutputs:
    """`return_dict_in_generate` gives what plain generation gives; of a row that has ended, the shapes only."""

    FIELDS = ("scores", "logits", "hidden_states", "attentions")

    @pytest.mark.parametrize("ends", [(), (0, 2)], ids=["same ends", "early ends"])
    @pytest.mark.parametrize("num_tokens", [1, 2, 12])
    @pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "gemma4", "gemma4_shared_kv", "qwen3_moe"])
    def test_outputs_equal_plain(self, family: str, num_tokens: int, ends: tuple[int, ...]):
        model, rows = calm_target(family), prompts(3)
        call = {**batch(rows), "max_new_tokens": num_tokens, "do_sample": False, "return_dict_in_generate": True}
        call |= {f"output_{name}": True for name in self.FIELDS}
        texts = model.generate(**call).sequences[:, 40:].tolist()
        if ends:
            call |= {"eos_token_id": [texts[row][num_tokens // (row + 2)] for row in ends], "pad_token_id": PAD}
        plain = model.generate(**call)
        lengths = [len(until(text, call.get("eos_token_id", []))) for text in texts]
        for wrong_at in STAGGERED:
            with knowing_rows(rows, texts, wrong_at):
                output = model.generate(**call, **ours(drafter()))
            assert type(output) is type(plain)
            assert output.sequences.tolist() == plain.sequences.tolist()
            for name in self.FIELDS:
                assert_same_steps(getattr(output, name), getattr(plain, name), lengths, call["attention_mask"], name)

    def test_scores_are_processed_and_logits_raw(self):
        model, rows = calm_target("llama"), prompts(3)
        call = {**batch(rows), "max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True}
        call |= {"output_scores": True, "output_logits": True, "repetition_penalty": 1.5}
        plain = model.generate(**call)
        with knowing_rows(rows, plain.sequences[:, 40:].tolist(), (1, 0, None)):
            output = model.generate(**call, **ours(drafter()))
        assert not torch.equal(output.scores[0], output.logits[0])
        for name in ("scores", "logits"):
            assert_same_steps(getattr(output, name), getattr(plain, name), [8] * 3, call["attention_mask"], name)

    def test_taps_do_not_leak_into_the_outputs(self):
        call = {**batch(prompts(3)), "do_sample": False, "max_new_tokens": 8, "return_dict_in_generate": True}
        assert set(target().generate(**call, **ours(drafter()))) == {"sequences", CACHE_NAME}

    def test_some_hidden_states_only(self):
        model, rows = calm_target("llama"), prompts(3)
        call = {**batch(rows), "do_sample": False, "max_new_tokens": 8, "return_dict_in_generate": True}
        call["output_hidden_states"] = [1, 2]
        plain = model.generate(**call)
        with knowing_rows(rows, plain.sequences[:, 40:].tolist(), (1, 0, None)):
            output = model.generate(**call, **ours(drafter()))
        steps = (output.hidden_states, plain.hidden_states)
        assert_same_steps(*steps, [8] * 3, call["attention_mask"], "hidden_states")

    def test_static_cache(self):
        model, rows = calm_target("llama"), prompts(3)
        call = {**batch(rows), "max_new_tokens": 10, "do_sample": False, "cache_implementation": "static"}
        call |= {"return_dict_in_generate": True, **{f"output_{name}": True for name in self.FIELDS}}
        plain = model.generate(**call)
        with knowing_rows(rows, plain.sequences[:, 40:].tolist(), (1, 0, None)):
            output = model.generate(**call, **ours(drafter()))
        for name in self.FIELDS:
            assert_same_steps(getattr(output, name), getattr(plain, name), [10] * 3, call["attention_mask"], name)


def assert_same_steps(
    actual: tuple, plain: tuple, lengths: Sequence[int], mask: torch.Tensor, name: str, tolerance: float = 1e-3
) -> None:
    """One entry per step: `[B, V]`, or layers of `[B, T, H]` or `[B, heads, T, keys]`; shapes always, values of those
    rows that have not ended and, in the first step, of those positions that are not padding."""
    assert len(actual) == len(plain)
    for step, pair in enumerate(zip(actual, plain, strict=True)):
        layers = [pair] if isinstance(pair[1], torch.Tensor) else zip(*pair, strict=True)
        for layer, (a, b) in enumerate(layers):
            path = f"{name}, step {step}, layer {layer}"
            assert (a is None) == (b is None), path
            if b is None:
                continue
            assert (a.shape, a.dtype) == (b.shape, b.dtype), path
            for row in range(b.shape[0]):
                if step < lengths[row]:
                    x, y = a[row], b[row]
                    if step == 0 and y.dim() > 1:
                        x, y = x[..., mask[row] != 0, :], y[..., mask[row] != 0, :]
                    torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance, msg=lambda m, p=path: f"{p}: {m}")


def assert_same_cache(actual: Any, plain: Any, mask: torch.Tensor, tolerance: float = 1e-4) -> None:
    """The same kind of cache with the same contents, padding left out.

    Args:
        mask: `[B, L]`, 0 at padding, over the positions that the cache has seen.
    """
    assert type(actual) is type(plain)
    assert int(actual.get_seq_length()) == int(plain.get_seq_length()) == mask.shape[1]
    for index, (a, b) in enumerate(zip(actual.layers, plain.layers, strict=True)):
        assert getattr(a, "record_past", False) == getattr(b, "record_past", False)
        assert (a.keys is None) == (b.keys is None)
        if b.keys is None:
            continue
        assert (a.keys.shape, a.values.shape) == (b.keys.shape, b.values.shape)
        length = min(mask.shape[1], b.keys.shape[-2])
        real = mask[:, None, -length:, None] != 0
        for x, y in ((a.keys, b.keys), (a.values, b.values)):
            x, y = (torch.where(real, states[:, :, :length], 0) for states in (x, y))
            torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance, msg=lambda m, i=index: f"layer {i}: {m}")


def grown(mask: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """A mask with `num_tokens` more positions."""
    return torch.nn.functional.pad(mask, (0, num_tokens), value=1)


CACHES: dict[str, Callable[[PreTrainedModel], Any]] = {
    "with config": lambda model: DynamicCache(config=model.config),
    "without config": lambda model: DynamicCache(),
}


class TestCaches:
    """A cache that comes in or goes out is the cache of plain generation."""

    @pytest.mark.parametrize("family", ["llama", *SLIDING])
    @pytest.mark.parametrize("num_tokens", [1, 2, 9])
    def test_returned_cache_equals_plain(self, family: str, num_tokens: int):
        model, rows = calm_target(family, None), prompts(3)
        call = {**batch(rows), "max_new_tokens": num_tokens, "do_sample": False, "return_dict_in_generate": True}
        plain = model.generate(**call)
        for wrong_at in (*STAGGERED, (3, 2, 1)):
            with knowing_rows(rows, plain.sequences[:, 40:].tolist(), wrong_at):
                output = model.generate(**call, **ours(drafter()))
            mask = grown(call["attention_mask"], num_tokens - 1)
            assert_same_cache(output[CACHE_NAME], plain[CACHE_NAME], mask)

    def test_returned_static_cache_equals_plain(self):
        model, rows = calm_target("llama", None), prompts(3)
        call = {**batch(rows), "max_new_tokens": 9, "do_sample": False, "return_dict_in_generate": True}
        call["cache_implementation"] = "static"
        plain = model.generate(**call)
        with knowing_rows(rows, plain.sequences[:, 40:].tolist(), (1, None, 0)):
            output = model.generate(**call, **ours(drafter()))
        assert_same_cache(output[CACHE_NAME], plain[CACHE_NAME], grown(call["attention_mask"], 8))

    @pytest.mark.parametrize("kind", CACHES)
    @pytest.mark.parametrize("family", ["llama", *SLIDING])
    def test_an_empty_cache_of_the_user(self, family: str, kind: str):
        caches: list[Any] = []

        def arguments() -> dict[str, Any]:
            caches.append(CACHES[kind](target(family)))
            return {CACHE_NAME: caches[-1]}

        assert_lossless(target(family), prompts(3), alone=answers(3, family), arguments=arguments)
        # It is filled, not left beside: the newest token is all that it lacks.
        assert [int(past.get_seq_length()) for past in caches] == [40 + NUM_TOKENS - 1] * len(caches)

    @pytest.mark.parametrize("family", ["llama", "gemma3"])
    def test_the_users_cache_is_the_one_returned(self, family: str):
        past = DynamicCache(config=target(family).config)
        call = {**batch(prompts(3)), "max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True}
        output = target(family).generate(**call, **ours(drafter()), **{CACHE_NAME: past})
        assert output[CACHE_NAME] is past

    def test_a_static_cache_of_the_user(self):
        def arguments() -> dict[str, Any]:
            return {CACHE_NAME: StaticCache(config=target().config, max_cache_len=80)}

        assert_lossless(target(), prompts(3), alone=answers(3), arguments=arguments)

    @pytest.mark.parametrize("only_new_ids", [False, True], ids=["whole conversation", "new ids only"])
    @pytest.mark.parametrize("second", [1, 4])
    @pytest.mark.parametrize("family", kit.FAMILIES)
    def test_part_filled_cache(self, family: str, second: int, only_new_ids: bool):
        self.check_turn(family, second, only_new_ids)

    @pytest.mark.skipif(CACHE_NAME != "cache", reason="plain generation runs the cached part again in this version")
    def test_part_filled_cache_in_chunks(self):
        self.check_turn("llama", 5, False, prefill_chunk_size=2)

    @pytest.mark.parametrize("only_new_ids", [False, True], ids=["whole conversation", "new ids only"])
    @pytest.mark.parametrize("family", ["llama", "gemma3"])
    def test_part_filled_cache_and_a_row_that_ends_early(self, family: str, only_new_ids: bool):
        self.check_turn(family, 4, only_new_ids, ends_early=True)

    def check_turn(
        self, family: str, num_second: int, only_new_ids: bool, ends_early: bool = False, **kwargs: Any
    ) -> None:
        """A second turn, each row with new tokens of its own, on a cache that plain generation filled."""
        model, first = target(family), batch(prompts(3))
        settings = {"do_sample": False, "return_dict_in_generate": True}
        second = torch.randint(1, MASK, (3, num_second), generator=torch.Generator().manual_seed(8))

        def turn() -> dict[str, Any]:
            output = model.generate(**first, max_new_tokens=7, **settings)
            ids = torch.cat((output.sequences, second), dim=-1)
            ids = ids[:, output[CACHE_NAME].get_seq_length() :] if only_new_ids else ids
            mask = grown(first["attention_mask"], 7 + num_second)
            return {"input_ids": ids, "attention_mask": mask, CACHE_NAME: output[CACHE_NAME], **settings, **kwargs}

        call = turn()
        width = call["input_ids"].shape[1]
        if ends_early:
            texts = model.generate(**call, max_new_tokens=12).sequences[:, width:].tolist()
            settings["eos_token_id"] = next(t for t in texts[0][2:8] if t not in texts[1] and t not in texts[2])
            settings["pad_token_id"] = 0
            call = turn()
        plain = model.generate(**call, max_new_tokens=12)
        real = call["attention_mask"][:, -width:] != 0
        rows = [ids[kept].tolist() for ids, kept in zip(call["input_ids"], real, strict=True)]
        texts = plain.sequences[:, width:].tolist()
        mask = grown(call["attention_mask"], 11)
        if ends_early:
            # What stands behind the end is padding.
            mask[0, mask.shape[1] - 11 + texts[0].index(settings["eos_token_id"]) + 1 :] = 0
        for wrong_at in STAGGERED:
            with drafter().trace() as trace, knowing_rows(rows, texts, wrong_at):
                output = model.generate(**turn(), max_new_tokens=12, **ours(drafter()))
            assert output.sequences.tolist() == plain.sequences.tolist()
            if not ends_early:
                assert_drafted(trace, 3, wrong_at)
            # Wide logits come with wide states.
            assert_same_cache(output[CACHE_NAME], plain[CACHE_NAME], mask, tolerance=1e-3)

    @pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "gemma4"])
    def test_a_second_call_on_the_returned_cache(self, family: str):
        model = target(family)
        alone = [continuation(model, row, 20) for row in prompts(3)]

        def both_turns(**kwargs: Any) -> torch.Tensor:
            call = {"do_sample": False, "return_dict_in_generate": True, **kwargs}
            first = model.generate(**batch(prompts(3)), max_new_tokens=9, **call)
            mask = grown(batch(prompts(3))["attention_mask"], 9)
            on_it = {CACHE_NAME: first[CACHE_NAME], "input_ids": first.sequences, "attention_mask": mask}
            return model.generate(**on_it, max_new_tokens=11, **call).sequences[:, 40:]

        assert both_turns().tolist() == alone
        with knowing_rows(prompts(3), alone, (0, None, 2)):
            assert both_turns(**ours(drafter())).tolist() == alone

    @pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
    def test_conversations_over_many_turns(self, family: str):
        model, first = target(family), batch(prompts(3))
        settings = {"do_sample": False, "return_dict_in_generate": True, "max_new_tokens": 6}

        def talk(**kwargs: Any) -> tuple[list[list[int]], Any]:
            ids, mask, past = first["input_ids"], first["attention_mask"], {}
            for num_new in (0, 3, 1, 10):
                question = torch.randint(1, MASK, (3, num_new), generator=torch.Generator().manual_seed(num_new))
                ids, mask = torch.cat((ids, question), dim=-1), grown(mask, num_new)
                output = model.generate(input_ids=ids, attention_mask=mask, **settings, **past, **kwargs)
                ids, mask, past = output.sequences, grown(mask, 6), {CACHE_NAME: output[CACHE_NAME]}
            return ids.tolist(), (past[CACHE_NAME], mask[:, :-1])

        plain, (plain_cache, mask) = talk()
        # The oracle takes all that was said after the first prompts for one answer.
        with drafter().trace() as trace, knowing_rows(prompts(3), [row[40:] for row in plain], (None, 1, 0)):
            said, (cache_, _) = talk(**ours(drafter()))
        assert said == plain
        assert_drafted(trace, 3, (None, 1, 0))
        assert_same_cache(cache_, plain_cache, mask, tolerance=1e-3)

    @pytest.mark.parametrize("chunk", [1, 3, 10, 64])
    @pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "gemma4", "gemma4_shared_kv"])
    def test_prefill_in_chunks(self, family: str, chunk: int):
        assert_lossless(target(family), prompts(3), alone=answers(3, family), prefill_chunk_size=chunk)

    def test_chunks_do_not_change_drafts(self):
        call = {**batch(prompts(3)), "do_sample": False, "max_new_tokens": NUM_TOKENS, **ours(drafter())}
        heard = []
        for settings in ({}, {"prefill_chunk_size": 3}, {"prefill_chunk_size": 16}):
            with knowing_rows(prompts(3), answers(3), (0, None, 2)) as proposals:
                target().generate(**call, **settings)
            heard.append(proposals)
        assert heard[0] == heard[1] == heard[2]
        assert all(heard[0].values())


def shuffled_map() -> tuple[DSparkDrafter, DraftVocabularyMap]:
    """A drafter whose ids are another order of the target's, and the map between them."""
    order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(7))
    moved = int((torch.arange(VOCAB) != order).sum())
    mapping = DraftVocabularyMap(order, order.argsort(), is_identity=False, num_common=VOCAB, num_moved=moved)
    return kit.new_drafter(own_embed_tokens=True, own_lm_head=True, mask_token_id=int(order[MASK])), mapping


def reduced_drafter() -> DSparkDrafter:
    assistant = kit.new_drafter(own_lm_head=True, draft_vocab_size=40)
    assistant.d2t.copy_(torch.arange(40))  # every second token
    return assistant


WINDOWED = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 6}
DRAFTERS: dict[str, Callable[[], DSparkDrafter]] = {
    "plain": kit.new_drafter,
    "eager": lambda: kit.new_drafter(attn_implementation="eager"),
    "no Markov head": lambda: kit.new_drafter(markov_head_type="none"),
    "gated": lambda: kit.new_drafter(markov_head_type="gated"),
    "rnn": lambda: kit.new_drafter(markov_head_type="rnn"),
    "no confidence head": lambda: kit.new_drafter(enable_confidence_head=False),
    "confidence of the states alone": lambda: kit.new_drafter(confidence_head_with_markov=False),
    "DFlash anchor": lambda: kit.new_drafter(sample_from_anchor=False),
    "DFlash anchor, rnn": lambda: kit.new_drafter(sample_from_anchor=False, markov_head_type="rnn"),
    "sliding window": lambda: kit.new_drafter(**WINDOWED),
    "sliding window, eager": lambda: kit.new_drafter(**WINDOWED, attn_implementation="eager"),
    "Gemma 4 backbone": lambda: kit.new_drafter(backbone="gemma4", **WINDOWED),
    "own embedding and head": lambda: kit.new_drafter(own_embed_tokens=True, own_lm_head=True),
    "reduced vocabulary": reduced_drafter,
    "blocks of 1": lambda: kit.new_drafter(block_size=1),
    "blocks of 2": lambda: kit.new_drafter(block_size=2),
    "blocks of 8": lambda: kit.new_drafter(block_size=8),
    "other taps": lambda: kit.new_drafter(target_layer_ids=[1]),
}


class TestDrafters:
    """A row's drafts are the drafts of that row alone, whatever the rows beside it have accepted.

    No comparison of texts can show an error here: the text stays the target's, and only acceptance would fall.
    """

    SABOTEURS = (0, None, 2, 1)

    def drafts(self, first: int, last: int, **kwargs: Any) -> tuple[list[list[list[int]]], list[Any]]:
        """What the real drafter proposes for each row and, where it says so, how sure it is."""
        stops = kwargs.get("eos_token_id", [])
        rows, texts = prompts(8)[first:last], [until(answer, stops) for answer in answers(8)[first:last]]
        wrong_at = [self.SABOTEURS[row % len(self.SABOTEURS)] for row in range(first, last)]
        call = {**batch(rows), "do_sample": False, "max_new_tokens": NUM_TOKENS}
        assistant = kwargs.get("assistant_model") or kwargs["custom_generate"].drafter
        with assistant.trace() as trace, knowing_rows(rows, texts, wrong_at) as heard:
            output = target().generate(**call, **kwargs)
        assert output[:, max(map(len, rows)) :].tolist() == padded(texts)
        if last - first > 1:
            return [*heard.values()], [per_row(trace, "confidence", row) for row in range(last - first)]
        # A single row may come as a batch of one or as it always did.
        confidence = [r.confidence for r in trace.rounds]
        return [*heard.values()], [[c[0] if c and isinstance(c[0], list) else c for c in confidence]]

    def assert_drafts_of_the_row_alone(self, num_rows: int = 5, **kwargs: Any) -> list[list[list[int]]]:
        together, confidence = self.drafts(0, num_rows, **kwargs)
        assert any(map(any, together))
        for row in range(num_rows):
            alone, own_confidence = self.drafts(row, row + 1, **kwargs)
            assert together[row] == alone[0]
            for ours_, theirs in zip(confidence[row], own_confidence[0], strict=True):
                assert (ours_ or []) == pytest.approx(theirs or [], abs=1e-4)
        return together

    @pytest.mark.parametrize("kind", DRAFTERS)
    def test_same_drafts(self, kind: str):
        self.assert_drafts_of_the_row_alone(**ours(DRAFTERS[kind]()))

    @pytest.mark.parametrize("kind", ["plain", "rnn", "sliding window", "DFlash anchor"])
    @pytest.mark.parametrize("threshold", [0.0, 0.3])
    def test_same_drafts_after_rows_have_left(self, kind: str, threshold: float):
        stops = {"eos_token_id": STOPS, "pad_token_id": PAD}
        lengths = [len(until(answer, STOPS)) for answer in answers(8)]
        assert len(set(lengths)) > 3
        assert lengths != sorted(lengths)
        settings = {**ours(DRAFTERS[kind]()), "assistant_confidence_threshold": threshold}
        self.assert_drafts_of_the_row_alone(num_rows=8, **settings, **stops)

    def test_same_drafts_over_another_order_of_ids(self):
        assistant, mapping = shuffled_map()
        settings = {"num_assistant_tokens_schedule": "constant", "vocabulary_map": mapping}
        self.assert_drafts_of_the_row_alone(custom_generate=SpeculativeDecoding(assistant, **settings))

    def test_rows_whose_anchor_the_drafter_does_not_know_wait(self):
        # It knows no token of the upper half: such a row gets no draft, and the others get theirs.
        ids = torch.arange(VOCAB)
        to_draft = torch.where(ids < VOCAB // 2, ids, -1)
        mapping = DraftVocabularyMap(to_draft, to_draft, is_identity=False, num_common=VOCAB // 2, num_moved=0)
        assistant = kit.new_drafter(own_embed_tokens=True, own_lm_head=True, mask_token_id=0)
        settings = {"num_assistant_tokens_schedule": "constant", "vocabulary_map": mapping}
        together = self.assert_drafts_of_the_row_alone(custom_generate=SpeculativeDecoding(assistant, **settings))
        assert all([] in drafts for drafts in together)
        assert any(any(drafts) for drafts in together)

    def test_context_that_is_absorbed_without_a_draft(self, monkeypatch: pytest.MonkeyPatch):
        # As in a call that decodes plainly for a while.
        drafts = self.drafts(0, 5, **ours(drafter()))
        monkeypatch.setattr(candidate_generator, "_MOST_WAITING", 2)
        assert self.drafts(0, 5, **ours(drafter()))[0] == drafts[0]

    @pytest.mark.parametrize("num_tokens", [1, 2, 3])
    def test_fewer_tokens(self, num_tokens: int):
        together = self.assert_drafts_of_the_row_alone(**ours(drafter()), num_assistant_tokens=num_tokens)
        assert max(map(len, itertools.chain(*together))) == num_tokens

    @pytest.mark.parametrize("kind", ["plain", "gated", "rnn", "confidence of the states alone", "DFlash anchor"])
    @pytest.mark.parametrize("threshold", [0.3, 0.5, 1.0])
    def test_a_threshold_cuts_each_row_where_it_is_cut_alone(self, kind: str, threshold: float):
        settings = {**ours(DRAFTERS[kind]()), "assistant_confidence_threshold": threshold}
        if threshold == 1.0:
            assert not any(map(any, self.drafts(0, 5, **settings)[0]))
        else:
            together = self.assert_drafts_of_the_row_alone(**settings)
            assert len(set(map(len, itertools.chain(*together)))) > 1

    @pytest.mark.parametrize("settings", [{"repetition_penalty": 1.3}, {"bad_words_ids": [[85], [44]]}], ids=str)
    def test_processors_shape_the_drafts_of_their_row(self, settings: dict[str, Any]):
        # Rows without padding, which processors would read.
        rows = [prompts(2)[1][i : i + 8] for i in range(0, 40, 8)]
        texts = [continuation(target(), row, NUM_TOKENS, **settings) for row in rows]
        call = {"do_sample": False, "max_new_tokens": NUM_TOKENS, **settings, **ours(drafter())}
        with knowing_rows(rows, texts, self.SABOTEURS) as together:
            assert target().generate(**batch(rows), **call)[:, 8:].tolist() == texts
        for index, (row, text) in enumerate(zip(rows, texts, strict=True)):
            with knowing_rows([row], [text], (self.SABOTEURS[index % 4],)) as alone:
                target().generate(**batch([row]), **call)
            assert together[index] == alone[0]

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_drafter_of_a_float32_target(self, dtype: torch.dtype):
        assistant = kit.new_drafter(own_embed_tokens=True, own_lm_head=True).to(dtype)
        assert_lossless(target(), prompts(3), alone=answers(3), assistant=assistant)

    def test_a_drafter_that_overflows_steps_aside(self):
        assistant = kit.new_drafter()
        with torch.no_grad():
            assistant.fc.weight.fill_(float("inf"))
        call = {**batch(prompts(3)), "do_sample": False, "max_new_tokens": NUM_TOKENS}
        with pytest.warns(UserWarning, match="overflow in torch.float32: it proposes nothing"):
            output = target().generate(**call, **ours(assistant))
        assert output[:, 40:].tolist() == answers(3)


class TestReturnSequences:
    """`num_return_sequences` makes rows of a prompt, each prompt's next to each other."""

    @pytest.mark.parametrize("num_rows", [1, 3])
    @pytest.mark.parametrize("wrong_at", [(None,), (0, None, 2, 1, 3)], ids=str)
    def test_sampling_that_leaves_no_choice(self, num_rows: int, wrong_at: tuple[int | None, ...]):
        settings = {"do_sample": True, "top_k": 1, "num_return_sequences": 3, "max_new_tokens": NUM_TOKENS}
        rows = [row for row in prompts(num_rows) for _ in range(3)]
        texts = [answer for answer in answers(num_rows) for _ in range(3)]
        width = max(map(len, rows))
        with drafter().trace() as trace, knowing_rows(rows, texts, wrong_at):
            output = target().generate(**batch(prompts(num_rows)), **settings, **ours(drafter()))
        assert output.tolist() == torch.cat((batch(rows)["input_ids"], torch.tensor(texts)), dim=-1).tolist()
        assert output.shape == (3 * num_rows, width + NUM_TOKENS)
        assert_drafted(trace, 3 * num_rows, wrong_at)

    def test_sampling_gives_sequences_of_their_own(self):
        torch.manual_seed(0)
        call = {**batch(prompts(2)), "do_sample": True, "max_new_tokens": 8, "num_return_sequences": 4}
        output = target().generate(**call, temperature=2.0, **ours(drafter()))
        assert output.shape == (8, 48)
        assert output[:, :40].tolist() == batch([row for row in prompts(2) for _ in range(4)])["input_ids"].tolist()
        assert len(set(map(tuple, output[:4].tolist()))) == len(set(map(tuple, output[4:].tolist()))) == 4

    def test_greedy_search_gives_one_as_in_plain_generation(self):
        def message(**kwargs: Any) -> str:
            with pytest.raises(ValueError) as caught:
                target().generate(**batch(prompts(2)), do_sample=False, num_return_sequences=2, **kwargs)
            return str(caught.value)

        assert message(**ours(drafter())) == message()

    def test_sampling_that_leaves_no_choice_with_rows_that_end(self):
        eos = ending(answers(3), 3, None, 14)
        texts = [until(answer, eos) for answer in answers(3)]
        settings = {"do_sample": True, "top_k": 1, "max_new_tokens": NUM_TOKENS, "pad_token_id": PAD}
        with knowing_rows(prompts(3), texts, (0, None, 2)):
            output = target().generate(**batch(prompts(3)), **settings, eos_token_id=eos, **ours(drafter()))
        assert output[:, 40:].tolist() == padded(texts)
