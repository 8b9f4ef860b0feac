"""What `generate(return_dict_in_generate=True)` gives besides the ids: one entry for each new token."""

from typing import Any

import torch
from transformers import Cache, GenerationConfig
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ._compat import TargetModel, generate_output


class StepOutputs:
    """Scores, logits, hidden states and attentions of each committed token; `None` where not asked for.

    Args:
        config: says what is wanted.
        num_rows: rows of the batch. Finished rows, which have no numbers any more, get zeros, but for the
            rest of the round in which they end: there they get what the pass gave.
    """

    def __init__(self, config: GenerationConfig, num_rows: int):
        def empty(is_wanted: bool | None) -> tuple | None:
            return () if config.return_dict_in_generate and is_wanted else None

        self.scores = empty(config.output_scores)
        self.logits = empty(config.output_logits)
        self.attentions = empty(config.output_attentions)
        self.hidden_states = empty(config.output_hidden_states)
        self._num_rows = num_rows

    @property
    def are_wanted(self) -> bool:
        return any(kept is not None for kept in (self.scores, self.logits, self.attentions, self.hidden_states))

    def add_token(self, scores: torch.Tensor, logits: torch.Tensor) -> None:
        """`[B, V]` processed scores and raw logits of one token."""
        if self.scores is not None:
            self.scores += (scores,)
        if self.logits is not None:
            self.logits += (logits,)

    def add_prompt(self, outputs: Any) -> None:
        """The first entry is the whole prompt."""
        if self.hidden_states is not None:
            self.hidden_states += (outputs.hidden_states,)
        if self.attentions is not None:
            self.attentions += (outputs.attentions,)

    def add_pass(
        self, outputs: Any, num_new: int, rows: list[int], model: TargetModel, cache: Cache, static_length: int | None
    ) -> None:
        """Splits a pass over R active rows into one entry per new token.

        Args:
            rows: which rows of the batch the active ones are.
            static_length: keys that plain generation has in every pass, with a static cache.
        """
        if self.hidden_states is not None:
            self.hidden_states += tuple(
                tuple(None if s is None else self._widened(s[:, i : i + 1], rows) for s in outputs.hidden_states)
                for i in range(num_new)
            )
        if self.attentions is not None:
            windows = _windows(model, cache, len(outputs.attentions))
            self.attentions += tuple(
                tuple(
                    None if w is None else self._widened(_attention_row(w, i, window, static_length), rows)
                    for w, window in zip(outputs.attentions, windows, strict=True)
                )
                for i in range(num_new)
            )

    def _widened(self, states: torch.Tensor, rows: list[int]) -> torch.Tensor:
        if len(rows) == self._num_rows:
            return states
        full = states.new_zeros((self._num_rows, *states.shape[1:]))
        full[torch.tensor(rows, device=states.device)] = states
        return full

    def to_output(self, sequences: torch.Tensor, cache: Cache) -> GenerateDecoderOnlyOutput:
        return generate_output(
            sequences=sequences,
            cache=cache,
            scores=self.scores,
            logits=self.logits,
            attentions=self.attentions,
            hidden_states=self.hidden_states,
        )


def _attention_row(weights: torch.Tensor, row: int, window: int | None, static_length: int | None) -> torch.Tensor:
    """Row of `[R, heads, queries, keys]`, cut (or filled up) to the keys that a one-token pass would have had."""
    if static_length is not None and (window is None or weights.shape[-1] == static_length):
        num_missing = static_length - weights.shape[-1]
        return torch.nn.functional.pad(weights[:, :, row : row + 1], (0, num_missing))
    end = weights.shape[-1] - (weights.shape[-2] - 1 - row)
    start = 0 if window is None else max(0, end - window)
    return weights[:, :, row : row + 1, start:end]


def _windows(model: TargetModel, cache: Cache, num_layers: int) -> list[int | None]:
    """Width of the sliding window of each attention layer; `None` for a full one."""
    config = model.config.get_text_config(decoder=True)
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None:
        kinds = [kind for kind in layer_types if kind != "linear_attention"]
        windows = [config.sliding_window if kind == "sliding_attention" else None for kind in kinds]
    else:
        layers: Any = cache.layers
        windows = [layer.sliding_window if layer.is_sliding else None for layer in layers]
    return windows if len(windows) == num_layers else [None] * num_layers
