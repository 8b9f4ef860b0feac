"""Tiny random models, and drafters that know the answer.

A random drafter is almost never right, so a test with it alone would prove almost nothing. An *oracle* proposes the
target's true continuation; a *saboteur* is an oracle with one position wrong in every other draft. Both run a real
`DSparkDrafter` first (taps, draft cache, heads) and then replace the ids of its draft, never their number.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
import transformers
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from dspark_hf import DSparkConfig, DSparkDrafter, Trace
from dspark_hf.candidate_generator import Draft, DSparkCandidateGenerator
from dspark_hf.trace import Round

VOCAB = 97
MASK = 96
WINDOW = 8
PROMPT = (5, 17, 3, 60, 22, 41, 9, 33, 70, 12)
BLOCK = 4
POSITIONS = (None, 0, 1, 2, 3)

# Wide logits: a random target then says many different tokens, and none of them by a hair.
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_SLIDING_AND_FULL = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
}

# Family: config class, model class, settings of the family.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": WINDOW}),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {**_SLIDING_AND_FULL, "query_pre_attn_scalar": 8}),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {**_SLIDING_AND_FULL, "query_pre_attn_scalar": 8}),
    "gemma4": (
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        {
            **_SLIDING_AND_FULL,
            "global_head_dim": 8,
            "vocab_size_per_layer_input": VOCAB,
            "hidden_size_per_layer_input": 0,
        },
    ),
    "gemma4_shared_kv": (
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        {
            **_SLIDING_AND_FULL,
            "global_head_dim": 8,
            "vocab_size_per_layer_input": VOCAB,
            "hidden_size_per_layer_input": 4,
            "num_kv_shared_layers": 2,
        },
    ),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {"num_local_experts": 4}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
}
SLIDING_FAMILIES = ("mistral", "gemma2", "gemma3", "gemma4")


def new_target(family: str = "llama", **settings: Any) -> PreTrainedModel:
    """A random target in float32 of its own: for tests that change it."""
    config_class, model_class, own = FAMILIES[family]
    attention = settings.pop("attn_implementation", None)
    config = getattr(transformers, config_class)(**{**SIZES, **own, **settings})
    if attention is not None:
        config._attn_implementation = attention
    torch.manual_seed(0)
    return getattr(transformers, model_class)(config).eval()


@cache
def target(family: str = "llama", attn_implementation: str | None = None) -> PreTrainedModel:
    """The shared target of a family; nothing may change it."""
    return new_target(family, attn_implementation=attn_implementation)


def new_drafter(**settings: Any) -> DSparkDrafter:
    """A random drafter for these targets; `settings` are fields of `DSparkConfig`."""
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "block_size": BLOCK,
        "mask_token_id": MASK,
        "target_layer_ids": [-1, 0, 2],
        "num_target_layers": 4,
        "markov_rank": 6,
        "initializer_range": 0.3,
    }
    merged = {**sizes, **settings}
    if merged.get("markov_head_type") == "none":
        merged.setdefault("confidence_head_with_markov", False)
    torch.manual_seed(1)
    made = DSparkDrafter(DSparkConfig(**merged)).eval()
    # Tests count drafts and rounds, which "auto" chooses by the clock.
    made.generation_config.num_assistant_tokens_schedule = "constant"
    return made


@cache
def drafter(**settings: Any) -> DSparkDrafter:
    """The shared drafter of these settings; nothing may change it."""
    return new_drafter(**settings)


def inputs(prompt: Sequence[int] = PROMPT) -> dict[str, torch.Tensor]:
    """What a tokenizer would give for one text."""
    input_ids = torch.tensor([list(prompt)])
    return {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}


def continuation(model: PreTrainedModel, prompt: Sequence[int] = PROMPT, num_tokens: int = 32, **kwargs) -> list[int]:
    """What the target says after the prompt, by plain greedy decoding."""
    output = model.generate(**inputs(prompt), max_new_tokens=num_tokens, do_sample=False, **kwargs)
    return output[0, len(prompt) :].tolist()


@contextmanager
def knowing(
    answer: Sequence[Any],
    prompt_length: int = len(PROMPT),
    wrong_at: int | None = None,
    num_unseen: int | Sequence[int] | None = 0,
) -> Iterator[None]:
    """Inside, every greedy drafter proposes what `answer` (the tokens after the prompt) says comes next.

    Also checks what no text can show: that the draft cache holds exactly the committed context in every round.

    Args:
        answer: beyond its end, proposals are made up. For a batch: one answer for each row of the call.
        prompt_length: tokens before `answer`, padding included.
        wrong_at: position of a draft that is wrong, in every other draft that is long enough, the first one included;
            `None`: all are right.
        num_unseen: positions of the prompt that the drafter never sees: padding, or cached before the call; `None`: do
            not check. For a batch: of each row of the call.
    """
    real_draft = DSparkCandidateGenerator.draft
    sabotaged: dict[tuple[int, int], int] = {}
    answers = [[*row] for row in answer] if answer and not isinstance(answer[0], int) else [[*answer]]

    def draft(self: DSparkCandidateGenerator, prefixes: Any, limits: Any, gate: Any = None) -> Draft:
        limits = [limits] * len(prefixes) if isinstance(limits, int) else limits
        real = real_draft(self, prefixes, limits, gate)
        rows = []
        for slot, (row, length) in enumerate(zip(self.rows, real.row_lengths, strict=True)):
            num_committed = prefixes[slot].shape[-1]
            assert length <= max(0, limits[slot])
            if real.length and num_unseen is not None:
                unseen = num_unseen if isinstance(num_unseen, int) else num_unseen[row]
                assert self.cache.lengths[slot] == num_committed - 1 - unseen
            start = num_committed - prompt_length
            tokens = [*answers[row][start : start + length]]
            tokens += [(start + i) % VOCAB for i in range(len(tokens), length)]
            if wrong_at is not None and wrong_at < len(tokens):
                count = sabotaged[id(self), row] = sabotaged.get((id(self), row), 0) + 1
                if count % 2:
                    tokens[wrong_at] = (tokens[wrong_at] + 1) % VOCAB
            rows.append(tokens + [0] * (real.length - len(tokens)))
        ids = prefixes[0].new_tensor(rows).view(len(rows), real.length)
        return dataclasses.replace(real, token_ids=ids, scores=None)

    with patch.object(DSparkCandidateGenerator, "draft", draft):
        yield


def num_drafted(rounds: Sequence[Round]) -> int:
    return sum(len(proposed) for r in rounds for proposed, _, _ in r.per_row())


def num_accepted(rounds: Sequence[Round]) -> int:
    return sum(accepted for r in rounds for _, accepted, _ in r.per_row())


def num_rejected(rounds: Sequence[Round]) -> int:
    """Drafted tokens that the target replaced by its own; those behind them, or behind a stop, do not count."""
    rows = [row for r in rounds for row in r.per_row()]
    return sum(accepted < len(proposed) and num_new > accepted for proposed, accepted, num_new in rows)


def assert_drafted(trace: Trace, wrong_at: int | None = None) -> None:
    """The drafter was really used: something was drafted, accepted and, from a saboteur, rejected."""
    assert num_drafted(trace.rounds) > 0
    assert num_accepted(trace.rounds) > 0
    assert wrong_at is None or num_rejected(trace.rounds) > 0


def assert_lossless(
    model: PreTrainedModel,
    assistant: DSparkDrafter,
    *,
    prompt: Sequence[int] = PROMPT,
    answer: Sequence[int] | None = None,
    wrong_at: Sequence[int | None] = (None, 1),
    num_unseen: int = 0,
    arguments: Callable[[], dict[str, Any]] = dict,
    drafted: bool = True,
    **kwargs: Any,
) -> Trace:
    """Generating with an oracle, and with each saboteur, gives the very ids of plain greedy generation.

    Args:
        answer: what the oracle knows; `None`: what plain generation says without stops.
        wrong_at: one run each, as for `knowing`; `None` is the oracle.
        num_unseen: as for `knowing`.
        arguments: makes arguments of `generate` that cannot be used twice (processors, criteria, streamers).
        drafted: whether tokens must have been drafted, accepted and, from a saboteur, rejected.
        kwargs: arguments of `generate`.

    Returns:
        The trace of the last run.
    """
    if "generation_config" not in kwargs:
        kwargs = {"do_sample": False, "max_new_tokens": 20, **kwargs}
    kwargs = {**inputs(prompt), **kwargs}
    plain = sequences(model.generate(**kwargs, **arguments()))
    length = kwargs["input_ids"].shape[1]
    if answer is None:
        answer = [*plain[0, length:].tolist()]
    for position in wrong_at:
        with assistant.trace() as trace, knowing(answer, length, position, num_unseen):
            ours = sequences(model.generate(**kwargs, **arguments(), assistant_model=assistant))
        assert ours.tolist() == plain.tolist()
        if drafted:
            assert_drafted(trace, position)
    return trace


def sequences(output: Any) -> torch.LongTensor:
    return output if isinstance(output, torch.Tensor) else output.sequences


def hooks_of(model: torch.nn.Module) -> int:
    """Forward hooks on all modules of a model."""
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """One token of one or two letters per id (`word_of`), so that a stop string may end inside a token or span two."""
    pairs = [(word[0], word[1]) for word in map(word_of, range(26, VOCAB))]
    backend = Tokenizer(models.BPE({word_of(i): i for i in range(VOCAB)}, pairs))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False)


def word_of(token: int) -> str:
    """The text of a token."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    return letters[token] if token < 26 else letters[token % 26] + letters[5 * (token // 26)]
