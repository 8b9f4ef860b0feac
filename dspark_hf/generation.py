"""The decoding loop: prefill, then draft, verify, commit until something stops it.

transformers' own assisted loop takes one row, runs past stop strings and custom stopping criteria that are met inside
a block, shows processors prefixes that plain generation never sees, and mistakes a part-filled cache. This loop takes
any batch and commits token by token: every committed token passes the processors and the stopping criteria exactly
once, in order, with exactly the prefix that plain generation would show them, and nothing is committed after a stop.
"""

import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ._compat import TargetModel, get_cache
from .alignment import check_pair
from .candidate_generator import Draft, DSparkCandidateGenerator, nothing
from .committing import Committer
from .cost_model import CostModel
from .costs import CostTable
from .lookup import ContextLookup
from .modeling_dspark import DSparkDrafter
from .policies import new_schedule, resolve_draft_length
from .prefill import prefill_apart, rows_to_part
from .requests import cannot_batch, cannot_crop, check_request
from .sampling import one_hot_scores
from .scheduling import DraftLength, Plan, RowOutcome, RowState, Schedule
from .sequences import Sequences
from .target_attention import AttentionMode, Unpadded, attending, invariant_width, takes_unpadded
from .target_inputs import TargetInputs, differ_by_row
from .target_rows import BufferedRows, CroppedRows, can_roll_back, open_rows, takes_batches
from .target_taps import skips_prompt_positions
from .trace import Round, Trace, active_traces
from .vocabulary import DraftVocabularyMap


class SpeculativeDecoding:
    """A `custom_generate` for `generate` that decodes with a DSpark drafter.

    `target.generate(..., assistant_model=drafter)` builds one by itself. Used by hand, it is the way to the same code
    that needs no hook on transformers: `target.generate(**inputs, custom_generate=SpeculativeDecoding(drafter))`.
    There, transformers hands a callable neither `streamer` nor `tokenizer`: give the streamer here as well as to
    `generate`, and stop strings as `stopping_criteria=[StopStringCriteria(tokenizer, stop_strings)]`.

    Holds settings only, and may serve any number of calls at once.

    Args:
        drafter: the drafter.
        num_assistant_tokens: draft tokens of a round at most; `None`: `drafter.generation_config`, else the most.
        assistant_confidence_threshold: confidence that ends a draft; `None`: `drafter.generation_config`, else off.
        num_assistant_tokens_schedule: the name of a schedule (`policies` lists them), or a subclass of `Schedule`;
            `None`: `drafter.generation_config`, else `"auto"`.
        prompt_lookup_num_tokens: tokens that may be copied from the context in place of a draft; 0: none; `None`: the
            schedule's own default.
        draft_invariant: make the text independent of the drafter, of the schedule and of the length of drafts, bit for
            bit where the kernels allow it (`target_attention` says where): for comparing texts in half precision.
        streamer: receives every new token, as in `generate`.
        synced_gpus: keep passing through the target until every process has finished, as in `generate`.
        vocabulary_map: between the ids of the target's and the drafter's tokenizer, where they differ.

    Raises:
        UnsupportedGenerationError: a setting that this drafter cannot follow.
        AlignmentError: raised by the call, before any work, where drafter and target do not fit.
    """

    generator_class = DSparkCandidateGenerator

    def __init__(
        self,
        drafter: DSparkDrafter,
        *,
        num_assistant_tokens: int | None = None,
        assistant_confidence_threshold: float | None = None,
        num_assistant_tokens_schedule: str | type[Schedule] | None = None,
        prompt_lookup_num_tokens: int | None = None,
        draft_invariant: bool = False,
        streamer: BaseStreamer | None = None,
        synced_gpus: bool = False,
        vocabulary_map: DraftVocabularyMap | None = None,
    ):
        self.drafter = drafter
        self.draft_invariant = draft_invariant
        self.streamer = streamer
        self.synced_gpus = synced_gpus
        self.vocabulary_map = vocabulary_map
        self.draft_length: DraftLength = resolve_draft_length(
            drafter.generation_config,
            drafter.config.num_draft_tokens,
            drafter.confidence_head is not None,
            num_assistant_tokens,
            assistant_confidence_threshold,
            num_assistant_tokens_schedule,
            prompt_lookup_num_tokens,
        )

    def __call__(
        self,
        model: TargetModel,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> GenerateDecoderOnlyOutput | torch.Tensor:
        """The decoding loop, called by `generate` with everything prepared. Returns what plain decoding returns."""
        pair = check_pair(model, self.drafter, vocabulary_map=self.vocabulary_map)
        pair.raise_if_blocked()
        check_request(model, input_ids, generation_config, model_kwargs, self.draft_invariant)
        for finding in pair.warnings:
            warnings.warn(str(finding), UserWarning, stacklevel=2)
        traces = active_traces(self.drafter)
        # As plain decoding, whose tokens turn the whole text into it.
        input_ids = input_ids.long()
        committer = Committer(
            generation_config, logits_processor, stopping_criteria, input_ids, streamer=self.streamer
        )
        pads_rows = (
            input_ids.shape[0] == 1
            or self.draft_invariant
            or committer.outputs.are_wanted
            or not takes_unpadded(model)
            or differ_by_row(model_kwargs, input_ids.shape[0])
        )
        # What is drawn by chance is accepted less often, and costs more to draw; an invariant pass is a dearer one.
        kind = (bool(generation_config.do_sample), self.draft_invariant)
        table = _cost_table(model, self.drafter, input_ids.shape[1], kind)
        # Nothing may come between its hooks and what takes them off again.
        with self.generator_class(
            self.drafter,
            model,
            do_sample=generation_config.do_sample,
            logits_processor=logits_processor,
            draft_length=self.draft_length,
            num_rows=input_ids.shape[0],
            prompt_mask=model_kwargs.get("attention_mask"),
            num_cached=int(get_cache(model_kwargs).get_seq_length()),
            vocabulary_map=self.vocabulary_map,
            report_confidence=bool(traces),
        ) as generator:
            decoding = _Decoding(
                model=model,
                generator=generator,
                schedule=new_schedule(self.draft_length, table, pads_rows),
                committer=committer,
                config=generation_config,
                model_kwargs=model_kwargs,
                traces=traces,
                lookup_tokens=self.draft_length.lookup_tokens,
                attention_mode="invariant" if self.draft_invariant else "packed",
                pads_rows=pads_rows,
            )
            return decoding.run(self.synced_gpus)


class _Decoding:
    """The state of one call."""

    def __init__(
        self,
        model: TargetModel,
        generator: DSparkCandidateGenerator,
        schedule: Schedule,
        committer: Committer,
        config: GenerationConfig,
        model_kwargs: dict[str, Any],
        traces: list[Trace],
        lookup_tokens: int,
        attention_mode: AttentionMode,
        pads_rows: bool,
    ):
        self.model = model
        self.generator = generator
        self.schedule = schedule
        self.committer = committer
        self.config = config
        self.traces = traces
        self.inputs = TargetInputs(model, model_kwargs)
        self.rows: BufferedRows | CroppedRows | None = None
        self.clock = _Clock(model.device, bool(traces))
        self._pads_rows = pads_rows
        self._has_warned = False
        self.lookups: list[ContextLookup] = []
        self._lookup_tokens = lookup_tokens
        self._attention_mode = attention_mode
        if lookup_tokens:
            self.lookups = [ContextLookup(ids) for ids in self._real_prompts(model_kwargs.get("attention_mask"))]

    @property
    def sequences(self) -> Sequences:
        return self.committer.sequences

    def run(self, synced_gpus: bool) -> GenerateDecoderOnlyOutput | torch.Tensor:
        started = self.clock.now()
        try:
            # Processes that gather parameters together must all make the same number of passes.
            self.prefill(in_one_pass=synced_gpus)
            prefilled = self.clock.now()
            for trace in self.traces:
                trace.prefill_seconds += prefilled - started
            with self.model._optimize_model_for_decode():
                while self._goes_on(synced_gpus):
                    if self.committer.active:
                        self.round()
                    else:
                        self._keep_peers_company()
                self._feed_last_tokens(synced_gpus)
        finally:
            if self.rows is not None:
                self.rows.restore(self._cache_is_visible)
            for trace in self.traces:
                trace.seconds += self.clock.now() - started
                trace.num_new_tokens += self.committer.num_new_tokens
        if self.committer.streamer is not None:
            self.committer.streamer.end()
        return self.committer.result(get_cache(self.inputs.model_kwargs))

    def prefill(self, in_one_pass: bool = False) -> None:
        """Runs the prompts, whose states become the drafter's context, and commits the tokens that they predict.

        Args:
            in_one_pass: all of them together, also where they differ in length.
        """
        kwargs, input_ids = self.inputs.model_kwargs, self.sequences.level_ids()
        num_rows = len(self.sequences)
        skips = skips_prompt_positions(self.model, self.generator.drafter.config.target_layer_ids)
        if skips or kwargs.get("logits_to_keep") == 1:
            # The last logits, but by index. A number makes the host drop the rest of the prompt where layers share
            # keys; and the head would read a part of each row, which takes a copy of its weight on a CPU.
            kwargs["logits_to_keep"] = torch.tensor([-1], device=input_ids.device)
        groups = None
        if not (in_one_pass or self._pads_rows or self._cache_is_visible):
            groups = rows_to_part(self.model, kwargs, self.config)
        if groups is None:
            with self.generator.listening(prefill=True):
                outputs = self.model._prefill(input_ids, self.config, kwargs)
        else:
            with self.generator.listening():
                outputs = prefill_apart(self.model, input_ids, self.config, kwargs, groups)
            self.generator.commit_prompts(groups, input_ids.shape[1])
        cache = get_cache(outputs)
        if not all(map(can_roll_back, cache.layers)):
            raise cannot_crop(self.model, cache)
        mask = kwargs.get("attention_mask")
        if num_rows > 1:
            if not takes_batches(cache):
                raise cannot_batch(cache)
            self.inputs.open_batch(mask, int(cache.get_seq_length()), num_rows)
        self.rows = open_rows(
            cache,
            num_rows,
            self.committer.max_length,
            mask,
            has_spare_tokens=self._attention_mode == "invariant",
            keeps_finished=self._cache_is_visible,
        )
        self.committer.commit(outputs.logits[:, -1:], nothing(input_ids[:, 0]))
        self.committer.outputs.add_prompt(outputs)
        self.inputs.commit(outputs, 1)
        self._after_commit(list(range(num_rows)))

    def round(self) -> None:
        """Draft, schedule, verify, commit."""
        assert self.rows is not None
        clock, committer, active = self.clock, self.committer, list(self.committer.active)
        started = clock.now()
        plan = self.schedule.plan(self._row_states())
        draft = self.draft(plan)
        drafted = clock.now()
        outputs = self.verify(draft)
        verified = clock.now()
        unpadded = self.rows.unpadded if isinstance(self.rows, BufferedRows) else None
        if unpadded is None:
            counts = committer.commit(outputs.logits[:, -self.rows.width :][:, : 1 + draft.length], draft)
        else:
            counts = committer.commit(outputs.logits, draft, is_padded=False)
        if committer.outputs.are_wanted:
            committer.outputs.add_pass(
                outputs, counts[0], active, self.model, get_cache(self.inputs.model_kwargs), self.rows.static_length
            )
        self.rows.commit(counts)
        self.generator.commit(counts, unpadded)
        self.generator.check_overflow(draft, committer.has_overflown)
        self.inputs.commit(outputs, counts[0])
        self._after_commit(active)
        self._learn(plan, draft, active, clock.now() - started, drafted - started)
        if self.traces:
            times: dict[str, Any] = {"draft_seconds": drafted - started, "verify_seconds": verified - drafted}
            times |= {"chain_seconds": draft.chain_seconds, "seconds": clock.now() - started}
            record = _record(
                plan, draft, active, committer.num_new, committer.num_accepted, len(self.sequences) > 1, times
            )
            for trace in self.traces:
                trace.rounds.append(record)

    def draft(self, plan: Plan) -> Draft:
        """What the plan asks for: draft tokens of the drafter, copied ones of the context, or nothing."""
        prefixes = [self.sequences.prefix(row) for row in self.committer.active]
        limits = [row.num_tokens if row.source == "drafter" else 0 for row in plan.rows]
        if any(limits):
            draft = self.generator.draft(prefixes, limits, plan.gate)
        else:
            draft = nothing(torch.cat([prefix[:, -1] for prefix in prefixes]))
        copied = {
            slot: self._offers[slot].token_ids[: row.num_tokens]
            for slot, row in enumerate(plan.rows)
            if row.source == "lookup" and row.num_tokens
        }
        return _with_copies(draft.over_vocabulary(self.generator.vocab_size), copied) if copied else draft

    def verify(self, draft: Draft) -> Any:
        """One pass of the target over anchor and draft of each active row."""
        assert self.rows is not None
        active, block, width = self.committer.active, draft.token_ids, 1 + draft.length
        widths, unpadded = [1 + length for length in draft.row_lengths], None
        if self._attention_mode == "invariant":
            # Some numbers of rows have kernels of their own: tokens that nobody reads come along.
            width = invariant_width(width, len(active), self.model.dtype)
            dummies = self.sequences.anchors(active)[:, None].expand(-1, width - 1 - draft.length)
            block = torch.cat((block, dummies), dim=-1)
            widths = [width] * len(active)
        if len(active) == 1:
            input_ids = self.sequences.with_draft(active[0], block)
        else:
            input_ids = torch.cat((self.sequences.anchors(active)[:, None], block), dim=-1)
            if not self._pads_rows and min(widths) < width:
                unpadded = Unpadded.of(widths, block.device)
                input_ids, width = unpadded.flat(input_ids), sum(widths)
        self.rows.begin(widths, unpadded)
        inputs = self.inputs.of_pass(self.rows, input_ids, width)
        with self.generator.listening(), attending(self._attention_mode, unpadded):
            return self.model(**inputs, return_dict=True)

    def _goes_on(self, synced_gpus: bool) -> bool:
        is_done = not self.committer.active
        return self.model._has_unfinished_sequences(is_done, synced_gpus, device=self.sequences.device)

    def _row_states(self) -> list[RowState]:
        states = []
        self._offers: dict[int, Any] = {}
        for slot, row in enumerate(self.committer.active):
            length = self.sequences.lengths[row]
            room = max(0, self.committer.max_length - length - 1)
            most = min(room, self._lookup_tokens)
            offer = self.lookups[row].offer(most) if self.lookups and most > 0 else None
            self._offers[slot] = offer
            states.append(RowState(row, length, room, offer, self.generator.can_draft))
        return states

    def _after_commit(self, active: list[int]) -> None:
        """Tells the context lookup, and takes finished rows out of everything."""
        if self.lookups:
            for row, tokens in zip(active, self.committer.new_tokens, strict=True):
                self.lookups[row].extend(tokens)
        slots = self.committer.slots
        if slots and len(slots) < len(active):
            assert self.rows is not None
            self.rows.select(slots)
            self.generator.select(slots)
            self.inputs.select(slots, len(active))

    def _learn(self, plan: Plan, draft: Draft, active: list[int], seconds: float, draft_seconds: float) -> None:
        committer, lengths = self.committer, self.sequences.lengths
        outcomes = [
            RowOutcome(
                row,
                plan.rows[slot].source,
                draft.row_lengths[slot],
                committer.num_accepted[slot],
                has_ended=slot not in committer.slots and lengths[row] < committer.max_length,
                next_was_seen=committer.num_new[slot] > committer.num_accepted[slot],
            )
            for slot, row in enumerate(active)
        ]
        self.schedule.observe(plan, outcomes, seconds, draft_seconds if self.clock.is_exact else None)
        mismatch = None if self._has_warned else self.schedule.mismatch()
        if mismatch is not None:
            self._has_warned = True
            warnings.warn(mismatch, UserWarning, stacklevel=2)

    def _real_prompts(self, prompt_mask: torch.Tensor | None) -> list[list[int]]:
        ids = self.sequences.level_ids().tolist()
        if prompt_mask is None:
            return ids
        real = (prompt_mask[:, -len(ids[0]) :] != 0).tolist()
        return [[token for token, is_real in zip(*row, strict=True) if is_real] for row in zip(ids, real, strict=True)]

    @property
    def _cache_is_visible(self) -> bool:
        """Whether anybody sees the cache after the call."""
        cache = get_cache(self.inputs.model_kwargs)
        return bool(self.config.return_dict_in_generate or getattr(cache, "_is_user_defined", False))

    def _feed_last_tokens(self, synced_gpus: bool) -> None:
        """Rows that ended before others left without the states of their last token, which plain generation has."""
        early = []
        if isinstance(self.rows, BufferedRows) and len(self.sequences) > 1 and self._cache_is_visible:
            early = self.rows.early_rows()
        # Where one process has to make this pass, all of them do.
        if not self.model._has_unfinished_sequences(not early, synced_gpus, device=self.sequences.device):
            return
        if not early:
            self._keep_peers_company()
        else:
            assert isinstance(self.rows, BufferedRows)
            self.rows.recall(early)
            self.inputs.recall(early)
            # A text may begin behind what the cache held before.
            num_before = self.rows.prompt_length - self.sequences.prompt_length
            lengths = [length - num_before for length in self.rows.lengths]
            newest = [self.sequences.token(row, n) for row, n in zip(early, lengths, strict=True)]
            self.rows.begin([1] * len(early))
            inputs = self.inputs.of_pass(self.rows, torch.stack(newest)[:, None], 1)
            self.model(**inputs, return_dict=True)
            self.rows.commit([1] * len(early))

    def _keep_peers_company(self) -> None:
        # Sharded parameters are gathered by all processes together: one pass for each of theirs.
        self.model(self.sequences.prefix(0)[:, -1:], use_cache=False)


def _cost_table(model: TargetModel, drafter: DSparkDrafter, context_length: int, kind: tuple[bool, ...]) -> CostTable:
    """What rounds of this pair cost where it stands now: given with the drafter, or measured by all its calls of this
    kind, which start from what a profile left in the cache."""
    if drafter.cost_model is not None:
        differences = drafter.cost_model.differences(model, drafter)
        if not differences:
            return drafter.cost_model.table(context_length)
        found = "; ".join(f"{name}: {there} there, {here} here" for name, (there, here) in differences.items())
        warnings.warn(
            f"`drafter.cost_model` was measured elsewhere ({found}), so this call learns its own prices. Measure anew "
            "with `profile_costs`.",
            UserWarning,
            stacklevel=2,
        )
    by_place = _cost_tables.setdefault(drafter, weakref.WeakKeyDictionary()).setdefault(model, {})
    place = (model.device, model.dtype, drafter.device, drafter.dtype, torch.get_num_threads(), kind)
    if place not in by_place:
        cached = CostModel.cached(model, drafter)
        table = CostTable() if cached is None else cached.table(context_length, is_fixed=False)
        return by_place.setdefault(place, table)
    return by_place[place]


_cost_tables: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def _with_copies(draft: Draft, copied: dict[int, list[int]]) -> Draft:
    """A draft with the tokens of some rows, by slot, copied from the context: their distribution is one-hot."""
    device = draft.token_ids.device
    lengths = [len(copied.get(slot, ())) or length for slot, length in enumerate(draft.row_lengths)]
    token_ids = torch.nn.functional.pad(draft.token_ids, (0, max(lengths) - draft.length))
    scores = draft.scores
    if scores is not None:
        scores = torch.nn.functional.pad(scores, (0, 0, 0, max(lengths) - draft.length))
    for slot, tokens in copied.items():
        ids = torch.tensor(tokens, device=device)
        token_ids[slot, : len(tokens)] = ids
        if scores is not None:
            scores[slot, : len(tokens)] = one_hot_scores(ids, scores.shape[-1])
    return replace(draft, token_ids=token_ids, scores=scores, lengths=lengths)


class _Clock:
    """Wall time on the host. Where a trace listens, the device has caught up; else nobody waits for it.

    Attributes:
        is_exact: whether the time between two readings is that of the work between them.
    """

    def __init__(self, device: torch.device, is_traced: bool):
        self.is_exact = device.type == "cpu" or is_traced
        self._synchronize: Callable[[], None] | None = None
        if is_traced and device.type != "cpu" and hasattr(torch, device.type):
            self._synchronize = getattr(torch, device.type).synchronize

    def now(self) -> float:
        if self._synchronize is not None:
            self._synchronize()
        return perf_counter()


def _record(
    plan: Plan,
    draft: Draft,
    active: list[int],
    counts: list[int],
    num_accepted: list[int],
    is_batch: bool,
    times: dict[str, Any],
) -> Round:
    proposed = [ids[:n] for ids, n in zip(draft.token_ids.tolist(), draft.row_lengths, strict=True)]
    fields: dict[str, Any] = {
        "proposed": proposed,
        "accepted": list(num_accepted),
        "confidence": draft.confidence or [None] * len(active),
        "num_new_tokens": counts,
        "source": [row.source for row in plan.rows],
    }
    if not is_batch:
        fields = {name: of_rows[0] for name, of_rows in fields.items()}
    return Round(**fields, rows=active, is_batch=is_batch, reason=plan.reason, **times)
