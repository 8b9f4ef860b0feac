"""A target alone and with its drafter: open the pair, time one answer, judge two texts. Used by demo and benchmark."""

import json
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from .checkpoints import names_a_drafter, refuse_missing_folder
from .demo_weights import DRAFTER_FOLDER, TARGET_ID, describe_demo_target, fetch_demo_target
from .modeling_dspark import DSparkDrafter
from .registry import Match, find_drafter
from .trace import TraceSummary

# Greedy whatever the model's own generation_config asks for: two texts can be compared only without chance, and the
# margins of `judge` are those of the raw logits.
GREEDY: dict[str, Any] = {"do_sample": False, "num_beams": 1, "repetition_penalty": 1.0}

# How far a logit margin may move between a one-token pass and a block pass, in units of eps · max |logit|. On
# SmolLM2-135M (30 layers, 1,800 positions) the largest move was 2.0 units in bfloat16 and 10.8 in float32; these are
# twice that. The 16-bit dtypes round only between operations, their sums run in float32; in float32 the order of the
# sums counts too, hence more units (of a 65,536 times smaller eps).
_ROUNDING_UNITS = {torch.bfloat16: 4.0, torch.float16: 4.0, torch.float32: 22.0}


def check_given(settings: Any, **needed: str) -> None:
    """Raises `ValueError` where one of these options, named with what it is, is missing."""
    for name, what in needed.items():
        if getattr(settings, name) is None:
            raise ValueError(f"{name} is missing: {what}")


def check_positive(settings: Any, *names: str) -> None:
    """Raises `ValueError` where one of these options is given and below 1, a list of numbers included."""
    for name in names:
        value = getattr(settings, name)
        for number in value if isinstance(value, list) else [value]:
            if number is not None and number < 1:
                raise ValueError(f"--{name.replace('_', '-')} is {number}, it must be 1 or more")


def check_warpers(settings: Any) -> None:
    """Raises `ValueError` where `--top-k` or `--top-p` is given and can be none."""
    if settings.top_k is not None and settings.top_k < 0:
        raise ValueError(f"--top-k is {settings.top_k}, it must be 0 or more")
    if settings.top_p is not None and not 0.0 < settings.top_p <= 1.0:
        raise ValueError(f"--top-p is {settings.top_p}, it must lie between 0 and 1")


def sampling_words(settings: Any) -> str:
    """How tokens are drawn, for the head of a table."""
    given = {"top_k": settings.top_k, "top_p": settings.top_p}
    said = [f"{name} {value:g}" for name, value in given.items() if value is not None]
    default = [name for name, value in given.items() if value is None]
    said += [f"default {' and '.join(default)}"] if default else []
    return ", ".join([f"temperature {settings.temperature:g}", *said])


def check_folders(settings: Any, *names: str) -> None:
    """Raises `ValueError` where one of these files is to be written into a folder that is not there, or is one."""
    check_parents(settings, *names)
    for name in names:
        path = getattr(settings, name)
        if path is not None and Path(path).is_dir():
            raise ValueError(f"--{name} is {path}, which is a folder: name a file")


def check_parents(settings: Any, *names: str) -> None:
    """Raises `ValueError` where one of these is to be written into a folder that is not there."""
    for name in names:
        path = getattr(settings, name)
        if path is not None and not Path(path).absolute().parent.is_dir():
            raise ValueError(f"--{name} is {path}, whose folder does not exist")


def id_list(ids: int | list[int] | None) -> list[int]:
    """Token ids of a config (`eos_token_id` and the like), which may be one, several or none."""
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)


@dataclass
class TargetSettings:
    """Which target to open, and how."""

    target: str | None = field(default=None, metadata={"help": f"target: hub id or folder; default: {TARGET_ID}"})
    gguf_file: str | None = field(default=None, metadata={"help": "name of a GGUF file in --target"})
    dtype: Literal["bfloat16", "float32"] = field(
        default="bfloat16", metadata={"help": "dtype of all models; greedy texts are equal in float32"}
    )
    device: str | None = field(default=None, metadata={"help": "default: the accelerator if there is one, else cpu"})

    def __post_init__(self) -> None:
        if self.gguf_file is not None and self.target is None:
            raise ValueError("--gguf-file names a file in --target, which is missing")


@dataclass
class PairSettings(TargetSettings):
    """Which pair to open, and how."""

    drafter: str | None = field(
        default=None, metadata={"help": "drafter: hub id or folder; default: the one that is known for the target"}
    )

    @cached_property
    def match(self) -> Match | None:
        """The drafter that is known for the target, looked up once: the Hub may be asked. `None` where a drafter is
        named, or neither of the two.

        Raises:
            UnknownTargetError: none is known.
        """
        return None if self.drafter is not None or self.target is None else find_drafter(self.target)


@dataclass
class Pair:
    """A target with its tokenizer, and a drafter."""

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    drafter: DSparkDrafter


@dataclass(frozen=True)
class Answer:
    """The new tokens of one `generate` call, its wall time, and the drafter's record of it."""

    token_ids: list[int]
    seconds: float
    summary: TraceSummary | None = None

    @property
    def tokens_per_second(self) -> float:
        return len(self.token_ids) / self.seconds


@dataclass(frozen=True)
class Verdict:
    """Whether two greedy texts are the same, and if not, whether rounding explains the first difference.

    A block pass rounds differently from a one-token pass, so that a near tie may fall the other way; from there on
    the texts go separate ways. That is all that may happen.

    Attributes:
        position: index of the first token that differs; `None` for equal texts.
        margin: how far the lower one of the two tokens lies below the highest logit there, in a plain pass over the
            common text; the top-2 margin, where the two are the top 2. `inf` where one text ends and the other goes
            on.
        rounding: the largest margin that rounding explains in this dtype.
        dtype: the target's.
    """

    position: int | None = None
    margin: float = 0.0
    rounding: float = 0.0
    dtype: str = ""

    @property
    def identical(self) -> bool:
        return self.position is None

    @property
    def explained(self) -> bool:
        """Whether the texts are equal, or differ by rounding only."""
        return self.identical or self.margin <= self.rounding

    def __str__(self) -> str:
        if self.position is None:
            return "identical"
        where = f"differs from token {self.position + 1} on, margin {self.margin:.3g} there:"
        if self.explained:
            return f"{where} within {self.dtype} rounding (up to {self.rounding:.2g})"
        return f"{where} BEYOND ROUNDING ({self.dtype}: up to {self.rounding:.2g}), please report"


def load_pair(settings: PairSettings, report: Callable[[str], None] = print) -> Pair:
    """Opens the target, its tokenizer and the drafter; fetches the demo's target where no other one is named."""
    check_sources(settings)
    target, tokenizer = load_target(settings, report)
    return Pair(target, tokenizer, load_drafter(settings))


def check_sources(settings: PairSettings) -> None:
    """Refuses what cannot work before anything is loaded: a misspelled drafter should not cost the target's loading.

    Raises:
        ValueError: this torch cannot use `--device`.
        OSError: a folder is not there, or a drafter stands in the target's place.
        UnknownTargetError: no drafter is named, and none is known for the target.
    """
    check_target_source(settings)
    _check_source("--drafter", settings.drafter)
    _drafter_location(settings)


def check_target_source(settings: TargetSettings) -> None:
    """`check_sources` for commands without a drafter; raises the same."""
    resolve_device(settings)
    _check_source("--target", settings.target)


def load_target(
    settings: TargetSettings, report: Callable[[str], None] = print
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Opens the target and its tokenizer; fetches the demo's target where no other one is named."""
    source: Any = settings.target or fetch_demo_target(report)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=settings.gguf_file)
    target = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=settings.gguf_file, dtype=getattr(torch, settings.dtype), device_map=resolve_device(settings)
    )
    return target.eval(), tokenizer


def load_drafter(settings: PairSettings) -> DSparkDrafter:
    """Opens the drafter that is named, or the one that is known for the target."""
    options = {"dtype": getattr(torch, settings.dtype), "device_map": resolve_device(settings)}
    drafter = DSparkDrafter.from_pretrained(_drafter_location(settings), **options).eval()
    if settings.match is not None:
        settings.match.confirm(settings.target, drafter.config)
    return drafter


def target_name(target: PreTrainedModel, settings: TargetSettings) -> str:
    """What the target is, without this machine's paths."""
    if settings.target is None:
        return describe_demo_target(Path(str(target.name_or_path)))
    return public_name(settings.target)


def drafter_name(settings: PairSettings) -> str:
    """What the drafter is, without this machine's paths."""
    location = _drafter_location(settings)
    return public_name(location) if isinstance(location, str) else f"dspark_hf/drafters/{location.name}"


def public_name(source: str, depth: int = 1) -> str:
    """A hub id, or the last parts of a folder's or a file's path: what may stand in a file that is published."""
    is_local = bool(source) and (os.path.exists(source) or os.path.isabs(source))
    return "/".join(Path(source).resolve().parts[-depth:]) if is_local else source


def public_settings(settings: Any) -> dict[str, Any]:
    """The fields of a command's settings without paths of this machine."""
    public: dict[str, Any] = {}
    for name, value in asdict(settings).items():
        given = getattr(settings, name)
        if isinstance(given, str):
            value = public_name(given)
        elif isinstance(given, list) and all(isinstance(each, str) for each in given):
            value = [public_name(each) for each in given]
        public[name] = value
    return public


def _drafter_location(settings: PairSettings) -> str | Path:
    """The drafter that is named, the one that is known for the target, or the demo's."""
    if settings.match is not None:
        return settings.match.pair.location
    return settings.drafter or DRAFTER_FOLDER


def _check_source(option: str, source: str | None) -> None:
    """Raises `OSError` for a folder that is not there, and for a drafter in the target's place."""
    if source is None:
        return
    try:
        refuse_missing_folder(source)
    except OSError as error:
        raise OSError(f"{option}: {error}") from error
    config = Path(source) / "config.json"
    if option == "--target" and config.is_file() and names_a_drafter(json.loads(config.read_text(encoding="utf-8"))):
        raise OSError(f"{option}: {source} holds a drafter. Pass it as --drafter, and the model it drafts for here.")


def resolve_device(settings: TargetSettings) -> str:
    """Where the models go.

    Raises:
        ValueError: this torch cannot use `--device`.
    """
    default = str(torch.accelerator.current_accelerator()) if torch.accelerator.is_available() else "cpu"
    if settings.device is None:
        return default
    available = {"cpu", default}
    if torch.device(settings.device).type not in available:
        raise ValueError(
            f"--device is {settings.device}, but this torch can use {' and '.join(sorted(available))} only"
        )
    return settings.device


def encode_prompt(pair: Pair, prompt: str) -> BatchEncoding:
    """A user's prompt as the target's inputs: in its chat template, where it has one.

    Raises:
        ValueError: nothing is left of the prompt.
    """
    return encode_messages(pair, [{"role": "user", "content": prompt}])


def encode_messages(pair: Pair, messages: list[dict[str, str]], **template_options: Any) -> BatchEncoding:
    """A conversation as the target's inputs. Without a chat template it is the last message alone.

    Raises:
        ValueError: nothing is left of it.
    """
    if pair.tokenizer.chat_template is None:
        inputs = pair.tokenizer(messages[-1]["content"], return_tensors="pt")
    else:
        inputs = pair.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, return_tensors="pt", **template_options
        )
    if inputs["input_ids"].numel() == 0:
        # What transformers makes of a folder without tokenizer files: a tokenizer without tokens.
        raise ValueError(f"The tokenizer of {pair.target.name_or_path} gives no tokens: are its files there?")
    return inputs.to(pair.target.device)


def timed_answer(
    pair: Pair,
    inputs: BatchEncoding,
    *,
    max_new_tokens: int,
    with_drafter: bool = False,
    streamer: BaseStreamer | None = None,
    **options: Any,
) -> Answer:
    """Answers greedily, as `timed_generate` does."""
    options |= {**GREEDY, "max_new_tokens": max_new_tokens, "streamer": streamer}
    return timed_generate(pair, inputs, with_drafter=with_drafter, **options)


def timed_generate(pair: Pair, inputs: BatchEncoding, *, with_drafter: bool, **options: Any) -> Answer:
    """Answers plain or with the drafter, and measures the wall time of the `generate` call.

    Args:
        inputs: one prompt, `input_ids` of shape (1, prompt length).
        options: further arguments of `generate`.
    """
    if with_drafter:
        options["assistant_model"] = pair.drafter
    with pair.drafter.trace() if with_drafter else nullcontext() as trace:
        start = time.perf_counter()
        output = pair.target.generate(**inputs, **options)  # type: ignore[operator]  # classes with a head have it
        # The copy to the host is inside the measured time: it waits for an accelerator to finish.
        token_ids = output[0, inputs["input_ids"].shape[1] :].tolist()
        seconds = time.perf_counter() - start
    return Answer(token_ids, seconds, trace.summary() if trace is not None else None)


def warm_up(pair: Pair, inputs: BatchEncoding) -> None:
    """Answers once each way, so that no measured call pays for what happens only at the first one."""
    for with_drafter in (False, True):
        timed_answer(pair, inputs, max_new_tokens=8, with_drafter=with_drafter)


@torch.inference_mode()
def judge(target: PreTrainedModel, prompt_ids: Sequence[int], plain: Sequence[int], drafted: Sequence[int]) -> Verdict:
    """Compares the new tokens of plain generation with those of another way to the same text.

    Args:
        prompt_ids: the prompt of both.
        plain: new tokens of plain greedy generation.
        drafted: new tokens of the other way.
    """
    position = _first_difference(plain, drafted)
    if position is None:
        return Verdict()
    dtype = str(target.dtype).removeprefix("torch.")
    if position == min(len(plain), len(drafted)):
        return Verdict(position, margin=math.inf, dtype=dtype)
    common = torch.tensor([[*prompt_ids, *plain[:position]]], device=target.device)
    logits = target(input_ids=common, use_cache=False).logits[0, -1].float()  # (vocabulary,)
    lower = min(logits[plain[position]].item(), logits[drafted[position]].item())
    rounding = _ROUNDING_UNITS[target.dtype] * torch.finfo(target.dtype).eps * logits.abs().max().item()
    return Verdict(position, margin=logits.max().item() - lower, rounding=rounding, dtype=dtype)


def _first_difference(plain: Sequence[int], drafted: Sequence[int]) -> int | None:
    for position, (one, other) in enumerate(zip(plain, drafted, strict=False)):
        if one != other:
            return position
    return min(len(plain), len(drafted)) if len(plain) != len(drafted) else None


def geometric_mean(ratios: Sequence[float]) -> float:
    """The mean for ratios: twice as fast and half as fast cancel out."""
    return math.exp(math.fsum(map(math.log, ratios)) / len(ratios))
