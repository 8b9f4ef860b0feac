"""The pages say what is so: links lead somewhere, code runs, commands exist, the API reference is that of the code.

Blocks of a page run in their order on a tiny pair, which stands for every model that they load. A block that cannot
says why, in a comment above it: `<!-- not run: needs a Hub -->`.
"""

import importlib.util
import itertools
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from conftest import FIXTURES
from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.repocard import metadata_load
from markdown_it import MarkdownIt
from markdown_it.token import Token
from test_demo import ascii_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from dspark_hf import DSparkDrafter, cli

ROOT = Path(__file__).parent.parent
FIXTURE = FIXTURES / "deepspec_qwen3_vanilla"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("model_cards/**/*.md"))]
FOLDERS = (
    "",
    "docs",
    "dspark_hf",
    "dspark_hf/checkpoints",
    "examples",
    "tests",
)  # whose files pages name without the folder
NOT_RUN = re.compile(r"<!-- not run: \S.* -->")


def tokens(page: Path) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8"))


def inline(page: Path) -> Iterator[Token]:
    for token in tokens(page):
        yield from token.children or []


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def anchors(page: Path) -> set[str]:
    """What GitHub calls the headings of a page."""
    found: dict[str, int] = {}
    parsed = tokens(page)
    for heading, text in itertools.pairwise(parsed):
        if heading.type == "heading_open":
            words = "".join(child.content for child in text.children or [] if child.type in ("text", "code_inline"))
            slug = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
            found[slug] = found.get(slug, -1) + 1
    return {f"{slug}-{n}" if n else slug for slug, count in found.items() for n in range(count + 1)}


def links(page: Path) -> list[str]:
    """Links and pictures that stay in the repository."""
    targets = [str(token.attrs.get("href") or token.attrs.get("src") or "") for token in inline(page)]
    return [target for target in targets if target and not re.match(r"\w+:", target)]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_somewhere(page: Path):
    for link in links(page):
        path, _, anchor = link.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{name_of(page)} links to {link}, which is not there"
        assert not anchor or anchor in anchors(there), f"{name_of(page)} links to {link}, which has no such heading"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_that_the_text_names_are_there(page: Path):
    named = {token.content for token in inline(page) if token.type == "code_inline"}
    for file in (name for name in named if re.fullmatch(r"[\w/]+\.py", name) and "generate.py" not in name):
        assert any((ROOT / folder / file).exists() for folder in FOLDERS), f"{name_of(page)} names {file}"


def test_the_index_has_every_page():
    index = ROOT / "docs" / "README.md"
    pages = {path.name for path in index.parent.glob("*.md")} - {index.name}
    assert pages <= set(links(index))


def blocks(page: Path, language: str) -> list[tuple[str, str]]:
    """Code of a language, and the comment above it."""
    found, above = [], ""
    for token in tokens(page):
        if token.type == "fence" and token.info == language:
            found.append((token.content, above))
        above = token.content.strip() if token.type == "html_block" else ""
    return found


PAGES_WITH_PYTHON = [page for page in PAGES if blocks(page, "python")]


@pytest.fixture
def tiny_pair(monkeypatch, tmp_path) -> dict:
    """Names that the pages use without loading them, and a tiny pair behind every way to load one."""
    model = AutoModelForCausalLM.from_pretrained(FIXTURE / "target", dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.max_new_tokens = 24
    drafter = DSparkDrafter.from_pretrained(FIXTURE, dtype=torch.float32)
    tokenizer = ascii_tokenizer()
    tokenizer.pad_token = "~"
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: model)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: tokenizer)
    monkeypatch.setattr(DSparkDrafter, "from_pretrained", lambda *_, **__: drafter)
    monkeypatch.setattr(DSparkDrafter, "for_target", lambda *_, **__: drafter)
    monkeypatch.chdir(tmp_path)
    prompts = ["What is 2 + 2?", "Say hello.", "Count to five.", "Name a colour."]
    inputs = tokenizer(prompts[0], return_tensors="pt")
    return {"model": model, "drafter": drafter, "tokenizer": tokenizer, "prompts": prompts, "inputs": inputs}


@pytest.mark.parametrize("page", PAGES_WITH_PYTHON, ids=name_of)
def test_python_runs(page: Path, tiny_pair: dict):
    for code, above in blocks(page, "python"):
        compiled = compile(code, name_of(page), "exec")
        if not NOT_RUN.fullmatch(above):
            exec(compiled, tiny_pair)


def commands(text: str) -> Iterator[list[str]]:
    """The words behind each `dspark-hf`; a single N stands for a number."""
    for line in text.replace("\\\n", " ").splitlines():
        for command in re.split(r"&&|\|", line):
            found = re.match(r"\s*(?:\S*/)?dspark-hf\s+(.+)", command)
            if found and "COMMAND" not in found[1]:
                yield ["1" if word == "N" else word for word in shlex.split(found[1], comments=True)]


def exit_code(run: Callable[[list[str]], object], words: list[str]) -> object:
    try:
        return run(words)
    except SystemExit as stopped:
        return stopped.code


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_are_accepted_as_they_stand(page: Path, monkeypatch, capsys, tmp_path):
    for name, (settings_class, _) in cli.COMMANDS.items():
        monkeypatch.setitem(cli.COMMANDS, name, (settings_class, lambda settings: 0))
    monkeypatch.chdir(tmp_path)
    for words in commands("\n".join(code for code, _ in blocks(page, "bash"))):
        for file in words:  # which settings may look for
            if Path(file).suffix in (".jsonl", ".gz", ".json", ".yaml"):
                Path(file).write_text("{}", encoding="utf-8")
        assert exit_code(cli.main, words) == 0, f"{name_of(page)}: dspark-hf {words}: {capsys.readouterr().err}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_in_the_text_have_the_options_that_they_name(page: Path, capsys):
    mentions = "\n".join(token.content for token in inline(page) if token.type == "code_inline")
    for words in commands(mentions):
        is_parsed = exit_code(cli._parser().parse_args, words) not in (1, 2)
        assert is_parsed, f"{name_of(page)}: dspark-hf {words}: {capsys.readouterr().err}"


def script(path: str) -> ModuleType:
    """A script that writes pages."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_api_reference_is_that_of_the_docstrings():
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert page == script("docs/make_api.py").api_page(), "run `python docs/make_api.py`"


def test_every_published_drafter_that_opens_has_a_card_to_fill():
    templates = script("model_cards/make_templates.py")
    stored = {page.name: page.read_text(encoding="utf-8") for page in templates.FOLDER.glob("*.md")}
    assert stored.keys() == templates.cards().keys(), "run `python model_cards/make_templates.py`"
    for name, text in templates.cards().items():
        is_filled = templates.UNMEASURED not in stored[name]
        assert is_filled or stored[name] == text, f"{name}: run `python model_cards/make_templates.py`"
        assert ModelCardData(**metadata_load(templates.FOLDER / name)).base_model == ModelCard(text).data.base_model
