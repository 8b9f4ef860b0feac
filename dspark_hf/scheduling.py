"""How many draft tokens of a round does the target verify? Pure numbers: no model, no tensor.

Today there is one policy: at most `num_assistant_tokens`, cut before the first position whose confidence falls below
`assistant_confidence_threshold`. Both look only at what is known before the token in question is drawn (the confidence
c_k is a function of the tokens before position k), so the output keeps the target's distribution (paper, section 4).
"""

from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from transformers import GenerationConfig

from .errors import UnsupportedGenerationError


@dataclass(frozen=True)
class DraftLength:
    """The draft length policy of one call.

    Attributes:
        num_assistant_tokens: draft tokens of a round at most.
        confidence_threshold: a position with a confidence below it ends the draft; 0 is off.
    """

    num_assistant_tokens: int
    confidence_threshold: float

    def ends_before(self, confidence: float) -> bool:
        """Whether a position of this confidence is left out, and all after it. NaN ends the draft."""
        return self.confidence_threshold > 0 and not confidence >= self.confidence_threshold


def resolve_draft_length(
    drafter_config: GenerationConfig,
    num_draft_tokens: int,
    has_confidence_head: bool,
    num_assistant_tokens: int | None = None,
    confidence_threshold: float | None = None,
    schedule: str | None = None,
) -> DraftLength:
    """The policy from the per-call arguments (they win), the drafter's settings, and the defaults.

    Args:
        drafter_config: `drafter.generation_config`.
        num_draft_tokens: tokens that one block gives.
        has_confidence_head: whether a threshold has anything to read.
        num_assistant_tokens, confidence_threshold, schedule: of this call; `None` where it says nothing.

    Raises:
        UnsupportedGenerationError: a value out of range, or a setting that this drafter cannot follow.
    """
    schedule = _first_given(schedule, drafter_config.num_assistant_tokens_schedule, "constant")
    if schedule != "constant":
        raise UnsupportedGenerationError(
            f"`num_assistant_tokens_schedule` is {schedule!r}, but a DSpark drafter follows 'constant' only. "
            "Set it to 'constant' in the call or in `drafter.generation_config`; `assistant_confidence_threshold` "
            "shortens drafts round by round."
        )
    tokens = _first_given(num_assistant_tokens, drafter_config.num_assistant_tokens, num_draft_tokens)
    if not _is_integer(tokens) or not 1 <= tokens <= num_draft_tokens:
        raise UnsupportedGenerationError(
            f"`num_assistant_tokens` is {tokens!r}, but it must be an integer from 1 to {num_draft_tokens}, what a "
            "block of this drafter gives. Leave it out to use all of them."
        )
    threshold = _first_given(confidence_threshold, drafter_config.assistant_confidence_threshold, 0.0)
    if not _is_probability(threshold):
        raise UnsupportedGenerationError(
            f"`assistant_confidence_threshold` is {threshold!r}, expected a probability from 0 (off) to 1."
        )
    if threshold > 0 and not has_confidence_head:
        raise UnsupportedGenerationError(
            f"`assistant_confidence_threshold` is {threshold}, but this drafter has no confidence head. "
            "Set it to 0 or leave it out."
        )
    return DraftLength(int(tokens), float(threshold))


def _is_integer(value: object) -> bool:
    """True for every integer type (NumPy's too), but not for booleans."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_probability(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and 0.0 <= float(value) <= 1.0


def _first_given(*values: Any) -> Any:
    return next(value for value in values if value is not None)
