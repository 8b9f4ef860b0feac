"""Prices of rounds in a file: measured once, instead of learned from the first rounds of a pair.

Left in the cache (`model.save()`), they are where the calls of this pair, on this machine, start from; the calls go on
learning. Given to a drafter (`drafter.cost_model = model`), they stand still: then no decision depends on the clock,
and the same seed and settings give the same sampled text, as with a schedule without prices.
"""

import hashlib
import json
import os
import platform
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from huggingface_hub.constants import HF_HOME
from torch import nn

from .acceptance import DRAFTER
from .checkpoints.files import write_whole
from .costs import CostTable
from .modeling_dspark import DSparkDrafter
from .policies import ConstantSchedule
from .scheduling import Plan, RowState, row_plan
from .trace import Round


@dataclass(frozen=True)
class Prices:
    """Seconds of the parts of a round.

    Attributes:
        passes: of the target's pass, and all of the round beside the draft, by rows and by draft tokens of all rows.
        drafts: of a draft, by rows and by draft tokens of a row.
    """

    passes: dict[int, dict[int, float]]
    drafts: dict[int, dict[int, float]]


@dataclass(frozen=True)
class CostModel:
    """Prices of a pair.

    Attributes:
        place: what they hold for: device, dtypes, threads, models, versions.
        contexts: by the tokens before the round, ascending.
    """

    place: dict[str, Any]
    contexts: dict[int, Prices]

    def prices(self, context_length: int | None = None) -> Prices:
        """The prices at a context length: between two that were measured, in proportion; beyond them, those of the
        nearest. `None`: of the shortest."""
        known = sorted(self.contexts)
        length = known[0] if context_length is None else min(max(context_length, known[0]), known[-1])
        above = next(n for n in known if n >= length)
        below = max(n for n in known if n <= length)
        if above == below:
            return self.contexts[above]
        at = (length - below) / (above - below)
        low, high = self.contexts[below], self.contexts[above]
        return Prices(_between(low.passes, high.passes, at), _between(low.drafts, high.drafts, at))

    def table(self, context_length: int | None = None, is_fixed: bool = True) -> CostTable:
        """The prices as schedules read them.

        Args:
            is_fixed: nothing is learned into it.
        """
        prices = self.prices(context_length)
        return CostTable.of(prices.passes, prices.drafts, is_fixed)

    def save(self, path: str | os.PathLike | None = None) -> Path:
        """Writes the file; without a path, into the user's cache, under a name made of `place`."""
        path = _cached(self.place) if path is None else Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, asdict(self))
        return path

    @classmethod
    def load(cls, path: str | os.PathLike) -> "CostModel":
        """Reads a file.

        Raises:
            OSError: there is none, or it is something else.
        """
        text = Path(path).read_text(encoding="utf-8")
        try:
            fields = json.loads(text)
            contexts = {
                int(length): Prices(_numbers(prices["passes"]), _numbers(prices["drafts"]))
                for length, prices in fields["contexts"].items()
            }
            curves = [of_rows for prices in contexts.values() for of_rows in prices.passes.values()]
            if not curves or not all(0 in of_rows and min(of_rows.values()) > 0 for of_rows in curves):
                raise ValueError("a price is missing or not positive")
            if len({(tuple(prices.passes), tuple(prices.drafts)) for prices in contexts.values()}) > 1:
                raise ValueError("its context lengths have prices for different numbers of rows")
            return cls(dict(fields["place"]), contexts)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise OSError(f"{path} holds no prices ({error}). Write it anew with `profile_costs`.") from error

    @classmethod
    def cached(cls, target: Any, drafter: DSparkDrafter) -> "CostModel | None":
        """The prices that `save` left in the cache for this pair, where it stands now; `None` without any that can be
        read: a call does not fail for them, it learns its own."""
        path = _cached(place_of(target, drafter))
        try:
            return cls.load(path) if path.is_file() else None
        except (OSError, UnicodeDecodeError) as error:
            warnings.warn(f"Decoding learns its own prices: {error}", UserWarning, stacklevel=2)
            return None

    def differences(self, target: Any, drafter: DSparkDrafter) -> dict[str, tuple[Any, Any]]:
        """In what a pair differs from the one of these prices: here and there, by name; empty if they hold for it."""
        here = place_of(target, drafter)
        return {name: (self.place.get(name), value) for name, value in here.items() if self.place.get(name) != value}

    def speed_ups(self, num_rows: int, acceptance: float, context_length: int | None = None) -> list[float]:
        """Expected speed over plain decoding, of drafts of 0, 1, ... tokens for every row, by these prices.

        A draft of n tokens brings tau = 1 + p + ... + p^n tokens a row, and lasts as long as the draft and the pass:
        speed = tau / (T_draft / T_plain + T_pass / T_plain).

        Args:
            num_rows: rows of the batch; one of those that were measured.
            acceptance: p, the chance that a draft token is accepted where those before it are.
            context_length: tokens before the round; default: the shortest measured.

        Raises:
            ValueError: `num_rows` was not measured, or `acceptance` is no chance.
        """
        prices = self.prices(context_length)
        if num_rows not in prices.passes:
            raise ValueError(f"No prices for {num_rows} rows, only for {', '.join(map(str, sorted(prices.passes)))}.")
        if not 0 <= acceptance <= 1:
            raise ValueError(f"`acceptance` is {acceptance}, expected a chance from 0 to 1.")
        passes, drafts = prices.passes[num_rows], prices.drafts.get(num_rows, {})
        lengths = sorted(size // num_rows for size in passes)
        tokens = [sum(acceptance**k for k in range(1 + n)) for n in lengths]
        seconds = [passes[num_rows * n] + (drafts[n] if n else 0.0) for n in lengths]
        return [passes[0] * tau / cost for tau, cost in zip(tokens, seconds, strict=True)]


def place_of(target: Any, drafter: DSparkDrafter) -> dict[str, Any]:
    """What prices depend on."""
    device = target.device
    config = target.config.get_text_config(decoder=True)
    return {
        "device": _device_name(device),
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        "target": f"{type(target).__name__}, {config.num_hidden_layers} layers of {config.hidden_size}",
        "target_sizes": [config.vocab_size, getattr(config, "intermediate_size", None)],
        "target_dtype": str(target.dtype),
        # Packed and quantized ones cost something else, in the same dtype.
        "target_linear": sorted({type(m).__name__ for m in target.modules() if isinstance(m, nn.Linear)}),
        "attention": str(config._attn_implementation),
        "drafter": f"{drafter.config.num_hidden_layers} layers of {drafter.config.hidden_size}",
        "drafter_dtype": str(drafter.dtype),
        "block_size": drafter.config.block_size,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return str(device)
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}, {os.cpu_count()} cores"


def _numbers(part: dict[str, dict[str, float]]) -> dict[int, dict[int, float]]:
    # JSON knows strings only as keys.
    return {int(rows): {int(n): float(seconds) for n, seconds in of.items()} for rows, of in part.items()}


def _between(low: dict[int, dict[int, float]], high: dict[int, dict[int, float]], at: float) -> dict:
    """Prices in proportion: `at` 0 gives the first ones, 1 the others."""
    return {
        rows: {n: (1 - at) * seconds + at * high[rows][n] for n, seconds in of.items() if n in high[rows]}
        for rows, of in low.items()
    }


# Calls after which a length should have been seen, and as many again for each further time.
_PATIENCE = 8


class _Sweep(ConstantSchedule):
    """Every number of draft tokens in turn, the same for all rows, then again."""

    num_rounds = 0

    def plan(self, rows: Sequence[RowState]) -> Plan:
        most = self._settings.num_assistant_tokens
        length = self.num_rounds % (1 + most)
        self.num_rounds += 1
        return Plan([row_plan(DRAFTER, min(length, row.room)) for row in rows], "profiling")


def profile_costs(
    target: Any,
    drafter: DSparkDrafter,
    *,
    batch_sizes: Sequence[int] = (1,),
    context_lengths: Sequence[int] = (256,),
    repeats: int = 7,
    seed: int = 0,
) -> CostModel:
    """Measures what rounds of a pair cost, by decoding a random text with drafts of every length in turn.

    A few seconds for each batch size and context length, on an otherwise idle machine.

    Args:
        batch_sizes: rows of the passes that are measured; others are taken from the nearest.
        context_lengths: tokens of the prompts. Prices grow with them, nearly all at the same pace, and only their
            ratios count: a second length matters for texts of many thousand tokens.
        repeats: of each length; the median counts.
        seed: of the random prompts.

    Raises:
        ValueError: a number is out of range, or the drafter proposes nothing.
    """
    if not batch_sizes or not context_lengths or min(*batch_sizes, *context_lengths, repeats) < 1:
        raise ValueError("`batch_sizes`, `context_lengths` and `repeats` must hold numbers from 1 on.")
    generator = torch.Generator().manual_seed(seed)
    contexts = {}
    for context_length in sorted(set(context_lengths)):
        measured = {
            num_rows: _measure(target, drafter, num_rows, context_length, repeats, generator)
            for num_rows in sorted(set(batch_sizes))
        }
        contexts[context_length] = Prices(
            {num_rows: passes for num_rows, (passes, _) in measured.items()},
            {num_rows: drafts for num_rows, (_, drafts) in measured.items()},
        )
    return CostModel(place_of(target, drafter), contexts)


def _measure(
    target: Any,
    drafter: DSparkDrafter,
    num_rows: int,
    context_length: int,
    repeats: int,
    generator: torch.Generator,
) -> tuple[dict[int, float], dict[int, float]]:
    """Seconds of passes by their size and of drafts by their length."""
    num_lengths = 1 + drafter.config.num_draft_tokens
    vocab_size = target.config.get_text_config(decoder=True).vocab_size
    input_ids = torch.randint(vocab_size, (num_rows, context_length), generator=generator).to(target.device)
    rounds: dict[int, list[Round]] = {length: [] for length in range(num_lengths)}
    # Enough for a turn of all lengths, even if every draft is accepted.
    num_tokens = max((repeats + 1) * num_lengths, num_lengths * (num_lengths + 1))
    # Whatever the drafter's own settings are.
    settings: dict[str, Any] = {"num_assistant_tokens": drafter.config.num_draft_tokens}
    if drafter.confidence_head is not None:
        settings["assistant_confidence_threshold"] = 0.0
    num_calls = 0
    while (fewest := min(map(len, rounds.values()))) < repeats + 1:
        if num_calls >= _PATIENCE * (1 + fewest):
            missing = ", ".join(str(length) for length, of_length in rounds.items() if len(of_length) == fewest)
            raise ValueError(
                f"The drafter makes no drafts of {missing} tokens for {num_rows} rows: nothing to measure. Check with "
                "`dspark-hf generate` that it proposes what the target accepts, and its dtype for overflows."
            )
        num_calls += 1
        with drafter.trace() as trace:
            target.generate(
                input_ids=input_ids,
                attention_mask=torch.ones_like(input_ids),
                max_new_tokens=num_tokens,
                # No token ends the text. `min_new_tokens` would be a processor of logits, and drafts that pass through
                # processors cost more.
                eos_token_id=vocab_size,
                pad_token_id=0,
                do_sample=False,
                num_beams=1,
                assistant_model=drafter,
                num_assistant_tokens_schedule=_Sweep,
                **settings,
            )
        for one in trace.rounds:
            lengths = {len(proposed) for proposed, _, _ in one.per_row()}
            # Where the room ran out, drafts are cut and rows gone.
            if len(one.rows) == num_rows and len(lengths) == 1:
                rounds[lengths.pop()].append(one)
    # The first one of each length does not count: it pays for what happens once.
    return _medians({length: of_length[1:] for length, of_length in rounds.items()}, num_rows)


def _medians(rounds: dict[int, list[Round]], num_rows: int) -> tuple[dict[int, float], dict[int, float]]:
    """Median seconds of passes by their size, and of drafts by their length, from rounds by draft length."""
    passes = {num_rows * n: median(r.seconds - r.draft_seconds for r in of_n) for n, of_n in rounds.items()}
    return passes, {n: median(r.draft_seconds for r in of_n) for n, of_n in rounds.items() if n}


def _cached(place: dict[str, Any]) -> Path:
    name = hashlib.sha256(json.dumps(place, sort_keys=True).encode()).hexdigest()[:16]
    return Path(HF_HOME) / "dspark_hf" / "costs" / f"{name}.json"
