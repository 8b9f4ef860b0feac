"""The committed token ids of every row of a call, in one buffer that grows by doubling."""

import torch


class Sequences:
    """Rows of token ids with lengths of their own.

    Args:
        input_ids: `[B, P]`, the prompts, padding included.
        max_length: no row will be longer.

    Attributes:
        prompt_length: P.
        lengths: tokens of each row, padding of the prompt included.
    """

    def __init__(self, input_ids: torch.Tensor, max_length: int):
        self.prompt_length = input_ids.shape[1]
        self.lengths = [self.prompt_length] * input_ids.shape[0]
        self._max_length = max(max_length, self.prompt_length)
        self._ids = input_ids
        self._make_room(self.prompt_length + 1)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def device(self) -> torch.device:
        return self._ids.device

    def prefix(self, row: int) -> torch.Tensor:
        """`[1, L]` ids of a row; a view, good until the next change."""
        return self._ids[row : row + 1, : self.lengths[row]]

    def level_ids(self) -> torch.Tensor:
        """`[B, L]` ids of all rows, which must have one length; for a batch a copy."""
        ids = self._ids[:, : self.lengths[0]]
        return ids if ids.shape[0] == 1 else ids.contiguous()

    def anchors(self, rows: list[int]) -> torch.Tensor:
        """`[R]`, the last token of some rows."""
        return torch.cat([self._ids[row, self.lengths[row] - 1 : self.lengths[row]] for row in rows])

    def token(self, row: int, position: int) -> torch.Tensor:
        """A token of a row, a scalar."""
        return self._ids[row, position]

    def with_draft(self, row: int, draft_ids: torch.Tensor) -> torch.Tensor:
        """`[1, L + n]`, a row with a `[1, n]` draft behind it, which is not committed."""
        start, end = self.lengths[row], self.lengths[row] + draft_ids.shape[1]
        self._make_room(end)
        self._ids[row, start:end] = draft_ids[0]
        return self._ids[row : row + 1, :end]

    def append(self, row: int, token_ids: torch.Tensor | list[int]) -> None:
        """Commits tokens at the end of a row."""
        start, end = self.lengths[row], self.lengths[row] + len(token_ids)
        self._make_room(end)
        if isinstance(token_ids, torch.Tensor):
            self._ids[row, start:end] = token_ids
        else:
            self._ids[row, start:end] = self._ids.new_tensor(token_ids)
        self.lengths[row] = end

    def padded(self, pad_token_id: int | None) -> torch.Tensor:
        """`[B, longest]`, short rows filled up with `pad_token_id` at their end."""
        longest = max(self.lengths)
        ids = self._ids[:, :longest].clone()
        for row, length in enumerate(self.lengths):
            if length < longest:
                ids[row, length:] = 0 if pad_token_id is None else pad_token_id
        return ids

    def _make_room(self, length: int) -> None:
        capacity = self._ids.shape[1]
        if length <= capacity and self._ids.shape[1] > self.prompt_length:
            return
        grown = max(length, min(2 * max(length, 64), self._max_length))
        ids = self._ids.new_zeros((self._ids.shape[0], grown))
        ids[:, :capacity] = self._ids
        self._ids = ids
