"""The settings of a foreign `config.json`, looked up wherever its writer put them, and checked.

Publishers write the same field at top level, in `dspark_config`, in `dflash_config` or in `transformer_layer_config`.
All four are read alike; two places that disagree are an error. Nothing is guessed: a field without which the drafter
would run and silently draft badly is required.
"""

from typing import Any

import transformers

from ..configuration_dspark import DSparkConfig
from ..errors import CheckpointFieldError

PLACES = ("", "dspark_config", "dflash_config", "transformer_layer_config")
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_TARGET = ("target_model_name_or_path", "target_model_revision")


class Fields:
    """Read-only view of one `config.json`.

    Args:
        source: the folder or repository id, for errors.
        config_dict: the parsed file.
        home: the section where this format writes its drafting fields, to name one that is missing.
    """

    def __init__(self, source: str, config_dict: dict[str, Any], home: str = ""):
        self.source, self.home = source, home
        self.sections = {place: config_dict if place == "" else config_dict.get(place) for place in PLACES}
        for place, section in self.sections.items():
            if section is not None and not isinstance(section, dict):
                raise CheckpointFieldError(source, place, f"must be a JSON object, got {section!r}.")

    def mentions(self, name: str) -> bool:
        """Whether the field stands anywhere, `null` included."""
        return any(name in section for section in self.sections.values() if section)

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a field; `null` counts as absent.

        Raises:
            CheckpointFieldError: two places give different values.
        """
        found = self._find(name)
        for place, value in found[1:]:
            if value != found[0][1]:
                raise CheckpointFieldError(
                    self.source,
                    found[0][0],
                    f"is {found[0][1]!r}, but `{place}` is {value!r}. Keep the one that the drafter was trained with.",
                )
        return found[0][1] if found else default

    def require(self, name: str) -> Any:
        """The value of a field that must be there."""
        value = self.get(name)
        if value is None:
            raise self.error(
                name, "is missing and cannot be guessed. Write the value that the drafter was trained with there."
            )
        return value

    def whole(self, name: str, minimum: int = 1) -> int:
        """The value of a required integer field."""
        value = self.require(name)
        if not is_whole(value) or value < minimum:
            raise self.error(name, f"must be an integer of at least {minimum}, got {value!r}.")
        return value

    def optional_whole(self, name: str, minimum: int = 1) -> int | None:
        """The value of an integer field that may be absent."""
        return None if self.get(name) is None else self.whole(name, minimum)

    def number(self, name: str, default: float | None = None) -> float | None:
        """The value of a numeric field that may be absent."""
        value = self.get(name, default)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise self.error(name, f"must be a number, got {value!r}.")
        return value

    def flag(self, name: str, default: bool | None = None) -> bool:
        """The value of a boolean field: required unless there is a default."""
        value = self.require(name) if default is None else self.get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, f"must be true or false, got {value!r}.")
        return value

    def error(self, name: str, problem: str) -> CheckpointFieldError:
        """An error about a field, under the name by which this file knows it."""
        found = self._find(name)
        field = found[0][0] if found else _dotted(self.home, name)
        return CheckpointFieldError(self.source, field, problem)

    def _find(self, name: str) -> list[tuple[str, Any]]:
        return [
            (_dotted(place, name), section[name])
            for place, section in self.sections.items()
            if section and section.get(name) is not None
        ]


def read_block(fields: Fields, vocab_size: int, sample_from_anchor: bool) -> dict[str, Any]:
    """`block_size` and `mask_token_id`, under the same names in every format."""
    mask_token_id = fields.require("mask_token_id")
    if not is_whole(mask_token_id) or not 0 <= mask_token_id < vocab_size:
        raise fields.error(
            "mask_token_id",
            f"must lie in the vocabulary of {vocab_size} ids, got {mask_token_id!r}. Write the id that the drafter "
            "was trained with there; another token (pad, for instance) is no substitute.",
        )
    return {
        "block_size": fields.whole("block_size", minimum=1 if sample_from_anchor else 2),
        "mask_token_id": mask_token_id,
        "sample_from_anchor": sample_from_anchor,
    }


def read_taps(fields: Fields, name: str = "target_layer_ids", shift: int = 0) -> dict[str, Any]:
    """The tapped layers of the target and, where the file says it, how many layers the target has.

    Args:
        name: what the format calls the list of layers.
        shift: what the format adds to our ids: 1 where ids index `hidden_states`, whose first is the embedding output.
    """
    layer_ids = fields.require(name)
    if not isinstance(layer_ids, list) or not layer_ids or not all(is_whole(layer_id) for layer_id in layer_ids):
        raise fields.error(name, f"must be a non-empty list of integers, got {layer_ids!r}.")
    if layer_ids != sorted(set(layer_ids)):
        raise fields.error(
            name,
            f"must be ascending and without repetition, got {layer_ids}: the order decides which columns of "
            "`fc.weight` read which layer. Write the ids of the training run there.",
        )
    num_target_layers = fields.optional_whole("num_target_layers")
    _check_tap_range(fields, name, layer_ids, shift, num_target_layers)
    return {
        "target_layer_ids": [layer_id - shift for layer_id in layer_ids],
        "num_target_layers": num_target_layers,
    }


def _check_tap_range(fields: Fields, name: str, layer_ids: list[int], shift: int, num_layers: int | None) -> None:
    lowest = shift - 1
    if layer_ids[0] < lowest:
        raise fields.error(name, f"must be {lowest} (the embedding output) or larger, got {layer_ids}.")
    if num_layers is not None and layer_ids[-1] - shift > num_layers - 2:
        raise fields.error(
            name,
            f"must not exceed {num_layers - 2 + shift} for a target of {num_layers} layers, got {layer_ids}: the "
            "output of the last layer cannot be tapped, because transformers hands it out final-normed. Check that "
            "the config belongs to this drafter.",
        )


def read_special_tokens(fields: Fields) -> dict[str, Any]:
    """The ids of the target's special tokens, where the file says them."""
    return {name: fields.get(name) for name in SPECIAL_TOKENS}


def read_target(fields: Fields) -> dict[str, Any]:
    """Which model the drafter is for, where the file says it."""
    return {name: fields.get(name) for name in _TARGET}


def read_heads(fields: Fields) -> dict[str, Any]:
    """The Markov head and the confidence head, under the same names in DeepSpec and speculators."""
    markov_rank = fields.whole("markov_rank", minimum=0)
    confidence = fields.flag("enable_confidence_head")
    return {
        "markov_rank": markov_rank,
        "markov_head_type": fields.require("markov_head_type") if markov_rank else "none",
        "enable_confidence_head": confidence,
        "confidence_head_with_markov": confidence and fields.flag("confidence_head_with_markov"),
    }


NO_HEADS = {
    "markov_rank": 0,
    "markov_head_type": "none",
    "enable_confidence_head": False,
    "confidence_head_with_markov": False,
}


def render_common(config: DSparkConfig) -> dict[str, Any]:
    """What the top level of every foreign `config.json` says: `read_special_tokens`, `read_target` and more."""
    optional = {name: getattr(config, name) for name in (*_TARGET, "num_target_layers")}
    return {
        **{name: getattr(config, name) for name in SPECIAL_TOKENS},
        **{name: value for name, value in optional.items() if value is not None},
        "dtype": config.to_dict().get("dtype"),
        "tie_word_embeddings": False,
        "transformers_version": transformers.__version__,
    }


def render_block(config: DSparkConfig) -> dict[str, Any]:
    """The inverse of `read_block`."""
    return {"block_size": config.block_size, "mask_token_id": config.mask_token_id}


def render_heads(config: DSparkConfig) -> dict[str, Any]:
    """The inverse of `read_heads`. A field that says nothing is left out, as DeepSpec does."""
    heads: dict[str, Any] = {"markov_rank": 0, "enable_confidence_head": config.enable_confidence_head}
    if config.has_markov_head:
        heads |= {"markov_rank": config.markov_rank, "markov_head_type": config.markov_head_type}
    if config.enable_confidence_head:
        heads["confidence_head_with_markov"] = config.confidence_head_with_markov
    return heads


def is_whole(value: Any) -> bool:
    """Whether a JSON value is an integer (`true` is not)."""
    return isinstance(value, int) and not isinstance(value, bool)


def _dotted(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name
