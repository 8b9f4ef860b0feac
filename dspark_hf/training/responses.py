"""Responses of the target, as rows of token ids: reading, holding out, anchors, batches."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, Sampler

from ..prompt_files import file_stem, numbered_lines

# Rows of a sampler's draw that are sorted by length together, in global batches: more would make epochs alike.
_BATCHES_PER_BUCKET = 16


@dataclass(frozen=True)
class Response:
    """One response of the target to one prompt.

    Attributes:
        prompt_ids: ids of the prompt, chat template included.
        response_ids: ids of the response; the last one is the end-of-sequence id where it ended by itself.
        dataset: where the prompt comes from.
        index: number of the prompt there.
    """

    prompt_ids: list[int]
    response_ids: list[int]
    dataset: str
    index: int


def read_responses(path: str | Path, vocab_size: int | None = None) -> list[Response]:
    """Reads a file of JSON lines (`.jsonl`, or `.jsonl.gz`) with `prompt_ids` and `response_ids`.

    Without `dataset` a row is of the set that is named after the file, without `index` it has the number of its line,
    counted from 1.

    Args:
        path: the file.
        vocab_size: ids must be smaller; `None`: do not check.

    Raises:
        OSError: there is no such file.
        ValueError: a line is something else, or the file has none; the message says which line.
    """
    path = Path(path)
    rows = [_parse(line, path, number, vocab_size) for number, line in numbered_lines(path)]
    if not rows:
        raise ValueError(f"{path} holds no rows. Expected JSON lines with `prompt_ids` and `response_ids`.")
    return rows


def _parse(line: str, path: Path, number: int, vocab_size: int | None) -> Response:
    where = f"{path}, line {number}"
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is no JSON ({error}).") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{where} holds {type(fields).__name__}, expected a JSON object.")
    for name in ("prompt_ids", "response_ids"):
        ids = fields.get(name)
        if not isinstance(ids, list) or not ids or not all(type(i) is int and i >= 0 for i in ids):
            raise ValueError(
                f"{where}: `{name}` is {_shown(ids)}, expected a list of token ids. Training reads responses of the "
                "target as token ids: `dspark-hf data` writes them."
            )
        if vocab_size is not None and max(ids) >= vocab_size:
            raise ValueError(
                f"{where}: `{name}` holds {max(ids)}, but the target has {vocab_size} ids. The responses are of "
                "another model."
            )
    index = fields.get("index", number)
    if type(index) is not int:
        raise ValueError(f"{where}: `index` is {index!r}, expected an integer.")
    return Response(fields["prompt_ids"], fields["response_ids"], str(fields.get("dataset", file_stem(path))), index)


def _shown(value: object) -> str:
    text = "missing" if value is None else repr(value)
    return text if len(text) < 60 else f"{text[:56]} ..."


def split_held_out(
    rows: Sequence[Response], every: int = 20, datasets: Sequence[str] = ("mt-bench",)
) -> tuple[list[Response], list[Response]]:
    """Parts rows into those to train on and those that are held out.

    Args:
        rows: all of them.
        every: rows whose `index` is divisible by it are held out; 0: none for that reason.
        datasets: sets of which every row is held out.

    Raises:
        ValueError: nothing is left to train on.
    """
    held_out = [row.dataset in datasets or (every > 0 and row.index % every == 0) for row in rows]
    train = [row for row, is_out in zip(rows, held_out, strict=True) if not is_out]
    if not train:
        raise ValueError(
            f"All {len(rows)} rows are held out (every index divisible by {every}, and the sets "
            f"{', '.join(datasets) or 'none'}): none is left to train on."
        )
    return train, [row for row, is_out in zip(rows, held_out, strict=True) if is_out]


def _generator(seed: int, epoch: int, index: int) -> torch.Generator:
    """Chance that depends on these numbers alone."""
    return torch.Generator().manual_seed(((seed * 1_000_003 + epoch) * 1_000_000_007 + index) % 2**63)


class ResponseDataset(Dataset):
    """Sequences (prompt and response) with anchors, drawn anew in each epoch.

    The anchors are a function of seed, epoch and row alone: neither the order of the rows, nor the number of
    processes, nor a restart changes them. An anchor is a response token with at least one more behind it: the first
    one is what the prefill gives, the tokens of the prompt are never one.

    Args:
        rows: the responses. Those without an anchor (of one token, or beyond `max_length`) are left out.
        num_anchors: anchors of a sequence at most.
        max_length: longer sequences are cut.
        seed: of the anchors.
        num_draws: random numbers with each anchor, one for each draft position; 0: none.
        first_row_id: the id of the first row, where several datasets are told apart by the ids of their rows.

    Attributes:
        rows: the rows in use.
        num_dropped: how many were left out.
    """

    def __init__(
        self,
        rows: Sequence[Response],
        num_anchors: int,
        max_length: int,
        seed: int = 0,
        first_row_id: int = 0,
        num_draws: int = 0,
    ):
        self.first_row_id, self.num_draws = first_row_id, num_draws
        self.num_anchors, self.max_length, self.seed = num_anchors, max_length, seed
        self.epoch = 0
        self.rows = [row for row in rows if self._length(row) - len(row.prompt_ids) >= 2]
        self.num_dropped = len(rows) - len(self.rows)
        self.lengths = [self._length(row) for row in self.rows]

    def _length(self, row: Response) -> int:
        return min(len(row.prompt_ids) + len(row.response_ids), self.max_length)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row, length = self.rows[index], self.lengths[index]
        ids = torch.tensor((row.prompt_ids + row.response_ids)[:length])
        candidates = torch.arange(len(row.prompt_ids), length - 1)
        generator = _generator(self.seed, self.epoch, index)
        chosen = torch.randperm(len(candidates), generator=generator)[: self.num_anchors]
        item = {"row_id": self.first_row_id + index, "input_ids": ids, "anchors": candidates[chosen.sort().values]}
        if self.num_draws:
            item["draws"] = torch.rand(len(chosen), self.num_draws, generator=generator)
        return item


def collate(items: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A batch: `row_ids` and `lengths` `[B]`, `input_ids` `[B, L]` (0 behind the end), `anchors` `[B, N]` (-1), and
    `draws` `[B, N, n]` where the items have them."""
    batch = {
        "row_ids": torch.tensor([item["row_id"] for item in items]),
        "lengths": torch.tensor([len(item["input_ids"]) for item in items]),
        "input_ids": pad_sequence([item["input_ids"] for item in items], batch_first=True),
        "anchors": pad_sequence([item["anchors"] for item in items], batch_first=True, padding_value=-1),
    }
    if "draws" in items[0]:
        batch["draws"] = pad_sequence([item["draws"] for item in items], batch_first=True)
    return batch


class LengthBucketSampler(Sampler[int]):
    """Rows in random order, such that those of a global batch have about the same length.

    The order is a function of seed and epoch alone.

    Args:
        dataset: the rows; its epoch follows the sampler's.
        batch_size: rows of a global batch, those of all processes and accumulation steps.
        seed: of the order.
    """

    def __init__(self, dataset: ResponseDataset, batch_size: int, seed: int = 0):
        self.dataset, self.batch_size, self.seed = dataset, batch_size, seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.dataset)

    def __iter__(self) -> Iterator[int]:
        generator = _generator(self.seed, self.epoch, -1)
        order = torch.randperm(len(self.dataset), generator=generator).tolist()
        size, lengths = self.batch_size * _BATCHES_PER_BUCKET, self.dataset.lengths
        batches: list[list[int]] = []
        for start in range(0, len(order), size):
            bucket = sorted(order[start : start + size], key=lambda i: lengths[i])
            batches += [bucket[i : i + self.batch_size] for i in range(0, len(bucket), self.batch_size)]
        # A short batch stays last: in the middle it would shift the rows of all that follow.
        num_full = math.floor(len(order) / self.batch_size)
        full = [batch for batch in batches if len(batch) == self.batch_size]
        short = [batch for batch in batches if len(batch) < self.batch_size]
        for i in torch.randperm(num_full, generator=generator).tolist():
            yield from full[i]
        for batch in short:
            yield from batch
