"""Opens what a benchmark measures."""

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from .. import __version__
from ..comparison import (
    check_sources,
    check_target_source,
    drafter_name,
    id_list,
    load_drafter,
    load_target,
    resolve_device,
    target_name,
)
from ..modeling_dspark import DSparkDrafter
from ..packed_weights import pack_weights
from .random_models import random_drafter, random_target
from .settings import BenchmarkSettings


@dataclass(frozen=True)
class Models:
    """The models of a benchmark, and what to call them in results (never by this machine's paths).

    Attributes:
        tokenizer: `None` for a target with random weights.
        assistant: the small model of ordinary assisted generation, where asked for.
    """

    target: PreTrainedModel
    drafter: DSparkDrafter
    tokenizer: PreTrainedTokenizerBase | None
    assistant: PreTrainedModel | None
    target_name: str
    drafter_name: str

    @property
    def eos_token_ids(self) -> set[int]:
        config: Any = self.target.generation_config
        return set(id_list(config.eos_token_id))

    @property
    def pad_token_id(self) -> int:
        """What fills up short prompts; masked, so that any id would do."""
        own = self.target.generation_config.pad_token_id
        return own if own is not None else min(self.eos_token_ids, default=0)


def load_models(settings: BenchmarkSettings, report: Callable[[str], None]) -> Models:
    """Opens or makes the models.

    Args:
        report: receives a line for each thing that takes time.
    """
    num_layers = settings.num_random_drafter_layers
    (check_sources if num_layers is None else check_target_source)(settings)
    tokenizer, assistant = None, None
    if settings.random_target is not None:
        dtype = getattr(torch, settings.dtype)
        target = random_target(settings.random_target, dtype, resolve_device(settings), settings.seed)
    else:
        target, tokenizer = load_target(settings, report)
    drafter = load_drafter(settings) if num_layers is None else random_drafter(target, num_layers, settings.seed)
    if settings.assistant is not None:
        assistant = AutoModelForCausalLM.from_pretrained(
            settings.assistant, dtype=target.dtype, device_map=resolve_device(settings)
        ).eval()
    if settings.pack_weights:
        for model in (target, drafter, assistant):
            if model is not None:
                pack_weights(model)
    return Models(
        target,
        drafter,
        tokenizer,
        assistant,
        target_name=f"random weights, {settings.random_target}"
        if settings.random_target is not None
        else target_name(target, settings),
        drafter_name=drafter_name(settings) if num_layers is None else f"random weights, draft layers: {num_layers}",
    )


def environment(models: Models) -> dict[str, Any]:
    """What the numbers depend on: versions, machine, threads, models. No paths: results are published."""
    device = models.target.device
    return {
        "dspark_hf": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "target": models.target_name,
        "drafter": models.drafter_name,
    }
