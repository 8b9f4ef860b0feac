"""Every example runs, on a tiny pair, and what it prints is true; every notebook too."""

import ast
import gzip
import io
import json
import os
import re
import runpy
import sys
from pathlib import Path

import kit
import pytest
from conftest import FIXTURES
from hub_stand_in import TOKEN, running_hub
from huggingface_hub import constants
from test_demo import ascii_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from dspark_hf import Calibration, DSparkDrafter

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
NOTEBOOKS = EXAMPLES / "notebooks"
DRAFTER = FIXTURES / "deepspec_qwen3_vanilla"
HUB_ID = "org/tiny-target"


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory) -> Path:
    """A tiny target that never ends by itself, with a tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("pair") / "tiny-target"
    target = AutoModelForCausalLM.from_pretrained(DRAFTER / "target")
    target.generation_config.eos_token_id = None
    target.generation_config.pad_token_id = 0
    target.save_pretrained(folder)
    tokenizer = ascii_tokenizer()
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def prompts(tmp_path) -> str:
    file = tmp_path / "prompts.jsonl"
    rows = [{"index": 10 * number, "prompt": f"Add {number} and one"} for number in range(6)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


@pytest.fixture
def options(target_folder) -> list[str]:
    """The tiny pair, in float32, where texts are equal token for token."""
    return ["--target", str(target_folder), "--drafter", str(DRAFTER), "--dtype", "float32"]


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    """Runs an example as a script and returns what it printed. Its files go to `tmp_path`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES)  # as Python does for a script

    def run_example(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run_example


@pytest.fixture
def plain(target_folder):
    """What the target says by itself, after a conversation in its chat template."""
    target = AutoModelForCausalLM.from_pretrained(target_folder)
    tokenizer = AutoTokenizer.from_pretrained(target_folder)

    def answer(conversation: str, num_tokens: int) -> str:
        inputs = tokenizer(conversation, return_tensors="pt")
        output = target.generate(**inputs, max_new_tokens=num_tokens, do_sample=False)
        return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    return answer


def numbers(pattern: str, text: str) -> list[float]:
    """The numbers that stand where the groups of a pattern are, in its first match."""
    found = re.search(pattern, text)
    assert found, f"no {pattern!r} in {text!r}"
    return [float(group) for group in found.groups()]


def test_quickstart(run, options, plain):
    out = run("quickstart.py", *options, "--prompt", "hello", "--max-new-tokens", "12")
    assert out.startswith(plain("<hello>:", 12) + "\n\n")
    # The first token is the prefill's, and nothing ends early.
    num_tokens, num_rounds, tau = numbers(r"(\d+) tokens in (\d+) rounds: ([\d.]+) per round", out)
    assert num_tokens == 12
    assert tau == pytest.approx(11 / num_rounds, abs=0.006)


def test_batch(run, options, plain):
    out = run("batch.py", "one", "three", *options, "--max-new-tokens", "8")
    for prompt in ("one", "three"):
        assert f"> {prompt}\n{plain(f'<{prompt}>:', 8).strip()}\n\n" in out
    assert numbers(r"(\d+) tokens, ([\d.]+) per row", out)[0] == 16


def test_sampling_and_streaming(run, options):
    call = ["sampling_and_streaming.py", *options, "--prompt", "hello", "--max-new-tokens", "12"]
    first, again, other = run(*call), run(*call), run(*call, "--seed", "1")
    assert text_of(first) == text_of(again) != text_of(other)
    assert "round 0: proposed " in first


def text_of(out: str) -> str:
    """What was streamed: all before the report on rounds."""
    return out.partition("\nround 0: ")[0]


def test_streaming_chat(run, options, plain, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\n"))
    out = run("streaming_chat.py", *options, "--max-new-tokens", "8")
    first = plain("<one>:", 8)
    second = plain(f"<one><{first}><two>:", 8)
    position = out.index(first)
    assert second in out[position + len(first) :]
    assert len(re.findall(r"tokens per round, \d+ per second\]", out)) == 2


def test_quantized_target(run, tmp_path):
    pytest.importorskip("bitsandbytes")
    # In 4 bits, a block of weights that share a scale has 64 of a row.
    kit.new_target(vocab_size=128, hidden_size=64, head_dim=16).save_pretrained(tmp_path / "target")
    ascii_tokenizer().save_pretrained(tmp_path / "target")
    kit.new_drafter(vocab_size=128, hidden_size=64).save_pretrained(tmp_path / "drafter")
    options = ["--target", str(tmp_path / "target"), "--drafter", str(tmp_path / "drafter"), "--dtype", "float32"]
    sizes = []
    for bits in ("4", "8"):
        out = run("quantized_target.py", *options, "--bits", bits, "--prompt", "hello", "--max-new-tokens", "8")
        sizes += numbers(r"in \d bits: ([\d.]+) MB", out)
        assert numbers(r"(\d+) tokens in", out) == [8]
    assert sizes[0] < sizes[1]


def test_two_devices(run, options, plain):
    out = run("two_devices.py", *options, "--target-device", "cpu", "--drafter-device", "cpu", "--max-new-tokens", "8")
    assert out.startswith("target on cpu, drafter on cpu\nBoth are on one device, so nothing travels.\n")
    assert plain("<Why is the sky blue? Explain it to a child.>:", 8) in out
    drafting, verifying = numbers(r"seconds: ([\d.]+) of drafting, ([\d.]+) of the target's passes", out)
    assert drafting + verifying > 0


def test_calibrate_and_schedule(run, options, prompts, tmp_path):
    more = ["--prompts", prompts, "--max-new-tokens", "16", "--output", str(tmp_path)]
    out = run("calibrate_and_schedule.py", *options, *more)
    assert numbers(r"error: ([\d.]+)% before, ([\d.]+)% after", out)
    lines = re.findall(r"^(\S+) +([\d.]+) tokens verified a round, ([\d.]+) written", out, flags=re.MULTILINE)
    assert [schedule for schedule, _, _ in lines] == ["constant", "confidence", "hardware", "auto"]
    assert all(float(written) >= 1 for _, _, written in lines)
    assert len(Calibration.load(tmp_path).temperatures) == 7


def test_train_a_drafter(run, target_folder, prompts, tmp_path):
    pair = ["--target", str(target_folder), "--dtype", "float32", "--prompts", prompts]
    small = ["--max-new-tokens", "16", "--max-steps", "2", "--draft-vocab-size", "64"]
    out = run("train_a_drafter.py", *pair, *small, "--output-dir", str(tmp_path / "drafter"))
    drafter = DSparkDrafter.from_pretrained(tmp_path / "drafter")
    assert drafter.config.draft_vocab_size == 64
    assert len((tmp_path / "drafter" / "responses.jsonl").read_text().splitlines()) == 6
    assert re.search(r"3 rows to train on \(.*\), 3 held out", out)
    assert "Held-out rows: acceptance length" in out


def test_evaluate(run, options, prompts, tmp_path):
    out = run("evaluate.py", *options, "--prompts", prompts, "--max-new-tokens", "8")
    report = json.loads((tmp_path / "results.json").read_text())
    found = report["drafters"][DRAFTER.name]["all"]
    assert found["num_prompts"] == 2
    assert found["audit"]["num_identical"] == found["audit"]["num_texts"] > 0
    tau = found["drafts"]["acceptance_length"]
    assert f"{DRAFTER.name}: {tau:.2f} tokens per round of a full draft, × " in out


# The client itself sends large files in a way that its own library is about to drop.
@pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload raw:DeprecationWarning")
def test_publish(run, tmp_path, monkeypatch):
    DSparkDrafter.from_pretrained(DRAFTER, target_model_name_or_path=HUB_ID).save_pretrained(tmp_path / "drafter")
    call = ["publish.py", "you/tiny", "--drafter", str(tmp_path / "drafter")]
    with running_hub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        out = run(*call)
        assert "dry run: you/tiny was not touched" in out
        assert f"base_model: {HUB_ID}" in out
        assert "model.safetensors" in out
        assert hub.writes == []
        assert "pushed: " in run(*call, "--push")
        assert "model.safetensors" in hub.files("you/tiny")
        assert hub.repositories["you/tiny"].visibility == "private"


def test_template_prompts(run, tmp_path):
    run("template_prompts.py", "--num-prompts", "30", "--output", "made.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "made.jsonl").read_text().splitlines()]
    assert len({row["prompt"] for row in rows}) == 30
    assert {row["dataset"] for row in rows} == {"template-sums", "template-programs", "template-chat"}


def test_assistant_prompts(run, tmp_path):
    run("assistant_prompts.py", "--num-prompts", "300", "--output", "made.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "made.jsonl").read_text().splitlines()]
    assert len({row["prompt"] for row in rows}) == 300
    kinds = {"writing", "roles", "riddles", "extraction", "science", "society"}
    assert {row["dataset"] for row in rows} == {f"assistant-{kind}" for kind in kinds}
    # A slot that nothing was put into.
    assert not [row["prompt"] for row in rows if re.search(r"\{\w*\}", row["prompt"])]


def shown_code(prompt: str) -> list[str]:
    """The blocks of code of a prompt, each of which must be Python."""
    pieces = prompt.split("```")
    assert len(pieces) % 2 == 1, prompt
    for piece in pieces[1::2]:
        assert piece.startswith("python\n"), prompt
        ast.parse(piece.removeprefix("python\n"))
    return pieces[1::2]


def test_function_prompts(run, tmp_path):
    run("function_prompts.py", "--num-prompts", "200", "--output", "made.jsonl")
    asked = [json.loads(line)["prompt"] for line in (tmp_path / "made.jsonl").read_text().splitlines()]
    assert len(set(asked)) == 200
    assert {len(shown_code(prompt)) for prompt in asked} == {0, 1}  # in words, and with code


# What the prompts can show, and what would break one: a block of code or a backslash in the docstring, or lines of
# text that begin left of the function.
DOCUMENTED = '''
def kept(values):
    """Return the largest of the values, or None."""
    return max(values, default=None)

class Holder:
    def method(self, count: int = 3) -> int:
        """Count up to a number, and return the sum of all."""
        return sum(range(count))

    def left(self):
        """Write the head of a table and then its first row."""
        return """
name: value
"""
'''
BROKEN = [
    'def fenced():\n    """Show an example, as in:\n\n    ```python\n    fenced()\n    ```\n    """\n',
    'def fence():\n    """Return what opens a block of code."""\n    return "```"\n',
    "def quotes():\n    '''Return text between \"\"\" and the same again.'''\n",
    'def backslash():\n    r"""Return what \\N matches, in a raw docstring."""\n',
]


def test_function_prompts_show_whole_python(run, tmp_path, monkeypatch):
    packages = tmp_path / "packages"
    packages.mkdir()
    for number, text in enumerate([DOCUMENTED, *BROKEN]):
        ast.parse(text)
        (packages / f"part{number}.py").write_text(text)
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(packages), "purelib": str(packages)})
    names = set()
    for seed in range(8):
        run("function_prompts.py", "--seed", str(seed), "--output", "made.jsonl")
        asked = [json.loads(line)["prompt"] for line in (tmp_path / "made.jsonl").read_text().splitlines()]
        assert len(asked) == 2
        names |= {re.search(r"def (\w+)", code)[1] for prompt in asked for code in shown_code(prompt)}
    assert names == {"kept", "method"}


SUM = "Emma has 12 even numbers and 3 odd ones, {Emma_12}. In 1999 Emma's \\\\frac{12}{7} of the first 12 were f12(x)."


def test_varied_prompts(run, tmp_path):
    rows = [{"index": 20, "turns": ["Held out: is 5 the first number?"]}, {"index": 1, "turns": [SUM, "second turn"]}]
    (tmp_path / "given.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run("varied_prompts.py", str(tmp_path / "given.jsonl"), "--num-prompts", "50", "--output", "made.jsonl")
    made = [json.loads(line) for line in (tmp_path / "made.jsonl").read_text().splitlines()]
    assert {row["dataset"] for row in made} == {"varied-given"}
    asked = [row["prompt"] for row in made]
    assert len(set(asked)) == 50
    assert SUM not in asked
    kind = r"(\w+) has (\d\d) (even|odd) numbers and ([2-9]) (even|odd) ones, {Emma_12}. In (\d{4}) (\w+)'s "
    kind += r"\\\\frac{(\d\d)}{([2-9])} of the (first|last) (\d\d) were f12\(x\)\."
    found = [re.fullmatch(kind, prompt) for prompt in asked]
    assert all(found)
    # The same number and the same name are replaced by the same others, all over the text.
    assert all(match[1] == match[7] and match[2] == match[8] == match[11] for match in found)
    for group in range(1, 11):
        assert len({match[group] for match in found}) > 1, group


# A prompt without anything to vary ends the search, where it would else go on for ever.
def test_varied_prompts_end(run, tmp_path):
    (tmp_path / "given.jsonl").write_text(json.dumps({"prompt": "?", "index": 1}) + "\n")
    run("varied_prompts.py", str(tmp_path / "given.jsonl"), "--output", "made.jsonl")
    assert (tmp_path / "made.jsonl").read_text().strip() == ""


# In place of the package: what its `create_dataset` gives.
GYM = """
SUMS = "Ann has {0} red apples. How many are left?", "{0} boys run {0} miles. How far is it in all?"

def create_dataset(name, size, seed):
    assert name != "codeio", "it runs the code of its rows"
    if name == "gsm_symbolic":
        form = " Give the result as your final answer. Do not include units."
        return [{"question": SUMS[n % 2].format(n) + form} for n in range(200)]
    return [{"question": f"What does {name} make of {n}? Please give it."} for n in range(200)]
"""


@pytest.fixture
def reasoning_gym(monkeypatch, tmp_path):
    """Stands in for the package of that name: its generators, and its tasks for programs."""
    specs = ["Input:\n  `numbers` (list): them\nOutput:\n  `return` (int)", "Input:\nOutput:"]
    tasks = [(f"Given {n} numbers in a list, what is the sum of them?", specs[n % 2]) for n in range(40)]
    tasks.append(("Вычислить сумму всех чисел из этого списка и вернуть ее", specs[0]))
    package = tmp_path / "stand_in" / "reasoning_gym"
    (package / "data").mkdir(parents=True)
    with gzip.open(package / "data" / "codeio.jsonl.gz", "wt", encoding="utf-8") as lines:
        for task, spec in tasks:
            lines.write(json.dumps({"task_description": task, "input_output_spec": spec}) + "\n")
    (package / "__init__.py").write_text(GYM)
    monkeypatch.syspath_prepend(package.parent)
    yield
    sys.modules.pop("reasoning_gym", None)


KINDS_OF_GYM = ("programs", "sums", "problems")


def test_gym_prompts(run, tmp_path, reasoning_gym):
    rows = [{"index": 20, "turns": ["Ben has 7 green apples. How many are left?"]}, {"index": 1, "prompt": "boys run"}]
    (tmp_path / "given.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run("gym_prompts.py", str(tmp_path / "given.jsonl"), "--output", "made.jsonl")
    made = [json.loads(line) for line in (tmp_path / "made.jsonl").read_text().splitlines()]
    # As many of each kind as there are programs that can be shown; what is like a held-out prompt is passed over.
    asked = {kind: [row["prompt"] for row in made if row["dataset"] == f"gym-{kind}"] for kind in KINDS_OF_GYM}
    assert [len(set(prompts)) for prompts in asked.values()] == [40, 40, 40]
    assert all(re.match(r"\d+ boys run \d+ miles. How far is it in all\?\nPlease reason", p) for p in asked["sums"])
    assert all(re.match(r"What does \w+ make of \d+\?\nPlease reason step", p) for p in asked["problems"])
    assert {len(shown_code(prompt)) for prompt in asked["programs"]} == {0, 1}
    shown = [prompt for prompt in asked["programs"] if "```" in prompt]
    assert all(re.search(r"def \w+\(numbers\):\n    \"\"\" Given \d+ numbers", prompt) for prompt in shown)


# Examples that another test module runs.
ELSEWHERE = ["train_smollm2"]


@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem not in ELSEWHERE))
def test_every_example_is_run_here(name):
    assert f"test_{name}" in globals(), f"examples/{name}.py has no test: write one that looks at what it prints"


def stored(name: str) -> dict:
    return json.loads((NOTEBOOKS / name).read_text(encoding="utf-8"))


@pytest.fixture
def run_notebook(target_folder, monkeypatch, tmp_path):
    """Runs a notebook with the tiny pair in its cell of parameters. Returns what it printed, and how many figures it
    drew."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    pair = {"target_id": str(target_folder), "drafter_id": str(DRAFTER), "dtype": "float32", "max_new_tokens": 12}

    def run(name: str) -> tuple[str, int]:
        notebook = nbformat.read(NOTEBOOKS / name, as_version=4)
        (parameters,) = (cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ()))
        parameters.source = "\n".join(f"{name} = {value!r}" for name, value in pair.items())
        where = {"metadata": {"path": str(tmp_path)}}
        nbclient.NotebookClient(notebook, timeout=300, resources=where).execute()
        outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
        text = "".join(output.text for output in outputs if output.get("name") == "stdout")
        return text, sum("image/png" in output.get("data", {}) for output in outputs)

    return run


def test_faster_in_ten_lines(run_notebook, plain):
    text, num_figures = run_notebook("faster_in_ten_lines.ipynb")
    assert plain("<Write a Python function that reverses a string, and explain it.>:", 12) in text
    num_tokens, num_rounds, tau = numbers(r"(\d+) tokens in 1 \+ (\d+) passes .*\n.*: ([\d.]+) tokens per round", text)
    assert num_tokens == 12
    assert tau == pytest.approx(11 / num_rounds, abs=0.006)
    assert text.count("the same text") == 3
    assert num_figures == 1


def test_the_ten_lines_are_ten():
    heading = "## The ten lines"
    cells = ["".join(cell["source"]) for cell in stored("faster_in_ten_lines.ipynb")["cells"]]
    code = cells[cells.index(heading) + 1]
    assert len([line for line in code.splitlines() if line.strip()]) == 10


def test_look_inside_a_round(run_notebook, plain):
    text, num_figures = run_notebook("look_inside_a_round.ipynb")
    assert plain("<A train travels 60 km in 45 minutes. How fast is it in km/h?>:", 12) in text
    assert numbers(r"(\d+) tokens, (\d+) rounds", text)[0] == 12
    assert numbers(r"(\d+) tokens were judged", text)[0] > 0
    counts = re.findall(r"^ *(\d+) × (?:drafter|lookup|none): ", text, flags=re.MULTILINE)
    assert 1 <= sum(map(int, counts)) <= 11
    assert num_figures == 4


@pytest.mark.parametrize("name", sorted(path.name for path in NOTEBOOKS.glob("*.ipynb")))
def test_a_notebook_is_run_here_and_stored_without_outputs(name):
    assert f"test_{Path(name).stem}" in globals(), f"examples/notebooks/{name} has no test: write one"
    for cell in stored(name)["cells"]:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
