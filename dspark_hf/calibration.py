"""Calibrated confidences: what the confidence head says against what happens, and temperatures that mend it.

The scheduler reads products of confidences, a_k = c_1 ... c_k, as the chance that a draft survives up to position k.
Sequential temperature scaling (paper, section 3.3) makes them that: for position 1, 2, ... in turn it searches the
temperature T_k of c_k = sigmoid(z_k / T_k) with which a_k is calibrated best, the positions before it fixed.

A temperature cannot mend a head that is sure of one thing and asked about another: heads learn the acceptance of
sampling, and greedy decoding accepts less often. So a shift b_k may be searched with it,
c_k = sigmoid(z_k / T_k + b_k). Both keep the order of the confidences of their position: no ranking changes within it.

Numbers and one file; `calibrating` runs the rounds that they come from.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from .checkpoints.files import optional_file, write_whole

CALIBRATION_NAME = "dspark_calibration.json"

NUM_BINS = 15
# Temperatures of the search: 0.1 to 10, even in the logarithm, 1 among them; with shifts, fewer of them.
_GRID = torch.logspace(-1, 1, 201, dtype=torch.float64)
_COARSE_GRID = torch.logspace(-1, 1, 41, dtype=torch.float64)
_SHIFTS = torch.linspace(-3, 3, 61, dtype=torch.float64)


@dataclass(frozen=True)
class Reliability:
    """A curve: in each bin of predicted chances, how many there are, their mean, and how often they came true."""

    count: list[int]
    predicted: list[float]
    observed: list[float]


@dataclass(frozen=True)
class PositionReport:
    """One position of the block, before and after calibration.

    Attributes:
        position: from 1.
        temperature, shift: of the calibrated confidence.
        num_reached: blocks whose draft tokens before this position were all accepted.
        survival_rate: share of all blocks whose draft is accepted up to here.
        ece_before, ece_after: expected calibration error of the survival a_k, over all blocks.
        brier_before, brier_after: mean squared error of a_k.
        auc: area under the ROC curve of c_k among the blocks that reached the position, the same before and after;
            NaN where all of them, or none, were accepted.
        before, after: reliability of a_k.
    """

    position: int
    temperature: float
    num_reached: int
    survival_rate: float
    ece_before: float
    ece_after: float
    brier_before: float
    brier_after: float
    auc: float
    before: Reliability
    after: Reliability
    shift: float = 0.0


@dataclass(frozen=True)
class Calibration:
    """Temperatures of the confidences of one drafter, and what they were fitted to.

    Attributes:
        temperatures: T_1, T_2, ..., one per draft position; 1 changes nothing.
        shifts: b_1, b_2, ..., as many; 0 changes nothing.
        positions: how good the confidences were and are, on blocks that the fit did not see.
        num_blocks: blocks of the fit, and of the report.
        provenance: target, prompts, decoding settings, versions: whatever helps to judge whether it applies.
    """

    temperatures: list[float]
    positions: list[PositionReport] = field(default_factory=list)
    num_blocks: dict[str, int] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)
    shifts: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        for temperature in self.temperatures:
            if not _is_number(temperature) or not 0 < temperature < 1e6:
                raise ValueError(f"`temperatures` holds {temperature!r}, expected positive numbers, one per position.")
        if not self.shifts:
            object.__setattr__(self, "shifts", [0.0] * len(self.temperatures))
        for shift in self.shifts:
            if not _is_number(shift) or not -1e6 < shift < 1e6:
                raise ValueError(f"`shifts` holds {shift!r}, expected numbers, one per position.")
        if len(self.shifts) != len(self.temperatures):
            raise ValueError(f"`shifts` has {len(self.shifts)} numbers, expected {len(self.temperatures)}.")

    def applied(self, logits: torch.Tensor, position: int = 0) -> torch.Tensor:
        """`[..., n]` logits of the head, of n draft positions from `position` on, to calibrated ones."""
        numbers = [
            torch.tensor(values[position : position + logits.shape[-1]], dtype=logits.dtype, device=logits.device)
            for values in (self.temperatures, self.shifts)
        ]
        return logits / numbers[0] + numbers[1]

    def undone(self, logits: torch.Tensor) -> torch.Tensor:
        """Calibrated logits `[..., n]` of the first n positions to those of the head."""
        temperatures, shifts = (
            torch.tensor(values[: logits.shape[-1]], dtype=logits.dtype) for values in (self.temperatures, self.shifts)
        )
        return (logits - shifts) * temperatures

    @property
    def ece(self) -> tuple[float, float]:
        """Expected calibration error before and after, mean of all positions."""
        num = max(1, len(self.positions))
        return sum(p.ece_before for p in self.positions) / num, sum(p.ece_after for p in self.positions) / num

    def save(self, folder: str | os.PathLike) -> Path:
        """Writes `dspark_calibration.json` into a folder, beside the drafter."""
        path = Path(folder) / CALIBRATION_NAME
        write_whole(path, asdict(self))
        return path

    @classmethod
    def load(cls, source: str | os.PathLike, **location: Any) -> "Calibration | None":
        """Reads the file of a folder or a repository; `None` where there is none.

        Args:
            location: as for `from_pretrained`: `revision`, `token`, `cache_dir`, ...

        Raises:
            OSError: the file is not what it should be.
        """
        path = optional_file(source, CALIBRATION_NAME, **location)
        if path is None:
            return None
        try:
            return cls._from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise OSError(
                f"{path} is not a calibration ({error}). Delete it, or write it anew with `dspark-hf calibrate`."
            ) from error

    @classmethod
    def _from_dict(cls, fields: dict[str, Any]) -> "Calibration":
        positions = [
            PositionReport(
                **{
                    **p,
                    # JSON knows no NaN.
                    "auc": float("nan") if p["auc"] is None else p["auc"],
                    "before": Reliability(**p["before"]),
                    "after": Reliability(**p["after"]),
                }
            )
            for p in fields.get("positions", [])
        ]
        return cls(
            temperatures=list(fields["temperatures"]),
            positions=positions,
            num_blocks=dict(fields.get("num_blocks", {})),
            provenance=dict(fields.get("provenance", {})),
            shifts=list(fields.get("shifts", [])),
        )


def fit(logits: torch.Tensor, accepted: torch.Tensor, with_shifts: bool = False) -> tuple[list[float], list[float]]:
    """Sequential temperature scaling.

    Args:
        logits: `[N, n]` of the confidence head, over the drafted tokens of each block.
        accepted: `[N]`, how many of them were accepted.
        with_shifts: search shifts as well.

    Returns:
        T_1, ..., T_n and b_1, ..., b_n. Where errors are the same, those nearest to 1 and 0.
    """
    logits, prefix = logits.double(), torch.ones(len(logits), dtype=torch.float64)
    grid = _COARSE_GRID if with_shifts else _GRID
    scales = grid[grid.log().abs().argsort(stable=True)]
    offsets = _SHIFTS[_SHIFTS.abs().argsort(stable=True)] if with_shifts else torch.zeros(1, dtype=torch.float64)
    temperatures, shifts = [], []
    for k in range(logits.shape[1]):
        survived = (accepted > k).double()
        best = (float("inf"), 1.0, 0.0)
        for shift in offsets.tolist():
            candidates = prefix[:, None] * torch.sigmoid(logits[:, k, None] / scales + shift)
            for temperature, predicted in zip(scales.tolist(), candidates.T, strict=True):
                error = expected_calibration_error(predicted, survived)
                if error < best[0] - 1e-12:
                    best = error, temperature, shift
        temperatures.append(best[1])
        shifts.append(best[2])
        prefix = prefix * torch.sigmoid(logits[:, k] / best[1] + best[2])
    return temperatures, shifts


def report(
    logits: torch.Tensor, accepted: torch.Tensor, temperatures: Sequence[float], shifts: Sequence[float] | None = None
) -> list[PositionReport]:
    """How good confidences are with these numbers and without; arguments as for `fit`."""
    logits, positions = logits.double(), []
    calibration = Calibration(list(temperatures), shifts=list(shifts or []))
    raw, mended = torch.sigmoid(logits).cumprod(1), torch.sigmoid(calibration.applied(logits)).cumprod(1)
    for k, temperature in enumerate(temperatures):
        survived, reached = (accepted > k).double(), accepted >= k
        before, after = raw[:, k], mended[:, k]
        positions.append(
            PositionReport(
                position=1 + k,
                temperature=float(temperature),
                shift=float(calibration.shifts[k]),
                num_reached=int(reached.sum()),
                survival_rate=float(survived.mean()),
                ece_before=expected_calibration_error(before, survived),
                ece_after=expected_calibration_error(after, survived),
                brier_before=float((before - survived).square().mean()),
                brier_after=float((after - survived).square().mean()),
                auc=area_under_roc(logits[reached, k], survived[reached]),
                before=reliability(before, survived),
                after=reliability(after, survived),
            )
        )
    return positions


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def expected_calibration_error(predicted: torch.Tensor, came_true: torch.Tensor, num_bins: int = NUM_BINS) -> float:
    """Mean distance of predicted chances `[N]` and observed frequencies, over bins of equal width, by their counts."""
    bins = (predicted * num_bins).long().clamp(0, num_bins - 1)
    difference = torch.zeros(num_bins, dtype=torch.float64).index_add_(0, bins, (predicted - came_true).double())
    return float(difference.abs().sum() / max(1, len(predicted)))


def reliability(predicted: torch.Tensor, came_true: torch.Tensor, num_bins: int = NUM_BINS) -> Reliability:
    """The curve behind `expected_calibration_error`; empty bins have mean and frequency 0."""
    bins = (predicted * num_bins).long().clamp(0, num_bins - 1)
    zeros = torch.zeros(num_bins, dtype=torch.float64)
    count = torch.bincount(bins, minlength=num_bins)
    share = 1 / count.clamp_min(1).double()
    return Reliability(
        count.tolist(),
        (zeros.index_add(0, bins, predicted.double()) * share).tolist(),
        (zeros.index_add(0, bins, came_true.double()) * share).tolist(),
    )


def area_under_roc(scores: torch.Tensor, came_true: torch.Tensor) -> float:
    """The chance that of two cases the one that came true has the higher score; ties count half. NaN without both."""
    num_true = int(came_true.sum())
    num_false = len(came_true) - num_true
    if num_true == 0 or num_false == 0:
        return float("nan")
    _, inverse, counts = scores.unique(return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    ranks = (last - (counts.double() - 1) / 2)[inverse]
    return float((ranks[came_true > 0].sum() - num_true * (num_true + 1) / 2) / (num_true * num_false))
