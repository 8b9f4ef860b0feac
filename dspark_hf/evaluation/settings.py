"""The options of `dspark-hf eval`."""

from dataclasses import dataclass, field
from pathlib import Path

from ..benchmark.methods import find_method
from ..benchmark.settings import BenchmarkSettings
from ..comparison import PairSettings, TargetSettings, check_folders, check_parents, check_positive, check_warpers
from ..policies import SCHEDULES
from ..reports import json_field


@dataclass
class EvaluationSettings(TargetSettings):
    """Compare drafters of one target: accepted length, acceptance by position, speed, calibration, equal texts."""

    drafter: list[str] | None = field(
        default=None,
        metadata={"help": "one or more drafters: hub ids or folders; default: the target's known one"},
    )
    prompts: list[str] | None = field(
        default=None,
        metadata={
            "help": "files of JSON lines (.jsonl, .jsonl.gz) with messages, turns or prompt, one for each dataset; "
            "default: the built-in ones"
        },
    )
    num_prompts: int | None = field(
        default=None, metadata={"help": "of each dataset so many, evenly over it; default: all"}
    )
    held_out: int | None = field(
        default=None, metadata={"help": "only prompts whose index is divisible by this; default: all"}
    )
    schedules: list[str] = field(
        default_factory=lambda: ["auto"],
        metadata={"help": f"schedules whose speed is measured, any of {', '.join(SCHEDULES)}, with :N or :0.N"},
    )
    temperature: float = field(default=0.0, metadata={"help": "0: greedy; above: sample, and compare no text"})
    top_k: int | None = field(
        default=None, metadata={"help": "of sampling; 0: all tokens; default: what `generate` takes for this target"}
    )
    top_p: float | None = field(
        default=None, metadata={"help": "of sampling; 1: all tokens; default: what `generate` takes for this target"}
    )
    seed: int = field(default=0, metadata={"help": "of sampling"})
    batch_size: int = field(default=1, metadata={"help": "prompts per call, of one dataset each time"})
    max_new_tokens: int = field(default=128, metadata={"help": "maximum number of new tokens per answer"})
    enable_thinking: bool | None = field(
        default=None, metadata={"help": "for chat templates that know it; default: what the template does"}
    )
    json: str | None = json_field()
    markdown: str | None = field(default=None, metadata={"help": "also write the tables to this file (Markdown)"})
    plot: str | None = field(default=None, metadata={"help": "folder for figures (PNG); needs matplotlib"})
    threads: int | None = field(default=None, metadata={"help": "CPU threads of torch; default: its own choice"})

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_numbers()
        self._check_files()
        if not self.schedules:
            raise ValueError("--schedules is empty: name at least one, auto for example")
        for name in self.schedules:
            try:
                find_method(f"dspark-{name}")
            except ValueError as error:
                raise ValueError(f"--schedules names {name}, expected one of {', '.join(SCHEDULES)}") from error
        for option in ("drafter", "prompts", "schedules"):
            values: list[str] = getattr(self, option) or []
            if len(set(values)) < len(values):
                raise ValueError(f"--{option} names {_twice(values)} twice")

    @property
    def pairs(self) -> list[PairSettings]:
        """The target with each drafter."""
        target = {name: getattr(self, name) for name in ("target", "gguf_file", "dtype", "device")}
        drafters: list[str | None] = [*self.drafter] if self.drafter else [None]
        return [PairSettings(**target, drafter=drafter) for drafter in drafters]

    @property
    def of_calls(self) -> BenchmarkSettings:
        """What the benchmark's calls of `generate` read."""
        return BenchmarkSettings(
            dtype=self.dtype,
            device=self.device,
            max_new_tokens=self.max_new_tokens,
            batch_size=self.batch_size,
            do_sample=self.temperature > 0,
            temperature=self.temperature or 1.0,
            top_k=self.top_k,
            top_p=self.top_p,
            seed=self.seed,
        )

    def _check_numbers(self) -> None:
        check_positive(self, "num_prompts", "held_out", "batch_size", "max_new_tokens", "threads")
        if not self.temperature >= 0.0:
            raise ValueError(f"--temperature is {self.temperature}, it must be 0 (greedy) or more")
        check_warpers(self)

    def _check_files(self) -> None:
        for file in self.prompts or ():
            if not Path(file).is_file():
                raise ValueError(f"--prompts names {file}, which is no file")
        check_folders(self, "json", "markdown")
        check_parents(self, "plot")
        if self.plot is not None and Path(self.plot).exists() and not Path(self.plot).is_dir():
            raise ValueError(f"--plot is {self.plot}, which is no folder")


def _twice(values: list[str]) -> str:
    return next(value for number, value in enumerate(values) if value in values[:number])
