"""The files that a model card takes its numbers from: read, and checked to be about this drafter."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ..alignment import model_name
from ..configuration_dspark import DSparkConfig
from ..evaluation.prompts import ALL
from ..evaluation.tables import audit_remark, conditions, make_tables

# Names of things with what they are, a line each.
Facts = dict[str, str]


@dataclass(frozen=True)
class Measured:
    """What `dspark-hf eval` found about one drafter.

    Attributes:
        datasets: its numbers by dataset, as in the report.
        conditions: a sentence: target, decoding, versions, machine.
        tables: Markdown.
        remark: what became of the comparison of texts.
    """

    datasets: Mapping[str, Any]
    conditions: str
    tables: list[str]
    remark: str


def read_results(path: str | os.PathLike, config: DSparkConfig, repo_id: str) -> Measured:
    """The numbers of a drafter in a file of `dspark-hf eval --json`.

    Raises:
        ValueError: it is no such file, or is about another target, or about other drafters.
        OSError: it cannot be read.
    """
    report = _read_json(path)
    try:
        _check_target(path, report["environment"]["target"], config)
        report["drafters"] = _one_drafter(path, report["drafters"], repo_id)
        return _measured(path, report, config)
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not what `dspark-hf eval --json` writes ({error!r}).") from error


def _measured(path: str | os.PathLike, report: dict[str, Any], config: DSparkConfig) -> Measured:
    (datasets,) = report["drafters"].values()
    num_positions = len(datasets[ALL]["drafts"]["acceptance_rate_per_position"])
    if num_positions != config.num_draft_tokens:
        raise ValueError(
            f"{path} is about drafts of {num_positions} tokens, but this drafter proposes {config.num_draft_tokens}: "
            "evaluate this one with `dspark-hf eval`."
        )
    settings: Any = SimpleNamespace(**report["settings"])
    environment = report["environment"]
    versions = ", ".join(f"{name} {environment[name]}" for name in ("dspark_hf", "transformers", "torch"))
    return Measured(
        datasets=datasets,
        conditions=f"With {environment['target']}, {conditions(settings)}; {versions}; {environment['device']}, "
        f"{environment['machine']}, threads: {environment['threads']}.",
        tables=[table.markdown() for table in make_tables(report)],
        remark=audit_remark(report, settings),
    )


def read_training(path: str | os.PathLike, config: DSparkConfig) -> Facts:
    """What a `trainer_state.json` or a `NAME.provenance.json` says about the training.

    Raises:
        ValueError: it is neither, or is about another target.
        OSError: it cannot be read.
    """
    content = _read_json(path)
    try:
        if "log_history" in content:
            return _of_training_run(content)
        _check_target(path, content["target"], config)
        return _of_training_data(content)
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is neither the `trainer_state.json` of a training run nor a `.provenance.json` of "
            f"`dspark-hf data` ({error!r})."
        ) from error


def _read_json(path: str | os.PathLike) -> dict[str, Any]:
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not a valid JSON file ({error}).") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds {type(content).__name__}, expected an object.")
    return content


def _check_target(path: str | os.PathLike, found: str, config: DSparkConfig) -> None:
    # Behind a space stands how the model was had ("org/name (a GGUF of it)"); a folder says its last part only.
    expected = str(config.target_model_name_or_path)
    if model_name(found.split(" ")[0]) != model_name(expected):
        raise ValueError(f"{path} is about the target {found}, but this drafter is for {expected}.")


def _one_drafter(path: str | os.PathLike, drafters: dict[str, Any], repo_id: str) -> dict[str, Any]:
    named = [name for name in drafters if len(drafters) == 1 or name in (repo_id, repo_id.rpartition("/")[2])]
    if len(named) != 1:
        raise ValueError(
            f"{path} is about {', '.join(drafters)}, none of which is called {repo_id}: give the result of this "
            "drafter alone."
        )
    return {named[0]: drafters[named[0]]}


def _of_training_run(state: dict[str, Any]) -> Facts:
    facts = {"steps": f"{state['global_step']:,}", "epochs": f"{state['epoch']:.2f}"}
    ends = [entry for entry in state["log_history"] if "train_runtime" in entry]
    if ends:
        facts["wall time"] = f"{ends[-1]['train_runtime'] / 60:.0f} minutes"
        facts["mean training loss"] = f"{ends[-1]['train_loss']:.3f}"
    return facts


def _of_training_data(provenance: dict[str, Any]) -> Facts:
    decoding = provenance["decoding"]
    if not isinstance(decoding, str):
        decoding = "sampled, " + ", ".join(f"{name} {value}" for name, value in decoding.items())
    facts = {"responses of": provenance["target"], "decoding of the responses": decoding}
    for name, label in (("dtype", "dtype of the target"), ("max_new_tokens", "longest response, in tokens")):
        if name in provenance:
            facts[label] = str(provenance[name])
    return facts
