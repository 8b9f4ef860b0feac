"""The decoding loop: prefill, then draft, verify, commit until something stops it.

transformers' own assisted loop runs past stop strings and custom stopping criteria that are met inside a block, shows
processors prefixes that plain generation never sees, and mistakes a part-filled cache. This loop commits token by
token instead: every committed token passes the processors and the stopping criteria exactly once, in order, with
exactly the prefix that plain generation would show them, and nothing is committed after a stop.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    StoppingCriteriaList,
)
from transformers.generation import GenerationMode
from transformers.generation.candidate_generator import (
    _prepare_attention_mask,
    _prepare_position_ids,
    _prepare_token_type_ids,
)
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ._compat import (
    CHUNKS_PART_FILLED_CACHE,
    TargetModel,
    generate_output,
    get_cache,
    is_croppable,
    stop_recording_past,
)
from .alignment import check_pair
from .candidate_generator import Draft, DSparkCandidateGenerator
from .errors import UnsupportedGenerationError
from .modeling_dspark import DSparkDrafter
from .sampling import draw, is_accepted, probabilities, residual
from .scheduling import DraftLength, resolve_draft_length
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
        num_assistant_tokens_schedule: `None`: `drafter.generation_config`, else `"constant"`, the only one.
        streamer: receives every new token, as in `generate`.
        synced_gpus: keep passing through the target until every process has finished, as in `generate`.
        vocabulary_map: between the ids of the target's and the drafter's tokenizer, where they differ.

    Raises:
        UnsupportedGenerationError: a setting that this drafter cannot follow.
        AlignmentError: raised by the call, before any work, where drafter and target do not fit.
    """

    def __init__(
        self,
        drafter: DSparkDrafter,
        *,
        num_assistant_tokens: int | None = None,
        assistant_confidence_threshold: float | None = None,
        num_assistant_tokens_schedule: str | None = None,
        streamer: BaseStreamer | None = None,
        synced_gpus: bool = False,
        vocabulary_map: DraftVocabularyMap | None = None,
    ):
        self.drafter = drafter
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
        _check_request(model, input_ids, generation_config, model_kwargs)
        for finding in pair.warnings:
            warnings.warn(str(finding), UserWarning, stacklevel=2)
        traces = active_traces(self.drafter)
        cache = get_cache(model_kwargs)
        generator = DSparkCandidateGenerator(
            self.drafter,
            model,
            do_sample=generation_config.do_sample,
            logits_processor=logits_processor,
            draft_length=self.draft_length,
            prompt_mask=model_kwargs.get("attention_mask"),
            num_cached=int(cache.get_seq_length()),
            vocabulary_map=self.vocabulary_map,
            report_confidence=bool(traces),
        )
        with generator:
            decoding = _Decoding(
                model=model,
                generator=generator,
                streamer=self.streamer,
                config=generation_config,
                logits_processor=logits_processor,
                stopping_criteria=stopping_criteria,
                input_ids=input_ids,
                model_kwargs=model_kwargs,
            )
            return decoding.run(self.synced_gpus, traces)


@dataclass
class _Outputs:
    """One entry per new token, as plain generation returns them; `None` where not asked for."""

    scores: tuple | None
    logits: tuple | None
    attentions: tuple | None
    hidden_states: tuple | None


@dataclass
class _Decoding:
    """The state of one call."""

    model: TargetModel
    generator: DSparkCandidateGenerator
    streamer: BaseStreamer | None
    config: GenerationConfig
    logits_processor: Any
    stopping_criteria: StoppingCriteriaList
    input_ids: torch.Tensor
    model_kwargs: dict[str, Any]
    cache: Any = None
    num_cached: int = 0
    finished: bool = False

    def __post_init__(self) -> None:
        def empty(is_wanted: bool | None) -> tuple | None:
            return () if self.config.return_dict_in_generate and is_wanted else None

        self.outputs = _Outputs(
            scores=empty(self.config.output_scores),
            logits=empty(self.config.output_logits),
            attentions=empty(self.config.output_attentions),
            hidden_states=empty(self.config.output_hidden_states),
        )

    def run(self, synced_gpus: bool, traces: list[Trace]) -> GenerateDecoderOnlyOutput | torch.Tensor:
        clock = _Clock(self.model.device if traces else None)
        started, prompt_length = clock.now(), self.input_ids.shape[1]
        try:
            self.prefill()
            prefilled = clock.now()
            for trace in traces:
                trace.prefill_seconds += prefilled - started
            self._decode(synced_gpus, traces, clock)
        finally:
            self._leave_cache_clean()
            for trace in traces:
                trace.seconds += clock.now() - started
                trace.num_new_tokens += self.input_ids.shape[1] - prompt_length
        if self.streamer is not None:
            self.streamer.end()
        return self._result()

    def prefill(self) -> None:
        """Runs the prompt, whose states become the drafter's context, and commits the token that it predicts."""
        if skips_prompt_positions(self.model, self.generator.drafter.config.target_layer_ids):
            # The last logits, but by index: only a number makes the host drop the rest of the prompt.
            self.model_kwargs["logits_to_keep"] = torch.tensor([-1], device=self.input_ids.device)
        with self.generator.listening(prefill=True):
            outputs = self.model._prefill(self.input_ids, self.config, self.model_kwargs)
        self.cache = get_cache(outputs)
        if not all(map(is_croppable, self.cache.layers)):
            raise _cannot_crop(self.model, self.cache)
        self.num_cached = int(self.cache.get_seq_length())
        # Only now: while it records, a sliding-window cache would hold a long prompt in full.
        self.cache.activate_past_recording()
        self._commit(outputs, Draft(self.input_ids.new_empty((1, 0))), is_prefill=True)

    def _decode(self, synced_gpus: bool, traces: list[Trace], clock: "_Clock") -> None:
        """Rounds until something stops them."""
        with self.model._optimize_model_for_decode():
            while self.model._has_unfinished_sequences(self.finished, synced_gpus, device=self.input_ids.device):
                if self.finished:
                    self._keep_peers_company()
                    continue
                before = clock.now()
                draft = self.generator.draft(self.input_ids, self.config.max_length - self.input_ids.shape[1] - 1)
                drafted = clock.now()
                num_new = self.verify(draft)
                if traces:
                    record = _record(draft, num_new, self.input_ids, drafted - before, clock.now() - drafted)
                    for trace in traces:
                        trace.rounds.append(record)

    def verify(self, draft: Draft) -> int:
        """One pass of the target over anchor and draft; commits what stands, and returns how many tokens that is."""
        with self.generator.listening():
            outputs = self.model(**self._model_inputs(draft), return_dict=True)
        num_new = self._commit(outputs, draft)
        # The pass wrote anchor and draft; the newest token is not in the cache, as in plain decoding.
        self.cache.crop(-(1 + draft.length - num_new))
        self.num_cached += num_new
        self.generator.commit(num_new)
        return num_new

    def _model_inputs(self, draft: Draft) -> dict[str, Any]:
        input_ids = torch.cat((self.input_ids, draft.token_ids), dim=-1)
        kwargs = _extended(self.model_kwargs, draft.length)
        inputs = self.model.prepare_inputs_for_generation(
            input_ids, next_sequence_length=1 + draft.length, is_first_iteration=False, **kwargs
        )
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = 1 + draft.length
        return inputs

    def _commit(self, outputs: Any, draft: Draft, is_prefill: bool = False) -> int:
        """Commits draft tokens while they stand, then one token of the target, unless a criterion stops it first."""
        logits = outputs.logits[:, -1 - draft.length :]
        num_new, stands = 0, True
        while stands and not self.finished:
            next_token_logits = logits[:, num_new].to(copy=True, dtype=torch.float32, device=self.input_ids.device)
            scores = self.logits_processor(self.input_ids, next_token_logits)
            token, stands = self._decide(scores, draft, num_new)
            self._append(token, scores, next_token_logits)
            num_new += 1
        self._store_states(outputs, num_new, is_prefill)
        self.model_kwargs = self.model._update_model_kwargs_for_generation(
            outputs, self.model_kwargs, is_encoder_decoder=False, num_new_tokens=num_new
        )
        return num_new

    def _decide(self, scores: torch.Tensor, draft: Draft, position: int) -> tuple[torch.Tensor, bool]:
        """The token at a position, `[1]`, and whether it is the draft's, so that the next position counts as well."""
        if position == draft.length:
            return (draw(probabilities(scores)) if self.config.do_sample else scores.argmax(dim=-1)), False
        drafted = draft.token_ids[:, position]
        if not self.config.do_sample:
            token = scores.argmax(dim=-1)
            return token, bool(token == drafted)
        assert draft.scores is not None
        target_probs, draft_probs = probabilities(scores), probabilities(draft.scores[:, position])
        if bool(is_accepted(target_probs, draft_probs, drafted, torch.rand_like(target_probs[:, 0]))):
            return drafted, True
        return draw(residual(target_probs, draft_probs)), False

    def _append(self, token: torch.Tensor, scores: torch.Tensor, logits: torch.Tensor) -> None:
        self.input_ids = torch.cat((self.input_ids, token[:, None]), dim=-1)
        if self.outputs.scores is not None:
            self.outputs.scores += (scores,)
        if self.outputs.logits is not None:
            self.outputs.logits += (logits,)
        self.finished = bool(self.stopping_criteria(self.input_ids, self.outputs.scores).all())
        if self.streamer is not None:
            self.streamer.put(token.cpu())

    def _store_states(self, outputs: Any, num_new: int, is_prefill: bool) -> None:
        """Splits a pass into one entry per new token; the first entry is the whole prompt, as in plain decoding."""
        if self.outputs.hidden_states is not None:
            states = outputs.hidden_states
            if is_prefill:
                self.outputs.hidden_states += (states,)
            else:
                self.outputs.hidden_states += tuple(
                    tuple(None if layer is None else layer[:, i : i + 1] for layer in states) for i in range(num_new)
                )
        if self.outputs.attentions is not None:
            weights = outputs.attentions
            if is_prefill:
                self.outputs.attentions += (weights,)
            else:
                windows = self._windows(len(weights))
                self.outputs.attentions += tuple(
                    tuple(map(self._attention_row, weights, [i] * len(weights), windows)) for i in range(num_new)
                )

    def _attention_row(self, weights: torch.Tensor | None, row: int, window: int | None) -> torch.Tensor | None:
        """Row of `[1, heads, queries, keys]`, cut to the keys that a one-token pass would have had."""
        if weights is None:
            return None
        if self.cache.is_compileable:  # a static cache: the same keys for every query
            return weights[:, :, row : row + 1]
        end = weights.shape[-1] - (weights.shape[-2] - 1 - row)
        start = 0 if window is None else max(0, end - window)
        return weights[:, :, row : row + 1, start:end]

    def _windows(self, num_layers: int) -> list[int | None]:
        """Width of the sliding window of each attention layer; `None` for a full one."""
        config = self.model.config.get_text_config(decoder=True)
        layer_types = getattr(config, "layer_types", None)
        if layer_types is not None:
            kinds = [kind for kind in layer_types if kind != "linear_attention"]
            windows = [config.sliding_window if kind == "sliding_attention" else None for kind in kinds]
        else:
            windows = [layer.sliding_window if layer.is_sliding else None for layer in self.cache.layers]
        return windows if len(windows) == num_layers else [None] * num_layers

    def _leave_cache_clean(self) -> None:
        """Takes uncommitted positions out of the cache after an exception, and stops it from recording in any case."""
        if self.cache is None:
            return
        surplus = int(self.cache.get_seq_length()) - self.num_cached
        if surplus > 0:
            self.cache.crop(-surplus)
        stop_recording_past(self.cache)

    def _keep_peers_company(self) -> None:
        # Sharded parameters are gathered by all processes together: one pass for each of theirs.
        self.model(self.input_ids[:, -1:], use_cache=False)

    def _result(self) -> GenerateDecoderOnlyOutput | torch.Tensor:
        if not self.config.return_dict_in_generate:
            return self.input_ids
        return generate_output(sequences=self.input_ids, cache=self.cache, **vars(self.outputs))


def _extended(model_kwargs: dict[str, Any], num_tokens: int) -> dict[str, Any]:
    """The keyword arguments of a pass, as long as they are now plus a draft of `num_tokens`.

    Each is extended from its own length: with a part-filled cache, masks span more than the ids that were passed.
    """
    kwargs = dict(model_kwargs)
    for name, extend in _EXTENSIONS.items():
        if kwargs.get(name) is not None:
            kwargs = extend(kwargs, kwargs[name].shape[-1] + num_tokens)
    if (token_types := kwargs.get("mm_token_type_ids")) is not None:
        # Drafted tokens are text.
        text = token_types.new_zeros((token_types.shape[0], num_tokens))
        kwargs["mm_token_type_ids"] = torch.cat((token_types, text), dim=-1)
    return kwargs


_EXTENSIONS: dict[str, Callable[[dict[str, Any], int], dict[str, Any]]] = {
    "attention_mask": partial(_prepare_attention_mask, is_encoder_decoder=False),
    "position_ids": partial(_prepare_position_ids, is_encoder_decoder=False),
    "token_type_ids": _prepare_token_type_ids,
}


class _Clock:
    """Wall time on the host, with the device caught up; does not wait where nobody measures."""

    def __init__(self, device: torch.device | None):
        self._synchronize: Callable[[], None] | None = None
        if device is not None and device.type != "cpu" and hasattr(torch, device.type):
            self._synchronize = getattr(torch, device.type).synchronize

    def now(self) -> float:
        if self._synchronize is not None:
            self._synchronize()
        return perf_counter()


def _record(draft: Draft, num_new: int, input_ids: torch.Tensor, draft_seconds: float, verify_seconds: float) -> Round:
    proposed = draft.token_ids[0].tolist()
    committed = input_ids[0, input_ids.shape[1] - num_new :].tolist()
    accepted = 0
    while accepted < min(len(proposed), num_new) and proposed[accepted] == committed[accepted]:
        accepted += 1
    return Round(proposed, accepted, draft.confidence, num_new, draft_seconds, verify_seconds)


def _check_request(
    model: TargetModel, input_ids: torch.Tensor, config: GenerationConfig, model_kwargs: dict[str, Any]
) -> None:
    """Refuses, before any work, what the loop does not do exactly.

    Raises:
        UnsupportedGenerationError: the message says what to do instead.
    """
    problem = _unsupported_setting(config) or _unsupported_inputs(input_ids, model_kwargs)
    if problem is not None:
        raise UnsupportedGenerationError(problem)
    cache = get_cache(model_kwargs)
    if model._is_stateful or (cache is not None and not _may_be_croppable(cache)):
        raise _cannot_crop(model, cache)
    if cache is None:
        raise UnsupportedGenerationError(
            f"{type(model).__name__} got no key/value cache from `generate`, which verification needs. "
            "Leave out `assistant_model` for this model."
        )
    if config.prefill_chunk_size and not CHUNKS_PART_FILLED_CACHE and int(cache.get_seq_length()) > 0:
        raise UnsupportedGenerationError(
            "`prefill_chunk_size` together with a part-filled cache gives wrong text in this version of transformers, "
            "with or without a drafter: leave one of them out, or update transformers."
        )


def _unsupported_setting(config: GenerationConfig) -> str | None:
    mode = config.get_generation_mode()
    rivals = {
        "prompt_lookup_num_tokens": config.prompt_lookup_num_tokens,
        "assistant_early_exit": config.assistant_early_exit,
        "use_mtp": getattr(config, "use_mtp", None),
    }
    rival = next((name for name, value in rivals.items() if value), None)
    if rival is not None:
        return f"`{rival}` and a DSpark drafter both propose tokens: leave one of them out."
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        return (
            f"A DSpark drafter speeds up greedy search and sampling, not {mode.value.replace('_', ' ')}. "
            "Leave out `assistant_model`, or the settings that ask for this mode."
        )
    if config.assistant_ensemble_weight is not None:
        return (
            "`assistant_ensemble_weight` changes the distribution of the output, which a DSpark drafter never does: "
            "leave it out."
        )
    if not config.use_cache:
        return "A DSpark drafter needs `use_cache=True`: verification continues from the target's cache."
    return None


def _unsupported_inputs(input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> str | None:
    if input_ids.shape[0] != 1:
        return (
            f"A DSpark drafter supports one sequence per call so far, got {input_ids.shape[0]} "
            "(`num_return_sequences` counts). Call `generate` for each prompt, or leave out `assistant_model` for "
            "batches."
        )
    if model_kwargs.get("inputs_embeds") is not None:
        return "A DSpark drafter needs to know the tokens: pass `input_ids` instead of `inputs_embeds`."
    return None


def _may_be_croppable(cache: Any) -> bool:
    """False only where a layer can tell already: one with a convolution knows after its first pass."""
    return all(is_croppable(layer) or hasattr(layer, "is_conv_states_initialized") for layer in cache.layers)


def _cannot_crop(model: TargetModel, cache: Any) -> UnsupportedGenerationError:
    kept = (
        "a state"
        if cache is None
        else f"{type(cache).__name__}({', '.join(sorted({type(layer).__name__ for layer in cache.layers}))})"
    )
    return UnsupportedGenerationError(
        f"{type(model).__name__} keeps {kept}, which cannot take back rejected draft tokens. Use the default "
        "(dynamic) cache; for a model with a recurrent state, leave out `assistant_model`."
    )
