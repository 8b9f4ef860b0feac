"""The clock that may end a run, and what it has seen so far: kept in checkpoints, shown while it trains."""

import time
from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils import broadcast
from tqdm.auto import tqdm
from transformers import ProgressCallback, TrainerCallback
from transformers.trainer_callback import ExportableState

# The learning rate's schedule is made for so many steps where it follows the clock.
CLOCK_STEPS = 10_000


class Clock:
    """Seconds and supervised draft tokens of training so far, those before a restart included.

    Args:
        limit: seconds after which the training ends; `None`: something else ends it.
    """

    def __init__(self, limit: float | None):
        self.limit = limit
        self._draft_tokens: int | torch.Tensor = 0
        self.before, self.share, self.last_step = 0.0, 0.0, 0.0
        self.started: float | None = None

    @property
    def draft_tokens(self) -> int:
        return int(self._draft_tokens)

    def count(self, draft_tokens: int | torch.Tensor) -> None:
        """Adds supervised draft tokens. A tensor stays on its device until the count is read: no step waits for it."""
        self._draft_tokens = self._draft_tokens + draft_tokens

    @property
    def elapsed(self) -> float:
        return self.before + (0.0 if self.started is None else time.monotonic() - self.started)

    def start(self, before: float, draft_tokens: int) -> None:
        """Begins, or goes on after so many seconds and draft tokens."""
        self.before, self.started, self._draft_tokens = before, time.monotonic(), draft_tokens
        self.read()

    def read(self) -> float:
        """The share of the time that is over, up to 1; it stays the same until the next reading."""
        self.share = min(1.0, self.elapsed / self.limit) if self.limit is not None else 0.0
        return self.share


def by_clock(rule: Callable[[int], float], clock: Clock) -> Callable[[int], float]:
    """A schedule of the learning rate that is asked for the time in place of the step."""

    # A plain function: of anything else, a checkpoint of the schedule would hold the attributes.
    def rate(step: int) -> float:
        return rule(round(clock.share * CLOCK_STEPS))

    return rate


class ClockCallback(TrainerCallback, ExportableState):
    """Ends the training in time. All processes go by the clock of the first; a restart goes on with it, and with the
    count of draft tokens."""

    def __init__(self, clock: Clock):
        self._clock = clock
        self._was_between_steps = False

    def state(self) -> dict:
        return {"args": {}, "attributes": {"elapsed": self._clock.elapsed, "draft_tokens": self._clock.draft_tokens}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        saved = state.stateful_callbacks.get(type(self).__name__, {})
        attributes = saved.get("attributes", {})
        self._clock.start(attributes.get("elapsed", 0.0), attributes.get("draft_tokens", 0))

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._clock.limit is None:
            return
        before, share = self._clock.share, self._clock.read()
        if args.world_size > 1:
            share = self._clock.share = float(broadcast(torch.tensor(share, device=args.device)))
        # An evaluation or a checkpoint in between is no part of a step, and the last step need not wait for one.
        if not self._was_between_steps:
            self._clock.last_step = share - before
        self._was_between_steps = False

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._was_between_steps = True

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._was_between_steps = True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # The next step would end more than half of itself too late.
        if self._clock.limit is not None and self._clock.share + 1.5 * self._clock.last_step >= 1.0:
            control.should_training_stop = True


class ClockProgress(ProgressCallback):
    """transformers' progress bar, in seconds in place of steps."""

    training_bar: Any

    def __init__(self, clock: Clock):
        super().__init__()
        self._clock = clock

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero and self._clock.limit is not None:
            self.training_bar = tqdm(
                total=round(self._clock.limit), initial=round(self._clock.elapsed), unit="s", dynamic_ncols=True
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.training_bar is not None:
            self.training_bar.update(round(self._clock.elapsed) - self.training_bar.n)
