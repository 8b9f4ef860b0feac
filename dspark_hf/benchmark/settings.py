"""The options of `dspark-hf bench`."""

from dataclasses import dataclass, field
from pathlib import Path

from ..comparison import PairSettings, check_folders, check_positive, check_warpers
from ..reports import json_field
from .methods import METHODS, find_method
from .random_models import SHAPES

_DEFAULT_METHODS = ("plain", "prompt-lookup", "dspark")
_DEFAULT_DRAFTER_LAYERS = 5


@dataclass
class BenchmarkSettings(PairSettings):
    """Measure ways of generating on held-out prompts against plain generation: speed, costs, memory, text."""

    methods: list[str] | None = field(
        default=None,
        metadata={
            "help": f"any of {', '.join(METHODS)}, or dspark-SCHEDULE with :N draft tokens or :0.N as threshold; "
            f"default: {', '.join(_DEFAULT_METHODS)}, if batches allow"
        },
    )
    assistant: str | None = field(
        default=None, metadata={"help": "small model for the method assistant: hub id or folder"}
    )
    max_new_tokens: int = field(default=128, metadata={"help": "maximum number of new tokens per answer"})
    num_prompts: int = field(default=24, metadata={"help": "how many prompts, from the start of the file"})
    prompts: str | None = field(
        default=None, metadata={"help": "JSON lines with prompt, or turns; default: the built-in ones"}
    )
    with_copy: bool = field(
        default=False, metadata={"help": "also four copy-heavy prompts, a group of their own that 'all' leaves out"}
    )
    batch_size: int = field(default=1, metadata={"help": "prompts per call, of one dataset each time"})
    context_length: list[int] | None = field(
        default=None,
        metadata={"help": "cut or extend all prompts to so many tokens; with several values, costs against them"},
    )
    repeats: int = field(default=1, metadata={"help": "measure each prompt this many times and take the median"})
    num_assistant_tokens: int | None = field(
        default=None, metadata={"help": "draft tokens of a round at most; default: all that a block gives"}
    )
    do_sample: bool = field(default=False, metadata={"help": "sample; texts are then not compared"})
    temperature: float = field(default=1.0, metadata={"help": "of sampling"})
    top_k: int | None = field(
        default=None, metadata={"help": "of sampling; 0: all tokens; default: what `generate` takes for this target"}
    )
    top_p: float | None = field(
        default=None, metadata={"help": "of sampling; 1: all tokens; default: what `generate` takes for this target"}
    )
    seed: int = field(default=0, metadata={"help": "of sampling, of random weights and of simulated acceptance"})
    simulate_acceptance: float | None = field(
        default=None,
        metadata={
            "help": "the drafter runs, but its proposals are replaced: the target's own next token with this "
            "probability per position, else another one"
        },
    )
    random_target: str | None = field(
        default=None,
        metadata={
            "help": f"a target with random weights instead of --target: {', '.join(SHAPES)}, or a hub id or folder "
            "with a config; prompts are random ids then"
        },
    )
    drafter_layers: int | None = field(
        default=None,
        metadata={
            "help": "a drafter with random weights and so many layers instead of --drafter (blocks of 7, Markov rank "
            f"256); default with --random-target: {_DEFAULT_DRAFTER_LAYERS}"
        },
    )
    pack_weights: bool = field(
        default=False, metadata={"help": "pack the linear layers of all models (CPU): every method is faster then"}
    )
    json: str | None = json_field()
    threads: int | None = field(default=None, metadata={"help": "CPU threads of torch; default: its own choice"})

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_numbers()
        self._check_methods()
        self._check_models()
        check_folders(self, "json")
        if self.context_length is not None:
            # Tables hold the others against the shortest.
            self.context_length = sorted(set(self.context_length))
        if self.prompts is not None and not Path(self.prompts).is_file():
            raise ValueError(f"--prompts is {self.prompts}, which is no file")

    @property
    def method_names(self) -> list[str]:
        """The methods to measure. Plain generation, which the others are compared with, is always the first."""
        if self.methods is not None:
            return ["plain", *(name for name in dict.fromkeys(self.methods) if name != "plain")]
        return [name for name in _DEFAULT_METHODS if self.batch_size == 1 or METHODS[name].takes_batches]

    @property
    def num_random_drafter_layers(self) -> int | None:
        """Layers of a drafter with random weights; `None`: a real drafter."""
        if self.drafter_layers is None and self.random_target is not None:
            return _DEFAULT_DRAFTER_LAYERS
        return self.drafter_layers

    def _check_numbers(self) -> None:
        check_positive(self, "max_new_tokens", "num_prompts", "repeats", "threads", "batch_size")
        check_positive(self, "num_assistant_tokens", "drafter_layers", "context_length")
        if self.simulate_acceptance is not None and not 0.0 <= self.simulate_acceptance <= 1.0:
            raise ValueError(f"--simulate-acceptance is {self.simulate_acceptance}, it must lie between 0 and 1")
        if self.temperature <= 0.0:
            raise ValueError(f"--temperature is {self.temperature}, it must be above 0")
        check_warpers(self)

    def _check_methods(self) -> None:
        for name in self.methods or ():
            try:
                method = find_method(name)
            except ValueError as error:
                raise ValueError(f"--methods names {error}") from error
            if self.batch_size > 1 and not method.takes_batches:
                raise ValueError(f"--methods names {name}, which takes no batch: leave it out, or --batch-size")
        if ("assistant" in self.method_names) != (self.assistant is not None):
            raise ValueError("--assistant and the method assistant of --methods need each other")

    def _check_models(self) -> None:
        if self.random_target is not None:
            for name in ("target", "drafter", "prompts", "assistant"):
                if getattr(self, name) is not None:
                    raise ValueError(f"--random-target and --{name} exclude each other")
            if self.with_copy:
                raise ValueError("--random-target and --with-copy exclude each other")
            if self.simulate_acceptance is None:
                raise ValueError("--random-target writes no real text: it needs --simulate-acceptance")
        if self.drafter_layers is not None and self.drafter is not None:
            raise ValueError("--drafter-layers and --drafter exclude each other")
        if self.simulate_acceptance is not None and self.do_sample:
            raise ValueError("--simulate-acceptance knows the greedy text only: leave out --do-sample")
