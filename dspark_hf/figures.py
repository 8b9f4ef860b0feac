"""Figures as PNG files, drawn by matplotlib, which only this module needs (`pip install "dspark-hf[plot]"`)."""

import os
from collections.abc import Mapping, Sequence
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


def require_matplotlib() -> None:
    """Says so before any work where a figure could not be drawn after it.

    Raises:
        ImportError: matplotlib is missing.
    """
    _pyplot()


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


def plot_thresholds(curves: dict[str, list[tuple[float, float, float]]], path: str | os.PathLike) -> None:
    """Draws what a static confidence threshold does: acceptance rate (left) and tokens per round (right) against it.

    Args:
        curves: by name, `(threshold, accepted over verified draft tokens, tokens per round)`.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: there is no point to draw.
    """
    if not any(curves.values()):
        raise ValueError("No threshold was measured: name methods like dspark-confidence:0.5.")
    pyplot = _pyplot()
    figure, (rates, lengths) = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for name, points in curves.items():
        thresholds = [threshold for threshold, _, _ in points]
        rates.plot(thresholds, [100 * rate for _, rate, _ in points], marker="o", markersize=4, label=name)
        lengths.plot(thresholds, [length for _, _, length in points], marker="o", markersize=4, label=name)
    rates.set_ylabel("accepted of verified draft tokens, %")
    rates.set_ylim(0, 100)
    lengths.set_ylabel("tokens per round (τ)")
    lengths.set_ylim(bottom=1)
    for panel in (rates, lengths):
        panel.set_xlabel("assistant_confidence_threshold")
        panel.grid(alpha=0.3)
    lengths.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def plot_costs(
    contexts: dict[int, tuple[dict[int, dict[int, float]], dict[int, dict[int, float]]]], path: str | os.PathLike
) -> None:
    """Draws the cost curve: seconds of the target's pass by its draft tokens, and of a draft, for each batch size.

    Args:
        contexts: by context length, seconds of passes by rows and by draft tokens of all rows, and seconds of drafts
            by rows and by draft tokens of a row.

    Raises:
        ImportError: matplotlib is missing.
    """
    pyplot = _pyplot()
    figure, panels = pyplot.subplots(
        1, len(contexts), figsize=(1 + 4.5 * len(contexts), 3.8), sharey=True, squeeze=False, layout="constrained"
    )
    for panel, (context_length, (passes, drafts)) in zip(panels[0], sorted(contexts.items()), strict=True):
        for number, (num_rows, by_size) in enumerate(sorted(passes.items())):
            color, rows = f"C{number}", "1 row" if num_rows == 1 else f"{num_rows} rows"
            sizes, lengths = sorted(by_size), sorted(drafts[num_rows])
            of_row = [size / num_rows for size in sizes]
            panel.plot(of_row, [1e3 * by_size[n] for n in sizes], marker="o", markersize=4, color=color, label=rows)
            draft_ms = [1e3 * drafts[num_rows][n] for n in lengths]
            panel.plot(lengths, draft_ms, linestyle="--", marker=".", color=color, label=f"{rows}: draft")
        panel.set_title(f"{context_length:,} tokens of context", fontsize=9)
        panel.set_xlabel("draft tokens of a row")
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("milliseconds")
    panels[0][0].legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def plot_acceptance_by_position(rates: Mapping[str, Sequence[float | None]], path: str | os.PathLike) -> None:
    """Draws how often a draft token is accepted at each position, given that those before it were; a line per drafter.

    Args:
        rates: of each drafter, from position 1 on; `None` where no draft came so far.

    Raises:
        ImportError: matplotlib is missing.
    """
    pyplot = _pyplot()
    figure, panel = pyplot.subplots(figsize=(5.5, 3.8), layout="constrained")
    for name, of_drafter in rates.items():
        known = [(position, 100 * rate) for position, rate in enumerate(of_drafter, 1) if rate is not None]
        panel.plot([p for p, _ in known], [r for _, r in known], marker="o", markersize=4, label=name)
    panel.set_xticks(range(1, 1 + max(map(len, rates.values()))))
    panel.set_xlabel("draft position")
    panel.set_ylabel("accepted, of drafts accepted so far, %")
    panel.set_ylim(0, 100)
    panel.grid(alpha=0.3)
    panel.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def plot_acceptance_lengths(lengths: Mapping[str, Mapping[str, float | None]], path: str | os.PathLike) -> None:
    """Draws τ by dataset, a bar for each drafter; a line at 1, what plain decoding gives.

    Args:
        lengths: of each drafter, by dataset, the same ones; `None` without a round.

    Raises:
        ImportError: matplotlib is missing.
    """
    pyplot = _pyplot()
    datasets, width = list(next(iter(lengths.values()))), 0.8 / len(lengths)
    figure, panel = pyplot.subplots(figsize=(2 + 1.1 * len(datasets), 3.8), layout="constrained")
    for number, (name, of_drafter) in enumerate(lengths.items()):
        left = [place - 0.4 + width * (number + 0.5) for place in range(len(datasets))]
        bars = panel.bar(left, [of_drafter[dataset] or 0.0 for dataset in datasets], 0.92 * width, label=name)
        panel.bar_label(bars, fmt="%.2f", fontsize=6, padding=1)
    panel.axhline(1, color="0.4", linewidth=1, linestyle="--")
    panel.set_xticks(range(len(datasets)), datasets)
    panel.set_ylabel("tokens per round (τ)")
    panel.margins(y=0.15)
    panel.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def plot_training(histories: Mapping[str, Sequence[Mapping[str, Any]]], path: str | os.PathLike) -> None:
    """Draws cross entropy (left) and expected τ (right) against the draft tokens that were supervised so far, a colour
    for each run: pale on the rows it trains on, dots and a line on held-out ones, the mean over their datasets.

    Args:
        histories: `log_history` of each run, as `trainer_state.json` keeps it.

    Raises:
        ImportError: matplotlib is missing.
    """
    pyplot = _pyplot()
    figure, panels = pyplot.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    for number, (name, history) in enumerate(histories.items()):
        color = f"C{number}"
        for panel, quantity in zip(panels, ("cross_entropy", "tau"), strict=True):
            trained = [(entry["draft_tokens"], entry[quantity]) for entry in history if quantity in entry]
            panel.plot([n / 1e6 for n, _ in trained], [y for _, y in trained], color=color, alpha=0.3, linewidth=1)
            held_out = _held_out(history, quantity)
            label = f"{name}, held out" if held_out else name
            panel.plot([n / 1e6 for n in held_out], held_out.values(), color=color, marker="o", ms=4, label=label)
    for panel, label in zip(panels, ("cross entropy", "expected τ of sampling, teacher-forced"), strict=True):
        panel.set_xlabel("supervised draft tokens, millions")
        panel.set_ylabel(label)
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _held_out(history: Sequence[Mapping[str, Any]], quantity: str) -> dict[int, float]:
    """The mean over the held-out datasets, by the draft tokens before the evaluation."""
    found: dict[int, list[float]] = {}
    for entry in history:
        for name, value in entry.items():
            # Greedy and decoded τ have names of their own: `eval_<dataset>_greedy_tau`.
            is_of_dataset = name.startswith("eval_") and name.endswith(f"_{quantity}")
            if is_of_dataset and not name.endswith((f"_greedy_{quantity}", f"_generate_{quantity}")):
                found.setdefault(entry["draft_tokens"], []).append(value)
    return {draft_tokens: sum(values) / len(values) for draft_tokens, values in found.items()}


def _draw(panel: Any, curve: Reliability, color: str, label: str) -> None:
    total = max(1, sum(curve.count))
    bins = [i for i, count in enumerate(curve.count) if count]
    predicted, observed = [curve.predicted[i] for i in bins], [curve.observed[i] for i in bins]
    panel.plot(predicted, observed, color=color, linewidth=1, label=label)
    panel.scatter(predicted, observed, s=[4 + 200 * curve.count[i] / total for i in bins], color=color, alpha=0.6)
