"""The calls of an evaluation: every prompt once, in batches of one dataset."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..benchmark.prompts import Case
from ..data.encoding import Encoder
from ..data.sources import BadRow, Source, read_sources
from ..prompt_files import PROMPTS_FILE, evenly_spread
from .settings import EvaluationSettings

ALL = "all"


@dataclass(frozen=True)
class EvaluationCase(Case):
    """The prompts of one call, and their indices in the dataset `group`."""

    indices: list[int]


def read_datasets(settings: EvaluationSettings) -> dict[str, list[Source]]:
    """The prompts of each dataset, as few of them as the settings ask for.

    Raises:
        ValueError: a row is no prompt, an index comes twice in its dataset, or a dataset keeps no prompt.
    """
    sources = read_sources(
        settings.prompts or [str(PROMPTS_FILE)],
        split="train",
        num_prompts=None,
        keep_responses=False,
        on_bad_row=_refuse,
    )
    datasets: dict[str, list[Source]] = {source.dataset: [] for source in sources}
    if ALL in datasets:
        raise ValueError(f"--prompts has a dataset called {ALL!r}, the name of all together: rename it")
    for source in sources:
        if source.index % (settings.held_out or 1) == 0:
            datasets[source.dataset].append(source)
    for name, members in datasets.items():
        if not members:
            raise ValueError(f"--held-out is {settings.held_out}, but {name} has no prompt with such an index")
    return {name: evenly_spread(members, settings.num_prompts) for name, members in datasets.items()}


def make_cases(datasets: dict[str, list[Source]], encoder: Encoder, batch_size: int) -> list[EvaluationCase]:
    """The calls in order. The last batch of a dataset may be smaller: no prompt counts twice.

    Raises:
        ValueError: the chat template refuses a prompt, or nothing is left of it.
    """
    return [
        _case(name, members[start : start + batch_size], encoder)
        for name, members in datasets.items()
        for start in range(0, len(members), batch_size)
    ]


def _case(dataset: str, members: Sequence[Source], encoder: Encoder) -> EvaluationCase:
    return EvaluationCase(
        dataset,
        [f"{dataset} {source.index}" for source in members],
        [encoder.prompt_ids(source) for source in members],
        [source.index for source in members],
    )


def _refuse(row: BadRow) -> None:
    raise row
