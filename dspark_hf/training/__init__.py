"""Training a drafter on responses of its target.

    rows = read_responses("responses.jsonl", target.config.vocab_size)
    train_rows, held_out = split_held_out(rows)
    drafter = new_drafter(target, num_hidden_layers=2, mask_token_id=choose_mask_token(rows, target))
    trainer = DSparkTrainer(drafter, target, DSparkTrainingArguments("out", max_seconds=3600), train_rows, held_out)
    trainer.train()
    trainer.save_model()

In the order in which data flow: `responses` (rows, anchors, batches) -> `target_features` (what is read of the target;
`feature_store` keeps it) -> `blocks` (all blocks of a batch in one pass) -> `objective` -> `step` -> `optimizer` ->
`trainer`, with the settings of `arguments`; `new_drafter` makes what is trained, `run` is the command
`dspark-hf train`.
"""

from typing import TYPE_CHECKING, Any

from .arguments import DSparkTrainingArguments
from .new_drafter import (
    choose_draft_vocabulary,
    choose_mask_token,
    drafter_config,
    new_drafter,
    with_block_size,
    with_draft_vocabulary,
    with_markov_head,
    with_more_layers,
)
from .responses import Response, read_responses, split_held_out

if TYPE_CHECKING:
    from .trainer import DSparkTrainer

__all__ = [
    "DSparkTrainer",
    "DSparkTrainingArguments",
    "Response",
    "choose_draft_vocabulary",
    "choose_mask_token",
    "drafter_config",
    "new_drafter",
    "read_responses",
    "split_held_out",
    "with_block_size",
    "with_draft_vocabulary",
    "with_markov_head",
    "with_more_layers",
]


def __getattr__(name: str) -> Any:
    """Imports the trainer where it is asked for: transformers' `Trainer` takes long, and commands start without it."""
    if name == "DSparkTrainer":
        from .trainer import DSparkTrainer

        return DSparkTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
