"""Makes the calls, and keeps what they gave: rounds of full drafts, speeds, verdicts on texts."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..benchmark.measuring import CaseMeasurer
from ..benchmark.methods import Call, find_method
from ..benchmark.models import Models
from ..comparison import judge
from ..errors import AlignmentError, UnsupportedGenerationError
from ..modeling_dspark import DSparkDrafter
from ..trace import Round
from .prompts import EvaluationCase
from .settings import EvaluationSettings

# The name of the calls that show acceptance, beside those of the schedules.
FULL = "full drafts"
# A threshold of 0: full drafts, whatever the drafter's own generation_config asks for.
_FULL_METHOD = "dspark-constant:0.0"


@dataclass(frozen=True)
class Turn:
    """One call of `generate`.

    Attributes:
        texts: new tokens of each row, up to the end of its text.
        seconds: wall time of the call; where `rounds` were noted, that of the call with the trace.
    """

    texts: list[list[int]]
    seconds: float
    rounds: list[Round] = field(default_factory=list)

    @property
    def num_new_tokens(self) -> int:
        return sum(map(len, self.texts))

    @property
    def tokens_per_second(self) -> float:
        return self.num_new_tokens / self.seconds


@dataclass(frozen=True)
class Difference:
    """A greedy text that is not plain generation's.

    Attributes:
        schedule: of the call, or `"full drafts"`.
        position: index of the first new token that differs.
        margin: how far the lower one of the two tokens lies below the highest logit there (the top-2 margin, where
            they are the top 2), in a plain pass; `None` where one text ends and the other goes on.
        rounding: the largest margin that rounding explains.
        within_rounding: whether it does.
    """

    drafter: str
    schedule: str
    dataset: str
    index: int
    position: int
    margin: float | None
    rounding: float
    within_rounding: bool


@dataclass(frozen=True)
class CaseResult:
    """One case, answered plainly and with each drafter.

    Attributes:
        turns: of each drafter, by schedule, the full drafts included.
        verdicts: of all texts of each drafter, whether they are identical and whether rounding explains them; empty
            when sampling.
        differences: the texts that are not identical.
    """

    case: EvaluationCase
    plain: Turn
    turns: dict[str, dict[str, Turn]]
    verdicts: dict[str, list[tuple[bool, bool]]]
    differences: list[Difference]


class Evaluator:
    """Answers cases, one after the other.

    Args:
        models: the target; its drafter is not looked at.
        drafters: by the names that they have in results.
    """

    def __init__(self, settings: EvaluationSettings, models: Models, drafters: Mapping[str, DSparkDrafter]):
        self.settings = settings
        self.models = models
        self.drafters = drafters
        self._measurer = CaseMeasurer(settings.of_calls, models)
        self._num_answered = 0

    def warm_up(self, case: EvaluationCase) -> None:
        """Makes every call once, and short: no measured one pays for what happens at the first one only.

        Raises:
            ValueError: a drafter does not fit the target, or cannot follow a schedule.
        """
        for drafter, schedule in self._calls():
            try:
                self._turn(case, drafter, schedule, max_new_tokens=8)
            except (AlignmentError, UnsupportedGenerationError) as error:
                raise ValueError(f"{drafter}: {error}") from error

    def answer(self, case: EvaluationCase) -> CaseResult:
        """Every call in turn, in an order that rotates from case to case."""
        calls = self._calls()
        shift = self._num_answered % len(calls)
        taken = {call: self._turn(case, *call) for call in [*calls[shift:], *calls[:shift]]}
        self._num_answered += 1
        names = [FULL, *self.settings.schedules]
        turns = {drafter: {name: taken[drafter, name] for name in names} for drafter in self.drafters}
        plain, verdicts, differences = taken["", ""], {}, []
        for drafter in self.drafters if self.settings.temperature == 0 else ():
            judged = [self._judge(case, plain, drafter, name, turns[drafter][name]) for name in names]
            verdicts[drafter] = [verdict for of_call, _ in judged for verdict in of_call]
            differences += [difference for _, of_call in judged for difference in of_call]
        return CaseResult(case, plain, turns, verdicts, differences)

    def _calls(self) -> list[tuple[str, str]]:
        """Drafter and schedule of each call; both empty for plain generation."""
        return [("", ""), *((drafter, name) for drafter in self.drafters for name in (FULL, *self.settings.schedules))]

    def _turn(self, case: EvaluationCase, name: str, schedule: str, max_new_tokens: int | None = None) -> Turn:
        inputs = case.inputs(self.models.pad_token_id, self.models.target.device)
        drafter = self.drafters.get(name, self.models.drafter)
        seed = self.settings.seed + self._num_answered
        options: dict[str, Any] = {"inputs": inputs, "seed": seed, "max_new_tokens": max_new_tokens}
        if schedule == FULL:
            call = Call(drafter, num_assistant_tokens=drafter.config.num_draft_tokens)
            with drafter.trace() as trace:
                texts = self._measurer.generate(find_method(_FULL_METHOD), call=call, **options)
            return Turn(texts, trace.seconds, trace.rounds)
        method = find_method(f"dspark-{schedule}" if schedule else "plain")
        started = time.perf_counter()
        texts = self._measurer.generate(method, call=Call(drafter), **options)
        return Turn(texts, time.perf_counter() - started)

    def _judge(
        self, case: EvaluationCase, plain: Turn, drafter: str, schedule: str, turn: Turn
    ) -> tuple[list[tuple[bool, bool]], list[Difference]]:
        verdicts, differences = [], []
        rows: Sequence[Any] = [*zip(case.indices, case.prompt_ids, plain.texts, turn.texts, strict=True)]
        for index, *texts in rows:
            verdict = judge(self.models.target, *texts)
            verdicts.append((verdict.identical, verdict.explained))
            if verdict.position is not None:
                where = (drafter, schedule, case.group, index, verdict.position)
                margin = verdict.margin if math.isfinite(verdict.margin) else None
                differences.append(Difference(*where, margin, verdict.rounding, verdict.explained))
        return verdicts, differences
