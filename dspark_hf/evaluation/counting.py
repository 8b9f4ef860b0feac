"""From rounds and calls to the numbers of an evaluation: pure functions."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan
from statistics import fmean
from typing import Any

from ..benchmark.summary import spread
from ..calibrating import Blocks
from ..calibration import report
from ..comparison import geometric_mean
from ..trace import Round, Trace


@dataclass(frozen=True)
class PositionNumbers:
    """The confidences of one draft position.

    Attributes:
        position: from 1.
        survival_rate: share of the drafts that are accepted up to here.
        ece, brier: expected calibration error and mean squared error of the survival, the product of the confidences
            up to here, over all drafts.
        auc: area under the ROC curve of the confidence, among the drafts accepted before the position; `None` where
            all of them were accepted here, or none.
    """

    position: int
    survival_rate: float
    ece: float
    brier: float
    auc: float | None


@dataclass(frozen=True)
class ConfidenceNumbers:
    """How far confidences are to be trusted (paper, section 3.3), as the drafter gives them, its calibration included.

    Attributes:
        num_drafts: full drafts that were judged to their first rejection, or accepted in full.
        ece, brier, auc: means over the positions (`auc`: over those that have one).
    """

    num_drafts: int
    ece: float
    brier: float
    auc: float | None
    positions: list[PositionNumbers]


@dataclass(frozen=True)
class DraftNumbers:
    """What the target made of full drafts.

    Attributes:
        num_rounds: of all rows, the prefill not counted.
        num_new_tokens: that these rounds added.
        acceptance_length: τ, tokens per round and row, bonus included; `None` without a round.
        verified, accepted: draft tokens.
        verify_rate: accepted over verified draft tokens; `None` where nothing was drafted.
        judged_per_position: drafts that reached each position: all draft tokens before it were accepted, and the
            target said something about it.
        acceptance_rate_per_position: how often the draft token was accepted there; `None` where no draft came so far.
        confidence: `None` without a confidence head, or without a full draft.
    """

    num_rounds: int
    num_new_tokens: int
    acceptance_length: float | None
    verified: int
    accepted: int
    verify_rate: float | None
    judged_per_position: list[int]
    acceptance_rate_per_position: list[float | None]
    confidence: ConfidenceNumbers | None


@dataclass(frozen=True)
class SpeedNumbers:
    """Speed over calls.

    Attributes:
        tokens_per_second: of all rows of a call, prefill included; geometric mean.
        ratio_to_plain: to plain generation in the same turn; geometric mean.
        ratio_spread: its extremes and quartiles.
        worst: `names` of the prompts of the call with the lowest ratio, and that `ratio_to_plain`.
    """

    tokens_per_second: float
    ratio_to_plain: float
    ratio_spread: dict[str, float]
    worst: dict[str, Any]


@dataclass(frozen=True)
class AuditNumbers:
    """Greedy texts against those of plain generation: the three numbers add up to `num_texts`."""

    num_texts: int
    num_identical: int
    num_within_rounding: int
    num_beyond_rounding: int


def count_drafts(rounds: Sequence[Round], num_draft_tokens: int) -> DraftNumbers:
    """The numbers of rounds with full drafts.

    Args:
        num_draft_tokens: what a block gives.
    """
    rows = [row for one in rounds for row in one.per_row()]
    num_new, verified = sum(new for _, _, new in rows), sum(len(proposed) for proposed, _, _ in rows)
    accepted = sum(count for _, count, _ in rows)
    judged, stood = [0] * num_draft_tokens, [0] * num_draft_tokens
    for proposed, count, new in rows:
        # Without a token of the target at its end, a stop ended the row: nobody judged what came next.
        num_judged = min(len(proposed), count + 1) if new > count else count
        for position in range(num_judged):
            judged[position] += 1
            stood[position] += position < count
    return DraftNumbers(
        num_rounds=len(rows),
        num_new_tokens=num_new,
        acceptance_length=num_new / len(rows) if rows else None,
        verified=verified,
        accepted=accepted,
        verify_rate=accepted / verified if verified else None,
        judged_per_position=judged,
        acceptance_rate_per_position=[s / j if j else None for s, j in zip(stood, judged, strict=True)],
        confidence=_confidence(rounds, num_draft_tokens),
    )


def _confidence(rounds: Sequence[Round], num_draft_tokens: int) -> ConfidenceNumbers | None:
    blocks = Blocks()
    blocks.add(Trace(rounds=list(rounds)), num_draft_tokens, calibration=None)
    if not blocks.accepted:
        return None
    positions = [
        PositionNumbers(p.position, p.survival_rate, p.ece_before, p.brier_before, None if isnan(p.auc) else p.auc)
        for p in report(*blocks.tensors(), temperatures=[1.0] * num_draft_tokens)
    ]
    areas = [p.auc for p in positions if p.auc is not None]
    return ConfidenceNumbers(
        num_drafts=len(blocks.accepted),
        ece=fmean(p.ece for p in positions),
        brier=fmean(p.brier for p in positions),
        auc=fmean(areas) if areas else None,
        positions=positions,
    )


def count_speed(names: Sequence[list[str]], speeds: Sequence[float], plain: Sequence[float]) -> SpeedNumbers:
    """The speed of calls.

    Args:
        names: the prompts of each call.
        speeds, plain: tokens per second of each call, and of plain generation on the same prompts.
    """
    ratios = [own / base for own, base in zip(speeds, plain, strict=True)]
    worst = min(range(len(ratios)), key=ratios.__getitem__)
    return SpeedNumbers(
        tokens_per_second=geometric_mean(speeds),
        ratio_to_plain=geometric_mean(ratios),
        ratio_spread=spread(ratios),
        worst={"names": names[worst], "ratio_to_plain": ratios[worst]},
    )


def count_texts(verdicts: Sequence[tuple[bool, bool]]) -> AuditNumbers:
    """The numbers of verdicts, each `(identical, explained)`."""
    identical, explained = sum(one for one, _ in verdicts), sum(one for _, one in verdicts)
    return AuditNumbers(len(verdicts), identical, explained - identical, len(verdicts) - explained)
