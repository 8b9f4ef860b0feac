"""The command `dspark-hf`. The options of a subcommand are the fields of its settings class, defaults included."""

import argparse
import copy
import dataclasses
import json
import platform
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import torch
import transformers
import yaml
from transformers import HfArgumentParser

from . import __version__
from .alignment import MUST_NOT_RUN, AlignmentReport, Finding, check_alignment
from .benchmark import BenchmarkSettings, SweepSettings, run_benchmark, run_sweep
from .calibration_run import CalibrationSettings, run_calibration
from .comparison import PairSettings, check_folders, load_pair
from .conversion import ConvertSettings, run_conversion
from .data import DataSettings, run_data
from .demo import DemoSettings, run_demo
from .doctor_run import DoctorSettings, run_doctor
from .drafters_run import DraftersSettings, run_drafters
from .errors import AlignmentError, DSparkError
from .evaluation import EvaluationSettings, run_evaluation
from .generate_run import GenerateSettings, run_generate
from .hub import PushSettings, run_push
from .inspect_run import InspectSettings, run_inspect
from .profile_run import ProfileSettings, run_profile
from .prompt_files import numbered_lines
from .reports import STANDARD_OUTPUT, console_for, json_field, write_json
from .training.run import TrainSettings, report_of, run_training


@dataclass
class CheckSettings(PairSettings):
    """Check whether a drafter may draft for a target, and whether it will do so well."""

    json: str | None = json_field()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_folders(self, "json")


@dataclass
class VersionSettings:
    """Print the versions to include in a bug report."""

    json: str | None = json_field()

    def __post_init__(self) -> None:
        check_folders(self, "json")


def _demo(settings: DemoSettings) -> int:
    return 0 if run_demo(settings) else 1


def _bench(settings: BenchmarkSettings) -> int:
    run_benchmark(settings)
    return 0


def _sweep(settings: SweepSettings) -> int:
    run_sweep(settings)
    return 0


def _calibrate(settings: CalibrationSettings) -> int:
    run_calibration(settings)
    return 0


def _profile(settings: ProfileSettings) -> int:
    run_profile(settings)
    return 0


def _data(settings: DataSettings) -> int:
    path = run_data(settings)
    console_for(settings.json).print(f"wrote {path}", markup=False, highlight=False, soft_wrap=True)
    num_rows = sum(1 for _ in numbered_lines(path))
    write_json({"output": str(path), "num_rows": num_rows}, settings.json)
    return 0


def _train(settings: TrainSettings) -> int:
    # transformers prints its log.
    with redirect_stdout(sys.stderr) if settings.json == STANDARD_OUTPUT else nullcontext():
        trainer = run_training(settings)
    if settings.process_index == 0:
        write_json(report_of(trainer), settings.json)
    return 0


def _eval(settings: EvaluationSettings) -> int:
    report = run_evaluation(settings)
    return 0 if all(difference["within_rounding"] for difference in report["differences"]) else 1


def _push(settings: PushSettings) -> int:
    run_push(settings)
    return 0


def _generate(settings: GenerateSettings) -> int:
    run_generate(settings)
    return 0


def _drafters(settings: DraftersSettings) -> int:
    run_drafters(settings)
    return 0


def _doctor(settings: DoctorSettings) -> int:
    return 0 if run_doctor(settings) else 1


def _inspect(settings: InspectSettings) -> int:
    run_inspect(settings)
    return 0


def _check(settings: CheckSettings) -> int:
    say = partial(console_for(settings.json).print, markup=False, highlight=False, soft_wrap=True)
    try:
        pair = load_pair(settings, say)
    except AlignmentError as error:
        # Of the drafter that is known for a target, the first thing that speaks against it.
        finding = Finding(MUST_NOT_RUN, error.field, error.target_value, error.drafter_value, error.remedy)
        report = AlignmentReport([finding])
    else:
        report = check_alignment(pair.target, pair.drafter, target_tokenizer=pair.tokenizer, raise_error=False)
    say(str(report))
    findings = [{name: str(value) for name, value in vars(finding).items()} for finding in report.findings]
    write_json({"ok": report.ok, "findings": findings}, settings.json)
    return 0 if report.ok else 1


def _convert(settings: ConvertSettings) -> int:
    run_conversion(settings)
    return 0


def _version(settings: VersionSettings) -> int:
    versions = {
        "dspark-hf": __version__,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    for name, version in versions.items():
        console_for(settings.json).print(name, version, highlight=False)
    write_json(versions, settings.json)
    return 0


COMMANDS: dict[str, tuple[type, Callable[[Any], int]]] = {
    "demo": (DemoSettings, _demo),
    "generate": (GenerateSettings, _generate),
    "drafters": (DraftersSettings, _drafters),
    "doctor": (DoctorSettings, _doctor),
    "inspect": (InspectSettings, _inspect),
    "bench": (BenchmarkSettings, _bench),
    "sweep": (SweepSettings, _sweep),
    "eval": (EvaluationSettings, _eval),
    "calibrate": (CalibrationSettings, _calibrate),
    "profile": (ProfileSettings, _profile),
    "data": (DataSettings, _data),
    "train": (TrainSettings, _train),
    "push": (PushSettings, _push),
    "check": (CheckSettings, _check),
    "convert": (ConvertSettings, _convert),
    "version": (VersionSettings, _version),
}


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    # "(default: None)" says nothing; where None stands for something, the help text itself names it.
    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


class _Parser(HfArgumentParser):
    @staticmethod
    def _parse_dataclass_field(parser: argparse.ArgumentParser, field: dataclasses.Field) -> None:
        """An option, and where the field is marked `positional`, also a word without the option's name."""
        field = copy.copy(field)
        metadata = dict(field.metadata)
        if metadata.pop("positional", False):
            parser.add_argument(field.name, nargs="?", default=argparse.SUPPRESS, help=metadata["help"])
            metadata["help"] = f"the same as {field.name}"
        field.metadata = MappingProxyType(metadata)
        HfArgumentParser._parse_dataclass_field(parser, field)
        action = parser._actions[-1]
        if action.nargs == "+":
            # A list may be empty: its option without a word.
            action.nargs = "*"

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (--help lists the options)\n")


def _parser() -> _Parser:
    parser = _Parser(prog="dspark-hf", description="DSpark speculative decoding for Hugging Face transformers.")
    subparsers = parser.add_subparsers(dest="command", metavar="command", required=True)
    for name, (settings_class, _) in COMMANDS.items():
        command = subparsers.add_parser(
            name,
            dataclass_types=settings_class,
            help=settings_class.__doc__,
            description=settings_class.__doc__,
            formatter_class=_HelpFormatter,
            allow_abbrev=False,
        )
        command.add_argument("--config", help="YAML file with options by name; those of the command line come first")
        command.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def _with_config(parser: _Parser, arguments: list[str]) -> dict[str, Any]:
    """The parsed arguments, with those of the YAML file that `--config` names where the command line has none."""
    parsed = vars(parser.parse_args(arguments))
    path = parsed.pop("config", None)
    if path is None:
        return parsed
    try:
        options = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        parser.error(f"--config: cannot read {path} ({' '.join(str(error).split())})")
    if not isinstance(options, dict):
        parser.error(f"--config: {path} holds {type(options).__name__}, expected option names with their values")
    options = {str(name).replace("-", "_"): value for name, value in options.items()}
    unknown = sorted(options.keys() - parsed.keys())
    if unknown:
        parser.error(f"--config: {path} names {', '.join(unknown)}, which is no option of {parsed['command']}")
    # As words, so that a value is checked as if it had been typed; last comes the command line, which wins.
    words = [word for name, value in options.items() for word in _as_words(name, value)]
    # An option of one value ends a list, which would take the next words of the command line as its own.
    words += ["--config", path]
    parsed = vars(parser.parse_args([arguments[0], *words, *arguments[1:]]))
    parsed.pop("config")
    return parsed


def _as_words(name: str, value: Any) -> list[str]:
    if value is None:
        return []
    values = value if isinstance(value, list) else [json.dumps(value) if isinstance(value, dict) else value]
    return [f"--{name}", *map(str, values)]


def _settings(parser: _Parser, command: str, arguments: dict[str, Any]) -> Any:
    settings_class = COMMANDS[command][0]
    names = [field.name for field in dataclasses.fields(settings_class) if field.init]
    try:
        return settings_class(**{name: arguments[name] for name in names})
    except (ValueError, ImportError) as error:
        parser.error(str(error))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `dspark-hf`. Returns the exit code: 1 for an error at work, 2 (by `SystemExit`) for a wrong argument."""
    parser = _parser()
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if not arguments:
        parser.print_help()
        return 2
    if arguments[0] == "--version":
        arguments = ["version"]
    parsed = _with_config(parser, arguments)
    settings = _settings(parser, parsed["command"], parsed)
    try:
        return COMMANDS[parsed["command"]][1](settings)
    except (DSparkError, OSError, ValueError, ImportError) as error:
        if parsed["debug"]:
            raise
        print(f"dspark-hf: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
