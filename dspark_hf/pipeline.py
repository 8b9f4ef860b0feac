"""`DSparkPipeline`: transformers' text generation pipeline, with a drafter that makes it faster.

All that a pipeline does (chats, batches, padding, shapes of results) is transformers' own. Here are only the pair, the
stream of text, and the check that the drafter changes nothing.
"""

import contextvars
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from threading import Thread
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TextGenerationPipeline,
    TextIteratorStreamer,
)
from transformers.utils.chat_template_utils import Chat, is_valid_message

from ._compat import forget_assistant_defaults
from .comparison import GREEDY, Verdict, judge
from .modeling_dspark import DSparkDrafter


@dataclass(frozen=True)
class LosslessReport:
    """How greedy texts with the drafter compare to plain ones, in the order of the prompts.

    Attributes:
        verdicts: of each prompt: the position of the first new token that differs (`None`: equal), the target's margin
            between both tokens there (the top-2 margin, where they are the top 2), and whether rounding explains it.
    """

    verdicts: list[Verdict]

    @property
    def equal(self) -> bool:
        """Whether every text is the same, token for token."""
        return all(verdict.identical for verdict in self.verdicts)

    @property
    def lossless(self) -> bool:
        """Whether every text is the same, or differs by the rounding of the target's dtype only."""
        return all(verdict.explained for verdict in self.verdicts)

    @property
    def first_difference(self) -> tuple[int, Verdict] | None:
        """The index of the first prompt whose texts differ, and its verdict."""
        return next(((index, one) for index, one in enumerate(self.verdicts) if not one.identical), None)

    def __str__(self) -> str:
        num_equal = sum(verdict.identical for verdict in self.verdicts)
        differing = [f"prompt {index}: {one}" for index, one in enumerate(self.verdicts) if not one.identical]
        return "\n".join([f"{num_equal} of {len(self.verdicts)} texts are identical", *differing])


class DSparkPipeline(TextGenerationPipeline):
    """`transformers.pipeline("text-generation")` for a target and its drafter.

    Called with a text, a chat (a list of messages) or a list of either, it returns what that pipeline returns, and
    takes what that takes: `return_full_text`, `batch_size`, and all arguments of `generate`. Its defaults are those as
    well: sampling at temperature 0.7, 256 new tokens.

    Args:
        target: a model, or the folder or repository id of one.
        drafter: its drafter, or the folder or repository id of one (in any format). One that is loaded here has the
            target's dtype and device.
        tokenizer: the target's, or a folder or repository id; `None`: the one that lies beside the target.
        assistant_tokenizer: the drafter's, where it numbers the same tokens differently.
        dtype: of a target that is loaded here.
        kwargs: as for [`~transformers.TextGenerationPipeline`]: `device`, `batch_size`, settings of every call.

    Raises:
        OSError, UnsupportedCheckpointError, ...: as `from_pretrained` of target, drafter and tokenizer.
        ValueError: no tokenizer is given, and the target has none beside it.
    """

    assistant_model: Any
    assistant_tokenizer: Any
    tokenizer: Any

    def __init__(
        self,
        target: PreTrainedModel | str | os.PathLike,
        drafter: DSparkDrafter | str | os.PathLike,
        tokenizer: PreTrainedTokenizerBase | str | os.PathLike | None = None,
        *,
        assistant_tokenizer: PreTrainedTokenizerBase | None = None,
        dtype: str | torch.dtype = "auto",
        **kwargs: Any,
    ):
        # The target last: a misspelled drafter should not cost its loading.
        tokenizer = _load_tokenizer(tokenizer, target)
        loaded = DSparkDrafter.from_pretrained(drafter).eval() if isinstance(drafter, str | os.PathLike) else None
        if isinstance(target, str | os.PathLike):
            target = AutoModelForCausalLM.from_pretrained(target, dtype=dtype).eval()
        elif "device" not in kwargs and getattr(target, "hf_device_map", None) is None:
            kwargs["device"] = target.device  # transformers would move it to the first accelerator
        super().__init__(model=target, tokenizer=tokenizer, task="text-generation", **kwargs)
        forget_assistant_defaults(self, kwargs)
        # Not through `super`, which takes an assistant for a language model with a tokenizer.
        self.assistant_model = drafter if loaded is None else loaded.to(self.model.device, self.model.dtype)
        self.assistant_tokenizer = assistant_tokenizer

    @property
    def drafter(self) -> DSparkDrafter:
        """The drafter: `with pipe.drafter.trace() as trace:` shows what it does."""
        return self.assistant_model

    def stream(self, text_inputs: Any, **kwargs: Any) -> Iterator[str]:
        """The new text of one prompt in pieces, as it comes.

        Generation runs in a thread of its own, in the caller's context, and ends when the iterator is closed.

        Args:
            text_inputs: a text or a chat.
            kwargs: as for a call.

        Raises:
            ValueError: several prompts. What generation raises comes from the iterator.
        """
        if not isinstance(text_inputs, str) and not _is_chat(text_inputs):
            raise ValueError("`stream` takes one prompt, a text or a chat: texts of several would mingle.")
        streamer = _Pieces(
            self.tokenizer, skip_prompt=True, skip_special_tokens=kwargs.get("skip_special_tokens", True)
        )
        errors: list[BaseException] = []

        def generate() -> None:
            try:
                self(text_inputs, streamer=streamer, **kwargs)
            except _NobodyReads:
                pass
            except BaseException as error:
                errors.append(error)
            finally:
                streamer.text_queue.put(streamer.stop_signal)

        thread = Thread(target=contextvars.copy_context().run, args=(generate,), daemon=True)
        return _read(streamer, thread, errors)

    def verify_lossless(self, prompts: Any, **generate_kwargs: Any) -> LosslessReport:
        """Whether greedy texts with the drafter are those of plain `generate`.

        Args:
            prompts: a text, a chat, or a list of either; each is answered by itself.
            generate_kwargs: as for a call, without sampling. Margins are those of the target's raw logits.

        Raises:
            ValueError: an argument asks for something else than greedy decoding.
        """
        for name, value in GREEDY.items():
            if generate_kwargs.get(name, value) != value:
                raise ValueError(
                    f"`{name}` is {generate_kwargs[name]!r}, but only greedy texts can be compared: leave it out."
                )
        if isinstance(prompts, str) or _is_chat(prompts):
            prompts = [prompts]
        return LosslessReport([self._verdict(prompt, generate_kwargs) for prompt in prompts])

    def _verdict(self, prompt: Any, generate_kwargs: dict[str, Any]) -> Verdict:
        preprocess, forward, _ = self._sanitize_parameters(**{**generate_kwargs, **GREEDY})
        preprocess, forward = {**self._preprocess_params, **preprocess}, {**self._forward_params, **forward}
        plain = {
            name: value
            for name, value in forward.items()
            if not name.startswith("assistant_") and name not in _OF_DRAFTING
        }
        texts = []
        for parameters in (plain, forward):
            inputs = self.preprocess(Chat(prompt) if _is_chat(prompt) else prompt, **preprocess)
            prompt_ids = inputs["input_ids"][0].tolist()
            output = self.forward(inputs, **parameters)["generated_sequence"]
            texts.append(output[0, 0, len(prompt_ids) :].tolist())
        return judge(self.model, prompt_ids, *texts)


# Arguments of drafted calls alone, beside those that begin with `assistant_`.
_OF_DRAFTING = frozenset(
    ("draft_invariant", "num_assistant_tokens", "num_assistant_tokens_schedule", "prompt_lookup_num_tokens")
)


class _NobodyReads(Exception):
    """Ends a generation whose text nobody reads any more."""


class _Pieces(TextIteratorStreamer):
    is_closed = False

    def put(self, value: torch.Tensor) -> None:
        if self.is_closed:
            raise _NobodyReads
        super().put(value)


def _read(streamer: _Pieces, thread: Thread, errors: Sequence[BaseException]) -> Iterator[str]:
    thread.start()
    try:
        yield from filter(None, streamer)
    finally:
        streamer.is_closed = True
        thread.join()
    if errors:
        raise errors[0]


def _is_chat(prompt: Any) -> bool:
    is_list = isinstance(prompt, list | tuple) and len(prompt) > 0
    return isinstance(prompt, Chat) or (is_list and is_valid_message(prompt[0]))


def _load_tokenizer(
    tokenizer: PreTrainedTokenizerBase | str | os.PathLike | None, target: PreTrainedModel | str | os.PathLike
) -> PreTrainedTokenizerBase:
    if tokenizer is not None and not isinstance(tokenizer, str | os.PathLike):
        return tokenizer
    source = tokenizer or (target if isinstance(target, str | os.PathLike) else target.name_or_path)
    if not source:
        raise ValueError("`tokenizer` is missing, and the target was not loaded from a place that could have one.")
    return AutoTokenizer.from_pretrained(source)


__all__ = ["DSparkPipeline", "LosslessReport"]
