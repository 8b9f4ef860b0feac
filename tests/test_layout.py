"""The shape of the project: the README's map, one-way imports, a small silent surface, words that do not belong."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dspark_hf

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "dspark_hf"

# From the bottom up: a module imports only from those before it.
ORDER = [
    "errors",
    "_compat",
    "_version",
    "configuration_dspark",
    "checkpoints",
    "calibration",
    "draft_cache",
    "trace",
    "vocabulary",
    "alignment",
    "registry",
    "modeling_dspark",
    "target_taps",
    "target_attention",
    "lookup",
    "trust",
    "costs",
    "acceptance",
    "scheduling",
    "admission",
    "auto_schedule",
    "policies",
    "sampling",
    "processors",
    "packed_weights",
    "borrowing",
    "candidate_generator",
    "sequences",
    "target_rows",
    "target_inputs",
    "requests",
    "outputs",
    "committing",
    "cost_model",
    "prefill",
    "generation",
    "dispatch",
    "monitoring",
    "calibrating",
    "custom_generate",
    "__init__",
    "prompt_files",
    "demo_weights",
    "reports",
    "comparison",
    "demo",
    "generate_run",
    "drafters_run",
    "doctor_run",
    "inspect_run",
    "pipeline",
    "serving",
    "conversion",
    "simulation",
    "figures",
    "benchmark",
    "calibration_run",
    "profile_run",
    "data",
    "training",
    "evaluation",
    "hub",
    "cli",
]


def _modules() -> dict[str, list[Path]]:
    """Each module or subpackage directly below the package, with its files."""
    modules = {path.stem: [path] for path in PACKAGE.glob("*.py")}
    for folder in PACKAGE.iterdir():
        if (folder / "__init__.py").exists():
            modules[folder.name] = sorted(folder.glob("*.py"))
    return modules


def _imported(path: Path) -> set[str]:
    """Names of the package's own modules that a file imports, wherever in the file it does."""
    depth = len(path.relative_to(PACKAGE).parts)
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level == depth:
            names = [node.module.split(".")[0]] if node.module else [alias.name for alias in node.names]
            found |= {name if name in ORDER else "__init__" for name in names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "dspark_hf":
            parts = node.module.split(".")
            found.add(parts[1] if len(parts) > 1 else "__init__")
    return found


def test_every_module_has_its_place_in_the_order():
    assert sorted(_modules()) == sorted(ORDER)


@pytest.mark.parametrize("module", ORDER)
def test_imports_go_one_way(module):
    allowed = set(ORDER[: ORDER.index(module)])
    imported = set().union(*(_imported(path) for path in _modules()[module]))
    assert imported - {module} <= allowed


def test_the_file_map_of_the_readme_is_the_folder():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\| `dspark_hf/([^`]+)`", readme, flags=re.MULTILINE))
    present = {path.name for path in PACKAGE.glob("*.py")}
    present |= {path.name for suffix in ("jsonl", "yaml") for path in PACKAGE.glob(f"*.{suffix}")}
    present |= {f"{path.name}/" for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert named == present


def test_the_public_surface_is_small_and_real():
    assert len(dspark_hf.__all__) <= 25
    assert all(hasattr(dspark_hf, name) for name in dspark_hf.__all__)
    assert all(getattr(dspark_hf, name).__doc__ for name in dspark_hf.__all__)


def test_importing_is_silent():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", "import dspark_hf"], capture_output=True, text=True, check=True
    )
    assert done.stdout == ""
    assert done.stderr == ""


@pytest.mark.parametrize("example", sorted(path.name for path in (ROOT / "examples").glob("*.py")))
def test_examples_compile_and_use_public_modules(example):
    path = ROOT / "examples" / example
    compile(path.read_text(encoding="utf-8"), str(path), "exec")


def test_the_python_blocks_of_the_readme_compile():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    assert blocks
    for block in blocks:
        compile(block, "README.md", "exec")
