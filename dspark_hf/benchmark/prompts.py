"""What a call of `generate` gets: prompts from a file or at random, of their own or of a given length, in batches."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice, zip_longest
from pathlib import Path

import torch
from transformers import BatchEncoding, PreTrainedTokenizerBase

from ..comparison import Pair, encode_prompt
from ..prompt_files import COPY_PROMPTS_FILE, PROMPTS_FILE, Prompt, read_prompts
from .models import Models
from .settings import BenchmarkSettings

_RANDOM_PROMPT_LENGTH = 128


@dataclass(frozen=True)
class Case:
    """The prompts of one call.

    Attributes:
        group: what the results are grouped by: the dataset, or the context length.
        names: which prompt each row holds.
        prompt_ids: token ids of each row.
    """

    group: str
    names: list[str]
    prompt_ids: list[list[int]]

    def inputs(self, pad_token_id: int, device: torch.device) -> BatchEncoding:
        """`input_ids` and `attention_mask`, both `[B, longest prompt]`, padded on the left."""
        longest = max(map(len, self.prompt_ids))
        missing = [longest - len(ids) for ids in self.prompt_ids]
        return BatchEncoding(
            {
                "input_ids": torch.tensor(
                    [[pad_token_id] * n + ids for n, ids in zip(missing, self.prompt_ids, strict=True)], device=device
                ),
                "attention_mask": torch.tensor([[0] * n + [1] * (longest - n) for n in missing], device=device),
            }
        )


def make_cases(settings: BenchmarkSettings, models: Models) -> list[Case]:
    """The calls that are measured, in order."""
    rows = [*_rows(settings, models)]
    return [case for group, members in _grouped(rows).items() for case in _batches(members, group, settings)]


def make_mixed_cases(settings: BenchmarkSettings, models: Models) -> list[Case]:
    """The same with prompts of all groups side by side, so that large batches are not all of one kind."""
    in_turn = zip_longest(*_grouped([*_rows(settings, models)]).values())
    mixed = [row for turn in in_turn for row in turn if row is not None]
    return [*_batches(mixed, "all", settings)]


def _grouped(rows: list[Case]) -> dict[str, list[Case]]:
    groups: dict[str, list[Case]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    return groups


def _batches(rows: list[Case], group: str, settings: BenchmarkSettings) -> Iterator[Case]:
    """Batches of single prompts, each full: the last one is filled up with the first ones."""
    for start in range(0, len(rows), settings.batch_size):
        batch = [*islice(cycle(rows), start, start + settings.batch_size)]
        yield Case(group, [row.names[0] for row in batch], [row.prompt_ids[0] for row in batch])


def _rows(settings: BenchmarkSettings, models: Models) -> Iterator[Case]:
    """Single prompts."""
    if models.tokenizer is None:
        yield from _random_rows(settings, models)
        return
    prompts = read_prompts(Path(settings.prompts or PROMPTS_FILE))[: settings.num_prompts]
    if settings.with_copy:
        prompts += read_prompts(COPY_PROMPTS_FILE)
    pair = Pair(models.target, models.tokenizer, models.drafter)
    encoded = [encode_prompt(pair, prompt.prompt)["input_ids"][0].tolist() for prompt in prompts]
    if settings.context_length is None:
        for prompt, ids in zip(prompts, encoded, strict=True):
            yield Case(prompt.dataset, [f"{prompt.dataset} {prompt.index}"], [ids])
        return
    filler = _filler(prompts, models.tokenizer)
    for length in settings.context_length:
        for number, (prompt, ids) in enumerate(zip(prompts, encoded, strict=True)):
            name = f"{prompt.dataset} {prompt.index}"
            yield Case(_context_group(length), [name], [_of_length(length, ids, filler, number)])


def _random_rows(settings: BenchmarkSettings, models: Models) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(settings.seed)
    vocab_size = models.target.config.get_text_config(decoder=True).vocab_size
    for length in settings.context_length or [_RANDOM_PROMPT_LENGTH]:
        for number in range(settings.num_prompts):
            ids = torch.randint(vocab_size, (length,), generator=generator).tolist()
            yield Case(_context_group(length), [f"random {number}"], [ids])


def _context_group(length: int) -> str:
    return f"{length:,} tokens"


def _filler(prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    texts = [f"{prompt.prompt}\n\n" for prompt in prompts]
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def _of_length(length: int, prompt_ids: list[int], filler: list[list[int]], number: int) -> list[int]:
    """A prompt with the texts of the others before it, again and again, cut on the left to `length` tokens."""
    others = [token for ids in [*filler[number + 1 :], *filler[:number]] or filler for token in ids]
    missing = max(0, length - len(prompt_ids))
    before = [*islice(cycle(reversed(others)), missing)][::-1]
    return [*before, *prompt_ids][-length:]
