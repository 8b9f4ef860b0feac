"""How vLLM and SGLang serve a drafter: the command, or why there is none.

By what their readers of `config.json` take in September 2026. vLLM: `config/speculative.py`,
`transformers_utils/configs/speculators/`, `model_executor/models/qwen3_dspark.py`. SGLang: `models/dspark.py` and
`dflash.py`, `speculative/dflash_utils.py` and `dspark_components/dspark_config.py`. Neither engine is run here.
"""

import json
import shlex
from dataclasses import dataclass

from .checkpoints.speculators import kind_of
from .configuration_dspark import DSparkConfig


@dataclass(frozen=True)
class Launch:
    """How one engine serves a drafter.

    Attributes:
        engine: its name.
        command: the command line; `None` where it cannot serve this drafter.
        reason: why it cannot, one sentence.
    """

    engine: str
    command: str | None = None
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.engine}: {self.command or self.reason}"


def launch_lines(config: DSparkConfig, format_name: str, drafter: str, target: str | None = None) -> list[Launch]:
    """The command lines for a drafter in a format of `checkpoints.FORMATS`.

    Args:
        drafter: its folder or repository id.
        target: that of its target; `None`: the one that the config names, else the word TARGET.
    """
    target = target or config.target_model_name_or_path or "TARGET"
    lines = []
    for engine, refusal, command in (
        ("vLLM", _vllm_refusal, _vllm_command),
        ("SGLang", _sglang_refusal, _sglang_command),
    ):
        reason = _refusal(config, format_name) or refusal(config, format_name)
        words = command(config, format_name, drafter, target)
        lines.append(Launch(engine, reason=reason) if reason else Launch(engine, shlex.join(words)))
    return lines


def _is_dflash(config: DSparkConfig, format_name: str) -> bool:
    return format_name == "zlab" or (format_name == "speculators" and kind_of(config) == "dflash")


def _refusal(config: DSparkConfig, format_name: str) -> str:
    """What neither engine takes."""
    if format_name == "dspark_hf":
        return "does not read this format: convert to deepspec (or, for vLLM, speculators)."
    if not _is_dflash(config, format_name) and not config.has_markov_head:
        return "takes no DSpark drafter without a Markov head."
    if config.backbone == "qwen3":
        for name in ("embedding_scale", "logits_multiplier", "final_logit_softcapping"):
            if getattr(config, name) not in (None, 1.0):
                return f"does not read `{name}` in every version: its drafts would differ."
    return ""


def _vllm_refusal(config: DSparkConfig, format_name: str) -> str:
    if config.has_markov_head and config.markov_head_type != "vanilla":
        return f"builds vanilla Markov heads only, and this one is {config.markov_head_type}."
    if "sliding_attention" in config.layer_types:
        return "reads sliding draft layers by rules that depend on its version: not checked."
    return ""


def _vllm_command(config: DSparkConfig, format_name: str, drafter: str, target: str) -> list[str]:
    method = "dflash" if _is_dflash(config, format_name) else "dspark"
    speculative = {"method": method, "model": drafter, "num_speculative_tokens": config.num_draft_tokens}
    return ["vllm", "serve", target, "--speculative-config", json.dumps(speculative)]


def _sglang_refusal(config: DSparkConfig, format_name: str) -> str:
    if format_name == "speculators":
        return "refuses speculators' DSpark: convert to deepspec (or, for DFlash, to zlab)."
    if config.backbone != "qwen3" or config.hidden_act != "silu":
        return "builds draft layers of the Qwen3 kind only, with silu."
    if config.target_layer_ids[0] < 0:
        return "cannot tap the embedding output (-1 in `target_layer_ids`)."
    if "sliding_attention" in config.layer_types and not config.sliding_block_causal:
        return "makes every sliding draft layer causal, which this drafter is not."
    return ""


def _sglang_command(config: DSparkConfig, format_name: str, drafter: str, target: str) -> list[str]:
    algorithm = "DFLASH" if _is_dflash(config, format_name) else "DSPARK"
    options = {
        "--model-path": target,
        "--speculative-algorithm": algorithm,
        "--speculative-draft-model-path": drafter,
    }
    if algorithm == "DSPARK":
        options["--speculative-dspark-block-size"] = str(config.block_size)
    words = [word for option in options.items() for word in option]
    return ["python", "-m", "sglang.launch_server", *words]


__all__ = ["Launch", "launch_lines"]
