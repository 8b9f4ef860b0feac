"""`dspark-hf doctor`: what is installed, what this machine can do, and whether drafted text is the target's here."""

import importlib.metadata
import os
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

import torch
from huggingface_hub import constants
from packaging.requirements import Requirement
from rich.table import Table
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import is_flash_attn_2_available

from . import dispatch
from ._compat import CHUNKS_PART_FILLED_CACHE
from ._version import __version__
from .comparison import check_folders
from .configuration_dspark import DSparkConfig
from .demo_weights import cached_demo_target
from .modeling_dspark import DSparkDrafter
from .reports import console_for, json_field, write_json

OK: Final = "ok"
NOTE: Final = "note"
PROBLEM: Final = "problem"

_PACKAGE = "dspark-hf"
_PACKAGES = ("transformers", "torch", "accelerate", "huggingface-hub", "safetensors")
_OPTIONAL = {
    "gguf": "GGUF targets, the demo's target without the hub",
    "bitsandbytes": "targets in 8 and 4 bits",
    "datasets": "`dspark-hf train`, named datasets",
    "matplotlib": "figures",
}
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_STYLES = {OK: "", NOTE: "yellow", PROBLEM: "bold red"}
_NUM_TOKENS = 16


@dataclass
class DoctorSettings:
    """Check versions, devices and dtypes, and that drafted text equals plain text on this machine."""

    json: str | None = json_field()

    def __post_init__(self) -> None:
        check_folders(self, "json")


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        status: `"problem"` makes the exit code 1; `"note"` is worth knowing.
    """

    topic: str
    status: Literal["ok", "note", "problem"]
    text: str


def run_doctor(settings: DoctorSettings) -> bool:
    """Runs `dspark-hf doctor`. Returns whether there is no problem."""
    findings = list(examine())
    table = Table()
    for column in ("", "status", ""):
        table.add_column(column, overflow="fold")
    for finding in findings:
        table.add_row(finding.topic, finding.status, finding.text, style=_STYLES[finding.status])
    console_for(settings.json).print(table)
    healthy = all(finding.status != PROBLEM for finding in findings)
    write_json({"ok": healthy, "findings": list(map(asdict, findings))}, settings.json)
    return healthy


def examine() -> Iterator[Finding]:
    """Everything that the doctor looks at, in order."""
    yield from _versions()
    yield from _extras()
    for device in devices():
        yield from _device(device)
    yield from _environment()
    yield from _conflicts()


def devices() -> list[torch.device]:
    """What this torch can use: the CPU, and the accelerator if there is one."""
    found = [torch.device("cpu")]
    if torch.accelerator.is_available():
        found.append(torch.accelerator.current_accelerator() or found[0])
    return found


def _versions() -> Iterator[Finding]:
    yield Finding("python", OK, f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    requirements = _requirements()
    if requirements:
        yield Finding(_PACKAGE, OK, __version__)
    else:
        text = f"{__version__}, not installed as a package: versions are not compared with what it needs"
        yield Finding(_PACKAGE, NOTE, text)
    for name in _PACKAGES:
        version, needed = _version_of(name), requirements.get(name)
        if version is None:
            yield Finding(name, PROBLEM, f"is missing: `pip install '{needed or name}'`")
        elif needed is not None and not needed.specifier.contains(version, prereleases=True):
            yield Finding(name, PROBLEM, f"{version}, expected {needed.specifier}: `pip install '{needed}'`")
        else:
            yield Finding(name, OK, version)


def _requirements() -> dict[str, Requirement]:
    """What this package needs, by name; empty where it runs from a checkout that is not installed."""
    try:
        lines = importlib.metadata.requires(_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    requirements = map(Requirement, lines)
    return {each.name: each for each in requirements if each.marker is None or each.marker.evaluate({"extra": ""})}


def _version_of(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _extras() -> Iterator[Finding]:
    for name, purpose in _OPTIONAL.items():
        version = _version_of(name)
        text = version if version is not None else f"not installed; needed for {purpose}"
        yield Finding(name, OK if version is not None else NOTE, text)
    if is_flash_attn_2_available():
        yield Finding("flash attention", NOTE, "for single prompts; batches need sdpa or eager attention")


def _device(device: torch.device) -> Iterator[Finding]:
    yield Finding(str(device), OK, _description(device))
    works = [str(dtype).removeprefix("torch.") for dtype in _DTYPES if _multiplies(device, dtype)]
    lacking = {"bfloat16", "float32"} - {*works}
    text = ", ".join(works) + (f"; not {' and '.join(sorted(lacking))}: pass another --dtype" if lacking else "")
    yield Finding(f"{device} dtypes", NOTE if lacking else OK, text)
    yield _equality(device)


def _description(device: torch.device) -> str:
    if device.type == "cpu":
        capability = torch.backends.cpu.get_cpu_capability()
        return f"{torch.get_num_threads()} threads of {os.cpu_count()} cores, {capability}"
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, {torch.cuda.device_count()} of them"
    return "available"


def _multiplies(device: torch.device, dtype: torch.dtype) -> bool:
    try:
        ones = torch.ones(8, 8, device=device, dtype=dtype)
        return bool((ones @ ones == 8).all())
    except RuntimeError:
        return False


def _equality(device: torch.device) -> Finding:
    """Greedy text of a tiny random pair, plain and drafted, in float32."""
    topic = f"{device} text"
    try:
        target, drafter = tiny_pair(device)
        input_ids = torch.arange(2, 10, device=device)[None]
        options: dict[str, Any] = {
            "input_ids": input_ids,
            "attention_mask": torch.ones_like(input_ids),
            "max_new_tokens": _NUM_TOKENS,
            "do_sample": False,
        }
        plain = target.generate(**options)  # type: ignore[operator]  # classes with a head have it
        drafted = target.generate(**options, assistant_model=drafter)  # type: ignore[operator]
    except Exception as error:  # whatever goes wrong on this machine is what the doctor is asked for
        return Finding(topic, PROBLEM, f"a tiny pair fails: {' '.join(str(error).split()) or type(error).__name__}")
    if torch.equal(plain, drafted):
        return Finding(topic, OK, f"{_NUM_TOKENS} drafted tokens of a tiny pair equal plain generation")
    return Finding(topic, PROBLEM, f"drafted and plain text differ: {drafted.tolist()} and {plain.tolist()}")


def tiny_pair(device: torch.device) -> tuple[PreTrainedModel, DSparkDrafter]:
    """A random target and drafter in float32; the same ones every time."""
    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        # Wide logits: nothing is tied within rounding.
        "initializer_range": 0.3,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        # No token ends the text.
        config = Qwen3Config(**sizes, num_hidden_layers=4, bos_token_id=None, eos_token_id=None, pad_token_id=None)
        target: Any = Qwen3ForCausalLM(config)
        draft_config = DSparkConfig(
            **sizes, num_hidden_layers=2, num_target_layers=4, target_layer_ids=[0, 2], mask_token_id=63, block_size=4
        )
        drafter: Any = DSparkDrafter(draft_config)
    # "auto" might find that no draft pays.
    drafter.generation_config.num_assistant_tokens_schedule = "constant"
    return target.to(device).eval(), drafter.to(device).eval()


def _environment() -> Iterator[Finding]:
    offline = constants.HF_HUB_OFFLINE
    yield Finding("hub", NOTE if offline else OK, "HF_HUB_OFFLINE is set" if offline else constants.ENDPOINT)
    folder = cached_demo_target()
    text = "the demo's target is here" if folder is not None else "the demo's target is fetched at the first run"
    yield Finding("demo", OK if folder is not None else NOTE, text)


def _conflicts() -> Iterator[Finding]:
    if dispatch.is_installed():
        yield Finding("generate", OK, "`generate(assistant_model=drafter)` reaches the drafter")
    else:
        text = "another package has wrapped it since: if `assistant_model=drafter` fails, pass "
        text += "`custom_generate=SpeculativeDecoding(drafter)`"
        yield Finding("generate", NOTE, text)
    if not CHUNKS_PART_FILLED_CACHE:
        text = "before 5.24, `prefill_chunk_size` on a part-filled cache gives wrong text: refused with a drafter"
        yield Finding("prefill", NOTE, text)
    if torch.get_num_threads() == 1 and (os.cpu_count() or 1) > 1:
        yield Finding("threads", NOTE, "torch uses one thread: see OMP_NUM_THREADS and `torch.set_num_threads`")
