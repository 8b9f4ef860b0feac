"""`generate(custom_generate="org/drafter", trust_remote_code=True)`, by the code that a pushed drafter carries."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from gc import collect
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import kit
import pytest
import torch
from hub_stand_in import Commit, running_hub
from test_benchmark import pair  # noqa: F401  (a fixture)

from dspark_hf import DSparkDrafter, __version__, custom_generate
from dspark_hf.hub.card import make_model_card
from dspark_hf.hub.pushing import write_repository


@pytest.fixture(autouse=True)
def clean(monkeypatch, tmp_path):
    """transformers' own cache of code, and this package as if it were installed (it may run from a checkout)."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    installed = tmp_path / "installed" / f"dspark_hf-{__version__}.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: dspark-hf\nVersion: {__version__}\n")
    monkeypatch.syspath_prepend(installed.parent)


def publish(folder: Path, **settings) -> Path:
    """Writes what a push would send."""
    drafter = kit.new_drafter(target_model_name_or_path="org/tiny-target", **settings)
    folder.mkdir(parents=True)
    write_repository(drafter, folder, make_model_card(drafter, "someone/tiny-drafter"))
    return folder


def generate(target, folder, **options) -> list[int]:
    options = {"do_sample": False, "max_new_tokens": 20, **options}
    output = target.generate(**kit.inputs(), custom_generate=str(folder), trust_remote_code=True, **options)
    return output[0, len(kit.PROMPT) :].tolist()


def opened(target) -> list[DSparkDrafter]:
    return [*custom_generate._drafters.get(target, {}).values()]


def test_the_text_is_that_of_plain_generation_and_the_drafter_drafts(tmp_path):
    target = kit.new_target()
    answer = kit.continuation(target, num_tokens=20)
    folder = publish(tmp_path / "drafter")
    assert generate(target, folder) == answer
    (drafter,) = opened(target)
    drafter.generation_config.num_assistant_tokens_schedule = "constant"
    with drafter.trace() as trace, kit.knowing(answer, wrong_at=1):
        assert generate(target, folder) == answer
    kit.assert_drafted(trace, wrong_at=1)
    assert opened(target) == [drafter]


def test_the_code_of_the_card_runs_as_it_stands(pair, tmp_path):  # noqa: F811
    drafter = DSparkDrafter.from_pretrained(pair["drafter"], target_model_name_or_path="org/tiny-target")
    card = make_model_card(drafter, "someone/tiny-drafter")
    (tmp_path / "drafter").mkdir()
    write_repository(drafter, tmp_path / "drafter", card)
    text = card.text.replace("org/tiny-target", pair["target"])
    text = text.replace("someone/tiny-drafter", str(tmp_path / "drafter"))
    first, second = (block.split("```")[0] for block in text.split("```python\n")[1:])
    names: dict[str, Any] = {}
    exec(first, names)
    drafted = names["output"].tolist()
    exec(second, names)
    plain = names["model"].generate(**names["inputs"], max_new_tokens=128)
    assert names["output"].tolist() == drafted == plain.tolist()


def test_arguments_of_generate_arrive(tmp_path):
    target = kit.new_target()
    answer = kit.continuation(target, num_tokens=20)
    eos = answer[9]
    ended = answer[: answer.index(eos) + 1]
    assert generate(target, publish(tmp_path / "drafter"), eos_token_id=eos, pad_token_id=0) == ended


def test_two_folders_of_one_name_are_two_drafters(tmp_path):
    """Their code is the same file to transformers, which keeps one copy of it."""
    target = kit.new_target()
    for number, layers in enumerate((1, 2)):
        generate(target, publish(tmp_path / str(number) / "drafter", num_hidden_layers=layers))
    assert [drafter.config.num_hidden_layers for drafter in opened(target)] == [1, 2]


def test_the_drafter_follows_dtype_and_device_of_the_target(tmp_path, monkeypatch):
    # Threads that load weights know nothing of the caller's inference mode, and would hide what is tested here.
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")
    target, folder = kit.new_target().bfloat16(), publish(tmp_path / "drafter")
    with torch.inference_mode():
        generate(target, folder)
    (drafter,) = opened(target)
    assert (drafter.dtype, drafter.device) == (torch.bfloat16, target.device)
    assert not drafter.fc.weight.is_inference()


def test_threads_share_one_drafter(tmp_path, monkeypatch):
    folder = publish(tmp_path / "drafter")
    generate(kit.new_target(), folder)  # transformers copies the code, which is not ours to guard
    target = kit.new_target()
    answer, load = kit.continuation(target, num_tokens=20), Mock(wraps=DSparkDrafter.from_pretrained)
    monkeypatch.setattr(DSparkDrafter, "from_pretrained", load)
    with ThreadPoolExecutor(2) as threads:
        texts = [*threads.map(lambda _: generate(target, folder), range(4))]
    assert texts == [answer] * 4
    assert load.call_count == 1


def test_a_drafter_goes_with_its_target(tmp_path):
    target = kit.new_target()
    generate(target, publish(tmp_path / "drafter"))
    assert opened(target)
    num_targets = len(custom_generate._drafters)
    del target
    collect()
    assert len(custom_generate._drafters) < num_targets


def test_another_drafter_may_be_named(tmp_path):
    target, folder = kit.new_target(), publish(tmp_path / "drafter")
    other = publish(tmp_path / "other", num_hidden_layers=1)
    assert generate(target, folder, assistant_model=str(other)) == kit.continuation(target, num_tokens=20)
    assert [drafter.config.num_hidden_layers for drafter in opened(target)] == [1]


def test_code_of_a_repository_runs_only_where_it_is_trusted(tmp_path):
    target, folder = kit.new_target(), publish(tmp_path / "drafter")
    with pytest.raises(ValueError, match="trust_remote_code"):
        target.generate(**kit.inputs(), custom_generate=str(folder), trust_remote_code=False)


def test_an_older_package_is_named_before_anything_runs(tmp_path):
    target, folder = kit.new_target(), publish(tmp_path / "drafter")
    (folder / "custom_generate" / "requirements.txt").write_text("dspark-hf>=99.0\n")
    with pytest.raises(ImportError, match=rf"dspark-hf>=99.0 \(installed: {__version__}\)"):
        generate(target, folder)


@pytest.mark.parametrize("options", [{}, {"assistant_model": kit.target()}], ids=["nothing", "a model"])
def test_without_a_name_it_says_how_it_is_meant(options):
    with pytest.raises(ValueError, match="expected the name of a repository or folder"):
        custom_generate.generate(kit.target(), **kit.inputs(), **options)


_CALLER = """
import json, sys
import torch
from transformers import AutoModelForCausalLM

target = AutoModelForCausalLM.from_pretrained(sys.argv[1])
inputs = {"input_ids": torch.tensor([json.loads(sys.argv[2])]), "do_sample": False, "max_new_tokens": 20}
plain = target.generate(**inputs)
assert "dspark_hf" not in sys.modules
drafted = target.generate(**inputs, custom_generate="someone/tiny-drafter", trust_remote_code=True)
assert "dspark_hf" in sys.modules
assert not [name for name in sys.modules if name.startswith("dspark_hf.hub")]
assert drafted.tolist() == plain.tolist()
(opened,) = sys.modules["dspark_hf.custom_generate"]._drafters[target].values()
print(opened.config.name_or_path)
"""


def test_from_the_hub_by_a_program_that_does_not_know_this_package(tmp_path):
    """The real client, a new process, and a repository as it is pushed."""
    kit.new_target().save_pretrained(tmp_path / "target")
    folder = publish(tmp_path / "drafter")
    with running_hub() as hub:
        paths = [path for path in folder.rglob("*") if path.is_file()]
        files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
        hub.add("someone/tiny-drafter").branches["main"].append(Commit(files))
        places = [tmp_path / "installed", Path(custom_generate.__file__).parent.parent]
        environment = {
            **os.environ,
            "HF_ENDPOINT": hub.endpoint,
            "HF_HOME": str(tmp_path / "home"),
            "PYTHONPATH": os.pathsep.join(map(str, places)),
        }
        command = [sys.executable, "-c", _CALLER, str(tmp_path / "target"), json.dumps(kit.PROMPT)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout == "someone/tiny-drafter\n", done.stderr
