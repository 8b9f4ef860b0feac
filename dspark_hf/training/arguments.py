"""Every setting of a training run, shared by Python, command line and YAML."""

from dataclasses import dataclass, field
from typing import Literal

import torch
from transformers import TrainingArguments

from ..comparison import check_positive
from .objective import ObjectiveWeights


@dataclass
class DSparkTrainingArguments(TrainingArguments):
    """Train a drafter on responses of its target."""

    # The objective.
    num_anchors: int = field(default=64, metadata={"help": "blocks per sequence and epoch, at random places"})
    max_length: int = field(default=2048, metadata={"help": "longer sequences are cut"})
    cross_entropy_weight: float = field(default=0.1, metadata={"help": "weight of the cross entropy with the text"})
    distance_weight: float = field(
        default=0.9, metadata={"help": "weight of the L1 distance between drafter's and target's distributions"}
    )
    confidence_weight: float = field(default=1.0, metadata={"help": "weight of the confidence head's cross entropy"})
    position_decay: float = field(
        default=4.0, metadata={"help": "draft positions over which the weight of a position falls by e"}
    )
    sample_positions: bool = field(
        default=False,
        metadata={
            "help": "train a draft position with the chance that drafts are accepted up to it, as the confidence head "
            "has it, in place of weighting it: cheaper steps"
        },
    )
    temperature: float = field(
        default=1.0, metadata={"help": "of the decoding to train for: low for greedy, 1 for plain sampling"}
    )
    train_lm_head: bool = field(
        default=False, metadata={"help": "train the drafter's own head, where it has one; a new drafter gets one"}
    )
    train_embed_tokens: bool = field(
        default=False, metadata={"help": "train the drafter's own embedding, where it has one"}
    )
    confidence_only: bool = field(
        default=False,
        metadata={"help": "train the confidence head alone, best on new responses: drafts stay as they are"},
    )
    attn_implementation: Literal["sdpa", "flex_attention"] = field(
        default="sdpa",
        metadata={"help": "attention of the draft blocks; flex_attention: for many anchors on a GPU, experimental"},
    )
    # The run.
    max_seconds: float | None = field(
        default=None,
        metadata={"help": "end after so many seconds of training; the learning rate follows the clock, not the steps"},
    )
    feature_cache: str | None = field(
        default=None,
        metadata={
            "help": "keep the target's hidden states for later epochs: memory, or a folder; default: run the target "
            "each time"
        },
    )
    feature_cache_bits: int = field(
        default=16, metadata={"help": "of each value of the tapped states that --feature-cache keeps: 16, or 8"}
    )
    eval_prompts: int = field(
        default=0,
        metadata={
            "help": "at each evaluation, decode so many held-out prompts with the drafter, greedily: eval_generate_tau"
        },
    )
    eval_max_new_tokens: int = field(default=64, metadata={"help": "tokens that are decoded for each of them"})
    # Defaults of TrainingArguments that suit a drafter: those of the paper, at the size of a home.
    learning_rate: float = field(default=6e-4, metadata={"help": "peak learning rate"})
    muon: bool = field(
        default=False, metadata={"help": "train the matrices of the draft layers by Muon, AdamW the rest"}
    )
    lr_scheduler_type: str = field(default="cosine", metadata={"help": "schedule of the learning rate"})
    warmup_steps: float = field(default=0.04, metadata={"help": "steps of warm-up, or below 1 their share"})
    max_grad_norm: float = field(default=1.0, metadata={"help": "gradients are clipped to this norm"})
    logging_steps: float = field(default=10, metadata={"help": "steps between two lines of the log"})
    report_to: str | None = field(default="none", metadata={"help": "where the log goes: tensorboard, ..."})
    save_total_limit: int | None = field(default=2, metadata={"help": "checkpoints that are kept"})

    # On the command line, `--debug` shows the traceback of an error.
    debug: str | list = field(default="", init=False)

    def __post_init__(self) -> None:
        check_positive(self, "num_anchors", "max_length", "eval_max_new_tokens")
        for name in ("cross_entropy_weight", "distance_weight", "confidence_weight", "eval_prompts"):
            if getattr(self, name) < 0:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(self, name)}, it must not be negative")
        for option in self.options_by_confidence:
            if self.confidence_weight == 0:
                raise ValueError(f"{option} needs the confidence head: --confidence-weight must not be 0")
        if self.confidence_only and (self.muon or self.train_lm_head or self.train_embed_tokens):
            raise ValueError(
                "--confidence-only trains one small head: leave out --muon, --train-lm-head and --train-embed-tokens"
            )
        if self.feature_cache_bits not in (8, 16):
            raise ValueError(f"--feature-cache-bits is {self.feature_cache_bits}, it must be 8 or 16")
        for name in ("position_decay", "max_seconds", "temperature"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"--{name.replace('_', '-')} is {value}, it must be positive")
        if self.gradient_checkpointing:
            raise ValueError(
                "--gradient-checkpointing is not supported: a drafter has few layers. Where memory is short, lower "
                "--num-anchors or --per-device-train-batch-size"
            )
        if self.muon:
            if self.optim_args or self.optim != type(self).optim:
                raise ValueError("--muon comes with AdamW: leave out --optim and --optim-args, or --muon")
            if not hasattr(torch.optim, "Muon"):
                raise ImportError(
                    f"--muon needs torch 2.9 or newer, here is {torch.__version__}: upgrade or leave it out"
                )
        if self.feature_cache_bits != 16 and self.feature_cache is None:
            raise ValueError("--feature-cache-bits is of --feature-cache, which is missing")
        if self.attn_implementation not in ("sdpa", "flex_attention"):
            raise ValueError(f"--attn-implementation is {self.attn_implementation}, it must be sdpa or flex_attention")
        if self.push_to_hub:
            raise ValueError("--push-to-hub is not supported here: publish the drafter with `dspark-hf push`")
        if self.dataloader_persistent_workers:
            raise ValueError("--dataloader-persistent-workers would draw the anchors of the first epoch in all others")
        if not torch.accelerator.is_available():
            # transformers takes half precision on a CPU, and leaves memory unpinned, only where the CPU was asked for.
            self.use_cpu = True
        if self.attn_implementation == "flex_attention" and self.use_cpu:
            raise ValueError("--attn-implementation flex_attention has no gradient on a CPU: leave it at sdpa")
        # Batches hold anchors and row numbers, which no model's signature names.
        self.remove_unused_columns = False
        if self.max_seconds is not None and self.max_steps <= 0:
            self.num_train_epochs = 1e6
        super().__post_init__()

    @property
    def options_by_confidence(self) -> list[str]:
        """The options that are given and go by the drafter's confidence head."""
        given = {"--sample-positions": self.sample_positions, "--confidence-only": self.confidence_only}
        return [option for option, is_given in given.items() if is_given]

    @property
    def objective(self) -> ObjectiveWeights:
        return ObjectiveWeights(
            cross_entropy=self.cross_entropy_weight,
            distance=self.distance_weight,
            confidence=self.confidence_weight,
            decay=self.position_decay,
            temperature=self.temperature,
        )
