"""The drafting half of a round, and the state that it needs for one call of `generate`."""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LogitsProcessorList, PreTrainedModel
from transformers.generation import CandidateGenerator, logits_process

from .draft_cache import DraftCache
from .modeling_dspark import DSparkDrafter
from .sampling import draw, probabilities
from .scheduling import DraftLength, resolve_draft_length
from .target_taps import TargetTaps
from .vocabulary import DraftVocabularyMap

# Processors that depend on nothing but the ids and scores of the moment. Only these shape the draft distribution: a
# processor with a memory (a grammar, a watermark) must see committed tokens only. Leaving one out costs acceptance,
# never exactness, because the distribution that is verified against is the one that was drawn from.
_STATELESS_PROCESSORS = tuple(
    getattr(logits_process, name)
    for name in (
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "ExponentialDecayLengthPenalty",
        "ForcedBOSTokenLogitsProcessor",
        "ForcedEOSTokenLogitsProcessor",
        "LogitNormalization",
        "MinLengthLogitsProcessor",
        "MinNewTokensLengthLogitsProcessor",
        "MinPLogitsWarper",
        "NoBadWordsLogitsProcessor",
        "NoRepeatNGramLogitsProcessor",
        "RepetitionPenaltyLogitsProcessor",
        "SequenceBiasLogitsProcessor",
        "SuppressTokensAtBeginLogitsProcessor",
        "SuppressTokensLogitsProcessor",
        "TemperatureLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "TypicalLogitsWarper",
    )
)


@dataclass(frozen=True)
class Draft:
    """What one round proposes.

    Attributes:
        token_ids: `[B, n]`, ids of the target, n may be 0.
        scores: `[B, n, V]` float32 processed scores that the tokens were drawn from, over the target's vocabulary;
            `None` for a greedy draft (its distribution is one-hot).
        confidence: survival probability of each position that was looked at, the one that ended the draft included;
            `None` where nobody asked.
    """

    token_ids: torch.Tensor
    scores: torch.Tensor | None = None
    confidence: list[float] | None = None

    @property
    def length(self) -> int:
        return self.token_ids.shape[1]


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
        prompt_mask: `[B, P]` attention mask of the prompt, 0 at padding; `None` without padding.
        num_cached: positions that the target's cache held before the call; the drafter never sees their states.
        max_length: longest total sequence, to draft nothing beyond it in transformers' loop.
        vocabulary_map: between the target's and the drafter's token ids where they differ.
        report_confidence: compute confidences even where no threshold needs them.
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
        self.cache = DraftCache(config.num_hidden_layers)
        # Of a norm: quantization leaves norms alone, but not `fc`.
        norm: Any = drafter.hidden_norm.weight
        self._device, self._dtype = norm.device, norm.dtype
        self._processors: Any = LogitsProcessorList(
            p for p in logits_processor or () if type(p) in _STATELESS_PROCESSORS
        )
        self._prompt_mask = None if prompt_mask is None or bool((prompt_mask != 0).all()) else prompt_mask[:1].cpu()
        self._num_absorbed = num_cached
        self._waiting: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._report_confidence = report_confidence and drafter.confidence_head is not None
        self._embed = _embedding_of(drafter, target)
        self._lm_head = drafter.lm_head if drafter.lm_head is not None else target.get_output_embeddings()
        self._vocabulary = _DraftVocabulary(drafter, target, vocabulary_map, self._device)
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
        self._waiting.clear()
        self.cache = DraftCache(self.drafter.config.num_hidden_layers)

    def listening(self, prefill: bool = False) -> AbstractContextManager[None]:
        """The target's passes made inside are context for the next draft.

        Args:
            prefill: every position is committed already: they go straight to the draft cache, chunk by chunk.
        """
        return self._taps.listening(sink=self._absorb_prefill if prefill else None)

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
        self.commit(input_ids.shape[1] - 1 - self._num_absorbed)
        room = self.draft_length.num_assistant_tokens
        if self.max_length is not None:
            room = min(room, self.max_length - input_ids.shape[1] - 1)
        draft = self.draft(input_ids, room)
        return torch.cat((input_ids, draft.token_ids), dim=-1), draft.scores

    def update_candidate_strategy(self, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> None:
        """Nothing to adapt: the policy is constant."""

    def commit(self, num_positions: int) -> None:
        """The first `num_positions` rows of the target's last pass are committed: they become context."""
        rows = self._taps.take()
        if num_positions:
            features = rows[0] if len(rows) == 1 else torch.cat(rows, dim=1)
            self._keep(features[:, :num_positions])

    @torch.no_grad()
    def draft(self, input_ids: torch.Tensor, max_tokens: int) -> Draft:
        """Proposes up to `max_tokens` tokens after the anchor `input_ids[:, -1]`.

        Args:
            input_ids: `[1, L]`, every committed token; the states of all but the last one were committed.
            max_tokens: room that is left, besides the policy.
        """
        nothing = Draft(input_ids.new_empty((input_ids.shape[0], 0)))
        num_tokens = min(self.draft_length.num_assistant_tokens, max_tokens)
        anchor = self._vocabulary.to_draft(input_ids[:, -1].to(self._device))
        if num_tokens < 1 or self._stepped_aside or anchor is None:
            return nothing
        hidden_states = self._run_backbone(input_ids, anchor)
        return self._draw_chain(hidden_states, anchor, input_ids, num_tokens)

    def _run_backbone(self, input_ids: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        """One pass over waiting context and a full block: `[1, block_size, H]`. The block always has its full size,
        masks included: a shorter one would change every position's state."""
        block_ids = torch.cat((self._block_anchor(input_ids, anchor)[:, None], self._mask_ids), dim=-1)
        waiting = self._take_waiting()
        start = self._num_real(self._num_absorbed)
        block_positions = torch.arange(start, start + block_ids.shape[1], device=self._device)[None]
        context = None
        if waiting is not None:
            context, positions = waiting
            block_positions = torch.cat((positions, block_positions), dim=-1)
        output = self.drafter(
            noise_embeds=self._embed(block_ids).to(self._device, self._dtype),
            context_hidden_states=context,
            position_ids=block_positions,
            cache=self.cache,
        )
        self.cache.commit(0 if context is None else context.shape[1])
        return output.last_hidden_state

    def _block_anchor(self, input_ids: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        # A borrowed embedding is indexed by the target's ids, the drafter's own one by its own.
        return anchor if self.drafter.embed_tokens is not None else input_ids[:, -1].to(self._device)

    def _draw_chain(
        self, hidden_states: torch.Tensor, anchor: torch.Tensor, input_ids: torch.Tensor, num_tokens: int
    ) -> Draft:
        """Tokens left to right. What decides whether position k is drawn (its confidence) is known before x_k is."""
        drafter, first = self.drafter, self.drafter.config.first_draft_slot
        base = drafter.base_logits(hidden_states[:, first : first + num_tokens], self._lm_head).to(self._device)
        base = base[..., : self._vocabulary.num_rows]
        state = None
        if drafter.markov_head is not None:
            state = drafter.markov_head.initial_state(1)
            for slot in range(first):
                # Trained without a prediction at the anchor, the recurrence steps on that position all the same.
                _, state = drafter.markov_head(anchor, hidden_states[:, slot], state)
        previous, prefix = anchor, input_ids
        tokens: list[torch.Tensor] = []
        scores: list[Any] = []
        confidences: list[float] = []
        peaks = [hidden_states.abs().amax().float()]
        for k in range(num_tokens):
            hidden = hidden_states[:, first + k]
            if self.draft_length.confidence_threshold > 0:
                confidences.append(drafter.confidence(hidden[:, None], previous[:, None]).item())
                if self.draft_length.ends_before(confidences[-1]):
                    break
            logits = base[:, k]
            if drafter.markov_head is not None:
                bias, state = drafter.markov_head(previous, hidden, state)
                logits = logits + bias[..., : self._vocabulary.num_rows]
            peaks.append(logits.amax().float())
            choice = self._choose(logits, prefix)
            if choice is None:
                break
            token, previous, drawn_from = choice
            tokens.append(token)
            scores.append(drawn_from)
            if self._processors:
                prefix = torch.cat((prefix, token[:, None]), dim=-1)
        if not bool(torch.isfinite(torch.stack(peaks)).all()):
            self._step_aside()
            # A sampled draft has ended before the overflow. To drop what it drew by then, because of what came after,
            # would change the distribution of the output.
            tokens = tokens if self.do_sample else []
        if not tokens:
            return Draft(input_ids.new_empty((1, 0)), confidence=confidences or None)
        token_ids = torch.stack(tokens, dim=-1)
        if self._report_confidence and not confidences:
            confidences = self._all_confidences(hidden_states, anchor, token_ids)
        return Draft(
            token_ids.to(input_ids.device),
            torch.stack(scores, dim=1).to(input_ids.device) if self.do_sample else None,
            confidences or None,
        )

    def _choose(
        self, logits: torch.Tensor, prefix: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None:
        """`[1, Vd]` logits to the target's id, the drafter's id, and the scores drawn from; `None` if none is left."""
        if not self.do_sample and not self._processors:
            row = self._vocabulary.mask(logits).argmax(dim=-1)
            token, known = self._vocabulary.ids_of(row)
            return token.to(prefix.device), known, None
        # Processors hold tensors on the device of `input_ids`.
        scores = self._processors(prefix, self._vocabulary.scatter(logits.float()).to(prefix.device))
        if self.do_sample:
            probs = probabilities(scores)
            if not bool(torch.isfinite(probs).all()):
                return None
            token = draw(probs)
        else:
            token = scores.argmax(dim=-1)
            if not bool(torch.isfinite(scores[:, token]).all()):
                return None
        return token, self._vocabulary.known_to_draft(token.to(self._device)), scores if self.do_sample else None

    def _all_confidences(
        self, hidden_states: torch.Tensor, anchor: torch.Tensor, token_ids: torch.Tensor
    ) -> list[float]:
        drafted = self._vocabulary.known_to_draft(token_ids[:, :-1].to(self._device))
        previous = torch.cat((anchor[:, None], drafted), dim=-1)
        first = self.drafter.config.first_draft_slot
        states = hidden_states[:, first : first + token_ids.shape[1]]
        return self.drafter.confidence(states, previous)[0].tolist()

    def _step_aside(self) -> None:
        self._stepped_aside = True
        warnings.warn(
            f"The drafter's numbers overflow in {self._dtype}: it proposes nothing for the rest of this call, and "
            "generation goes on without it. Load the drafter in bfloat16 or float32.",
            UserWarning,
            stacklevel=2,
        )

    # Context. Positions count real tokens only: padding never reaches the drafter.

    def _absorb_prefill(self, features: torch.Tensor) -> None:
        self._keep(features)
        waiting = self._take_waiting()
        if waiting is not None:
            self.drafter.append_context(*waiting, self.cache)

    def _keep(self, features: torch.Tensor) -> None:
        """Takes `[1, T, m * Ht]` states of the T positions after those absorbed so far; drops padding."""
        start, end = self._num_absorbed, self._num_absorbed + features.shape[1]
        self._num_absorbed = end
        real = self._real_positions(start, end)
        if real is not None:
            features = features[:, real]
        if features.shape[1] == 0:
            return
        first = self._num_real(start)
        positions = torch.arange(first, first + features.shape[1], device=self._device)[None]
        self._waiting.append((features.to(self._device, self._dtype), positions))

    def _take_waiting(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """States and positions of the context that the draft cache lacks, side by side."""
        waiting, self._waiting = self._waiting, []
        if len(waiting) <= 1:
            return waiting[0] if waiting else None
        features, positions = zip(*waiting, strict=True)
        return torch.cat(features, dim=1), torch.cat(positions, dim=1)

    def _num_real(self, position: int) -> int:
        """Real tokens before a position of the target's sequence."""
        if self._prompt_mask is None:
            return position
        return position - int((self._prompt_mask[0, :position] == 0).sum())

    def _real_positions(self, start: int, end: int) -> torch.Tensor | None:
        """Indices, from `start`, of the positions that are not padding; `None` where all are real."""
        if self._prompt_mask is None or start >= self._prompt_mask.shape[1]:
            return None
        mask = torch.ones(end - start, dtype=torch.bool)
        known = self._prompt_mask[0, start:end] != 0
        mask[: known.shape[0]] = known
        return mask.nonzero().squeeze(-1).to(self._device)


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
        self._target_size = target.config.get_text_config(decoder=True).vocab_size
        self._readable = drafter.config.vocab_size
        # A borrowed head has the target's rows, a resized or padded vocabulary maybe more or fewer than the drafter's.
        self.num_rows = drafter.config.draft_vocab_size
        if drafter.lm_head is None:
            self.num_rows = min(self.num_rows, self._target_size)
        rows = torch.arange(self.num_rows, device=device)
        draft_ids = drafter.to_target_ids(rows)
        target_ids = draft_ids if self._map is None else self._map.to_target(draft_ids)
        # A row is of use if the target has its token and the drafter can read it back as the next position's input.
        usable = (target_ids >= 0) & (target_ids < self._target_size) & (draft_ids < self._readable)
        self._usable = None if bool(usable.all()) else usable
        self._is_plain = self._usable is None and self.num_rows == self._target_size and torch.equal(target_ids, rows)
        self._draft_ids, self._target_ids = draft_ids, target_ids

    def to_draft(self, target_ids: torch.Tensor) -> torch.Tensor | None:
        """The drafter's ids of committed tokens, `[1]`; `None` where it does not know one."""
        ids = target_ids if self._map is None else self._map.to_draft(target_ids)
        if self._map is None and self._readable >= self._target_size:
            return ids
        return ids if bool(((ids >= 0) & (ids < self._readable)).all()) else None

    def known_to_draft(self, target_ids: torch.Tensor) -> torch.Tensor:
        """The drafter's ids of tokens that it proposed itself."""
        return target_ids if self._map is None else self._map.to_draft(target_ids)

    def mask(self, logits: torch.Tensor) -> torch.Tensor:
        return logits if self._usable is None else logits.masked_fill(~self._usable, float("-inf"))

    def ids_of(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of the head to the target's and the drafter's ids."""
        return (rows, rows) if self._is_plain else (self._target_ids[rows], self._draft_ids[rows])

    def scatter(self, logits: torch.Tensor) -> torch.Tensor:
        """`[1, Vd]` logits to `[1, V]` over the target's vocabulary, -inf where the drafter has no row."""
        if self._is_plain:
            return logits
        scores = logits.new_full((logits.shape[0], self._target_size), float("-inf"))
        if self._usable is None:
            scores[:, self._target_ids] = logits
        else:
            scores[:, self._target_ids[self._usable]] = logits[:, self._usable]
        return scores


def _embedding_of(drafter: DSparkDrafter, target: PreTrainedModel) -> Callable[[torch.Tensor], torch.Tensor]:
    """Ids to block embeddings: the drafter's own table or the target's, scaled as the drafter was trained."""
    module: Any = drafter.embed_tokens if drafter.embed_tokens is not None else target.get_input_embeddings()
    scale = drafter.config.embedding_scale
    weight = module.weight
    # Raw rows where there are some to read: a weight may be packed, or be fetched only for the call (offloaded).
    is_readable = isinstance(module, torch.nn.Embedding) and weight.is_floating_point() and not weight.is_meta

    def embed(ids: torch.Tensor) -> torch.Tensor:
        ids = ids if weight.is_meta else ids.to(weight.device)
        if scale is None:
            return module(ids)
        if is_readable:
            rows = torch.nn.functional.embedding(ids, weight)
        else:
            # Gemma's module scales by itself, which must not happen twice.
            rows = module(ids) / getattr(module, "scalar_embed_scale", 1.0)
        # The factor is rounded to the table's dtype first, as Gemma does.
        return rows if scale == 1.0 else rows * torch.tensor(scale, dtype=rows.dtype)

    return embed
