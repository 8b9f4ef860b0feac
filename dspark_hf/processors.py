"""What is known of transformers' logits processors: which of them may see a draft, a block, a row alone."""

import copy
from typing import Any

import torch
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor
from transformers.generation import logits_process

# Processors that do not know which token a score is of: those that nobody can propose may be left out.
_RANK_ONLY = tuple(
    getattr(logits_process, name)
    for name in (
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "LogitNormalization",
        "MinPLogitsWarper",
        "TemperatureLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "TypicalLogitsWarper",
    )
)
# Processors that depend on nothing but scores: a whole block can go through them at once.
_SCORES_ONLY = (*_RANK_ONLY, logits_process.SuppressTokensLogitsProcessor)
# Processors that depend on nothing but the ids and scores of the moment, of each row by itself.
_MEMORYLESS = _SCORES_ONLY + tuple(
    getattr(logits_process, name)
    for name in (
        "ExponentialDecayLengthPenalty",
        "ForcedBOSTokenLogitsProcessor",
        "ForcedEOSTokenLogitsProcessor",
        "MinLengthLogitsProcessor",
        "MinNewTokensLengthLogitsProcessor",
        "NoBadWordsLogitsProcessor",
        "NoRepeatNGramLogitsProcessor",
        "RepetitionPenaltyLogitsProcessor",
        "SequenceBiasLogitsProcessor",
        "SuppressTokensAtBeginLogitsProcessor",
    )
)


def read_scores_only(processors: LogitsProcessorList) -> bool:
    return all(type(p) in _SCORES_ONLY for p in processors)


def rank_scores_only(processors: LogitsProcessorList) -> bool:
    return all(type(p) in _RANK_ONLY for p in processors)


def are_memoryless(processors: LogitsProcessorList) -> bool:
    return all(type(p) in _MEMORYLESS for p in processors)


def memoryless(processors: LogitsProcessorList) -> LogitsProcessorList:
    """Those that may shape a draft. One with a memory (a grammar, a watermark) must see committed tokens only.

    Leaving one out costs acceptance, never exactness, because the distribution that is verified against is the one
    that was drawn from.
    """
    return LogitsProcessorList(p for p in processors if type(p) in _MEMORYLESS)


def by_row(processors: LogitsProcessorList, num_rows: int) -> list[Any]:
    """The processors of each row, for calls with that row alone; an empty list where there are none."""
    if not processors:
        return []
    return [LogitsProcessorList(_of_row(p, row) for p in processors) for row in range(num_rows)]


def _of_row(processor: Any, row: int) -> Any:
    if type(processor) is not RepetitionPenaltyLogitsProcessor:
        return processor
    ignored = processor.prompt_ignore_length
    if not isinstance(ignored, torch.Tensor):
        return processor
    # It leaves out the padding of each row.
    own = copy.copy(processor)
    own.prompt_ignore_length = ignored[row : row + 1]
    return own
