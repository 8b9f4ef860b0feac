"""Runs the rounds that a calibration is fitted to: full drafts, real verification, every confidence noted."""

import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedTokenizerBase

from ._version import __version__
from .calibration import Calibration, fit, report
from .errors import UnsupportedGenerationError
from .modeling_dspark import DSparkDrafter
from .trace import Trace

# Fewer blocks than this in the fit leave the temperatures of late positions to chance.
FEW_BLOCKS = 200


@dataclass
class Blocks:
    """Full drafts with what became of them.

    Attributes:
        logits: of the confidence head, n per block.
        accepted: draft tokens accepted of each block.
    """

    logits: list[list[float]] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def add(self, trace: Trace, num_draft_tokens: int, calibration: Calibration | None) -> None:
        """Takes the full drafts of a trace; those that a stop cut short, or that the room did, tell nothing."""
        for confidence, accepted in (draft for one in trace.rounds for draft in one.drafts_with_confidence()):
            if len(confidence) == num_draft_tokens:
                raw = torch.logit(torch.tensor(confidence, dtype=torch.float64), eps=1e-12)
                self.logits.append((raw if calibration is None else calibration.undone(raw)).tolist())
                self.accepted.append(accepted)

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`[N, n]` logits and `[N]` accepted tokens."""
        return torch.tensor(self.logits, dtype=torch.float64), torch.tensor(self.accepted)


def calibrate(
    drafter: DSparkDrafter,
    target: Any,
    prompts: Sequence[str | Sequence[int] | torch.Tensor],
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    with_shifts: bool = True,
    held_out: int = 2,
    max_new_tokens: int = 128,
    do_sample: bool = False,
    temperature: float = 1.0,
    seed: int = 0,
    progress: Callable[[Sequence[Any]], Iterator[Any]] = iter,
) -> Calibration:
    """Measures how far the confidences of a drafter are to be trusted with a target, and mends them.

    Full drafts are verified, whatever the schedule would do, so acceptance is observed at every position that can be
    reached. Temperatures are fitted position by position (paper, section 3.3) on some of the prompts; what the report
    says is measured on the others.

    Give the result to `drafter.calibration`, or save it beside the drafter (`calibration.save(folder)`), where
    `from_pretrained` finds it.

    Args:
        drafter: with a confidence head.
        target: the model it drafts for.
        prompts: texts (a user's message each, put into the chat template where the tokenizer has one) or token ids.
        tokenizer: the target's; needed for texts.
        with_shifts: fit a shift to each position beside its temperature; without, it is the method of the paper.
        held_out: every so-many-th prompt goes to the report, not to the fit; at least 2.
        max_new_tokens: of each prompt.
        do_sample: draw the tokens, at `temperature`. What is accepted differs from greedy decoding: calibrate for the
            decoding that the drafter is used with.
        temperature: of sampling.
        seed: of sampling; the state of the global generator is put back.
        progress: wraps the prompts, as `tqdm` does.

    Raises:
        UnsupportedGenerationError: the drafter has no confidence head.
        ValueError: no prompts, or texts without a tokenizer, or nothing was drafted.
    """
    if drafter.confidence_head is None:
        raise UnsupportedGenerationError(
            "This drafter has no confidence head, so there is nothing to calibrate. Its drafts can be scheduled with "
            "`num_assistant_tokens_schedule='entropy'` or `'acceptance'`."
        )
    if held_out < 2:
        raise ValueError(f"`held_out` is {held_out}, expected at least 2: the fit needs prompts as well.")
    num_tokens = drafter.config.num_draft_tokens
    inputs = [_input_ids(prompt, tokenizer).to(target.device) for prompt in prompts]
    if len(inputs) < held_out:
        raise ValueError(f"`prompts` holds {len(inputs)} prompts, expected at least {held_out} (better, a hundred).")
    settings: dict[str, Any] = {"do_sample": do_sample, "max_new_tokens": max_new_tokens, "num_beams": 1}
    if do_sample:
        settings["temperature"] = temperature
    fitted, reported = Blocks(), Blocks()
    devices = [] if target.device.type == "cpu" else [target.device]
    with torch.random.fork_rng(devices, device_type=target.device.type if devices else "cuda"):
        torch.manual_seed(seed)
        for number, input_ids in enumerate(progress(inputs)):
            with drafter.trace() as trace:
                target.generate(
                    input_ids=input_ids,
                    attention_mask=torch.ones_like(input_ids),
                    assistant_model=drafter,
                    num_assistant_tokens=num_tokens,
                    num_assistant_tokens_schedule="constant",
                    assistant_confidence_threshold=0.0,
                    **settings,
                )
            (reported if number % held_out == held_out - 1 else fitted).add(trace, num_tokens, drafter.calibration)
    if not fitted.accepted or not reported.accepted:
        raise ValueError(
            f"Only {len(fitted.accepted) + len(reported.accepted)} full drafts were verified: give more prompts, or a "
            "larger `max_new_tokens`."
        )
    temperatures, shifts = fit(*fitted.tensors(), with_shifts)
    return Calibration(
        temperatures=temperatures,
        shifts=shifts,
        positions=report(*reported.tensors(), temperatures, shifts),
        num_blocks={"fit": len(fitted.accepted), "report": len(reported.accepted)},
        provenance={
            "target": _public_name(target),
            "dtype": str(target.dtype).removeprefix("torch."),
            "decoding": f"sampling, temperature {temperature:g}" if do_sample else "greedy",
            "num_prompts": len(inputs),
            "max_new_tokens": max_new_tokens,
            "dspark_hf": __version__,
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "platform": platform.machine(),
        },
    )


def _public_name(model: Any) -> str:
    """What a model was opened by; of a folder its last part only: the file is published."""
    name = str(getattr(model.config, "_name_or_path", ""))
    return Path(name).name if Path(name).is_dir() else name


def _input_ids(prompt: str | Sequence[int] | torch.Tensor, tokenizer: PreTrainedTokenizerBase | None) -> torch.Tensor:
    """`[1, P]` ids of a prompt."""
    if not isinstance(prompt, str):
        return torch.as_tensor(prompt, dtype=torch.long).reshape(1, -1)
    if tokenizer is None:
        raise ValueError("`prompts` holds texts: pass the target's `tokenizer` as well, or token ids.")
    if tokenizer.chat_template is None:
        return torch.tensor([tokenizer(prompt)["input_ids"]])
    messages = [{"role": "user", "content": prompt}]
    encoded: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    return torch.tensor([encoded["input_ids"]])
