"""One commit on the Hub: weights, config, calibration, card, and the code behind `custom_generate`.

Everything that may be wrong with the drafter, its card or the repository is looked at before anything is sent.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard, ModelInfo
from huggingface_hub.errors import (
    HfHubHTTPError,
    HTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id
from transformers.utils import CONFIG_NAME

from .._version import __version__
from ..alignment import is_hub_name
from ..calibration import CALIBRATION_NAME
from ..errors import HubError
from ..modeling_dspark import DSparkDrafter
from .card import LIBRARY_NAME, LICENSE_FIELDS, make_model_card

CARD_NAME = "README.md"
GENERATE_FILE = "custom_generate/generate.py"
REQUIREMENTS_FILE = "custom_generate/requirements.txt"
_GENERATE_CODE = '''"""Speculative decoding with the drafter of this repository.

    model.generate(**inputs, custom_generate="org/drafter", trust_remote_code=True)
"""

from dspark_hf.custom_generate import generate  # noqa: F401
'''

# Left from an earlier drafter they would count as this one's: weights in another number of files, temperatures.
_PARTS = re.compile(rf"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?|{re.escape(CALIBRATION_NAME)}")

_REMEDIES = {
    401: "The token is missing, wrong or expired: `hf auth login`, or set HF_TOKEN.",
    403: "This token may not write there: take one that may, or open a pull request (`create_pr`).",
    409: "Something else happens to the repository at this moment: wait, and push again.",
    412: "The branch has moved since it was looked at: see what came in, and push again.",
    429: "Too many requests: wait, and push again.",
}
_NO_ANSWER = "Is the Hub within reach from here, and HF_ENDPOINT right?"
_OUR_FAULT = "Mend that, and push again."
_SERVER_FAULT = "Look whether the commit is there; if not, push again: what was uploaded is not sent twice."


@dataclass(frozen=True)
class PushReport:
    """What was pushed, or would be.

    Attributes:
        repo_id: where to.
        files: size of each file in bytes, by its path in the repository.
        deleted: files of the drafter that was there before, which would be taken for parts of this one.
        card: the text of the model card.
        commit: of huggingface_hub, with `commit_url`, and `pr_url` for a pull request; `None` after a dry run.
    """

    repo_id: str
    files: dict[str, int]
    deleted: list[str]
    card: str
    commit: CommitInfo | None


def push_drafter_to_hub(
    drafter: DSparkDrafter,
    repo_id: str,
    *,
    commit_message: str = "Upload drafter",
    commit_description: str | None = None,
    private: bool | None = None,
    token: bool | str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    license: str | None = None,
    results: str | os.PathLike | None = None,
    training: Sequence[str | os.PathLike] = (),
    tags: Sequence[str] = (),
    card: ModelCard | None = None,
    overwrite_card: bool = False,
    dry_run: bool = False,
) -> PushReport:
    """Pushes a drafter in one commit; a repository that is not there is made. Tensors of the target (embedding, head)
    are not sent, where the drafter borrows them.

    Args:
        repo_id: `owner/name`.
        commit_message, commit_description, private, token, revision, create_pr: as in
            [`~transformers.PreTrainedModel.push_to_hub`]; `private` is for a new repository.
        license: of the drafter; `None`: that of the target's card, or none where it cannot be read.
        results, training, tags: for the card, as in [`make_model_card`].
        card: another card instead, finished: nothing is added to it.
        overwrite_card: replace the card that the repository has. A pull request replaces nothing by itself.
        dry_run: send nothing, and say what would be sent.

    Raises:
        ValueError: the drafter must not be published as it is (no target named, weights that are not finite), a file
            of `results` or `training` is about something else, or arguments contradict each other or the repository.
        FileExistsError: the repository has a card.
        HubError: the Hub said no, or was out of reach.
        OSError: a file cannot be read.
    """
    if create_pr and revision is not None:
        raise ValueError(f"`create_pr` opens a pull request to `main`, but `revision` is {revision}: leave one out.")
    if card is not None and (license is not None or results is not None or [*training, *tags]):
        raise ValueError("`card` is a finished one: leave `license`, `results`, `training` and `tags` out.")
    check_publishable(drafter, repo_id)
    api = HfApi(token=token)
    if card is None:
        fields = _license_of_target(api, drafter) if license is None else {"license": license}
        card = make_model_card(drafter, repo_id, license=fields, results=results, training=training, tags=tags)
    with _explained(repo_id, token):
        found = _look(api, repo_id, revision, may_fail=dry_run)
    if found is not None:
        _check_repository(found, private=private, may_replace_card=overwrite_card or create_pr)
    with TemporaryDirectory() as folder:
        files = write_repository(drafter, Path(folder), card)
        sizes = {name: path.stat().st_size for name, path in files.items()}
        if dry_run:
            return PushReport(repo_id, sizes, _outdated(found, files), str(card), commit=None)
        with _explained(repo_id, token):
            api.create_repo(repo_id, private=private, exist_ok=True)
            if revision is not None and not revision.startswith("refs/pr/"):
                api.create_branch(repo_id, branch=revision, exist_ok=True)
            # A new branch holds what `main` does.
            found = found or api.model_info(repo_id, revision=revision)
            deleted = _outdated(found, files)
            additions = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=path) for name, path in files.items()]
            commit = api.create_commit(
                repo_id,
                [*additions, *(CommitOperationDelete(path_in_repo=name) for name in deleted)],
                commit_message=commit_message,
                commit_description=commit_description,
                revision=revision,
                create_pr=create_pr,
                # Only on top of what was looked at: no card shall come in between.
                parent_commit=found.sha,
            )
    return PushReport(repo_id, sizes, deleted, str(card), commit)


def check_publishable(drafter: DSparkDrafter, repo_id: str) -> None:
    """Raises `ValueError` for a drafter that nobody else could use, and for a repository without an owner."""
    validate_repo_id(repo_id)
    if "/" not in repo_id:
        raise ValueError(f"`repo_id` is {repo_id!r}, expected `owner/name`.")
    target = drafter.config.target_model_name_or_path
    if target is None or not is_hub_name(target):
        found = "no target" if target is None else f"the target {target!r}"
        raise ValueError(
            f"The drafter's config names {found}, expected its id on the Hub (and no folder here): set "
            "`drafter.config.target_model_name_or_path = 'owner/name'` (on the command line: --target)."
        )
    broken = [
        name
        for name, tensor in drafter.state_dict().items()
        if tensor.is_floating_point() and not torch.isfinite(tensor).all()
    ]
    if broken:
        more = f" and {len(broken) - 3} more" if len(broken) > 3 else ""
        raise ValueError(
            f"The weights hold NaN or infinite values ({', '.join(broken[:3])}{more}). The training went wrong, or "
            "the file is damaged: take an earlier checkpoint."
        )


def write_repository(drafter: DSparkDrafter, folder: Path, card: ModelCard) -> dict[str, Path]:
    """Writes all files of the repository into an empty folder: paths by their names in the repository."""
    drafter.save_pretrained(folder)
    config = folder / CONFIG_NAME
    config.write_text(
        json.dumps(_without_folders(json.loads(config.read_text(encoding="utf-8"))), indent=2, sort_keys=True) + "\n",
        encoding="utf-8",
    )
    if drafter.calibration is not None:
        provenance = {name: _without_folders(value) for name, value in drafter.calibration.provenance.items()}
        replace(drafter.calibration, provenance=provenance).save(folder)
    card.save(folder / CARD_NAME)
    (folder / GENERATE_FILE).parent.mkdir()
    (folder / GENERATE_FILE).write_text(_GENERATE_CODE, encoding="utf-8")
    (folder / REQUIREMENTS_FILE).write_text(f"{LIBRARY_NAME}>={__version__}\n", encoding="utf-8")
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path for path in paths}


def _without_folders(value: Any) -> Any:
    """A path of this machine to its last part, wherever it stands."""
    if isinstance(value, dict):
        return {name: _without_folders(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_without_folders(each) for each in value]
    is_path = isinstance(value, str) and (os.path.isabs(value) or os.path.isdir(value))
    return Path(value).name if is_path else value


def _license_of_target(api: HfApi, drafter: DSparkDrafter) -> dict[str, str]:
    """The fields of a licence in the target's card; none where it cannot be read."""
    try:
        card = api.model_info(str(drafter.config.target_model_name_or_path)).card_data
    except (HTTPError, OSError):
        return {}
    fields = {} if card is None else card.to_dict()
    return {name: fields[name] for name in LICENSE_FIELDS if isinstance(fields.get(name), str)}


def _look(api: HfApi, repo_id: str, revision: str | None, may_fail: bool) -> ModelInfo | None:
    """The repository as it is; `None` where there is none, or, if it `may_fail`, no way to ask.

    A branch that is not there yet will begin as what `main` is.
    """
    try:
        return api.model_info(repo_id, revision=revision)
    except RepositoryNotFoundError:
        return None
    except RevisionNotFoundError:
        return _look(api, repo_id, None, may_fail) if revision is not None else None
    except (HTTPError, OSError) as error:
        if may_fail and not isinstance(error, HfHubHTTPError):
            return None
        raise


def _names(found: ModelInfo | None) -> list[str]:
    """The files of a repository."""
    return [] if found is None else [file.rfilename for file in found.siblings or ()]


def _outdated(found: ModelInfo | None, files: Mapping[str, Path]) -> list[str]:
    return [name for name in _names(found) if name not in files and _PARTS.fullmatch(name)]


def _check_repository(found: ModelInfo, *, private: bool | None, may_replace_card: bool) -> None:
    if private and found.private is False:
        raise ValueError(
            f"`private` is True, but {found.id} is there already, and public: make it private on the Hub first, or "
            "leave `private` out."
        )
    if CARD_NAME in _names(found) and not may_replace_card:
        raise FileExistsError(
            f"{found.id} has a {CARD_NAME}, which would be overwritten. Open a pull request (`create_pr`), or say "
            "that the card may go (`overwrite_card`)."
        )


@contextmanager
def _explained(repo_id: str, token: bool | str | None) -> Iterator[None]:
    """Turns errors of the Hub into ours, with a remedy and without the token."""
    try:
        yield
    except (HTTPError, RuntimeError) as error:
        # The client wraps what happens to a large file.
        cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error
        status = cause.response.status_code if isinstance(cause, HfHubHTTPError) else None
        found = " ".join(str(getattr(cause, "server_message", None) or cause).split())
        if isinstance(token, str) and token.strip():
            # A token that cannot be sent, with a line break in it, is quoted by the client.
            found = found.replace(token.strip(), "<token>")
        # Not from the error: its own text may hold the token.
        raise HubError(repo_id, status, found, _remedy(status)) from None


def _remedy(status: int | None) -> str:
    if status is None:
        return _NO_ANSWER
    return _REMEDIES.get(status, _SERVER_FAULT if status >= 500 else _OUR_FAULT)
