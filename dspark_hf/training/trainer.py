"""`DSparkTrainer`: transformers' `Trainer` for drafters.

What is accelerate's stays accelerate's (devices, processes, precision, accumulation, checkpoints, logs); what is ours
is the step, the log of acceptance, batches that a restart repeats, and a clock that may end the run.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Sampler
from transformers import ProgressCallback, Trainer
from transformers.utils import logging

from ..alignment import check_pair
from ..modeling_dspark import DSparkDrafter
from .arguments import DSparkTrainingArguments
from .clock import CLOCK_STEPS, Clock, ClockCallback, ClockProgress, by_clock
from .optimizer import MuonAndAdamW
from .responses import LengthBucketSampler, Response, ResponseDataset, collate
from .step import StepTotals, TrainingStep
from .target_features import CachedFeatures, FeatureSource, OnlineFeatures, TargetHead

logger = logging.get_logger(__name__)

# Fields of a config that no shape of a weight shows, and that say what the weights are for.
_MEANING: tuple[str, ...] = ("block_size", "sample_from_anchor", "target_layer_ids", "mask_token_id")
_MEANING += ("markov_head_type", "confidence_head_with_markov", "layer_types", "sliding_window", "rope_parameters")


class DSparkTrainer(Trainer):
    """Trains a drafter on responses of its target.

    Args:
        drafter: as `DSparkDrafter.from_pretrained`, or `new_drafter`, gives it; in float32. It is changed in place;
            what `args` does not train of it stays frozen.
        target: the model that it drafts for, frozen; its dtype is its own.
        args: the settings.
        train_rows: responses to train on.
        eval_rows: held-out responses; of several kinds, a mapping of names to them.
        kwargs: arguments of `transformers.Trainer` (callbacks, optimizers).

    Raises:
        AlignmentError: the drafter does not fit the target.
        ValueError: no row has room for an anchor, the drafter is not in float32, `muon` is asked for with FSDP or
            DeepSpeed, or a drafter without a confidence head is to be trained by it.
    """

    def __init__(
        self,
        drafter: DSparkDrafter,
        target: Any,
        args: DSparkTrainingArguments,
        train_rows: Sequence[Response],
        eval_rows: Sequence[Response] | Mapping[str, Sequence[Response]] | None = None,
        **kwargs: Any,
    ):
        check_pair(target, drafter).raise_if_blocked()
        _require_float32(drafter)
        for option in args.options_by_confidence:
            if drafter.confidence_head is None:
                raise ValueError(f"{option} needs a confidence head, and this drafter has none: leave it out")
        self.drafter, self.target = drafter, target
        self.args: DSparkTrainingArguments
        # Of the old weights; new ones need a new one.
        drafter.calibration = None
        for module, is_trained in (
            (drafter.lm_head, args.train_lm_head),
            (drafter.embed_tokens, args.train_embed_tokens),
        ):
            if module is not None:
                module.requires_grad_(is_trained)
        if drafter.confidence_head is not None and args.confidence_weight == 0:
            # Left without a gradient, it would keep processes waiting for one.
            drafter.confidence_head.requires_grad_(False)
        if args.confidence_only:
            for name, parameter in drafter.named_parameters():
                parameter.requires_grad_(name.startswith("confidence_head."))
        num_draws = drafter.config.num_draft_tokens if args.sample_positions else 0
        train_dataset = _dataset(train_rows, args, num_draws=num_draws)
        if not len(train_dataset):
            raise ValueError(
                f"None of the {len(train_rows)} rows has two response tokens within `max_length` ({args.max_length}): "
                "there is nothing to draft. Raise `max_length`, or give longer responses."
            )
        datasets: Any = None
        if isinstance(eval_rows, Mapping):
            datasets, first = {}, len(train_dataset)
            for name, rows in eval_rows.items():
                dataset = _dataset(rows, args, first)
                first += len(dataset)
                if len(dataset):
                    datasets[name] = dataset
        elif eval_rows is not None:
            datasets = _dataset(eval_rows, args, len(train_dataset))
        if args.n_gpu > 1:
            # transformers would split each batch over them in one process, which knows tensors only.
            logger.warning(
                "One of %d GPUs is used. For all of them, start the training by `accelerate launch` or `torchrun`.",
                args.n_gpu,
            )
            args._n_gpu = 1
        super().__init__(
            model=TrainingStep(drafter, target, args.objective, args.attn_implementation),
            args=args,
            data_collator=collate,
            train_dataset=train_dataset,
            eval_dataset=datasets,
            **kwargs,
        )
        if args.muon:
            if self.optimizer is not None or self.optimizer_cls_and_kwargs is not None:
                raise ValueError("`muon` and an optimizer of your own are both given: leave one of them out")
            if self.is_fsdp_enabled or self.is_deepspeed_enabled:
                raise ValueError(
                    "--muon needs whole matrices, but FSDP and DeepSpeed split them: leave one of them out"
                )
        self.model_accepts_loss_kwargs = True
        self._online = OnlineFeatures(target, drafter.config.target_layer_ids)
        self.features: FeatureSource = self._online
        if args.feature_cache is not None:
            kept = [self.train_dataset, *(datasets.values() if isinstance(datasets, dict) else [datasets])]
            head = TargetHead(target, args.temperature)
            folder = None if args.feature_cache == "memory" else Path(args.feature_cache)
            self.features = CachedFeatures(self._online, head, [d for d in kept if d], folder, args.feature_cache_bits)
        self._has_confidence = drafter.confidence_head is not None and args.confidence_weight > 0
        self._evaluated_rows: set[int] = set()
        self._train_totals: _Totals | None = None
        self._eval_totals: _Totals | None = None
        self._clock = Clock(args.max_seconds)
        self.add_callback(ClockCallback(self._clock))
        if args.max_seconds is not None and self.pop_callback(ProgressCallback) is not None:
            self.add_callback(ClockProgress(self._clock))

    @property
    def draft_tokens(self) -> int:
        """Supervised draft tokens so far, of all processes and also before a restart; with `sample_positions`, those
        that could have been drawn."""
        return self._clock.draft_tokens

    # Batches

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int]:
        args: Any = self.args
        size = args.train_batch_size * args.world_size * args.gradient_accumulation_steps
        return LengthBucketSampler(self.train_dataset, size, _seed(args))  # type: ignore[arg-type]

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> torch.Tensor:
        """The summed weights of all supervised positions of an optimizer step, on all processes; where positions are
        drawn, which is later, their number.

        transformers counts labels here, which our batches do not have.
        """
        config = self.drafter.config
        weights = self.args.objective.by_position(config.num_draft_tokens, are_drawn=self.args.sample_positions)
        summed = torch.cat((weights.new_zeros(1), weights.cumsum(0)))
        # Summed weights, and how many positions.
        total = torch.zeros(2, device=device)
        for batch in batch_samples:
            anchors, lengths = batch["anchors"], batch["lengths"]
            counts = (lengths[:, None] - 1 - anchors).clamp(0, config.num_draft_tokens)
            counts = counts.masked_fill(anchors < 0, 0)
            total += torch.stack((summed.to(counts.device)[counts].sum(), counts.sum())).to(device)
        everywhere = self.accelerator.reduce(total.clone(), reduction="sum")
        self._clock.count(everywhere[1].long())
        return (everywhere if self.args.average_tokens_across_devices else total)[0]

    # The step

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        totals: StepTotals = model(inputs, self.features(inputs))
        divisor = totals.weight if num_items_in_batch is None else num_items_in_batch
        loss = totals.loss / divisor
        if model.training and num_items_in_batch is not None and self.args.average_tokens_across_devices:
            # The gradients of the processes are averaged, the divisor is that of all of them.
            loss = loss * self.accelerator.num_processes
        kept = self._train_totals if model.training else self._eval_totals
        kept = _Totals.of(totals) if kept is None else kept.plus(totals)
        if model.training:
            self._train_totals = kept
        else:
            self._eval_totals = kept
        return (loss, totals) if return_outputs else loss

    def prediction_step(
        self, model: Any, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[torch.Tensor | None, None, None]:
        prepared = self._without_repeats(self._prepare_inputs(inputs))
        with torch.no_grad(), self.compute_loss_context_manager():
            loss = self.compute_loss(model, prepared)
        return loss.detach(), None, None

    def _without_repeats(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Several processes are given batches of one size, the last ones filled up with rows that were there before:
        those count once."""
        accelerator = self.accelerator
        if accelerator.num_processes == 1:
            return batch
        everywhere = accelerator.gather(batch["row_ids"]).tolist()
        size = len(batch["row_ids"])
        mine = range(accelerator.process_index * size, (accelerator.process_index + 1) * size)
        is_repeated = [everywhere[i] in self._evaluated_rows or everywhere[i] in everywhere[:i] for i in mine]
        self._evaluated_rows.update(everywhere)
        repeated = torch.tensor(is_repeated, device=batch["anchors"].device)
        return {**batch, "anchors": batch["anchors"].masked_fill(repeated[:, None], -1)}

    # The log

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs and self._train_totals is not None:
            totals, self._train_totals = self._train_totals.gathered(self.accelerator), None
            logs = {**logs, **totals.metrics(with_hits=False, with_confidence=self._has_confidence)}
            if self.args.sample_positions:
                # Each step was divided by how many positions could have been drawn.
                logs["loss"] = round(totals.mean_loss, 4)
        seen = {"draft_tokens": self.draft_tokens, "seconds": round(self._clock.elapsed, 1)}
        super().log({**logs, **seen}, start_time)

    def evaluation_loop(self, dataloader: Any, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        self._eval_totals = None
        self._evaluated_rows.clear()
        output = super().evaluation_loop(dataloader, *args, metric_key_prefix=metric_key_prefix, **kwargs)  # type: ignore[misc]
        if self._eval_totals is not None:
            totals = self._eval_totals.gathered(self.accelerator)
            metrics: Any = output.metrics
            found = totals.metrics(with_confidence=self._has_confidence)
            metrics.update({f"{metric_key_prefix}_{name}": value for name, value in found.items()})
            metrics[f"{metric_key_prefix}_loss"] = totals.mean_loss
            if self.args.eval_prompts > 0:
                metrics[f"{metric_key_prefix}_generate_tau"] = self._generate_tau(dataloader.dataset)
        self._flush_features()
        return output

    @torch.no_grad()
    def _generate_tau(self, dataset: ResponseDataset) -> float:
        """τ of the decoding loop itself, greedily and with full drafts. Each process decodes the same prompts."""
        self.drafter.eval()
        with self.drafter.trace() as trace:
            for row in dataset.rows[: self.args.eval_prompts]:
                input_ids = torch.tensor([row.prompt_ids], device=self.target.device)
                self.target.generate(
                    input_ids=input_ids,
                    attention_mask=torch.ones_like(input_ids),
                    assistant_model=self.drafter,
                    num_assistant_tokens_schedule="constant",
                    assistant_confidence_threshold=0.0,
                    max_new_tokens=self.args.eval_max_new_tokens,
                    do_sample=False,
                    num_beams=1,
                )
        return round(trace.summary().acceptance_length, 5)

    # Saving: a checkpoint is a drafter that `from_pretrained` opens.

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        # The rows before it must come back as they were; those behind it are computed again, in the same batches.
        self._flush_features()
        super()._save_checkpoint(*args, **kwargs)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As transformers' own; puts down the cache of hidden states at its end."""
        result = super().train(*args, **kwargs)
        self._flush_features()
        return result

    def _flush_features(self) -> None:
        if isinstance(self.features, CachedFeatures):
            self.features.flush()

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        output_dir = str(output_dir if output_dir is not None else self.args.output_dir)
        if state_dict is not None:
            state_dict = {name.removeprefix("drafter."): tensor for name, tensor in state_dict.items()}
        self.drafter.save_pretrained(output_dir, state_dict=state_dict)
        torch.save(self.args, f"{output_dir}/training_args.bin")

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        loaded = DSparkDrafter.from_pretrained(resume_from_checkpoint, dtype=torch.float32)
        ours, found = ({n: t.shape for n, t in d.state_dict().items()} for d in (self.drafter, loaded))
        if ours != found:
            name = next(name for name in (*ours, *found) if ours.get(name) != found.get(name))
            raise ValueError(
                f"{resume_from_checkpoint} holds another drafter than the one that is trained: {name} is "
                f"{found.get(name)} there and {ours.get(name)} here. Use another `output_dir`, or delete it."
            )
        self._refuse_other_meaning(resume_from_checkpoint, loaded)
        self.drafter.load_state_dict(loaded.state_dict())

    def _refuse_other_meaning(self, checkpoint: str, loaded: DSparkDrafter) -> None:
        """Weights of the same shapes can be those of other draft ids, taps or blocks: the step was made for ours."""
        for name in _MEANING:
            there, here = (getattr(drafter.config, name) for drafter in (loaded, self.drafter))
            if there != here:
                raise ValueError(
                    f"{checkpoint} holds another drafter than the one that is trained: `{name}` is {there} there and "
                    f"{here} here. Use another `output_dir`, or delete it."
                )
        if not torch.equal(loaded.proposed_ids.cpu(), self.drafter.proposed_ids.cpu()):
            raise ValueError(
                f"{checkpoint} proposes other ids than the drafter that is trained: the draft vocabulary is made of "
                "the responses, and they have changed. To go on from it with new responses, name it as the drafter to "
                "start from, and use another `output_dir`."
            )

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(str(self.state.best_model_checkpoint))

    # The optimizer, and the clock that its learning rate follows

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        if self.optimizer is None and self.args.muon:
            settings = self.args
            betas = (settings.adam_beta1, settings.adam_beta2)
            self.optimizer = MuonAndAdamW(
                self.drafter, settings.learning_rate, betas, settings.adam_epsilon, settings.weight_decay
            )
        return super().create_optimizer(*args, **kwargs)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        try:
            super()._load_optimizer_and_scheduler(checkpoint)
        except (KeyError, ValueError) as error:
            raise ValueError(
                f"{checkpoint} holds the state of another optimizer, or of other trained parameters ({error}). Go on "
                "with the settings that the run was begun with, or use another `output_dir`."
            ) from error

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if self.args.max_seconds is None:
            return super().create_scheduler(num_training_steps, optimizer)
        scheduler = super().create_scheduler(CLOCK_STEPS, optimizer)
        if not isinstance(scheduler, LambdaLR):
            raise ValueError(
                f"--lr_scheduler_type {self.args.lr_scheduler_type} goes by more than the step, so it cannot follow "
                "the clock of --max_seconds. Choose cosine, linear or constant_with_warmup."
            )
        scheduler.lr_lambdas = [by_clock(rule, self._clock) for rule in scheduler.lr_lambdas]
        return scheduler

    def close(self) -> None:
        """Puts down what the cache of hidden states has not written yet, and takes the hooks off the target; no step
        can follow."""
        try:
            self._flush_features()
        finally:
            self._online.close()


def _seed(args: DSparkTrainingArguments) -> int:
    return args.seed if args.data_seed is None else args.data_seed


def _dataset(
    rows: Sequence[Response], args: DSparkTrainingArguments, first_row_id: int = 0, num_draws: int = 0
) -> ResponseDataset:
    return ResponseDataset(rows, args.num_anchors, args.max_length, _seed(args), first_row_id, num_draws)


def _require_float32(drafter: DSparkDrafter) -> None:
    found = {parameter.dtype for parameter in drafter.parameters()}
    if found != {torch.float32}:
        raise ValueError(
            f"The drafter is in {', '.join(sorted(str(dtype) for dtype in found))}, but small steps vanish in half "
            "precision: load it with `dtype=torch.float32`, and set `bf16=True` for a fast pass."
        )


class _Totals:
    """Sums over many steps, without gradients."""

    def __init__(self, loss: torch.Tensor, weight: torch.Tensor, by_position: torch.Tensor, tau: torch.Tensor):
        self.loss, self.weight, self.by_position, self.tau = loss, weight, by_position, tau

    @classmethod
    def of(cls, totals: StepTotals) -> "_Totals":
        return cls(totals.loss.detach().float(), totals.weight, totals.by_position, totals.tau)

    def plus(self, totals: StepTotals) -> "_Totals":
        added = _Totals.of(totals)
        return _Totals(
            self.loss + added.loss,
            self.weight + added.weight,
            self.by_position + added.by_position,
            self.tau + added.tau,
        )

    def gathered(self, accelerator: Any) -> "_Totals":
        """Those of all processes."""
        parts = (self.loss, self.weight, self.by_position, self.tau)
        return _Totals(*(accelerator.reduce(part.clone(), reduction="sum") for part in parts))

    @property
    def mean_loss(self) -> float:
        return float(self.loss / self.weight)

    def metrics(self, with_hits: bool = True, with_confidence: bool = True) -> dict[str, float]:
        """Means, by name. `tau` is what sampling would accept along these texts, exactly; `greedy_tau` what taking the
        first choice would."""
        counts, cross_entropy, acceptance, _, error, bce = self.by_position
        total = counts.sum().clamp(min=1)
        named = {
            "cross_entropy": cross_entropy.sum() / total,
            "distance": 2 * (1 - acceptance.sum() / total),
        }
        if with_confidence:
            named |= {"confidence_bce": bce.sum() / total, "confidence_error": error.sum() / total}
        for position, chance in enumerate(acceptance / counts.clamp(min=1), 1):
            named[f"acceptance_{position}"] = chance
        if self.tau[0] > 0:
            named["tau"] = self.tau[1] / self.tau[0]
            if with_hits:
                named["greedy_tau"] = self.tau[2] / self.tau[0]
        return {name: round(float(value), 5) for name, value in named.items()}
