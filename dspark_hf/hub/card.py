"""The model card of a drafter: typed metadata, and a template file for the text.

Numbers come from files that a command wrote, never from here; what no file says is left out.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from ..evaluation.prompts import ALL
from ..modeling_dspark import DSparkDrafter
from .records import Facts, Measured, read_results, read_training

TEMPLATE = Path(__file__).with_name("model_card_template.md")
LIBRARY_NAME = "dspark-hf"
TAGS = ["dspark", "speculative-decoding", "custom_generate"]
# Of the four that the Hub knows (finetune, adapter, merge, quantized): the target stays as it is, and is needed.
BASE_MODEL_RELATION = "adapter"
LICENSE_FIELDS = ("license", "license_name", "license_link")


def make_model_card(
    drafter: DSparkDrafter,
    repo_id: str,
    *,
    license: Mapping[str, str] | None = None,
    results: str | os.PathLike | None = None,
    training: Sequence[str | os.PathLike] = (),
    tags: Sequence[str] = (),
) -> ModelCard:
    """The card of a drafter in the repository `repo_id`.

    Args:
        license: `license`, and where that is "other" `license_name` and `license_link`; `None` or empty: no licence.
        results: what `dspark-hf eval --json` wrote, for the tables of acceptance and speed. Of several drafters it
            takes the one that is called like the repository.
        training: `trainer_state.json` of a training run, and `NAME.provenance.json` of its data.
        tags: to be added to those that every drafter has.

    Raises:
        ValueError: a file is not what it should be, or is about another target or another drafter.
        OSError: a file cannot be read.
    """
    measured = None if results is None else read_results(results, drafter.config, repo_id)
    trained = [read_training(path, drafter.config) for path in training]
    evaluated, name = _eval_results(measured), repo_id.rpartition("/")[2]
    licence: dict[str, Any] = {field: (license or {}).get(field) for field in LICENSE_FIELDS}
    data = ModelCardData(
        base_model=drafter.config.target_model_name_or_path,
        base_model_relation=BASE_MODEL_RELATION,
        library_name=LIBRARY_NAME,
        pipeline_tag="text-generation",
        tags=[*TAGS, *tags],
        # The name is that of the results: it stands nowhere else in the metadata.
        model_name=name if evaluated else None,
        eval_results=evaluated or None,
        **licence,
    )
    calibration = drafter.calibration
    return ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        name=name,
        repo_id=repo_id,
        is_dflash=not (drafter.config.sample_from_anchor or drafter.config.has_markov_head),
        facts=_describe(drafter),
        measured=measured,
        # Without a report there are temperatures, but no numbers of theirs.
        calibration=calibration if calibration is not None and calibration.positions else None,
        trained=trained,
    )


def _describe(drafter: DSparkDrafter) -> Facts:
    """What the config and the weights say."""
    config = drafter.config
    num_parameters = sum(p.numel() for p in drafter.parameters())
    facts = {
        "draft tokens per block": str(config.num_draft_tokens),
        "draft layers": f"{config.num_hidden_layers} ({config.backbone}), width {config.hidden_size}",
        "tapped layers of the target (-1: the embedding)": ", ".join(map(str, config.target_layer_ids)),
        "Markov head": f"{config.markov_head_type}, rank {config.markov_rank}" if config.has_markov_head else "none",
        "confidence head": _confidence_head(drafter),
        "ids that it proposes": f"{config.draft_vocab_size:,} of {config.vocab_size:,}",
        "parameters": f"{num_parameters:,}, {str(drafter.dtype).removeprefix('torch.')}",
    }
    if config.borrowed_parts:
        facts["taken from the target, not stored here"] = " and ".join(config.borrowed_parts)
    return facts


def _confidence_head(drafter: DSparkDrafter) -> str:
    if not drafter.config.enable_confidence_head:
        return "none"
    return "yes" if drafter.calibration is None else "yes, with calibrated temperatures"


def _eval_results(measured: Measured | None) -> list[EvalResult]:
    """The accepted length, which does not depend on the machine; speed stands in the text, beside the machine."""
    if measured is None:
        return []
    lengths = {name: numbers["drafts"]["acceptance_length"] for name, numbers in measured.datasets.items()}
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=name,
            dataset_name=name,
            metric_type="acceptance_length",
            metric_name="acceptance length τ of full drafts",
            metric_value=round(length, 3),
        )
        for name, length in lengths.items()
        if name != ALL and length is not None
    ]
