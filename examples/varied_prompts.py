"""New prompts from given ones: other numbers, other names, the opposite of a word. A drafter's text has to be varied.

python examples/varied_prompts.py gsm8k.jsonl mbpp.jsonl --num-prompts 1000 --output prompts.jsonl
dspark-hf data --prompts prompts.jsonl --exclude held-out.jsonl --output responses.jsonl

Rows need `prompt`, or `turns`, of which the first counts. Rows whose `index` is divisible by 20 are passed over, and
MT-Bench is refused: `dspark-hf train` holds them out, for measuring. What comes of a prompt need not make sense; the
target answers it all the same, in the words that it has for such prompts.
"""

import json
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from template_prompts import NAMES, write_prompts

from dspark_hf.prompt_files import file_stem, numbered_lines

HELD_OUT, HELD_OUT_SETS = 20, ("mt-bench",)

OPPOSITES = (
    "even odd|first last|largest smallest|maximum minimum|max min|sum product|list tuple|lists tuples|array string|"
    "increasing decreasing|ascending descending|left right|row column|rows columns|positive negative|upper lower|"
    "uppercase lowercase|greater smaller|greatest least|more fewer|prefix suffix|start end|before after|add remove|"
    "highest lowest|higher lower|longest shortest|true false|sine cosine|square cube|mother father|son daughter|"
    "boys girls|day week|hours minutes|buys sells|morning evening|apples oranges|dogs cats|dollars euros|"
    "triangle rectangle|circle sphere|area perimeter|vowels consonants|word sentence|integer float"
)
OPPOSITE = {word: other for pair in OPPOSITES.split("|") for word, other in (pair.split(), reversed(pair.split()))}
# Names of functions, variables and commands stay as they are, with the numbers in them.
_WORD = re.compile(r"(?<![\w\\])[A-Za-z]+(?![\w(])")
_NUMBER = re.compile(r"(?<![\w.\\])\d+(?!\w)")
# In a sum in words, a capital word that "is", "has" or does something is a person.
_PERSON = re.compile(
    r"\b([A-Z][a-z]{2,})(?='s\b| (?:is|has|had|wants|buys|bought|sells|makes|gets|takes|runs|eats|decides|decided|"
    r"earns|needs|went|goes|and [A-Z][a-z]+|can|works|spends|pays|drives|reads|plans|starts)\b)"
)
_NO_PERSONS = {"The", "She", "Each", "This", "That", "There", "What", "How", "One", "Who", "They", "Then"}


def given_prompts(path: str, held_out: bool = False) -> Iterator[str]:
    """The prompts of a file, without those held out, or these alone."""
    all_held_out = file_stem(Path(path)) in HELD_OUT_SETS
    for number, line in numbered_lines(Path(path)):
        row = json.loads(line)
        if (all_held_out or row.get("index", number) % HELD_OUT == 0) == held_out:
            yield row["prompt"] if "prompt" in row else row["turns"][0]


def other_number(digits: str, draw: random.Random) -> str:
    """As long as the given one, so that an hour stays an hour and a year about a year."""
    return str(draw.randint(10 ** (len(digits) - 1) if len(digits) > 1 else 2, 10 ** len(digits) - 1))


def other_names(prompt: str, draw: random.Random) -> dict[str, str]:
    """For each person in a prompt a name of our own; two may come to share one."""
    persons = sorted(set(_PERSON.findall(prompt)) - _NO_PERSONS)
    return {person: draw.choice(NAMES) for person in persons}


def varied(prompt: str, draw: random.Random) -> str:
    """A prompt of the same kind: a number, name or word becomes the same other one all over the text."""
    words = {word: other for word, other in OPPOSITE.items() if draw.random() < 0.5}
    words |= other_names(prompt, draw)
    numbers: dict[str, str] = {}
    for digits in _NUMBER.findall(prompt):
        numbers.setdefault(digits, other_number(digits, draw))
    with_words = _WORD.sub(lambda match: words.get(match[0], match[0]), prompt)
    return _NUMBER.sub(lambda match: numbers[match[0]], with_words)


def prompts(paths: Sequence[str], seed: int = 0) -> Iterator[dict[str, str]]:
    """Rows of `dataset` and `prompt`: round after round over the given prompts in turn, none twice."""
    for path in paths:
        if file_stem(Path(path)) in HELD_OUT_SETS:
            raise SystemExit(f"{path} is held out for evaluation: make no prompts to train on of it")
    draw = random.Random(seed)
    given = [(file_stem(Path(path)), prompt) for path in paths for prompt in given_prompts(path)]
    seen = {prompt for _, prompt in given}
    found = True
    while found:
        found = False
        draw.shuffle(given)
        for dataset, prompt in given:
            new = varied(prompt, draw)
            if new not in seen:
                found = True
                seen.add(new)
                yield {"dataset": f"varied-{dataset}", "prompt": new}


if __name__ == "__main__":
    write_prompts(__doc__.splitlines()[0], prompts, takes_files=True)
