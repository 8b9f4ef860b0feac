"""Prompts of the generators in `reasoning-gym` (PyPI, Apache 2.0): programs, problems with numbers, sums in words.

pip install reasoning-gym
python examples/gym_prompts.py gsm8k.jsonl math500.jsonl --num-prompts 1000 --output prompts.jsonl
dspark-hf data --prompts prompts.jsonl --exclude held-out.jsonl --output responses.jsonl

Its sums in words follow a known benchmark. Nothing is taken that shares two words of five with a held-out prompt of
the given files: the rows whose `index` is divisible by 20, and all of MT-Bench, as for `dspark-hf train`.
"""

import gzip
import json
import random
import re
from collections.abc import Iterator, Sequence
from importlib import resources
from itertools import count
from typing import Any

import reasoning_gym
from function_prompts import COMPLETE, NOT_SHOWN
from template_prompts import REASONING, listed, write_prompts
from varied_prompts import given_prompts

ASKED = (
    "Write a python function to solve this: {task}",
    "{task} Write the code in Python.",
    "{task}\nWrite a Python program for it, and explain how it works.",
    "{task} Explain step by step how to do it.",
)
# Short questions with one answer, whose texts are no puzzles of symbols.
PROBLEMS = listed(
    "simple_equations polynomial_equations polynomial_multiplication simple_integration complex_arithmetic gcd lcm "
    "fraction_simplification prime_factorization count_primes base_conversion calendar_arithmetic time_intervals "
    "leg_counting simple_geometry advanced_geometry dice coin_flip family_relationships aiw knights_knaves syllogism"
)
# What the generators say about the form of an answer, which a chat would not.
_FORM = re.compile(r"\b(Give |Do not include|Your answer|Please |Respond|Answer with|Note:|For example)")
_ARGUMENT = re.compile(r"^\s*`(\w+)` \(", re.MULTILINE)
# Not the names, nor their ends.
_WORD = re.compile(r"\b[a-z]+\b")


def words_of(prompt: str) -> set[str]:
    """The words that stay when numbers and names change."""
    return set(_WORD.findall(prompt.replace(REASONING, "")))


def held_out_words(paths: Sequence[str]) -> list[set[str]]:
    """Those of each held-out prompt of these files."""
    return [words_of(prompt) for path in paths for prompt in given_prompts(path, held_out=True)]


def is_like(prompt: str, others: Sequence[set[str]]) -> bool:
    """Whether two fifths of the words of it and of another are the same."""
    words = words_of(prompt)
    return any(len(words & other) >= 0.4 * len(words | other) for other in others)


def code_tasks() -> list[tuple[str, list[str]]]:
    """Tasks for a program, and the names of its arguments: from the data of the package, whose own reader of them
    runs the code that comes with each."""
    tasks: dict[str, list[str]] = {}
    with gzip.open(resources.files(reasoning_gym).joinpath("data/codeio.jsonl.gz"), "rt", encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            task, inputs = row["task_description"].strip(), row["input_output_spec"].split("Output:")[0]
            if task.isascii() and 40 <= len(task) <= 600 and not NOT_SHOWN.search(task):
                tasks[task] = _ARGUMENT.findall(inputs)
    return list(tasks.items())


def programs(seed: int) -> Iterator[str]:
    """Complete a function for such a task, or write it; or solve it in words."""
    draw, tasks = random.Random(seed), code_tasks()
    draw.shuffle(tasks)
    for task, names in tasks:
        kind = draw.random()
        if kind < 0.5 and names:
            # Two words of the task, as good as most names.
            words = re.findall(r"\b[a-z]{4,}\b", task)
            name = "_".join(draw.sample(words, min(2, len(words)))) or "solve"
            yield COMPLETE.format(head=f'\n\ndef {name}({", ".join(names)}):\n    """ {task}\n    """\n')
        else:
            yield draw.choice(ASKED).format(task=task)


def sums(seed: int) -> Iterator[str]:
    """Sums in words."""
    for row in reasoning_gym.create_dataset("gsm_symbolic", size=100_000, seed=seed):
        yield _FORM.split(row["question"])[0].strip() + REASONING


def problems(seed: int) -> Iterator[str]:
    """Other questions with one answer, of each generator in turn."""
    sets = [reasoning_gym.create_dataset(name, size=100_000, seed=seed) for name in PROBLEMS]
    for index in count():
        for dataset in sets:
            question = _FORM.split(dataset[index]["question"])[0].strip()
            if 20 <= len(question) <= 500:
                yield question + REASONING


def prompts(paths: Sequence[str], seed: int = 0) -> Iterator[dict[str, Any]]:
    """Rows of `dataset` and `prompt`: each kind in turn, none twice, until the programs are through."""
    kinds = {"programs": programs(seed), "sums": sums(seed), "problems": problems(seed)}
    seen: set[str] = set()
    others = held_out_words(paths)
    while True:
        for kind, source in kinds.items():
            prompt = next((p for p in source if p not in seen and not is_like(p, others)), None)
            if prompt is None:
                return
            seen.add(prompt)
            yield {"dataset": f"gym-{kind}", "prompt": prompt}


if __name__ == "__main__":
    write_prompts(__doc__.splitlines()[0], prompts, takes_files=True)
