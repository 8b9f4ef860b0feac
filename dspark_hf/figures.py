"""Figures as PNG files, drawn by matplotlib, which only this module needs (`pip install "dspark-hf[plot]"`)."""

import os
from typing import Any

from .calibration import Calibration, Reliability


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError('Figures need matplotlib: pip install "dspark-hf[plot]".') from error
    matplotlib.use("Agg", force=False)
    from matplotlib import pyplot

    return pyplot


def plot_reliability(calibration: Calibration, path: str | os.PathLike) -> None:
    """Draws the reliability of survivals before and after calibration, a panel for each draft position.

    A point is a bin of predictions, as large as its share; on the diagonal, what was predicted came true.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: the calibration carries no report.
    """
    if not calibration.positions:
        raise ValueError("This calibration carries no report, only temperatures: there is nothing to draw.")
    pyplot = _pyplot()
    num_panels = len(calibration.positions)
    figure, axes = pyplot.subplots(
        1, num_panels, figsize=(2.6 * num_panels, 3.2), sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    for panel, position in zip(axes[0], calibration.positions, strict=True):
        panel.plot([0, 1], [0, 1], color="0.7", linewidth=1)
        _draw(panel, position.before, "tab:orange", f"before, ECE {100 * position.ece_before:.1f} %")
        _draw(panel, position.after, "tab:blue", f"after, ECE {100 * position.ece_after:.1f} %")
        panel.set_title(f"position {position.position}, T = {position.temperature:.2f}", fontsize=9)
        panel.set_xlabel("predicted survival", fontsize=8)
        panel.set_aspect("equal")
        panel.legend(fontsize=6, loc="upper left", frameon=False)
    axes[0][0].set_ylabel("observed survival", fontsize=8)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _draw(panel: Any, curve: Reliability, color: str, label: str) -> None:
    total = max(1, sum(curve.count))
    bins = [i for i, count in enumerate(curve.count) if count]
    predicted, observed = [curve.predicted[i] for i in bins], [curve.observed[i] for i in bins]
    panel.plot(predicted, observed, color=color, linewidth=1, label=label)
    panel.scatter(predicted, observed, s=[4 + 200 * curve.count[i] / total for i in bins], color=color, alpha=0.6)
