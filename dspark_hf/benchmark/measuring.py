"""Runs every method on a case, in turns, and takes down what can be measured.

Each turn is two calls. In the first one a streamer or a trace is attached, and memory is counted: it gives the time to
the first token, the parts of a round and the passes of the target. The second one, with nothing attached, gives the
speed.
"""

import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import BatchEncoding
from transformers.generation.streamers import BaseStreamer

from ..comparison import GREEDY, Verdict, judge
from ..simulation import SimulatedProposals
from ..trace import Round, Trace
from .memory import MemoryGrowth
from .methods import METHODS, Call, Method, find_method
from .models import Models
from .prompts import Case
from .settings import BenchmarkSettings

# Each call may leave the texts known so far at a new place.
_MOST_REHEARSALS = 8


@dataclass(frozen=True)
class RoundParts:
    """Where the rounds of our loop spent their time.

    Attributes:
        num_rounds: rounds after the prefill.
        median_ms: of one round: `round` in total, `drafter` (without the chain), `markov` (the chain), `target`
            (the forward pass) and `overhead` (everything else).
        seconds: the same, summed up.
        sources: how many rounds (in a batch: rows of rounds) got their proposals from where.
    """

    num_rounds: int
    median_ms: dict[str, float]
    seconds: dict[str, float]
    sources: dict[str, int]


@dataclass(frozen=True)
class Measurement:
    """One case answered by one method.

    Attributes:
        num_new_tokens: of all rows.
        tokens_per_second: of all rows, prefill included; the median of the repeats.
        ratio_to_plain: the median over the repeats of the ratio to plain generation in the same turn.
        ratios, seconds: of each repeat.
        first_token_seconds, decode_seconds: from the call to the first token, and from there on; medians.
        num_passes: passes of the target after the prefill.
        acceptance_length: tokens of a row per pass.
        memory_growth: bytes at the peak beyond those before the call; `None` where it cannot be measured.
        identical, explained, verdicts: of each row against plain generation; empty when sampling.
        simulated_acceptance: `None`: the proposals are the drafter's own, or there are none.
    """

    num_new_tokens: int
    tokens_per_second: float
    ratio_to_plain: float
    ratios: list[float]
    seconds: list[float]
    first_token_seconds: float
    decode_seconds: float
    num_passes: int
    acceptance_length: float | None
    memory_growth: int | None
    identical: list[bool]
    explained: list[bool]
    verdicts: list[str]
    acceptance_rate_per_position: list[float] | None = None
    round_parts: RoundParts | None = None
    simulated_acceptance: float | None = None


@dataclass(frozen=True)
class CaseResult:
    """One case, and what each method did with it."""

    group: str
    names: list[str]
    prompt_lengths: list[int]
    measurements: dict[str, Measurement]
    simulated_acceptance: float | None = None


@dataclass(frozen=True)
class _Record:
    """What an attended call gave."""

    first_token_seconds: float
    decode_seconds: float
    num_passes: int
    acceptance_length: float | None
    memory_growth: int | None
    trace: Trace | None = None


@dataclass
class _Turns:
    """What one method gave in each turn."""

    records: list[_Record] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    texts: list[list[list[int]]] = field(default_factory=list)

    @property
    def num_new_tokens(self) -> int:
        return sum(map(len, self.texts[0]))

    @property
    def speeds(self) -> list[float]:
        return [sum(map(len, texts)) / s for texts, s in zip(self.texts, self.seconds, strict=True)]

    def median(self, name: str) -> Any:
        values = [value for record in self.records if (value := getattr(record, name)) is not None]
        return statistics.median(values) if values else None


class CaseMeasurer:
    """Measures cases, one after the other."""

    def __init__(self, settings: BenchmarkSettings, models: Models):
        self.settings = settings
        self.models = models
        self._num_measured = 0

    def measure(self, case: Case) -> CaseResult:
        """Every method in turn, `settings.repeats` times, in an order that rotates from turn to turn."""
        inputs = case.inputs(self.models.pad_token_id, self.models.target.device)
        proposals = self._rehearse(inputs)
        names = self.settings.method_names
        turns = {name: _Turns() for name in names}
        for repeat in range(self.settings.repeats):
            shift = (self._num_measured + repeat) % len(names)
            for name in [*names[shift:], *names[:shift]]:
                self._take_turn(name, inputs, proposals, repeat, turns[name])
        self._num_measured += 1
        return CaseResult(
            case.group,
            case.names,
            [len(ids) for ids in case.prompt_ids],
            self._evaluated(case, turns),
            self.settings.simulate_acceptance,
        )

    def warm_up(self, case: Case) -> None:
        """Calls every method once, so that no measured call pays for what happens only at the first one."""
        inputs = case.inputs(self.models.pad_token_id, self.models.target.device)
        proposals = self._rehearse(inputs, max_new_tokens=8)
        for name in self.settings.method_names:
            self.generate(find_method(name), inputs, self._call(proposals), max_new_tokens=8)

    def _rehearse(self, inputs: BatchEncoding, **options: Any) -> SimulatedProposals | None:
        """Lets a simulated drafter learn what the target says to a prompt, in each method's own rounding."""
        acceptance = self.settings.simulate_acceptance
        if acceptance is None:
            return None
        vocab_size = self.models.target.config.get_text_config(decoder=True).vocab_size
        proposals = SimulatedProposals(inputs["input_ids"].shape[1], acceptance, vocab_size, self.settings.seed)
        device = self.models.target.device
        proposals.learn(self.generate(METHODS["plain"], inputs, self._call(None), **options), device)
        for method in filter(lambda method: method.drafts, map(find_method, self.settings.method_names)):
            for _ in range(_MOST_REHEARSALS):
                texts = self.generate(method, inputs, self._call(proposals), **options)
                if not proposals.learn(texts, device):
                    break
        return proposals

    def _call(self, proposals: SimulatedProposals | None) -> Call:
        models = self.models
        return Call(models.drafter, models.assistant, self.settings.num_assistant_tokens, proposals)

    def _take_turn(
        self, name: str, inputs: BatchEncoding, proposals: SimulatedProposals | None, repeat: int, turns: _Turns
    ) -> None:
        method, call = find_method(name), self._call(proposals)
        seed = self.settings.seed + repeat
        turns.records.append(self._record(method, inputs, call, seed))
        texts, seconds = _timed(lambda: self.generate(method, inputs, call, seed))
        turns.texts.append(texts)
        turns.seconds.append(seconds)
        if proposals is not None:
            proposals.learn(texts, self.models.target.device)

    def _record(self, method: Method, inputs: BatchEncoding, call: Call, seed: int) -> _Record:
        clock = None if method.is_traced else _ArrivalClock()
        call = replace(call, streamer=clock)
        drafter = self.models.drafter
        with (
            MemoryGrowth(self.models.target.device) as memory,
            drafter.trace() if method.is_traced else nullcontext() as trace,
        ):
            if clock is not None:
                clock.start()
            texts, seconds = _timed(lambda: self.generate(method, inputs, call, seed))
        if trace is not None:
            summary = trace.summary()
            decode_seconds = summary.seconds - summary.prefill_seconds
            return _Record(
                seconds - decode_seconds,
                decode_seconds,
                summary.num_rounds,
                summary.acceptance_length or None,
                memory.num_bytes,
                trace,
            )
        assert clock is not None
        passes = clock.num_passes
        length = (sum(map(len, texts)) - clock.num_first) / len(texts) / passes if passes else None
        return _Record(clock.first, seconds - clock.first, passes, length, memory.num_bytes)

    def generate(
        self,
        method: Method,
        inputs: BatchEncoding,
        call: Call,
        seed: int | None = None,
        max_new_tokens: int | None = None,
    ) -> list[list[int]]:
        """The new tokens of each row, up to the end of its text."""
        settings = self.settings
        options: dict[str, Any] = dict(GREEDY)
        if settings.do_sample:
            options = {"do_sample": True, "temperature": settings.temperature, "num_beams": 1}
            given = {"top_k": settings.top_k, "top_p": settings.top_p}
            options |= {name: value for name, value in given.items() if value is not None}
            torch.manual_seed(settings.seed if seed is None else seed)
        options["max_new_tokens"] = settings.max_new_tokens if max_new_tokens is None else max_new_tokens
        target: Any = self.models.target
        output = target.generate(**inputs, **options, streamer=call.streamer, **method.arguments(call))
        # The copy to the host is inside the measured time: it waits for an accelerator to finish.
        rows = output[:, inputs["input_ids"].shape[1] :].tolist()
        return [self._until_end(row) for row in rows]

    def _until_end(self, token_ids: list[int]) -> list[int]:
        stops = self.models.eos_token_ids
        end = next((i + 1 for i, token in enumerate(token_ids) if token in stops), len(token_ids))
        return token_ids[:end]

    def _evaluated(self, case: Case, turns: dict[str, _Turns]) -> dict[str, Measurement]:
        plain = turns["plain"]
        return {name: self._measurement(case, find_method(name), each, plain) for name, each in turns.items()}

    def _measurement(self, case: Case, method: Method, turns: _Turns, plain: _Turns) -> Measurement:
        verdicts = []
        if not self.settings.do_sample:
            # With prices that move, each repeat may draft otherwise: what counts of a prompt is its worst text.
            rows = zip(case.prompt_ids, plain.texts[0], *turns.texts, strict=True)
            verdicts = [self._worst_verdict(ids, text, others) for ids, text, *others in rows]
        ratios = [own / base for own, base in zip(turns.speeds, plain.speeds, strict=True)]
        traces = [record.trace for record in turns.records if record.trace is not None]
        return Measurement(
            num_new_tokens=turns.num_new_tokens,
            tokens_per_second=statistics.median(turns.speeds),
            ratio_to_plain=statistics.median(ratios),
            ratios=ratios,
            seconds=turns.seconds,
            first_token_seconds=turns.median("first_token_seconds"),
            decode_seconds=turns.median("decode_seconds"),
            num_passes=int(turns.median("num_passes")),
            acceptance_length=turns.median("acceptance_length"),
            memory_growth=turns.median("memory_growth"),
            identical=[verdict.identical for verdict in verdicts],
            explained=[verdict.explained for verdict in verdicts],
            verdicts=[str(verdict) for verdict in verdicts],
            acceptance_rate_per_position=traces[0].summary().acceptance_rate_per_position if traces else None,
            round_parts=round_parts([r for trace in traces for r in trace.rounds]),
            simulated_acceptance=self.settings.simulate_acceptance if method.drafts else None,
        )

    def _worst_verdict(self, prompt_ids: list[int], plain: list[int], texts: Sequence[list[int]]) -> Verdict:
        distinct = {tuple(text): text for text in texts}.values()
        verdicts = [judge(self.models.target, prompt_ids, plain, text) for text in distinct]
        return min(verdicts, key=lambda verdict: (verdict.explained, verdict.identical))


class _ArrivalClock(BaseStreamer):
    """Notes when tokens arrive. transformers' loops hand over the prompt first, then the tokens of each pass.

    Attributes:
        first: seconds from `start` to the first tokens.
        num_first: how many those were.
        num_passes: passes after the one that gave the first tokens.
    """

    def __init__(self) -> None:
        self.first = 0.0
        self.num_first = 0
        self.num_passes = -2  # neither the prompt nor the prefill counts

    def start(self) -> None:
        self._started = time.perf_counter()

    def put(self, value: torch.Tensor) -> None:
        self.num_passes += 1
        if self.num_passes == -1:
            return
        if self.num_passes == 0:
            self.first = time.perf_counter() - self._started
            self.num_first = value.numel()

    def end(self) -> None:
        pass


def round_parts(rounds: Sequence[Round]) -> RoundParts | None:
    """The parts of some rounds; `None` without any."""
    if not rounds:
        return None
    parts: dict[str, list[float]] = {
        "round": [r.seconds for r in rounds],
        "drafter": [r.draft_seconds - r.chain_seconds for r in rounds],
        "markov": [r.chain_seconds for r in rounds],
        "target": [r.verify_seconds for r in rounds],
        "overhead": [r.seconds - r.draft_seconds - r.verify_seconds for r in rounds],
    }
    sources = Counter(source for r in rounds for source in (r.source if r.is_batch else [r.source]))
    return RoundParts(
        num_rounds=len(rounds),
        median_ms={name: 1000 * statistics.median(values) for name, values in parts.items()},
        seconds={name: sum(values) for name, values in parts.items()},
        sources=dict(sources),
    )


def _timed(call: Callable[[], list[list[int]]]) -> tuple[list[list[int]], float]:
    started = time.perf_counter()
    result = call()
    return result, time.perf_counter() - started
