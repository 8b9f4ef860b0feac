"""From chats and documents to token ids, and where a chat template puts the words of a user."""

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from .sources import BadRow, Source

# Stands for the words of a user while a template is looked at. No template may change it, and no tokenizer needs to
# know it.
_STAND_IN = "user words stand here"


@dataclass(frozen=True)
class Encoder:
    """How the target's tokenizer is used.

    Attributes:
        stop_ids: what ends a response.
        enable_thinking: for chat templates that know it; `None`: what the template does.
        text_tokens: how many tokens of a document are the prompt.
    """

    tokenizer: PreTrainedTokenizerBase
    vocab_size: int
    stop_ids: frozenset[int]
    enable_thinking: bool | None = None
    text_tokens: int = 64

    def prompt_ids(self, source: Source) -> list[int]:
        """Token ids of all that the target reads before it answers.

        Raises:
            BadRow: the template refuses the chat, nothing is left of the prompt, or the ids that the row came with
                are not those of its prompt.
        """
        if source.prompt_ids is not None:
            self._check(source, "prompt_ids", source.prompt_ids)
            return source.prompt_ids
        if source.text is not None:
            ids = self.tokenizer(source.text)["input_ids"][: self.text_tokens]
        elif self.tokenizer.chat_template is None:
            ids = self.tokenizer(source.prompt)["input_ids"]
        else:
            ids = self._chat_ids(source)
        if not ids:
            raise BadRow(source.where, "the prompt gives no tokens")
        return ids

    def given_response_ids(self, source: Source) -> list[int]:
        """The response that the row came with, as token ids, with the EOS token where it is given as text only.

        Raises:
            BadRow: its ids are none of this vocabulary, or not those of its text.
        """
        if source.response_ids is None:
            ids = self.tokenizer(source.response, add_special_tokens=False)["input_ids"]
            eos = self.tokenizer.eos_token_id
            return ids if eos is None else [*ids, eos]
        self._check(source, "response_ids", source.response_ids)
        if source.response is not None and self.text_of(source.response_ids) != source.response:
            raise BadRow(source.where, "`response` is not the text of `response_ids` in the target's tokenizer")
        return source.response_ids

    def text_of(self, ids: list[int]) -> str:
        """A response as text, without special tokens."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def user_header(self) -> list[int]:
        """What the chat template puts before the first words of a user, as token ids.

        Raises:
            ValueError: there is no template, or it does not show where a user's words go.
        """
        remedy = "Prompts of its own cannot be had from this target: give it prompts with --prompts."
        if self.tokenizer.chat_template is None:
            raise ValueError(f"The target's tokenizer has no chat template. {remedy}")
        try:
            text = self._template([{"role": "user", "content": _STAND_IN}], tokenize=False)
        except Exception as error:  # whatever a template may raise
            raise ValueError(f"The chat template refuses a user's message ({error}). {remedy}") from error
        before, found, _ = text.partition(_STAND_IN)
        ids = self.tokenizer(before, add_special_tokens=False)["input_ids"]
        if not found or not ids:
            raise ValueError(f"The chat template shows no header before a user's message. {remedy}")
        return ids

    def _chat_ids(self, source: Source) -> list[int]:
        try:
            return self._template(source.messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        except Exception as error:  # a template refuses by any error of its own
            raise BadRow(source.where, f"the chat template refuses it: {error}") from error

    def _template(self, messages: Any, **options: Any) -> Any:
        if self.enable_thinking is not None:
            options["enable_thinking"] = self.enable_thinking
        return self.tokenizer.apply_chat_template(messages, **options)

    def _check(self, source: Source, name: str, ids: list[int]) -> None:
        if max(ids) >= self.vocab_size:
            raise BadRow(
                source.where, f"`{name}` has the id {max(ids)}, the target's vocabulary ends at {self.vocab_size}"
            )
        if name == "prompt_ids" and source.text is None and source.prompt.strip() not in self.tokenizer.decode(ids):
            raise BadRow(source.where, "`prompt` does not stand in `prompt_ids` in the target's tokenizer")
