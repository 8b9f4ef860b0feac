"""The command that calibrates a drafter: opens the pair, runs the rounds, writes the file, says what it found."""

from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

from rich.progress import track
from rich.table import Table

from .calibrating import FEW_BLOCKS, calibrate
from .calibration import Calibration
from .comparison import PairSettings, check_folders, drafter_name, encode_prompt, load_pair, target_name
from .figures import plot_reliability, require_matplotlib
from .prompt_files import PROMPTS_FILE, evenly_spread, read_prompts
from .reports import console_for, json_field, write_json


@dataclass
class CalibrationSettings(PairSettings):
    """Measure how far a drafter's confidences are to be trusted, and write temperatures that mend them."""

    output: str | None = field(
        default=None,
        metadata={"help": "folder for dspark_calibration.json; default: the one of --drafter, if it is a folder"},
    )
    prompts: str | None = field(
        default=None,
        metadata={"help": "JSON lines with prompt, or turns; default: the 24 built-in ones, which are few"},
    )
    num_prompts: int | None = field(
        default=None, metadata={"help": "how many prompts, evenly over the file; default: all"}
    )
    max_new_tokens: int = field(default=128, metadata={"help": "maximum number of new tokens per prompt"})
    with_shifts: bool = field(
        default=True, metadata={"help": "fit shifts beside temperatures; without, the method of the paper"}
    )
    do_sample: bool = field(default=False, metadata={"help": "sample, as the drafter will be used"})
    temperature: float = field(default=1.0, metadata={"help": "of sampling"})
    seed: int = field(default=0, metadata={"help": "of sampling"})
    plot: str | None = field(default=None, metadata={"help": "file for a reliability diagram (PNG); needs matplotlib"})
    json: str | None = json_field()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_folders(self, "plot", "json")
        if self.output is None and (self.drafter is None or not Path(self.drafter).is_dir()):
            raise ValueError("--output is missing: --drafter is no folder that the file could go to")
        for name in ("max_new_tokens", "num_prompts"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name} is {value}, expected at least 1")

    @property
    def folder(self) -> Path:
        return Path(self.output if self.output is not None else str(self.drafter))


def run_calibration(settings: CalibrationSettings) -> Calibration:
    """Runs `dspark-hf calibrate`."""
    if settings.output is not None and not settings.folder.is_dir():
        raise OSError(f"--output: {settings.output} is no folder")
    prompts = evenly_spread(read_prompts(Path(settings.prompts or PROMPTS_FILE)), settings.num_prompts)
    if settings.plot is not None:
        require_matplotlib()
    console = console_for(settings.json)
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    pair = load_pair(settings, say)
    calibration = calibrate(
        pair.drafter,
        pair.target,
        [encode_prompt(pair, prompt.prompt)["input_ids"] for prompt in prompts],
        with_shifts=settings.with_shifts,
        max_new_tokens=settings.max_new_tokens,
        do_sample=settings.do_sample,
        temperature=settings.temperature,
        seed=settings.seed,
        progress=lambda inputs: iter(track(inputs, description="prompts", console=console)),
    )
    provenance = {
        **calibration.provenance,
        "target": target_name(pair.target, settings),
        "drafter": drafter_name(settings),
        "datasets": sorted({prompt.dataset for prompt in prompts}),
    }
    calibration = replace(calibration, provenance=provenance)
    path = calibration.save(settings.folder)
    console.print(table_of(calibration))
    say("ECE, mean of all positions: {:.2%} before, {:.2%} after.".format(*calibration.ece))
    if calibration.num_blocks["fit"] < FEW_BLOCKS:
        say(f"Fitted to fewer than {FEW_BLOCKS} drafts: more prompts give temperatures that hold better.")
    say(f"wrote {path}")
    if settings.plot is not None:
        plot_reliability(calibration, settings.plot)
        say(f"wrote {settings.plot}")
    write_json({"file": str(path), **asdict(calibration)}, settings.json)
    return calibration


def table_of(calibration: Calibration) -> Table:
    """The report, a line per position."""
    blocks = calibration.num_blocks
    table = Table(title=f"Survival of drafts: fitted to {blocks['fit']}, reported on {blocks['report']} others")
    for name in ("position", "T", "shift", "survival", "ECE before", "after", "Brier before", "after", "AUC"):
        table.add_column(name, justify="right")
    for p in calibration.positions:
        errors = [f"{p.ece_before:.2%}", f"{p.ece_after:.2%}", f"{p.brier_before:.4f}", f"{p.brier_after:.4f}"]
        table.add_row(
            str(p.position),
            f"{p.temperature:.2f}",
            f"{p.shift:.1f}",
            f"{p.survival_rate:.1%}",
            *errors,
            f"{p.auc:.3f}",
        )
    return table
