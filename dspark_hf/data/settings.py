"""The options of `dspark-hf data`."""

from dataclasses import dataclass, field
from pathlib import Path

from ..comparison import TargetSettings, check_folders, check_positive
from ..reports import json_field


@dataclass
class DataSettings(TargetSettings):
    """Let the target answer prompts: the rows that a drafter is trained on."""

    output: str | None = field(
        default=None, metadata={"help": "file for the rows (.jsonl); a run that was interrupted goes on where it was"}
    )
    prompts: list[str] | None = field(
        default=None,
        metadata={
            "help": "files of JSON lines (.jsonl, .jsonl.gz) with messages, turns, prompt or text, or names or "
            "folders of datasets"
        },
    )
    split: str = field(default="train", metadata={"help": "of datasets"})
    num_prompts: int | None = field(default=None, metadata={"help": "of each file or dataset; default: all"})
    self_prompts: int = field(
        default=0, metadata={"help": "how many prompts the target writes for itself; needs a chat template"}
    )
    self_temperature: float = field(default=1.0, metadata={"help": "of the target while it writes prompts"})
    self_top_p: float = field(
        default=0.9, metadata={"help": "of the target while it writes prompts; higher is more varied, and less sense"}
    )
    self_max_tokens: int = field(default=128, metadata={"help": "longer prompts of the target's own are refused"})
    self_openings: str | None = field(
        default=None,
        metadata={"help": "text file, a line for each beginning of a prompt to go on from; default: none is given"},
    )
    exclude: list[str] | None = field(
        default=None, metadata={"help": "files of prompts that are never taken, held-out ones for example"}
    )
    keep_responses: bool = field(
        default=True, metadata={"help": "take responses that rows come with; without, the target answers those too"}
    )
    skip_bad_rows: bool = field(default=False, metadata={"help": "report rows that cannot be used, and go on"})
    enable_thinking: bool | None = field(
        default=None, metadata={"help": "for chat templates that know it; default: what the template does"}
    )
    max_new_tokens: int = field(default=512, metadata={"help": "maximum number of tokens of a response"})
    max_prompt_tokens: int = field(default=1024, metadata={"help": "longer prompts are left out"})
    text_tokens: int = field(
        default=64, metadata={"help": "of a document (text), so many tokens are the prompt, without a template"}
    )
    do_sample: bool = field(default=False, metadata={"help": "sample the responses; default: greedy"})
    temperature: float = field(default=1.0, metadata={"help": "of sampling"})
    top_p: float = field(default=1.0, metadata={"help": "of sampling"})
    top_k: int = field(default=0, metadata={"help": "of sampling; 0: all tokens"})
    seed: int = field(default=0, metadata={"help": "of sampling"})
    batch_size: int = field(default=32, metadata={"help": "responses that are written at a time"})
    threads: int | None = field(default=None, metadata={"help": "CPU threads of torch; default: its own choice"})
    json: str | None = json_field()

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_output()
        self._check_numbers()
        if not self.prompts and not self.self_prompts:
            raise ValueError("--prompts or --self-prompts is missing: there is nothing to answer")
        for name, paths in (("exclude", self.exclude), ("self_openings", [self.self_openings])):
            for path in paths or ():
                if path is not None and not Path(path).is_file():
                    raise ValueError(f"--{name.replace('_', '-')} names {path}, which is no file")

    @property
    def output_file(self) -> Path:
        return Path(str(self.output))

    def _check_output(self) -> None:
        if self.output is None:
            raise ValueError("--output is missing: the file for the rows")
        if self.output_file.suffix != ".jsonl":
            raise ValueError(
                f"--output is {self.output}, expected a name that ends in .jsonl (compress it afterwards)"
            )
        check_folders(self, "output", "json")

    def _check_numbers(self) -> None:
        check_positive(self, "num_prompts", "max_new_tokens", "max_prompt_tokens", "text_tokens")
        check_positive(self, "batch_size", "threads", "self_max_tokens")
        for name in ("self_prompts", "top_k"):
            if getattr(self, name) < 0:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(self, name)}, it must be 0 or more")
        for name in ("temperature", "self_temperature"):
            if getattr(self, name) <= 0.0:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(self, name)}, it must be above 0")
        for name in ("top_p", "self_top_p"):
            if not 0.0 < getattr(self, name) <= 1.0:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(self, name)}, it must lie between 0 and 1")
