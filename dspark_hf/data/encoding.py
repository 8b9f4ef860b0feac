"""From chats and documents to token ids, and where a chat template puts the words of a user."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..comparison import id_list
from .sources import BadRow, Source

# Stands for the words of a user while a template is looked at: no template changes them, no tokenizer must know them.
_STAND_IN = "user words stand here"


@dataclass(frozen=True)
class Encoder:
    """How the target's tokenizer is used.

    Attributes:
        vocab_size: ids from here on are not the target's.
        stop_ids: what ends a response.
        enable_thinking: for chat templates that know it; `None`: what the template does.
        text_tokens: how many tokens of a document are the prompt.
    """

    tokenizer: PreTrainedTokenizerBase
    vocab_size: int
    stop_ids: frozenset[int]
    enable_thinking: bool | None = None
    text_tokens: int = 64

    @classmethod
    def of(cls, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, **options: Any) -> "Encoder":
        """Takes vocabulary and stops from a target."""
        config: Any = target.generation_config
        ids = tokenizer.eos_token_id if config.eos_token_id is None else config.eos_token_id
        vocab_size = target.config.get_text_config(decoder=True).vocab_size
        return cls(tokenizer, vocab_size, frozenset(id_list(ids)), **options)

    def prompt_ids(self, source: Source) -> list[int]:
        """Token ids of all that the target reads before it answers.

        Raises:
            BadRow: the template refuses the chat, nothing is left of the prompt, or the ids that the row came with
                are not those of its prompt.
        """
        if source.prompt_ids is not None:
            self._check_prompt(source)
            return source.prompt_ids
        if source.text is not None:
            ids = self.tokenizer(source.text)["input_ids"][: self.text_tokens]
        elif self.tokenizer.chat_template is None:
            ids = self._plain_ids(source)
        else:
            ids = self._chat_ids(source)
        if not ids:
            raise BadRow(source.where, "the prompt gives no tokens")
        return ids

    def given_response_ids(self, source: Source) -> list[int]:
        """The response that the row came with, as token ids; where it is text only, with the EOS token.

        Raises:
            BadRow: its ids are none of this vocabulary, or not those of its text.
        """
        if source.response_ids is None:
            ids = self.tokenizer(source.response, add_special_tokens=False)["input_ids"]
            end = self._end_of_answer if source.messages is not None else self.tokenizer.eos_token_id
            return ids if end is None else [*ids, end]
        self._check_range(source, "response_ids", source.response_ids)
        texts = (self.text_of(source.response_ids), self.tokenizer.decode(source.response_ids))
        if source.response is not None and source.response not in texts:
            raise BadRow(source.where, "`response` is not the text of `response_ids` in the target's tokenizer")
        return source.response_ids

    def text_of(self, ids: list[int]) -> str:
        """Token ids as text, without special tokens."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def user_frame(self) -> tuple[list[int], frozenset[int]]:
        """What the chat template puts before the first words of a user, and what ends them.

        Returns:
            Token ids of the header, and the ids of which one ends the message.

        Raises:
            ValueError: there is no template, or it does not show where a user's words go.
        """
        remedy = "This target cannot write prompts for itself: leave out --self-prompts, and give it --prompts."
        if self.tokenizer.chat_template is None:
            raise ValueError(f"The target's tokenizer has no chat template. {remedy}")
        try:
            text = self._template([{"role": "user", "content": _STAND_IN}], tokenize=False)
        except Exception as error:  # a template refuses by any error of its own
            raise ValueError(f"The chat template refuses a user's message ({error}). {remedy}") from error
        before, found, behind = text.partition(_STAND_IN)
        header = self.tokenizer(before, add_special_tokens=False)["input_ids"]
        if not found or not header:
            raise ValueError(f"The chat template shows no header before a user's message. {remedy}")
        ends = self.tokenizer(behind, add_special_tokens=False)["input_ids"][:1]
        stop_ids = self.stop_ids | {end for end in ends if self.is_special(end)}
        if not stop_ids:
            raise ValueError(f"The chat template shows no token that ends a user's message. {remedy}")
        return header, stop_ids

    @cached_property
    def _end_of_answer(self) -> int | None:
        """What ends an assistant's message: the template's mark, which may be another one than the EOS token."""
        if self.tokenizer.chat_template is not None:
            chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _STAND_IN}]
            try:
                behind = self._template(chat, tokenize=False).rpartition(_STAND_IN)[2]
            except Exception:  # a template refuses by any error of its own
                behind = ""
            ends = self.tokenizer(behind.strip(), add_special_tokens=False)["input_ids"][:1]
            if ends and ends[0] in self.stop_ids:
                return ends[0]
        return self.tokenizer.eos_token_id

    def is_special(self, token: int) -> bool:
        """Whether a token is a mark rather than text."""
        added = self.tokenizer.added_tokens_decoder.get(token)
        return token in self.tokenizer.all_special_ids or (added is not None and added.special)

    def _plain_ids(self, source: Source) -> list[int]:
        if len(source.messages or ()) > 1:
            raise BadRow(source.where, "a chat of several messages, for which the target has no chat template")
        return self.tokenizer(source.prompt)["input_ids"]

    def _chat_ids(self, source: Source) -> list[int]:
        try:
            return self._template(source.messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        except Exception as error:  # a template refuses by any error of its own
            raise BadRow(source.where, f"the chat template refuses it: {error}") from error

    def _template(self, messages: Any, **options: Any) -> Any:
        if self.enable_thinking is not None:
            options["enable_thinking"] = self.enable_thinking
        return self.tokenizer.apply_chat_template(messages, **options)

    def _check_prompt(self, source: Source) -> None:
        ids = source.prompt_ids or []
        self._check_range(source, "prompt_ids", ids)
        if source.text is None and source.prompt.strip() not in self.tokenizer.decode(ids):
            raise BadRow(source.where, "`prompt` does not stand in `prompt_ids` in the target's tokenizer")

    def _check_range(self, source: Source, name: str, ids: list[int]) -> None:
        if max(ids) >= self.vocab_size:
            problem = f"`{name}` has the id {max(ids)}, the target's vocabulary ends before {self.vocab_size}"
            raise BadRow(source.where, problem)
