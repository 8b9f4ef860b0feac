"""`dspark-hf push` from settings to commit."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from huggingface_hub.utils import get_token
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from ..comparison import check_folders, check_given
from ..modeling_dspark import DSparkDrafter
from ..reports import console_for, json_field, write_json
from .pushing import PushReport, push_drafter_to_hub


@dataclass
class PushSettings:
    """Push a drafter to the Hub: one commit, with a model card and the code for custom_generate."""

    drafter: str | None = field(default=None, metadata={"positional": True, "help": "folder or hub id of the drafter"})
    repo_id: str | None = field(
        default=None,
        metadata={"positional": True, "help": "owner/name of the repository; made if it is not there"},
    )
    target: str | None = field(
        default=None, metadata={"help": "hub id of the target; default: what the drafter's config says"}
    )
    commit_message: str = field(default="Upload drafter", metadata={"help": "first line of the commit"})
    private: bool = field(
        default=False, metadata={"help": "make a new repository private, whatever its owner has set for new ones"}
    )
    revision: str | None = field(default=None, metadata={"help": "branch; default: main"})
    create_pr: bool = field(default=False, metadata={"help": "open a pull request instead of a commit on main"})
    license: str | None = field(
        default=None, metadata={"help": "of the drafter; default: that of the target's card, where it can be read"}
    )
    results: str | None = field(default=None, metadata={"help": "what `dspark-hf eval --json` wrote, for the card"})
    training: list[str] | None = field(
        default=None,
        metadata={"help": "trainer_state.json of the training, .provenance.json of its data, for the card"},
    )
    tags: list[str] | None = field(default=None, metadata={"help": "more tags for the card"})
    card: str | None = field(default=None, metadata={"help": "file of a finished card to push in place of ours"})
    overwrite_card: bool = field(default=False, metadata={"help": "replace the card that the repository has"})
    dry_run: bool = field(default=False, metadata={"help": "send nothing: list the files, and show the card"})
    json: str | None = json_field()

    def __post_init__(self) -> None:
        check_given(self, drafter="a folder or hub id", repo_id="owner/name of the repository")
        if self.card is not None and not Path(self.card).is_file():
            raise ValueError(f"--card is {self.card}, which is no file")
        check_folders(self, "json")


def run_push(settings: PushSettings, console: Console | None = None) -> PushReport:
    """Runs `dspark-hf push`. The token is that of `hf auth login` or HF_TOKEN: a command line is seen by others.

    Raises:
        As [`push_drafter_to_hub`] and `DSparkDrafter.from_pretrained`.
    """
    console = console or console_for(settings.json)
    changed: dict[str, Any] = {} if settings.target is None else {"target_model_name_or_path": settings.target}
    drafter = DSparkDrafter.from_pretrained(str(settings.drafter), **changed)
    report = push_drafter_to_hub(
        drafter,
        str(settings.repo_id),
        commit_message=settings.commit_message,
        private=settings.private or None,
        token=get_token(),
        revision=settings.revision,
        create_pr=settings.create_pr,
        license=settings.license,
        results=settings.results,
        training=settings.training or (),
        tags=settings.tags or (),
        card=None if settings.card is None else ModelCard.load(settings.card),
        overwrite_card=settings.overwrite_card,
        dry_run=settings.dry_run,
    )
    _show(report, console)
    write_json(asdict(report), settings.json)
    return report


def _show(report: PushReport, console: Console) -> None:
    table = Table("file", "size")
    table.columns[1].justify = "right"
    for name, size in report.files.items():
        table.add_row(name, decimal(size))
    for name in report.deleted:
        table.add_row(name, "deleted")
    console.print(table)
    if ModelCard(report.card, ignore_metadata_errors=True).data.license is None:  # type: ignore[attr-defined]
        console.print("The card names no licence: --license gives one.", style="yellow")
    if report.commit is None:
        console.print(report.card, markup=False, highlight=False, soft_wrap=True)
        console.print(f"Dry run: nothing was sent to {report.repo_id}.", style="bold")
    else:
        console.print(report.commit.pr_url or report.commit.commit_url, markup=False, soft_wrap=True)
