"""From measurements to the numbers of each group: geometric means, spread, the worst prompt."""

import statistics
from collections.abc import Sequence
from typing import Any

from ..comparison import geometric_mean
from .measuring import CaseResult, Measurement, RoundParts

# Four prompts that no drafter needs to be good at: their ratios would move every mean.
_NOT_IN_ALL = "copy"

# A method, and those whose better one it should keep up with.
_RIVALRIES = (
    ("dspark-constant", ("transformers-loop",)),
    ("dspark", ("dspark-constant",)),
    ("dspark", ("dspark-constant", "prompt-lookup")),
)


def summarize(results: Sequence[CaseResult], by_context: bool) -> dict[str, dict[str, dict[str, Any]]]:
    """The numbers of each group, and of all prompts together (`"all"`, without the copy-heavy ones), by method.

    Args:
        by_context: groups are context lengths: to mix them would say nothing.
    """
    groups: dict[str, list[CaseResult]] = {}
    for result in results:
        groups.setdefault(result.group, []).append(result)
    everything = [result for result in results if result.group != _NOT_IN_ALL]
    if everything and not by_context:
        groups["all"] = everything
    return {
        group: {method: _summarize_method(members, method) for method in members[0].measurements}
        for group, members in groups.items()
    }


def _summarize_method(results: Sequence[CaseResult], method: str) -> dict[str, Any]:
    measurements = [result.measurements[method] for result in results]
    worst = min(results, key=lambda result: result.measurements[method].ratio_to_plain)
    weights = [m.num_passes if m.acceptance_length else 0 for m in measurements]
    committed = [m.num_passes * (m.acceptance_length or 0.0) for m in measurements]
    verdicts = [identical for m in measurements for identical in m.identical]
    explained = [explained for m in measurements for explained in m.explained]
    return {
        "num_prompts": sum(len(result.names) for result in results),
        "tokens_per_second": geometric_mean([m.tokens_per_second for m in measurements]),
        "tokens_per_second_spread": spread([m.tokens_per_second for m in measurements]),
        "ratio_to_plain": geometric_mean([m.ratio_to_plain for m in measurements]),
        "ratio_spread": spread([ratio for m in measurements for ratio in m.ratios]),
        "worst": {"names": worst.names, "ratio_to_plain": worst.measurements[method].ratio_to_plain},
        "acceptance_length": sum(committed) / sum(weights) if sum(weights) else None,
        **_median_and_spread("first_token_ms", [1000 * m.first_token_seconds for m in measurements]),
        **_median_and_spread("pass_ms", [_pass_ms(m) for m in measurements]),
        **_median_and_spread("token_ms", [_token_ms(r.measurements[method], len(r.names)) for r in results]),
        **_median_and_spread("memory_growth", [m.memory_growth for m in measurements]),
        "round_parts": _summarize_parts([m.round_parts for m in measurements if m.round_parts is not None]),
        "num_identical": sum(verdicts) if verdicts else None,
        "num_beyond_rounding": explained.count(False) if explained else None,
        "simulated_acceptance": measurements[0].simulated_acceptance,
    }


def _summarize_parts(parts: Sequence[RoundParts]) -> dict[str, Any] | None:
    """Medians over the prompts of the median round, and the share of the total time that is overhead."""
    if not parts:
        return None
    seconds = {name: sum(part.seconds[name] for part in parts) for name in parts[0].seconds}
    sources = {name for part in parts for name in part.sources}
    return {
        "num_rounds": sum(part.num_rounds for part in parts),
        "median_ms": {name: statistics.median(p.median_ms[name] for p in parts) for name in parts[0].median_ms},
        "spread_ms": {name: spread([part.median_ms[name] for part in parts]) for name in parts[0].median_ms},
        "overhead_share": seconds["overhead"] / seconds["round"],
        "overhead_share_spread": spread([part.seconds["overhead"] / part.seconds["round"] for part in parts]),
        "sources": {name: sum(part.sources.get(name, 0) for part in parts) for name in sorted(sources)},
    }


def _pass_ms(measurement: Measurement) -> float | None:
    """What a pass of the target and everything around it took."""
    if not measurement.num_passes:
        return None
    return 1000 * measurement.decode_seconds / measurement.num_passes


def _token_ms(measurement: Measurement, num_rows: int) -> float | None:
    """What a token of a row took, behind the first one: in a batch, the rows that have ended wait for the others."""
    num_later = measurement.num_new_tokens - num_rows
    return 1000 * measurement.decode_seconds * num_rows / num_later if num_later > 0 else None


def _median_and_spread(name: str, values: Sequence[float | None]) -> dict[str, Any]:
    known = [value for value in values if value is not None]
    if not known:
        return {name: None, f"{name}_spread": None}
    return {name: statistics.median(known), f"{name}_spread": spread(known)}


def spread(values: Sequence[float]) -> dict[str, float]:
    """Extremes and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3
    return {"min": min(values), "q1": low, "median": middle, "q3": high, "max": max(values)}


def growth_against_context(summary: dict[str, dict[str, dict[str, Any]]]) -> dict[str, dict[str, dict[str, float]]]:
    """What a pass costs in each context, as a multiple of the shortest one's, and that multiple over plain's."""
    groups = [*summary]
    growth: dict[str, dict[str, dict[str, float]]] = {group: {} for group in groups}
    for group in groups:
        for method, numbers in summary[group].items():
            pass_ms, first = numbers["pass_ms"], summary[groups[0]][method]["pass_ms"]
            base, base_first = summary[group]["plain"]["pass_ms"], summary[groups[0]]["plain"]["pass_ms"]
            if pass_ms and first and base and base_first:
                factor = pass_ms / first
                growth[group][method] = {"factor": factor, "relative_to_plain": factor / (base / base_first)}
    return growth


def compare_rivals(results: Sequence[CaseResult]) -> list[dict[str, Any]]:
    """Each method against the better one, prompt by prompt, of those that it should keep up with."""
    comparisons = []
    for method, rivals in _RIVALRIES:
        if {method, *rivals} <= set(results[0].measurements):
            ratios = [_speed_against(result, method, rivals) for result in results]
            worst = min(range(len(results)), key=ratios.__getitem__)
            comparisons.append(
                {
                    "method": method,
                    "rivals": [*rivals],
                    "ratio": geometric_mean(ratios),
                    "ratio_spread": spread(ratios),
                    "worst": {"names": results[worst].names, "ratio": ratios[worst]},
                }
            )
    return comparisons


def _speed_against(result: CaseResult, method: str, rivals: Sequence[str]) -> float:
    """The median over the repeats of the ratio to the best rival of the same turn."""
    measured = result.measurements
    turns = zip(measured[method].ratios, *(measured[rival].ratios for rival in rivals), strict=True)
    return statistics.median(own / max(others) for own, *others in turns)
