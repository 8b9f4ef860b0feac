"""Prompts for a target's responses, made of documented functions of Python and of the installed packages.

python examples/function_prompts.py --num-prompts 1000 --output prompts.jsonl
dspark-hf data --prompts prompts.jsonl --output responses.jsonl

Real signatures and docstrings are more varied than what `template_prompts.py` puts together. Files are parsed, never
imported. What is installed decides what comes out.
"""

import ast
import random
import re
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path

from template_prompts import write_prompts

COMPLETE = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{head}\n```"
IN_WORDS = (
    "Write a python function to {task}",
    "Write a function to {task}",
    "How do I {task} in Python?",
    "Write a Python program that can {task}, and explain how it works.",
)
EXPLAIN = ("What does this function do?\n```python\n{source}\n```", "Explain this code:\n```python\n{source}\n```")

# A docstring with one of these would end the code that shows it, or itself, or mean something else.
NOT_SHOWN = re.compile(r'```|"""|\\')


def is_clean(source: str) -> bool:
    """Whether it is Python by itself (a method whose lines of text begin left of it is not), without a warning."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ast.parse(source)
    except (SyntaxError, Warning):
        return False
    return True


def functions(file: Path) -> Iterator[tuple[ast.FunctionDef, str, str]]:
    """Public, documented functions and methods of a file: each with its docstring and its source."""
    try:
        text = file.read_text(encoding="utf-8")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
    except (SyntaxError, UnicodeDecodeError, OSError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and not node.name.startswith(("_", "test")):
            docstring = ast.get_docstring(node)
            if docstring and 30 <= len(docstring) <= 600 and docstring.isascii() and not NOT_SHOWN.search(docstring):
                # Only now: it cuts the whole file into lines each time.
                source = textwrap.dedent(ast.get_source_segment(text, node, padded=True) or "")
                if len(source) <= 1500 and "```" not in source and is_clean(source):
                    yield node, docstring, source


def prompt_of(node: ast.FunctionDef, docstring: str, source: str, draw: random.Random) -> str:
    """Complete the function, write it from its first line, or explain it."""
    first = docstring.split("\n\n")[0].replace("\n", " ").rstrip(".")
    kind = draw.random()
    if kind < 0.6:
        node.args.args = [a for a in node.args.args if a.arg not in ("self", "cls")]
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        body = docstring.replace("\n", "\n    ")
        return COMPLETE.format(
            head=f'\n\ndef {node.name}({ast.unparse(node.args)}){returns}:\n    """ {body}\n    """\n'
        )
    if kind < 0.85 and len(first) <= 120 and not first.endswith(":"):
        return draw.choice(IN_WORDS).format(task=first[0].lower() + first[1:])
    return draw.choice(EXPLAIN).format(source=source)


def prompts(seed: int = 0) -> Iterator[dict[str, str]]:
    """Rows of `dataset` and `prompt`, at most five of a file and each first line once, until the files are read."""
    draw, seen = random.Random(seed), set()
    paths = sysconfig.get_paths()
    # Packages of the environment may lie below the standard library's folder: each file once.
    files = sorted({file for key in ("stdlib", "purelib") for file in Path(paths[key]).rglob("*.py")})
    draw.shuffle(files)
    for file in files:
        found = [entry for entry in functions(file) if entry[1].split("\n")[0] not in seen]
        for node, docstring, source in draw.sample(found, min(5, len(found))):
            first = docstring.split("\n")[0]
            if first not in seen:
                seen.add(first)
                yield {"dataset": "functions", "prompt": prompt_of(node, docstring, source, draw)}


if __name__ == "__main__":
    write_prompts(__doc__.splitlines()[0], prompts)
