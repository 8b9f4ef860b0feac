"""What is to be answered: rows of JSON lines or of `datasets`, read and checked before any work."""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from ..prompt_files import ask_of, file_stem, numbered_lines

Message = dict[str, Any]

_HOLDS_A_PROMPT = ("messages", "turns", "prompt", "text")


class BadRow(ValueError):
    """A row that cannot be used.

    Args:
        where: file and line, or dataset and row.
        problem: what was found and what was expected.
    """

    def __init__(self, where: str, problem: str):
        self.where, self.problem = where, problem
        super().__init__(f"{where}: {problem}")


@dataclass(frozen=True)
class Source:
    """A prompt, and the response that it came with, if any.

    Attributes:
        where: file and line, for messages.
        messages: the chat so far, its last message the user's; `None` for a document.
        text: a document, whose beginning is the prompt; `None` for a chat.
        prompt_ids, response, response_ids: as the row gave them.
    """

    dataset: str
    index: int
    where: str
    messages: list[Message] | None = None
    text: str | None = None
    prompt_ids: list[int] | None = None
    response: str | None = None
    response_ids: list[int] | None = None

    @property
    def key(self) -> tuple[str, int]:
        return self.dataset, self.index

    @property
    def prompt(self) -> str:
        """The last message, or the document."""
        return str(self.text if self.messages is None else self.messages[-1]["content"])

    @property
    def asked(self) -> list[str]:
        """Every message of the user, or the document."""
        if self.messages is None:
            return [str(self.text)]
        return said_by_user(self.messages)

    @property
    def is_given(self) -> bool:
        return self.response is not None or self.response_ids is not None


def said_by_user(messages: Iterable[Message]) -> list[str]:
    """What the user says in a chat."""
    return [str(message["content"]) for message in messages if message["role"] == "user"]


def read_sources(
    names: Iterable[str],
    *,
    split: str,
    num_prompts: int | None,
    keep_responses: bool,
    on_bad_row: Callable[[BadRow], None],
) -> list[Source]:
    """All prompts of files and datasets, in order.

    Args:
        names: files of JSON lines, or names or folders of `datasets`.
        split: of datasets.
        num_prompts: of each, the first so many good ones; `None`: all.
        keep_responses: take the responses that rows came with; if not, they are left unread.
        on_bad_row: receives each row that cannot be used, and raises it or lets it pass.

    Raises:
        OSError: a name is neither.
        ImportError: a dataset is named, and `datasets` is not installed.
        ValueError: there is no prompt in one of them.
    """
    seen: dict[tuple[str, int], str] = {}
    sources: list[Source] = []
    for name in names:
        found = [*islice(_good_rows(name, split, keep_responses, seen, on_bad_row), num_prompts)]
        if not found:
            raise ValueError(f"{name} holds no prompt")
        sources += found
    return sources


def _good_rows(
    name: str,
    split: str,
    keep_responses: bool,
    seen: dict[tuple[str, int], str],
    on_bad_row: Callable[[BadRow], None],
) -> Iterator[Source]:
    for where, dataset, number, row in _rows(name, split):
        try:
            source = source_of(row, where, dataset, number, keep_responses)
            if source.key in seen:
                raise BadRow(where, f"dataset {dataset!r} and index {source.index} are those of {seen[source.key]}")
        except BadRow as bad:
            on_bad_row(bad)
            continue
        seen[source.key] = where
        yield source


def _rows(name: str, split: str) -> Iterator[tuple[str, str, int, Any]]:
    """Where each row is, what its dataset is called, its number, and the row itself: text, or fields."""
    path = Path(name)
    if path.is_file():
        for number, line in numbered_lines(path):
            yield f"{path}, line {number}", file_stem(path), number, line
        return
    if path.suffix in (".jsonl", ".json", ".gz"):
        raise FileNotFoundError(f"{name} is no file on this machine")
    for number, row in enumerate(_load_dataset(name, split)):
        yield f"{name} ({split}), row {number}", path.name, number, row


def _load_dataset(name: str, split: str) -> Iterable[Any]:
    try:
        import datasets
    except ImportError as error:
        raise ImportError(
            f"{name} is no file, so it is taken for the name of a dataset, which needs the package datasets: "
            "`pip install 'dspark-hf[train]'`."
        ) from error
    if not any((Path(name) / file).is_file() for file in ("dataset_info.json", "dataset_dict.json")):
        return datasets.load_dataset(name, split=split)
    saved: Any = datasets.load_from_disk(name)
    if not isinstance(saved, dict):
        return saved
    if split not in saved:
        raise ValueError(f"{name} has no split {split}, but {', '.join(saved)}: choose one with --split")
    return saved[split]


def source_of(row: Any, where: str, dataset: str, number: int, keep_responses: bool = True) -> Source:
    """Reads one row.

    Args:
        row: a line of JSON, or its fields.
        where: for the message of an error.
        dataset, number: its name and index, where the row does not say.
        keep_responses: read the response as well.

    Raises:
        BadRow: there is no prompt in it, or a field is not what it must be.
    """
    fields = _fields(row, where)
    index = fields.get("index", number)
    if type(index) is not int:
        raise BadRow(where, f"`index` is {index!r}, expected a whole number")
    try:
        source = Source(str(fields.get("dataset", dataset)), index, where, **_ask(fields))
        # An empty text is no answer.
        if keep_responses and (fields.get("response", "") != "" or "response_ids" in fields):
            source = Source(
                source.dataset,
                index,
                where,
                source.messages,
                source.text,
                prompt_ids=_ids(fields, "prompt_ids"),
                response=_text(fields, "response"),
                response_ids=_ids(fields, "response_ids"),
            )
    except (LookupError, TypeError, ValueError) as error:
        raise BadRow(where, str(error)) from error
    if not source.prompt.strip():
        raise BadRow(where, "the prompt is empty")
    return source


def read_excluded(paths: Iterable[str]) -> list[str]:
    """Every text of a user in files of JSON lines: all `turns`, all messages.

    Raises:
        ValueError: a line cannot be read, or there is none. None is skipped: a held-out prompt would be trained on.
    """
    texts: list[str] = []
    for path in paths:
        before = len(texts)
        for where, _, _, row in _rows(path, split=""):
            fields = _fields(row, where)
            chat, turns = fields.get("messages", []), fields.get("turns", [])
            if not isinstance(turns, list) or not isinstance(chat, list) or not all(isinstance(m, dict) for m in chat):
                raise BadRow(where, _lacking(fields))
            found = [m.get("content") for m in chat if m.get("role") == "user"]
            found += [*turns, *(fields[name] for name in ("prompt", "text") if name in fields)]
            if not found or not all(isinstance(text, str) for text in found):
                raise BadRow(where, _lacking(fields))
            texts += found
        if len(texts) == before:
            raise ValueError(f"{path} holds no prompt to exclude")
    return texts


def _lacking(fields: dict[str, Any]) -> str:
    names = ", ".join(f"`{name}`" for name in _HOLDS_A_PROMPT)
    return f"expected text in one of {names}, found {', '.join(fields) or 'nothing'}"


def _fields(row: Any, where: str) -> dict[str, Any]:
    if isinstance(row, str):
        try:
            row = json.loads(row)
        except json.JSONDecodeError as error:
            raise BadRow(where, f"no JSON ({error.msg}, column {error.colno})") from error
    if not isinstance(row, dict):
        raise BadRow(where, f"a {type(row).__name__}, expected a JSON object")
    # A dataset has every column in every row.
    return {name: value for name, value in row.items() if value is not None}


def _ask(fields: dict[str, Any]) -> dict[str, Any]:
    """What the target will read: `messages`, or `text`."""
    if "messages" in fields:
        return {"messages": _chat(fields["messages"])}
    if "prompt" in fields or "turns" in fields:
        return {"messages": [{"role": "user", "content": ask_of(fields)}]}
    if "text" in fields:
        return {"text": _text(fields, "text")}
    raise LookupError(_lacking(fields))


def _chat(messages: Any) -> list[Message]:
    """The chat up to the user's last message: an answer after it is somebody else's, the target gives its own."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise TypeError("`messages` is no list of messages")
    for number, message in enumerate(messages):
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise TypeError(f"message {number} of `messages` lacks `role` or `content`, or one of them is no text")
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages or messages[-1]["role"] == "system":
        raise ValueError("`messages` asks nothing: there is no message of a user that could be answered")
    return messages


def _text(fields: dict[str, Any], name: str) -> str | None:
    value = fields.get(name)
    if value is not None and not isinstance(value, str):
        raise TypeError(f"`{name}` is {type(value).__name__}, expected text")
    return value


def _ids(fields: dict[str, Any], name: str) -> list[int] | None:
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, list) or not value or not all(type(token) is int and token >= 0 for token in value):
        raise TypeError(f"`{name}` is no list of token ids, or an empty one")
    return value
