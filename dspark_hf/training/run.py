"""`dspark-hf train`: opens target and data, makes or opens the drafter, trains, saves."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..comparison import check_folders, id_list
from ..demo_weights import TARGET_ID, fetch_demo_target
from ..figures import plot_training, require_matplotlib
from ..modeling_dspark import DSparkDrafter
from ..reports import console_for, json_field
from .arguments import DSparkTrainingArguments
from .new_drafter import (
    choose_draft_vocabulary,
    choose_mask_token,
    new_drafter,
    with_block_size,
    with_draft_vocabulary,
    with_markov_head,
    with_more_layers,
)
from .responses import Response, read_responses, split_held_out
from .target_features import CachedFeatures

if TYPE_CHECKING:
    from .trainer import DSparkTrainer

# The last file of a checkpoint that transformers writes.
_LAST_WRITTEN = "trainer_state.json"

# Fields of a new drafter, by the setting that says them.
_SHAPE: tuple[str, ...] = ("num_hidden_layers", "block_size", "markov_head_type", "markov_rank")
_SHAPE += ("target_layer_ids", "mask_token_id")
# What a drafter to start from can get.
_ADDABLE = ("num_hidden_layers", "markov_head_type", "block_size")
# What makes a DFlash drafter of one, and its objective.
_DFLASH_SHAPE = {"markov_head_type": "none", "sample_from_anchor": False, "enable_confidence_head": False}
_DFLASH_WEIGHTS = {"cross_entropy_weight": 1.0, "distance_weight": 0.0, "confidence_weight": 0.0}


@dataclass
class TrainSettings(DSparkTrainingArguments):
    """Train a drafter on responses of its target, and evaluate it on those that are held out."""

    target: str | None = field(default=None, metadata={"help": f"target: hub id or folder; default: {TARGET_ID}"})
    target_dtype: Literal["bfloat16", "float32"] = field(default="bfloat16", metadata={"help": "dtype of the target"})
    data: list[str] | None = field(
        default=None, metadata={"help": "JSON lines with prompt_ids and response_ids, as `dspark-hf data` writes them"}
    )
    held_out_every: int = field(
        default=20, metadata={"help": "rows whose index is divisible by it are held out; 0: none for that reason"}
    )
    held_out_datasets: list[str] = field(
        default_factory=lambda: ["mt-bench"], metadata={"help": "sets of which every row is held out"}
    )
    drafter: str | None = field(
        default=None, metadata={"help": "drafter to start from: hub id or folder; default: a new one"}
    )
    algorithm: Literal["dspark", "dflash"] = field(
        default="dspark", metadata={"help": "dflash: cross entropy alone, no heads, mask positions predict"}
    )
    num_hidden_layers: int | None = field(
        default=None, metadata={"help": "draft layers; default: 2, or those of --drafter, which more can be added to"}
    )
    block_size: int | None = field(
        default=None,
        metadata={"help": "positions of a block; default: 7, or those of --drafter, which can get more or fewer"},
    )
    markov_head_type: str | None = field(
        default=None,
        metadata={
            "help": "none, vanilla, gated or rnn; default: vanilla, or that of --drafter, which can become gated"
        },
    )
    markov_rank: int | None = field(default=None, metadata={"help": "rank of the Markov head; default: 256"})
    target_layer_ids: list[int] | None = field(
        default=None, metadata={"help": "tapped layers; default: five, evenly over the depth"}
    )
    mask_token_id: int | None = field(
        default=None, metadata={"help": "default: a special token, or an id, that the data never use"}
    )
    draft_vocab_size: int | None = field(
        default=None,
        metadata={
            "help": "ids that are proposed, the most frequent of the responses; default: all, or those of --drafter"
        },
    )
    init_layer_ids: list[int] | None = field(
        default=None, metadata={"help": "layers of the target that draft layers start as; default: at random"}
    )

    plot: str | None = field(default=None, metadata={"help": "file for the training curve (PNG); needs matplotlib"})
    json: str | None = json_field()

    def __post_init__(self) -> None:
        check_folders(self, "plot", "json")
        if self.output_dir is None:
            raise ValueError("--output-dir is missing: the folder for the drafter")
        if not self.data:
            raise ValueError("--data is missing: files with responses of the target (`dspark-hf data` writes them)")
        if self.held_out_every < 0:
            raise ValueError(f"--held-out-every is {self.held_out_every}, it must be 0 or more")
        given = [name for name in (*_SHAPE, "init_layer_ids") if name not in _ADDABLE and getattr(self, name, None)]
        if self.drafter is not None and given:
            raise ValueError(
                f"--{given[0].replace('_', '-')} is of a new drafter, but --drafter names one to start from"
            )
        if self.confidence_only:
            changing = ("draft_vocab_size", *_ADDABLE)
            given = [name for name in changing if getattr(self, name) is not None]
            if self.drafter is None or given:
                raise ValueError(
                    "--confidence-only leaves the drafts of a drafter as they are: name it by --drafter, without --"
                    + ", --".join(name.replace("_", "-") for name in (given or changing))
                )
        if self.algorithm == "dflash":
            if self.options_by_confidence:
                raise ValueError(
                    "--algorithm dflash has no confidence head: leave out --sample-positions and --confidence-only"
                )
            defaults = {each.name: each.default for each in fields(self)}
            for name, value in _DFLASH_WEIGHTS.items():
                given = getattr(self, name)
                if given not in (value, defaults[name]):
                    raise ValueError(
                        f"--{name.replace('_', '-')} is {given}, but --algorithm dflash means {value}: leave one out"
                    )
                setattr(self, name, value)
        super().__post_init__()
        for file in self.data:
            if not Path(file).is_file():
                raise ValueError(f"--data names {file}, which is no file")

    @property
    def shape(self) -> dict[str, Any]:
        """Fields of the new drafter's config that were said."""
        said = {name: getattr(self, name) for name in _SHAPE if getattr(self, name, None) is not None}
        return {"num_hidden_layers": 2, **said, **(_DFLASH_SHAPE if self.algorithm == "dflash" else {})}


def run_training(settings: TrainSettings, report: Callable[[str], None] = print) -> "DSparkTrainer":
    """Runs `dspark-hf train`: the drafter is in `settings.output_dir` afterwards. Goes on where an earlier run with
    the same folder was interrupted.

    Args:
        report: receives a line for each thing worth knowing; silent on all but the first process.
    """
    # Here, because every command reads the settings above, and transformers' `Trainer` takes long to import.
    from .trainer import DSparkTrainer

    if settings.plot is not None:
        require_matplotlib()
    if settings.process_index > 0:
        report = _say_nothing
    target = _load_target(settings, report)
    vocab_size = target.config.get_text_config(decoder=True).vocab_size
    rows = [row for path in settings.data or () for row in read_responses(path, vocab_size)]
    train_rows, held_out = split_held_out(rows, settings.held_out_every, settings.held_out_datasets)
    drafter = _make_drafter(settings, target, rows, train_rows, report)
    trainer = DSparkTrainer(drafter, target, settings, train_rows, _by_dataset(held_out))
    _describe(trainer, held_out, report)
    try:
        checkpoint = settings.resume_from_checkpoint or _last_checkpoint(settings, report)
        if checkpoint:
            report(f"Going on from {checkpoint}.")
        trainer.train(resume_from_checkpoint=checkpoint)
        trainer.save_model()
        trainer.save_state()
        report(f"wrote {settings.output_dir}")
        if held_out:
            metrics = trainer.evaluate()
            # With the last evaluation in its history.
            trainer.save_state()
            trainer.save_metrics("eval", metrics)
            if settings.process_index == 0:
                console_for(settings.json).print(table_of(metrics, drafter.config.num_draft_tokens))
        if settings.plot is not None and settings.process_index == 0:
            plot_training({"training": trainer.state.log_history}, settings.plot)
            report(f"wrote {settings.plot}")
    finally:
        trainer.close()
    part_processes()
    return trainer


def part_processes() -> None:
    """Waits for the other processes of a run, if there are any, and leaves their group: one that ends within it while
    others still work may be aborted, and the launcher then ends all of them."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def report_of(trainer: "DSparkTrainer") -> dict[str, Any]:
    """What `--json` says of a run: `output_dir`, `steps`, `draft_tokens`, and the last evaluation."""
    step = trainer.state.global_step
    last = [entry for entry in trainer.state.log_history if entry["step"] == step]
    metrics = {name: value for entry in last for name, value in entry.items() if name.startswith("eval_")}
    return {"output_dir": trainer.args.output_dir, "steps": step, "draft_tokens": trainer.draft_tokens, **metrics}


def table_of(metrics: dict[str, float], num_draft_tokens: int) -> Table:
    """The evaluation of held-out rows, a line per dataset."""
    table = Table(title="Held-out rows: acceptance length and, at each draft position, the chance of acceptance")
    first = "_acceptance_1"
    names = [name.removeprefix("eval_").removesuffix(first) for name in metrics if name.endswith(first)]
    for column in ("dataset", "τ sampled", "τ greedy", *map(str, range(1, num_draft_tokens + 1)), "confidence error"):
        table.add_column(column, justify="left" if column == "dataset" else "right")
    for name in names:
        chances = [f"acceptance_{k}" for k in range(1, num_draft_tokens + 1)]
        kinds = {"tau": ".2f", "greedy_tau": ".2f", **dict.fromkeys(chances, ".1%"), "confidence_error": ".1%"}
        # Rows without room for a whole block have no τ, drafters without confidences no error of theirs.
        found = [(metrics.get(f"eval_{name}_{kind}"), form) for kind, form in kinds.items()]
        table.add_row(name, *("" if value is None else format(value, form) for value, form in found))
    return table


def _say_nothing(line: str) -> None:
    pass


def _last_checkpoint(settings: TrainSettings, report: Callable[[str], None]) -> str | None:
    """The newest checkpoint that was written to its end."""
    found = {
        int(path.name.rpartition("-")[2]): path
        for path in Path(str(settings.output_dir)).glob(f"{PREFIX_CHECKPOINT_DIR}-*")
        if path.name.rpartition("-")[2].isdigit()
    }
    for step in sorted(found, reverse=True):
        if (found[step] / _LAST_WRITTEN).is_file():
            return str(found[step])
        report(f"{found[step]} is incomplete: the run was interrupted while it was written.")
    return None


def _load_target(settings: TrainSettings, report: Callable[[str], None]) -> Any:
    source: Any = settings.target or fetch_demo_target(report)
    target: Any = AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, settings.target_dtype))
    return target.to(settings.device).eval().requires_grad_(False)


def _make_drafter(
    settings: TrainSettings,
    target: Any,
    rows: Sequence[Response],
    train_rows: Sequence[Response],
    report: Callable[[str], None],
) -> DSparkDrafter:
    draft_ids = None
    if settings.draft_vocab_size is not None:
        vocab_size = target.config.get_text_config(decoder=True).vocab_size
        always = id_list(target.generation_config.eos_token_id)
        draft_ids = choose_draft_vocabulary(train_rows, settings.draft_vocab_size, vocab_size, always)
    if settings.drafter is not None:
        drafter = DSparkDrafter.from_pretrained(settings.drafter, dtype=torch.float32).to(target.device)
        drafter = drafter if draft_ids is None else with_draft_vocabulary(drafter, target, draft_ids)
        if settings.num_hidden_layers is not None:
            drafter = with_more_layers(drafter, settings.num_hidden_layers)
        if settings.markov_head_type is not None:
            drafter = with_markov_head(drafter, settings.markov_head_type)
        if settings.block_size is not None:
            drafter = with_block_size(drafter, settings.block_size)
        return drafter
    shape: dict[str, Any] = {"target_model_name_or_path": TARGET_ID} if settings.target is None else {}
    shape |= settings.shape
    if settings.train_lm_head:
        shape["own_lm_head"] = True
    if "mask_token_id" not in shape:
        special = AutoTokenizer.from_pretrained(settings.target or fetch_demo_target(report)).all_special_ids
        shape["mask_token_id"] = choose_mask_token(rows, target, special)
        report(f"Mask token: {shape['mask_token_id']}.")
    return new_drafter(
        target, draft_ids=draft_ids, init_layer_ids=settings.init_layer_ids, seed=settings.seed, **shape
    )


def _by_dataset(rows: Sequence[Response]) -> dict[str, list[Response]] | None:
    names = sorted({row.dataset for row in rows})
    return {name: [row for row in rows if row.dataset == name] for name in names} or None


def _describe(trainer: "DSparkTrainer", held_out: Sequence[Response], report: Callable[[str], None]) -> None:
    dataset: Any = trainer.train_dataset
    num_tokens = sum(dataset.lengths)
    report(
        f"{len(dataset)} rows to train on ({num_tokens:,} tokens), {len(held_out)} held out, {dataset.num_dropped} "
        "too short for a draft."
    )
    trained = sum(p.numel() for p in trainer.drafter.parameters() if p.requires_grad)
    report(f"{trained:,} trained parameters.")
    if isinstance(trainer.features, CachedFeatures):
        where = "in memory" if trainer.args.feature_cache == "memory" else f"in {trainer.args.feature_cache}"
        total, missing = (size / 1e9 for size in (trainer.features.num_bytes, trainer.features.num_missing_bytes))
        report(f"The target's hidden states take {total:.2f} GB {where}; {total - missing:.2f} GB are there already.")
