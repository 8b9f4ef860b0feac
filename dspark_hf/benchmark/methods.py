"""The ways to generate that are compared: for each one, what `generate` is called with.

A new method is one function and one line of `METHODS`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.generation import CandidateGenerator
from transformers.generation.streamers import BaseStreamer

from .._compat import TargetModel
from ..candidate_generator import DSparkCandidateGenerator
from ..modeling_dspark import DSparkDrafter
from ..policies import SCHEDULES, resolve_draft_length
from ..simulation import SimulatedCandidateGenerator, SimulatedDecoding, SimulatedProposals

_PROMPT_LOOKUP_TOKENS = 10  # what transformers' own documentation uses


@dataclass(frozen=True)
class Call:
    """One call of `generate`, as far as methods differ in it.

    Attributes:
        proposals: in place of the drafter's own; `None`: real ones.
    """

    drafter: DSparkDrafter
    assistant: PreTrainedModel | None = None
    num_assistant_tokens: int | None = None
    proposals: SimulatedProposals | None = None
    streamer: BaseStreamer | None = None


@dataclass(frozen=True)
class Method:
    """A way to generate.

    Attributes:
        arguments: a call to the further arguments of `generate`.
        drafts: whether the drafter takes part.
        is_traced: whether `drafter.trace()` sees it.
        takes_batches: whether it generates for more than one prompt at once.
    """

    arguments: Callable[[Call], dict[str, Any]]
    drafts: bool = False
    is_traced: bool = False
    takes_batches: bool = True


def _plain(call: Call) -> dict[str, Any]:
    return {}


def _prompt_lookup(call: Call) -> dict[str, Any]:
    return {"prompt_lookup_num_tokens": _PROMPT_LOOKUP_TOKENS}


def _assistant(call: Call) -> dict[str, Any]:
    return {"assistant_model": call.assistant}


def _dspark(
    call: Call,
    schedule: str | None = None,
    draft_invariant: bool | None = None,
    num_assistant_tokens: int | None = None,
    threshold: float | None = None,
) -> dict[str, Any]:
    settings: dict[str, Any] = {"num_assistant_tokens": num_assistant_tokens or call.num_assistant_tokens}
    settings |= {"num_assistant_tokens_schedule": schedule, "draft_invariant": draft_invariant}
    settings["assistant_confidence_threshold"] = threshold
    given = {name: value for name, value in settings.items() if value is not None}
    if call.proposals is None:
        return {"assistant_model": call.drafter, **given}
    decoding = SimulatedDecoding(call.drafter, proposals=call.proposals, streamer=call.streamer, **given)
    return {"custom_generate": decoding}


def _transformers_loop(call: Call) -> dict[str, Any]:
    """transformers' own assisted loop over our candidate generator, for comparison only.

    The loop asks a private method for its generator, which third parties cannot choose: it is set on the target for
    the duration of the call.
    """

    def decode(
        model: TargetModel,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: Any,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> Any:
        generator = _candidate_generator(call, model, logits_processor, generation_config, model_kwargs)
        with generator, generator.listening(), _drawing_candidates_from(generator, model):
            return model._assisted_decoding(
                input_ids,
                logits_processor=logits_processor,
                stopping_criteria=stopping_criteria,
                generation_config=generation_config,
                streamer=call.streamer,
                **model_kwargs,
            )

    return {"custom_generate": decode}


def _candidate_generator(
    call: Call,
    model: TargetModel,
    logits_processor: LogitsProcessorList,
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
) -> DSparkCandidateGenerator:
    drafter = call.drafter
    kind: Callable[..., DSparkCandidateGenerator] = DSparkCandidateGenerator
    if call.proposals is not None:
        kind = partial(SimulatedCandidateGenerator, proposals=call.proposals)
    return kind(
        drafter,
        model,
        do_sample=config.do_sample,
        logits_processor=logits_processor,
        draft_length=resolve_draft_length(
            drafter.generation_config,
            drafter.config.num_draft_tokens,
            drafter.confidence_head is not None,
            call.num_assistant_tokens,
            schedule="constant",
        ),
        prompt_mask=model_kwargs.get("attention_mask"),
        max_length=config.max_length,
    )


@contextmanager
def _drawing_candidates_from(generator: CandidateGenerator, model: TargetModel) -> Iterator[None]:
    model._get_candidate_generator = lambda **kwargs: generator
    try:
        yield
    finally:
        del model._get_candidate_generator


METHODS: dict[str, Method] = {
    "plain": Method(_plain),
    "prompt-lookup": Method(_prompt_lookup, takes_batches=False),
    "assistant": Method(_assistant, takes_batches=False),
    "transformers-loop": Method(_transformers_loop, drafts=True, takes_batches=False),
    "dspark": Method(_dspark, drafts=True, is_traced=True),
    "dspark-constant": Method(partial(_dspark, schedule="constant"), drafts=True, is_traced=True),
    "dspark-invariant": Method(partial(_dspark, draft_invariant=True), drafts=True, is_traced=True),
}


def find_method(name: str) -> Method:
    """A method by its name: one of `METHODS`, or `dspark-SCHEDULE`, with `:N` for the most draft tokens (an integer)
    or the threshold (with a point) where wanted: `dspark-constant:3`, `dspark-confidence:0.5`, `dspark-hardware`.

    Raises:
        ValueError: there is no such method.
    """
    if name in METHODS:
        return METHODS[name]
    kind, _, value = name.removeprefix("dspark-").partition(":")
    if not name.startswith("dspark-") or kind not in SCHEDULES:
        of_schedules = ", ".join(f"dspark-{schedule}" for schedule in SCHEDULES)
        raise ValueError(f"{name}, which is none of {', '.join(METHODS)}, {of_schedules} (and :N, :0.N)")
    settings: dict[str, Any] = {"schedule": kind}
    try:
        if value:
            settings |= {"threshold": float(value)} if "." in value else {"num_assistant_tokens": int(value)}
    except ValueError as error:
        raise ValueError(f"{name}: {value} is no number of draft tokens and no threshold") from error
    return Method(partial(_dspark, **settings), drafts=True, is_traced=True)
