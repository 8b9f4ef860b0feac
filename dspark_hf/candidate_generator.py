"""The drafting half of a round, and the state that it needs for one call of `generate`."""

import warnings
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch
from transformers import LogitsProcessorList, PreTrainedModel
from transformers.generation import CandidateGenerator

from .borrowing import embedding_of, head_of
from .draft_cache import DraftCache
from .errors import UnsupportedGenerationError
from .modeling_dspark import DSparkDrafter
from .policies import resolve_draft_length
from .processors import by_row, memoryless, rank_scores_only
from .sampling import draw, one_hot, probabilities, spread_columns
from .scheduling import DraftLength, Gate
from .target_attention import Unpadded
from .target_taps import TargetTaps
from .vocabulary import DraftVocabularyMap

# Context that waits for the next draft: beyond this it is absorbed without one, so that a call that drafts no more
# does not pile it up.
_MOST_WAITING = 256


@dataclass(frozen=True)
class Draft:
    """What one round proposes for R rows.

    Attributes:
        token_ids: `[R, n]`, ids of the target, n the longest draft of the round, maybe 0; short rows are padded.
        lengths: draft tokens of each row; `None`: n for all.
        scores: `[R, n, C]` float32 processed scores that the tokens were drawn from; `None` for a draft without chance
            (its distribution is one-hot).
        columns: `[C]`, the target's ids that the scores are of; nothing else could be drawn. `None`: all V in order.
        confidence: for each row c_k of each position that was looked at (the chance of its token if those before it
            are accepted), the one that ended the draft included; `None` where nobody asked.
        has_overflown: a boolean scalar on the drafter's device: numbers overflowed. `None`: nothing was computed.
        chain_seconds: wall time on the host of the sequential part (the Markov loop).
    """

    token_ids: torch.Tensor
    scores: torch.Tensor | None = None
    confidence: list[list[float]] | None = None
    lengths: list[int] | None = None
    has_overflown: torch.Tensor | None = None
    chain_seconds: float = 0.0
    columns: torch.Tensor | None = None

    @property
    def length(self) -> int:
        """Tokens of the longest row."""
        return self.token_ids.shape[1]

    @property
    def row_lengths(self) -> list[int]:
        return [self.length] * self.token_ids.shape[0] if self.lengths is None else self.lengths

    def probabilities(self, index: Any, vocab_size: int) -> torch.Tensor:
        """`[..., V]` float32: what the tokens at `index` of `[R, n]` were drawn from."""
        if self.scores is None:
            return one_hot(self.token_ids[index], vocab_size)
        return spread_columns(probabilities(self.scores[index]), self.columns, vocab_size, fill=0.0)

    def over_vocabulary(self, vocab_size: int) -> "Draft":
        """This draft with scores of all V ids, -inf where nothing could be drawn."""
        if self.scores is None or self.columns is None:
            return self
        scores = spread_columns(self.scores, self.columns, vocab_size, fill=float("-inf"))
        return replace(self, scores=scores, columns=None)

    def spread(self, slots: list[int], newest: torch.Tensor) -> "Draft":
        """This draft, made for the rows in `slots`, as one for all rows, whose newest tokens are `[R]`."""
        num_rows, at = len(newest), torch.tensor(slots, device=newest.device)
        token_ids = newest.new_zeros((num_rows, self.length)).index_copy_(0, at, self.token_ids)
        scores, lengths = self.scores, [0] * num_rows
        confidence: list[list[float]] | None = None
        if scores is not None:
            scores = scores.new_zeros((num_rows, *scores.shape[1:])).index_copy_(0, at.to(scores.device), scores)
        if self.confidence is not None:
            confidence = [[] for _ in range(num_rows)]
            for slot, of_row in zip(slots, self.confidence, strict=True):
                confidence[slot] = of_row
        for slot, length in zip(slots, self.row_lengths, strict=True):
            lengths[slot] = length
        return replace(self, token_ids=token_ids, scores=scores, confidence=confidence, lengths=lengths)


class DSparkCandidateGenerator(CandidateGenerator):
    """Proposes candidates with a DSpark drafter; one object per call of `generate`.

    It serves `dspark_hf`'s own decoding loop (`draft` after every pass of the target), and, through `get_candidates`,
    transformers' assisted loop as well, which must then run inside `with generator.listening():`. Call `close` at the
    end, or use it as a context manager.

    Args:
        drafter: the drafter.
        target: the model that `generate` was called on.
        do_sample: draw the draft tokens; otherwise take the most likely ones.
        logits_processor: processors and warpers of the call; those without a memory shape the draft as well.
        draft_length: the policy; `None`: from `drafter.generation_config`.
        num_rows: rows of the batch.
        prompt_mask: `[B, P]` attention mask of the prompt, 0 at padding; `None` without padding.
        num_cached: positions that the target's cache held before the call; the drafter never sees their states.
        max_length: longest total sequence, to draft nothing beyond it in transformers' loop.
        vocabulary_map: between the target's and the drafter's token ids where they differ.
        report_confidence: compute confidences even where no threshold needs them.

    Attributes:
        rows: indices, in the batch of the call, of the rows that are drafted for.
        cache: the drafter's keys and values.
    """

    requires_model_outputs = False

    def __init__(
        self,
        drafter: DSparkDrafter,
        target: PreTrainedModel,
        *,
        do_sample: bool = False,
        logits_processor: LogitsProcessorList | None = None,
        draft_length: DraftLength | None = None,
        num_rows: int = 1,
        prompt_mask: torch.Tensor | None = None,
        num_cached: int = 0,
        max_length: int | None = None,
        vocabulary_map: DraftVocabularyMap | None = None,
        report_confidence: bool = False,
    ):
        config = drafter.config
        self.drafter = drafter
        self.do_sample = do_sample
        self.draft_length = draft_length or resolve_draft_length(
            drafter.generation_config, config.num_draft_tokens, drafter.confidence_head is not None
        )
        self.max_length = max_length
        self.rows = list(range(num_rows))
        self.cache = DraftCache(config.num_hidden_layers, num_rows)
        # Of a norm: quantization leaves norms alone, but not `fc`.
        norm: Any = drafter.hidden_norm.weight
        self._device, self._dtype = norm.device, norm.dtype
        shaping = memoryless(logits_processor or LogitsProcessorList())
        self._processors = by_row(shaping, num_rows)
        # Such processors need no column but the drafter's own, and take all rows at once.
        self._is_compact = do_sample and rank_scores_only(shaping)
        self._context = _WaitingContext(prompt_mask, num_rows, num_cached, self._device, self._dtype)
        self._report_confidence = report_confidence and drafter.confidence_head is not None
        self._embed = embedding_of(drafter, target)
        self._lm_head = head_of(drafter, target)
        self._vocabulary = _DraftVocabulary(drafter, target, vocabulary_map, self._device)
        columns = self._vocabulary.columns if self._is_compact else None
        self._columns = None if columns is None else columns.to(target.device)
        mask_id = config.mask_token_id
        if drafter.embed_tokens is None and vocabulary_map is not None:
            mask_id = vocabulary_map.mask_to_target(mask_id)
        self._mask_ids = torch.full((1, config.block_size - 1), mask_id, device=self._device)
        self._stepped_aside = False
        self._taps = TargetTaps(target, config.target_layer_ids, self._device)

    def __enter__(self) -> "DSparkCandidateGenerator":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Takes the hooks off the target and lets go of every state."""
        self._taps.close()
        self._context.clear()
        self.cache = DraftCache(self.drafter.config.num_hidden_layers)

    def listening(self, prefill: bool = False) -> AbstractContextManager[None]:
        """The target's passes made inside are context for the next draft.

        Args:
            prefill: every position is committed already: they go straight to the draft cache, chunk by chunk.
        """
        return self._taps.listening(sink=self._absorb_prefill if prefill else None)

    @property
    def vocab_size(self) -> int:
        """V, of the target."""
        return self._vocabulary.target_size

    @property
    def can_draft(self) -> bool:
        """Whether it still proposes anything in this call."""
        return not self._stepped_aside

    def get_candidates(  # type: ignore[override]
        self, input_ids: torch.Tensor, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One round of transformers' assisted loop.

        Args:
            input_ids: `[1, L]`, every committed token, the anchor last.

        Returns:
            `[1, L + n]` ids and, when sampling, the `[1, n, V]` scores that the n new ones were drawn from.
        """
        if not self._taps.has_passes:
            return input_ids, None
        self.commit(input_ids.shape[1] - 1 - self._context.num_absorbed)
        room = self.draft_length.num_assistant_tokens
        if self.max_length is not None:
            room = min(room, self.max_length - input_ids.shape[1] - 1)
        draft = self.draft([input_ids], room)
        self.check_overflow(draft)
        return torch.cat((input_ids, draft.token_ids), dim=-1), draft.over_vocabulary(self.vocab_size).scores

    def update_candidate_strategy(self, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> None:
        """Nothing to adapt: in transformers' loop the policy is constant."""

    def commit(self, counts: int | list[int], unpadded: Unpadded | None = None) -> None:
        """The first positions of the target's last pass are committed, of each row as many as `counts` says.

        `unpadded` says how the rows part where the pass was one without padding.
        """
        passes = self._taps.take()
        counts = [counts] * len(self.rows) if isinstance(counts, int) else counts
        if any(counts):
            if not passes:
                raise UnsupportedGenerationError(
                    "The target made a pass without calling the hooks of its decoder layers, as a forward may that "
                    "was compiled before the call. Leave the target uncompiled, or leave out `assistant_model`."
                )
            features = passes[0] if len(passes) == 1 else torch.cat(passes, dim=1)
            features = features if unpadded is None else unpadded.padded(features)
            if self._context.is_in_prompt:
                self._context.keep_prompt(features[:, : max(counts)])
            else:
                self._context.keep(features, counts)
        if self._context.num_waiting >= _MOST_WAITING:
            self._absorb()

    def select(self, slots: list[int]) -> None:
        """Goes on with some of the rows."""
        self.rows = [self.rows[slot] for slot in slots]
        self.cache.select(slots)
        self._context.select(slots)

    @torch.no_grad()
    def draft(self, prefixes: Sequence[torch.Tensor], limits: int | Sequence[int], gate: Gate | None = None) -> Draft:
        """Proposes tokens after the anchor of each row.

        Args:
            prefixes: for each row `[1, L]`, every committed token, the anchor last; the states of all but the last
                one were committed.
            limits: most draft tokens, of each row or of all.
            gate: ends drafts on the way.
        """
        prefixes = [prefix.view(1, -1) for prefix in prefixes]
        most = self.draft_length.num_assistant_tokens
        lengths = [min(most, n) for n in ([limits] * len(prefixes) if isinstance(limits, int) else limits)]
        newest = torch.cat([prefix[:, -1] for prefix in prefixes])
        if self._stepped_aside or max(lengths) < 1:
            return nothing(newest)
        anchors, known = self._vocabulary.to_draft(newest.to(self._device))
        if known is not None:
            lengths = [length if is_known else 0 for length, is_known in zip(lengths, known, strict=True)]
            if max(lengths) < 1:
                return nothing(newest)
        slots = [slot for slot, length in enumerate(lengths) if length > 0]
        guard = _Guard(self.draft_length, gate, slots, len(lengths))
        if len(slots) == len(lengths):
            return self._draft_rows(None, newest, anchors, prefixes, lengths, guard)
        at = torch.tensor(slots, device=anchors.device)
        of_rows = newest[at.to(newest.device)], anchors[at], [prefixes[slot] for slot in slots]
        return self._draft_rows(slots, *of_rows, [lengths[slot] for slot in slots], guard).spread(slots, newest)

    def _draft_rows(
        self,
        slots: list[int] | None,
        newest: torch.Tensor,
        anchors: torch.Tensor,
        prefixes: list[torch.Tensor],
        lengths: list[int],
        guard: "_Guard",
    ) -> Draft:
        """The draft of some rows, or of all (`None`)."""
        hidden_states = self._run_backbone(slots, newest, anchors)
        started = perf_counter()
        if self._device.type == "cpu" and not bool(torch.isfinite(hidden_states).all()):
            return nothing(newest, has_overflown=torch.tensor(True))
        rows = self.rows if slots is None else [self.rows[slot] for slot in slots]
        return self._draw_chain(rows, hidden_states, anchors, prefixes, lengths, guard, started)

    def check_overflow(self, draft: Draft, has_overflown: bool | None = None) -> None:
        """Steps aside for the rest of the call, with a warning, where the numbers of a draft overflowed.

        What was drawn by then stays: it was drawn from a proper distribution, and to drop it because of what came
        after would change the distribution of the output.

        Args:
            has_overflown: `draft.has_overflown`, where the caller has fetched it from the device.
        """
        if draft.has_overflown is None or self._stepped_aside:
            return
        if bool(draft.has_overflown) if has_overflown is None else has_overflown:
            self._stepped_aside = True
            warnings.warn(
                f"The drafter's numbers overflow in {self._dtype}: it proposes nothing for the rest of this call, and "
                "generation goes on without it. Load the drafter in bfloat16 or float32.",
                UserWarning,
                stacklevel=2,
            )

    def _run_backbone(self, slots: list[int] | None, newest: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        """One pass over waiting context and a full block: `[R, block_size, H]`. The block always has its full size,
        masks included: a shorter one would change every position's state."""
        # A borrowed embedding is indexed by the target's ids, the drafter's own one by its own.
        first = anchors if self.drafter.embed_tokens is not None else newest.to(self._device)
        block_ids = torch.cat((first[:, None], self._mask_ids.expand(len(first), -1)), dim=-1)
        context, counts, positions = self._expect(block_ids.shape[1], slots)
        output = self.drafter(
            noise_embeds=self._embed(block_ids).to(self._device, self._dtype),
            context_hidden_states=context,
            position_ids=positions,
            cache=self.cache,
        )
        self.cache.commit(counts)
        return output.last_hidden_state

    def _expect(
        self, num_block: int, slots: list[int] | None = None
    ) -> tuple[torch.Tensor | None, list[int], torch.Tensor]:
        """Prepares a pass over the waiting context and a block of some rows, or of all: the context `[R, T, m * Ht]`,
        how much of it is each row's, and the positions of context and block, `[R, T + num_block]`."""
        context, counts = self._context.take(slots)
        num_context = 0 if context is None else context.shape[1]
        self.cache.expect(counts, num_context, num_block, self._device, slots)
        starts = [first + length for first, length in zip(self._context.offsets, self.cache.lengths, strict=True)]
        starts = starts if slots is None else [starts[slot] for slot in slots]
        steps = torch.arange(num_context + num_block, device=self._device)
        positions = torch.tensor(starts, device=self._device)[:, None] + steps
        if self.cache.key_lengths is not None:
            # The block stands right behind the row's own context, whatever padding lies between.
            padding = torch.tensor([num_context - count for count in counts], device=self._device)[:, None]
            positions = positions - padding * (steps >= num_context)
        return context, counts, positions

    def _draw_chain(
        self,
        rows: list[int],
        hidden_states: torch.Tensor,
        anchors: torch.Tensor,
        prefixes: list[torch.Tensor],
        lengths: list[int],
        guard: "_Guard",
        started: float,
    ) -> Draft:
        """Tokens left to right, all rows at once. What decides whether position k of a row is drawn (its confidence,
        or the entropy of its distribution) is known before x_k is."""
        drafter, first, device = self.drafter, self.drafter.config.first_draft_slot, prefixes[0].device
        base = drafter.base_logits(hidden_states[:, first : first + max(lengths)], self._lm_head).to(self._device)
        base = base[..., : self._vocabulary.num_rows]
        state = None
        if drafter.markov_head is not None:
            state = drafter.markov_head.initial_state(len(anchors))
            for slot in range(first):
                # Trained without a prediction at the anchor, the recurrence steps on that position all the same.
                _, state = drafter.markov_head(anchors, hidden_states[:, slot], state)
        previous = anchors
        tokens: list[torch.Tensor] = []
        scores: list[Any] = []
        peaks = [hidden_states.abs().amax().float()]
        k = 0
        while k < max(lengths):
            hidden = hidden_states[:, first + k]
            if guard.reads_confidence:
                guard.read_confidence(
                    k, lengths, drafter.confidence(hidden[:, None], previous[:, None], k)[:, 0].tolist()
                )
                if k >= max(lengths):
                    break
            logits = base[:, k]
            if drafter.markov_head is not None:
                bias, state = drafter.markov_head(previous, hidden, state)
                logits = logits + bias[..., : self._vocabulary.num_rows]
            scored, peak = self._score(logits, rows, prefixes)
            peaks.append(peak.amax().float())
            if self._device.type == "cpu":
                # Elsewhere a look at the numbers would cost a wait; there such a draft is verified, and falls.
                for row, is_finite in enumerate(torch.isfinite(peak).tolist()):
                    lengths[row] = lengths[row] if is_finite else min(lengths[row], k)
                if k >= max(lengths):
                    break
            if guard.reads_entropy:
                guard.ask_gate(k, lengths, _entropy(self._vocabulary.mask(scored) if scored is logits else scored))
                if k >= max(lengths):
                    break
            token, previous = self._choose(scored)
            tokens.append(token.to(device))
            scores.append(scored)
            if self._processors:
                prefixes = [torch.cat((p, token[i : i + 1, None]), dim=-1) for i, p in enumerate(prefixes)]
            k += 1
        # -inf is the work of processors that forbid everything, and no overflow.
        height = torch.stack(peaks)
        has_overflown = ~(torch.isfinite(height) | torch.isneginf(height)).all()
        confidences = guard.confidences
        lengths = guard.admitted(lengths)
        if max(lengths) < 1:
            return nothing(anchors.to(device), confidences, has_overflown, perf_counter() - started)
        token_ids = torch.stack(tokens[: max(lengths)], dim=-1)
        if self._report_confidence and not any(confidences):
            confidences = self._all_confidences(hidden_states, anchors, token_ids, lengths)
        return Draft(
            token_ids.to(device),
            torch.stack(scores[: max(lengths)], dim=1).to(device) if self.do_sample else None,
            confidences if any(confidences) else None,
            lengths,
            has_overflown,
            perf_counter() - started,
            self._columns,
        )

    def _score(
        self, logits: torch.Tensor, rows: list[int], prefixes: list[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`[R, Vd]` logits to what the next tokens are chosen by, and its `[R]` peaks, finite where all is well.

        That is float32 scores where there is a chance or a processor: of the ids that the drafter can propose, or
        `[R, V]` where a processor wants to see all of the target's. Else the logits as they are.
        """
        if not self.do_sample and not self._processors:
            return logits, self._vocabulary.mask(logits).amax(dim=-1)
        # Processors hold tensors on the device of `input_ids`.
        if self._is_compact:
            scores = self._vocabulary.compact(logits.float()).to(prefixes[0].device)
            if self._processors:
                scores = self._processors[rows[0]](prefixes[0], scores)
        else:
            scores = self._vocabulary.scatter(logits.float()).to(prefixes[0].device)
            if self._processors:
                scores = torch.cat(
                    [
                        self._processors[row](p, scores[i : i + 1])
                        for i, (row, p) in enumerate(zip(rows, prefixes, strict=True))
                    ]
                )
        peak = scores.amax(dim=-1)
        # A row without a proper distribution is drawn evenly, so that it is known what it was drawn from.
        return scores.masked_fill(~torch.isfinite(peak)[:, None], 0.0), peak.to(self._device)

    def _choose(self, scored: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The target's and the drafter's ids of the next tokens, `[R]` each."""
        if not self.do_sample and not self._processors:
            return self._vocabulary.ids_of(self._vocabulary.mask(scored).argmax(dim=-1))
        token = draw(probabilities(scored)) if self.do_sample else scored.argmax(dim=-1)
        if self._is_compact:
            return self._vocabulary.ids_of_columns(token.to(self._device))
        return token, self._vocabulary.known_to_draft(token.to(self._device))

    def _all_confidences(
        self, hidden_states: torch.Tensor, anchors: torch.Tensor, token_ids: torch.Tensor, lengths: list[int]
    ) -> list[list[float]]:
        drafted = self._vocabulary.known_to_draft(token_ids[:, :-1].to(self._device))
        previous = torch.cat((anchors[:, None], drafted), dim=-1)
        first = self.drafter.config.first_draft_slot
        states = hidden_states[:, first : first + token_ids.shape[1]]
        survivals = self.drafter.confidence(states, previous).tolist()
        return [row[:length] for row, length in zip(survivals, lengths, strict=True)]

    def commit_prompts(self, groups: list[list[int]], num_prompt: int) -> None:
        """The target's passes were over the prompts of these rows, one after the other, each over the last positions
        of `num_prompt`, padding before the prompts included."""
        passes = self._taps.take()
        features = passes[0].new_zeros((len(self.rows), num_prompt, passes[0].shape[-1]))
        for rows, states in zip(groups, passes, strict=True):
            features[rows, num_prompt - states.shape[1] :] = states
        self._absorb_prefill(features)

    def _absorb_prefill(self, features: torch.Tensor) -> None:
        self._context.keep_prompt(features)
        self._absorb()

    @torch.no_grad()
    def _absorb(self) -> None:
        """Moves the waiting context into the draft cache."""
        context, counts, positions = self._expect(0)
        if context is not None:
            self.drafter.append_context(context, positions, self.cache)
            if self.cache.key_lengths is not None:
                self.cache.commit(counts)


def nothing(
    newest: torch.Tensor,
    confidence: list[list[float]] | None = None,
    has_overflown: torch.Tensor | None = None,
    chain_seconds: float = 0.0,
) -> Draft:
    """A draft of no tokens for rows whose newest tokens are `[R]`."""
    if confidence is not None and not any(confidence):
        confidence = None
    ids = newest.new_empty((len(newest), 0))
    return Draft(ids, None, confidence, has_overflown=has_overflown, chain_seconds=chain_seconds)


def _entropy(scores: torch.Tensor) -> list[float]:
    """Of the distributions of `[R, V]` scores, in nats."""
    log_probs = scores.float().log_softmax(dim=-1)
    return (log_probs.exp() * log_probs.nan_to_num(neginf=0.0)).sum(dim=-1).neg().tolist()


class _Guard:
    """Ends the drafts of the rows that draft, by the threshold of the settings and by the gate of the plan.

    Attributes:
        confidences: of each row, at every position that was looked at.
    """

    def __init__(self, draft_length: DraftLength, gate: Gate | None, slots: list[int], num_rows: int):
        self._draft_length, self._gate, self._slots, self._num_rows = draft_length, gate, slots, num_rows
        self.confidences: list[list[float]] = [[] for _ in slots]
        asks_confidence = gate is not None and gate.signal == "confidence"
        self.reads_confidence = draft_length.confidence_threshold > 0 or asks_confidence
        self.reads_entropy = gate is not None and gate.signal == "entropy"

    def read_confidence(self, position: int, lengths: list[int], confidences: list[float]) -> None:
        """Cuts `lengths` to `position` where the draft ends before it."""
        for row, confidence in enumerate(confidences):
            if lengths[row] > position:
                self.confidences[row].append(confidence)
                if self._draft_length.ends_before(confidence):
                    lengths[row] = position
        if not self.reads_entropy:
            self.ask_gate(position, lengths, confidences)

    def admitted(self, lengths: list[int]) -> list[int]:
        """How many of the drawn tokens are verified."""
        if self._gate is None:
            return lengths
        of_all = [0] * self._num_rows
        for slot, length in zip(self._slots, lengths, strict=True):
            of_all[slot] = length
        admitted = self._gate.admitted(of_all)
        return [min(admitted[slot], length) for slot, length in zip(self._slots, lengths, strict=True)]

    def ask_gate(self, position: int, lengths: list[int], signals: list[float]) -> None:
        """Cuts `lengths` to `position` where the gate does, by what it asks for."""
        if self._gate is None:
            return
        of_all = [float("nan")] * self._num_rows
        for slot, length, signal in zip(self._slots, lengths, signals, strict=True):
            if length > position:
                of_all[slot] = signal
        is_open = self._gate.opens(position, of_all)
        for row, slot in enumerate(self._slots):
            if lengths[row] > position and not is_open[slot]:
                lengths[row] = position


class _WaitingContext:
    """States of committed positions that the draft cache lacks. Padding never gets here.

    Attributes:
        offsets: for each row, the position of the first state that the drafter ever saw: positions count real tokens.
        num_absorbed: positions of the target's sequence so far, padding included.
    """

    def __init__(
        self,
        prompt_mask: torch.Tensor | None,
        num_rows: int,
        num_cached: int,
        device: torch.device,
        dtype: torch.dtype,
    ):
        is_padded = prompt_mask is not None and not bool((prompt_mask != 0).all())
        self._real = (prompt_mask[:num_rows] != 0).to(device) if is_padded and prompt_mask is not None else None
        self.num_absorbed = num_cached
        self.offsets = [num_cached] * num_rows
        if self._real is not None:
            self.offsets = self._real[:, :num_cached].sum(dim=1).tolist()
        self._device, self._dtype = device, dtype
        self._parts: list[tuple[torch.Tensor, list[int]]] = []
        self._num_waiting = 0

    @property
    def num_waiting(self) -> int:
        """Positions that wait, padding of short rows included."""
        return self._num_waiting

    @property
    def is_in_prompt(self) -> bool:
        """Whether padding may still come."""
        return self._real is not None and self.num_absorbed < self._real.shape[1]

    def clear(self) -> None:
        self._parts.clear()
        self._num_waiting = 0

    def keep_prompt(self, features: torch.Tensor) -> None:
        """Takes `[B, T, m * Ht]` states of the next T positions of the prompts, and drops padding."""
        start, end = self.num_absorbed, self.num_absorbed + features.shape[1]
        if self._real is None or not self.is_in_prompt:
            self.keep(features, [features.shape[1]] * features.shape[0])
            return
        real = self._real[:, start:end]
        if real.shape[1] < features.shape[1]:
            real = torch.nn.functional.pad(real, (0, features.shape[1] - real.shape[1]), value=True)
        counts = real.sum(dim=1).tolist()
        if max(counts) > 0:
            # The real positions of each row first, in their order.
            order = (~real).long().sort(dim=1, stable=True).indices[:, : max(counts)]
            features = features.gather(1, order.to(features.device)[:, :, None].expand(-1, -1, features.shape[2]))
            self._parts.append((features.to(self._device, self._dtype), counts))
            self._num_waiting += max(counts)
        self.num_absorbed = end

    def keep(self, features: torch.Tensor, counts: list[int]) -> None:
        """Takes the first positions of `[R, T, m * Ht]` states, of each row as many as `counts` says."""
        self._parts.append((features[:, : max(counts)].to(self._device, self._dtype), counts))
        self._num_waiting += max(counts)
        self.num_absorbed += max(counts)

    def take(self, slots: list[int] | None = None) -> tuple[torch.Tensor | None, list[int]]:
        """All states that wait, of some rows or of all, `[R, T, m * Ht]`, and how many are each row's, padding
        behind."""
        if slots is not None:
            return self._take_rows(slots)
        parts, self._parts, self._num_waiting = self._parts, [], 0
        if not parts:
            return None, [0] * len(self.offsets)
        if len(parts) == 1:
            return parts[0]
        if all(len(set(counts)) == 1 for _, counts in parts):
            num_positions = sum(counts[0] for _, counts in parts)
            return torch.cat([features for features, _ in parts], dim=1), [num_positions] * len(self.offsets)
        return self._joined(parts, list(range(len(self.offsets))))

    def _take_rows(self, slots: list[int]) -> tuple[torch.Tensor | None, list[int]]:
        if not any(counts[slot] for _, counts in self._parts for slot in slots):
            return None, [0] * len(slots)
        taken = self._joined(self._parts, slots)
        self._hold(
            (features, [0 if slot in slots else count for slot, count in enumerate(counts)])
            for features, counts in self._parts
        )
        return taken

    def _hold(self, parts: Iterable[tuple[torch.Tensor, list[int]]]) -> None:
        """Goes on with these parts, each as long as its longest row: others may have been longer."""
        self._parts = [(features[:, : max(counts)], counts) for features, counts in parts if any(counts)]
        self._num_waiting = sum(max(counts) for _, counts in self._parts)

    @staticmethod
    def _joined(parts: list[tuple[torch.Tensor, list[int]]], slots: list[int]) -> tuple[torch.Tensor, list[int]]:
        rows = [torch.cat([features[slot, : counts[slot]] for features, counts in parts]) for slot in slots]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), [len(row) for row in rows]

    def select(self, slots: list[int]) -> None:
        self.offsets = [self.offsets[slot] for slot in slots]
        self._hold(
            (features[torch.tensor(slots, device=features.device)], [counts[slot] for slot in slots])
            for features, counts in self._parts
        )


class _DraftVocabulary:
    """From rows of the drafter's head to the target's token ids and back to the ids that the drafter reads."""

    def __init__(
        self,
        drafter: DSparkDrafter,
        target: PreTrainedModel,
        vocabulary_map: DraftVocabularyMap | None,
        device: torch.device,
    ):
        self._map = None if vocabulary_map is None or vocabulary_map.is_identity else vocabulary_map.to(device)
        self.target_size = target.config.get_text_config(decoder=True).vocab_size
        self._readable = drafter.config.vocab_size
        # A borrowed head has the target's rows, a resized or padded vocabulary maybe more or fewer than the drafter's.
        self.num_rows = drafter.config.draft_vocab_size
        if drafter.lm_head is None and not drafter.config.has_reduced_vocabulary:
            self.num_rows = min(self.num_rows, self.target_size)
        rows = torch.arange(self.num_rows, device=device)
        draft_ids = drafter.to_target_ids(rows)
        target_ids = draft_ids if self._map is None else self._map.to_target(draft_ids)
        # A row is of use if the target has its token and the drafter can read it back as the next position's input.
        usable = (target_ids >= 0) & (target_ids < self.target_size) & (draft_ids < self._readable)
        self._usable = None if bool(usable.all()) else usable
        self._is_plain = self._usable is None and self.num_rows == self.target_size and torch.equal(target_ids, rows)
        self._draft_ids, self._target_ids = draft_ids, target_ids
        # The target's ids that can be proposed, ascending, so that a draw does not depend on the drafter's order;
        # `None`: all.
        order = usable.nonzero()[:, 0]
        order = order[target_ids[order].argsort()]
        self._order = None if torch.equal(order, rows) else order
        self.columns = None if self._is_plain else target_ids[order]

    def to_draft(self, target_ids: torch.Tensor) -> tuple[torch.Tensor, list[bool] | None]:
        """The drafter's ids of committed tokens, `[R]`, and which of them it knows; `None`: all. It reads 0 for the
        others."""
        ids = target_ids if self._map is None else self._map.to_draft(target_ids)
        if self._map is None and self._readable >= self.target_size:
            return ids, None
        is_known = (ids >= 0) & (ids < self._readable)
        return ids.masked_fill(~is_known, 0), is_known.tolist()

    def known_to_draft(self, target_ids: torch.Tensor) -> torch.Tensor:
        """The drafter's ids of tokens that it proposed itself."""
        return target_ids if self._map is None else self._map.to_draft(target_ids)

    def mask(self, logits: torch.Tensor) -> torch.Tensor:
        return logits if self._usable is None else logits.masked_fill(~self._usable, float("-inf"))

    def ids_of(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of the head to the target's and the drafter's ids."""
        return (rows, rows) if self._is_plain else (self._target_ids[rows], self._draft_ids[rows])

    def compact(self, logits: torch.Tensor) -> torch.Tensor:
        """`[R, Vd]` logits to those of `columns`."""
        return logits if self._order is None else logits[:, self._order]

    def ids_of_columns(self, columns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The target's and the drafter's ids."""
        return self.ids_of(columns if self._order is None else self._order[columns])

    def scatter(self, logits: torch.Tensor) -> torch.Tensor:
        """`[R, Vd]` logits to `[R, V]` over the target's vocabulary, -inf where the drafter has no row."""
        return spread_columns(self.compact(logits), self.columns, self.target_size, fill=float("-inf"))
