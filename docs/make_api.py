"""Writes `docs/api.md` from the docstrings of the public names: `python docs/make_api.py`.

griffe reads the source without importing it, so the page does not depend on what is installed.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import griffe

ROOT = Path(__file__).parent.parent
PAGE = Path(__file__).parent / "api.md"

# Where a name of the page is looked for: the top of the package has all its public names, others are listed.
BY_TOPIC: dict[str, list[str]] = {
    "Generating": [
        "DSparkDrafter",
        "pipeline.DSparkPipeline",
        "SpeculativeDecoding",
        "DSparkConfig",
        "DraftVocabularyMap",
        "dispatch",
    ],
    "Checking a pair": ["check_alignment", "AlignmentReport", "alignment.Finding"],
    "What happened": ["Trace", "trace.TraceSummary", "trace.Round", "AcceptanceMonitor", "monitoring.Acceptance"],
    "Speed": ["pack_weights", "unpack_weights", "cost_model.profile_costs", "cost_model.CostModel"],
    "Confidence": ["calibrate", "Calibration"],
    "Schedules of your own": [
        "scheduling.Schedule",
        "scheduling.DraftLength",
        "scheduling.RowState",
        "scheduling.Plan",
        "scheduling.RowPlan",
        "scheduling.RowOutcome",
        "scheduling.Gate",
    ],
    "A loop of your own": ["DSparkCandidateGenerator"],
    "Training and publishing": ["training.DSparkTrainer", "hub.push_drafter_to_hub", "conversion.convert_drafter"],
    "Errors": [
        "DSparkError",
        "errors.UnknownTargetError",
        "errors.HubError",
        "AlignmentError",
        "CheckpointFieldError",
        "IncompleteCheckpointError",
        "UnsupportedCheckpointError",
        "UnsupportedGenerationError",
    ],
}


def api_page() -> str:
    """The page. Raises `ValueError` where a public name has no topic."""
    package = griffe.load("dspark_hf", search_paths=[str(ROOT)], docstring_parser="google")
    listed = [name for names in BY_TOPIC.values() for name in names]
    # `DSparkPipeline` is public, and imported at its first use only: it is found in its module.
    missing = sorted(set(package.exports or []) - {name.rpartition(".")[2] for name in listed})
    if missing:
        raise ValueError(f"BY_TOPIC of docs/make_api.py has no place for {', '.join(missing)}.")
    lines = [
        "# API reference",
        "",
        "Made from the docstrings by `python docs/make_api.py`: change those, not this page.",
    ]
    lines += ["Names without a module come from `dspark_hf` itself.", ""]
    for topic, names in BY_TOPIC.items():
        lines += [f"- {topic}: " + ", ".join(f"[`{name}`](#{_anchor(name)})" for name in names)]
    for topic, names in BY_TOPIC.items():
        lines += ["", f"## {topic}"]
        for name in names:
            found = package[name]
            lines += _entry(found.final_target if found.is_alias else found, name)
    return _with_links("\n".join(lines) + "\n", listed)


def _with_links(page: str, listed: list[str]) -> str:
    """Cross references as transformers writes them, [`name`], become links where the name is on the page."""
    places = {name.rpartition(".")[2]: _anchor(name) for name in listed}

    def linked(match: re.Match) -> str:
        name = match[1].rpartition(".")[2]
        return f"[`{name}`](#{places[name]})" if name in places else f"`{match[1]}`"

    return re.sub(r"\[`~?([\w.]+)`\](?!\()", linked, page)


def _anchor(name: str) -> str:
    """GitHub's: lower case, without dots."""
    return name.lower().replace(".", "")


def _entry(what: griffe.Object, name: str) -> Iterator[str]:
    yield from ("", f"### {name}", "")
    if what.is_module:
        yield from _text(what)
        # Its own ones: what it imports is described where it is from.
        members = [member for member in what.functions.values() if not member.is_alias and _is_public(member)]
    else:
        yield from _signature(what, name)
        yield from _text(what)
        members = [m for m in what.members.values() if (m.is_function or m.is_attribute) and _is_public(m)]
    for member in members:
        yield from _member(member, name)


def _member(member: griffe.Object, owner: str) -> Iterator[str]:
    yield ""
    if member.is_function:
        yield f"#### `{owner.rpartition('.')[2]}.{member.name}`"
        yield ""
        yield from _signature(member, member.name)
    else:
        annotation = f": {member.annotation}" if member.annotation is not None else ""
        yield f"#### `{owner.rpartition('.')[2]}.{member.name}{annotation}`"
        yield ""
    yield from _text(member)


def _is_public(member: griffe.Object) -> bool:
    return not member.name.startswith("_") and member.has_docstring


def _signature(what: griffe.Object, name: str) -> Iterator[str]:
    """A code block; of a class that of its `__init__`, and none where it is not its own."""
    function = what.members.get("__init__") if what.is_class else what
    if function is None or not function.is_function:
        return
    parameters = [parameter for parameter in function.parameters if parameter.name not in ("self", "cls")]
    words, is_keyword_only = [], False
    for parameter in parameters:
        if parameter.kind is griffe.ParameterKind.keyword_only and not is_keyword_only:
            words.append("*")
            is_keyword_only = True
        words.append(_parameter(parameter))
        is_keyword_only |= parameter.kind is griffe.ParameterKind.var_positional
    returns = f" -> {function.returns}" if function.returns is not None and not what.is_class else ""
    line = f"{name}({', '.join(words)}){returns}"
    if len(line) > 100:
        line = "\n".join([f"{name}(", *(f"    {word}," for word in words), f"){returns}"])
    yield from ("```text", line, "```", "")


def _parameter(parameter: griffe.Parameter) -> str:
    stars = {griffe.ParameterKind.var_positional: "*", griffe.ParameterKind.var_keyword: "**"}
    text = stars.get(parameter.kind, "") + parameter.name
    if parameter.annotation is not None:
        text += f": {parameter.annotation}"
    if parameter.default is not None and not stars.get(parameter.kind):
        text += f" = {parameter.default}" if parameter.annotation is not None else f"={parameter.default}"
    return text


def _text(what: griffe.Object) -> Iterator[str]:
    if what.docstring is None:
        return
    for number, section in enumerate(what.docstring.parse("google", warnings=False)):
        if number:
            yield ""
        if section.kind is griffe.DocstringSectionKind.text:
            yield section.value
        elif section.kind is griffe.DocstringSectionKind.admonition:
            yield from (f"{section.title}:", "", *_as_list(section.value.description))
        else:
            yield from (f"{section.title or section.kind.value.capitalize()}:", "")
            yield from (f"- {_item(item)}" for item in section.value)


def _as_list(text: str) -> list[str]:
    """A section that griffe does not know: an item for each line that is not indented."""
    return [line if line.startswith(" ") else f"- {line}" for line in text.splitlines()]


def _item(item: griffe.DocstringElement) -> str:
    annotation = str(item.annotation) if item.annotation is not None else ""
    name = getattr(item, "name", "") or annotation
    if name.endswith(","):  # several names in one line: griffe takes the last ones for a type
        name += f" {annotation}"
    text = " ".join(item.description.split())
    return f"`{name}`: {text}" if name else text


if __name__ == "__main__":
    PAGE.write_text(api_page(), encoding="utf-8")
