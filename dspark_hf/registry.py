"""Which drafter goes with which target: the pairs of `known_pairs.yaml`, and how a target is recognised.

A target is recognised by its id, by its name without marks of quantization, by the name of its folder, and by the
model that its `config.json` or its card say it was made from. All but the first are guesses: those that may be another
model are said aloud, and the configs of target and drafter decide ([`~dspark_hf.check_alignment`]).
"""

import json
import os
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import HfApi
from huggingface_hub.errors import HTTPError
from huggingface_hub.repocard import metadata_load
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import CONFIG_NAME

from .alignment import check_pair, model_name
from .checkpoints import refuse_missing_folder
from .checkpoints.files import optional_file
from .configuration_dspark import DSparkConfig
from .errors import UnknownTargetError

PAIRS_FILE = Path(__file__).parent / "known_pairs.yaml"
DRAFTERS_FOLDER = Path(__file__).parent / "drafters"
TESTED, SUPPORTED, NOT_YET = STATUSES = ("tested here", "format supported", "not supported yet")

_WATCH = "a drafter learns one model's way of writing, and τ shows whether it fits."
# How many models are looked at, from a copy to what it was made from.
_MOST_STEPS = 8
_HUB_TIMEOUT_SECONDS = 5.0
# What the Hub's cache makes of an id.
_CACHE_FOLDER = re.compile(r"models--(?P<owner>.+?)--(?P<name>.+)")


@dataclass(frozen=True)
class KnownPair:
    """A target and a drafter that was published for it. The file says what the fields mean."""

    target: str
    drafter: str
    algorithm: str
    format: str
    status: str
    source: str
    reason: str | None = None

    @property
    def location(self) -> str | Path:
        """What `from_pretrained` takes: an id on the Hub, or a folder of this package."""
        return self.drafter if "/" in self.drafter else DRAFTERS_FOLDER / self.drafter


@dataclass(frozen=True)
class Match:
    """The pair that was found for a target.

    Attributes:
        remark: why this may be the wrong one; `None` for a target of the file and its quantized copies.
    """

    pair: KnownPair
    remark: str | None = None

    def confirm(self, target: Any, drafter_config: DSparkConfig, **location: Any) -> None:
        """Compares target and drafter, and warns of what speaks against the pair.

        Args:
            target: as for [`find_drafter`].
            location: as for [`find_drafter`].

        Raises:
            AlignmentError: the drafter must not run with this target.
        """
        config = _config_of(target, location)
        findings: list[Any] = [self.remark] if self.remark else []
        if config is not None:
            report = check_pair(config, drafter_config)
            report.raise_if_blocked()
            findings += report.warnings
        for finding in findings:
            warnings.warn(str(finding), UserWarning, stacklevel=3)


@cache
def known_pairs() -> tuple[KnownPair, ...]:
    """All pairs of the file, in its order."""
    return tuple(KnownPair(**entry) for entry in yaml.safe_load(PAIRS_FILE.read_text(encoding="utf-8")))


def find_drafter(target: str | os.PathLike | PreTrainedModel | PreTrainedConfig, **location: Any) -> Match:
    """The pair of a target.

    Args:
        target: hub id, folder, model or config.
        location: `token`, `cache_dir`, `local_files_only`, as for `from_pretrained`: where to look for the config and
            the card of a target that is not in the file.

    Raises:
        OSError: `target` can only be a folder, and there is none.
        UnknownTargetError: no drafter is known, or none that can be used; the message says what to do.
    """
    name = _name_of(target)
    for candidate, remark in _candidates(name, location):
        pairs = [pair for pair in known_pairs() if model_name(pair.target) == model_name(candidate)]
        usable = next((pair for pair in pairs if pair.status != NOT_YET), None)
        if usable is not None:
            remark = remark or _namesake(candidate, usable.target)
            return Match(usable, remark and f"{remark}, so the drafter {usable.drafter} is taken: {_WATCH}")
        if pairs:
            found = " ".join(f"{pair.drafter} cannot be used for {name} yet: {pair.reason}." for pair in pairs)
            raise UnknownTargetError(name, found)
    raise UnknownTargetError(name, "" if name else "This model has no name by which a drafter could be known.")


def _namesake(name: str, target: str) -> str | None:
    """What makes a repository a guess that is called like a target, without a mark of quantization."""
    theirs, known = (each.lower().rpartition("/")[2] for each in (name, target))
    return f"{name} is called like {target}" if theirs == known and name.lower() != target.lower() else None


def _name_of(target: Any) -> str:
    if isinstance(target, (PreTrainedModel, PreTrainedConfig)):
        return str(getattr(target, "config", target).name_or_path or "")
    refuse_missing_folder(str(target))
    return str(target)


def _candidates(name: str, location: dict[str, Any]) -> Iterator[tuple[str, str | None]]:
    """Names by which a target may be known, the surest first, each with what makes it a guess."""
    if not name:
        return
    if os.path.isdir(name):
        in_cache = [match for part in Path(name).parts if (match := _CACHE_FOLDER.fullmatch(part))]
        yield from ((f"{match['owner']}/{match['name']}", None) for match in in_cache)
        folder = Path(name).resolve().name
        yield folder, f"The folder {name} is called like a known target"
    else:
        yield name, None
    seen, waiting = {name}, _bases(name, location)
    while waiting and len(seen) < _MOST_STEPS:
        base = waiting.pop(0)
        if base not in seen:
            seen.add(base)
            yield base, f"{name} was made from {base}, by its config.json or its card"
            waiting += _bases(base, location)


def _bases(name: str, location: dict[str, Any]) -> list[str]:
    """What a model says it was made from; nothing where it says nothing or cannot be asked."""
    if not os.path.isdir(name) and not _hub_answers(name, location):
        location = {**location, "local_files_only": True}
    try:
        config, card = (optional_file(name, file, **location) for file in (CONFIG_NAME, "README.md"))
        named = json.loads(Path(config).read_text(encoding="utf-8")).get("_name_or_path") if config else None
        bases = (metadata_load(card) or {}).get("base_model") if card else None
    except (OSError, ValueError, yaml.YAMLError):
        return []
    found = [named, *(bases if isinstance(bases, list) else [bases])]
    return [base for base in found if isinstance(base, str) and base]


def _hub_answers(name: str, location: dict[str, Any]) -> bool:
    """Whether the Hub has this model, asked once and briefly: fetching a file is tried again for half a minute."""
    if location.get("local_files_only"):
        return False
    try:
        HfApi().model_info(name, timeout=_HUB_TIMEOUT_SECONDS, token=location.get("token"))
    except (HTTPError, OSError, ValueError):
        return False
    return True


def _config_of(target: Any, location: dict[str, Any]) -> PreTrainedConfig | None:
    """The config of a target; `None` where it cannot be read here: `generate` compares the models themselves."""
    if isinstance(target, PreTrainedConfig):
        return target
    if isinstance(target, PreTrainedModel):
        return target.config
    try:
        return AutoConfig.from_pretrained(str(target), **location)
    except (OSError, ValueError):
        return None
