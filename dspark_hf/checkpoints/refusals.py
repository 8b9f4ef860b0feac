"""What is not a drafter that can be opened, and how to tell: one function and one sentence of advice per kind.

A drafter read by the wrong rules runs without any error and is never accepted, so a doubtful one is refused by name.
"""

from typing import Any

from ..errors import UnsupportedCheckpointError

Reason = tuple[str, str] | None
"""What was found, as a noun phrase, and what to do instead."""

_SUPPORTED = (
    "Supported are drafters saved by this package, DeepSpec (Qwen3DSparkModel, Gemma4DSparkModel), z-lab "
    "(DFlashDraftModel) and speculators (dspark, dflash)."
)
_LANGUAGE_MODELS = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")
_DFLASH2_FIELDS = ("selector_rank", "selector_top_k", "conv_kernel_size", "conv_group_size")


def refuse_unsupported(source: str, config_dict: dict[str, Any]) -> None:
    """Raise [`UnsupportedCheckpointError`] if the config tells of a kind that cannot be opened."""
    for kind in (_quantized, _whole_model, _eagle, _dflash2, _other_projector, _deepseek):
        reason = kind(config_dict)
        if reason is not None:
            raise UnsupportedCheckpointError(source, *reason)


def names_a_drafter(config_dict: dict[str, Any]) -> bool:
    """Whether a config is a drafter's by its own account, of a supported kind or not."""
    names = " ".join(_kind_names(config_dict)).lower()
    return "speculators_model_type" in config_dict or "dspark" in names or "dflash" in names


def unknown_kind(source: str, config_dict: dict[str, Any]) -> UnsupportedCheckpointError:
    """The refusal of a config that nothing here recognises."""
    architectures, model_type = config_dict.get("architectures"), config_dict.get("model_type")
    found = f"an unknown kind of model (architectures {architectures}, model_type {model_type!r})"
    return UnsupportedCheckpointError(source, found, _SUPPORTED)


def refuse_files(source: str, names: list[str]) -> None:
    """Raise [`UnsupportedCheckpointError`] if the weights are of a kind that is never opened."""
    gguf = [name for name in names if name.endswith(".gguf")]
    if gguf:
        raise UnsupportedCheckpointError(
            source,
            f"GGUF files ({', '.join(gguf)})",
            "Use the safetensors repository that they were converted from.",
        )
    pickles = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]
    if pickles:
        raise UnsupportedCheckpointError(
            source,
            f"only pickled weights ({', '.join(pickles)})",
            "Pickles can run code and are never opened: ask the author for safetensors.",
        )


def _quantized(config_dict: dict[str, Any]) -> Reason:
    if "group_size" in _section(config_dict, "quantization"):
        return "MLX-quantized weights", "Use the repository that they were converted from."
    if config_dict.get("quantization_config"):
        method = _section(config_dict, "quantization_config").get("quant_method")
        return f"quantized weights (quant_method {method!r})", "Use the unquantized drafter."
    return None


def _whole_model(config_dict: dict[str, Any]) -> Reason:
    architecture = next((name for name in _architectures(config_dict) if name.endswith(_LANGUAGE_MODELS)), None)
    if architecture is None or "speculators_model_type" in config_dict:
        return None
    keys = [*config_dict, *_section(config_dict, "text_config")]
    if any(key.startswith(("dspark", "dflash")) for key in keys):
        return (
            f"a whole language model with a drafter inside ({architecture})",
            "Only drafters in a folder of their own can be opened.",
        )
    return (
        f"an ordinary language model ({architecture})",
        "It can be the target; the drafter is another folder or repository.",
    )


def _eagle(config_dict: dict[str, Any]) -> Reason:
    names = [name for name in _kind_names(config_dict) if "eagle" in name.lower()]
    if not names:
        return None
    head = "an EAGLE-3 head" if "eagle3" in names[0].lower() else "an EAGLE head"
    return f"{head} ({names[0]})", "It drafts one token per pass, by other rules: use a DSpark or DFlash drafter."


def _dflash2(config_dict: dict[str, Any]) -> Reason:
    section = _section(config_dict, "dflash_config")
    named = any("dflash2" in name.lower() for name in _kind_names(config_dict))
    if named or _major(section.get("version")) >= 2 or any(field in section for field in _DFLASH2_FIELDS):
        return "a DFlash 2 drafter", "Its convolutions and candidate selector are not implemented: use a DFlash one."
    return None


def _other_projector(config_dict: dict[str, Any]) -> Reason:
    projector = _section(config_dict, "dflash_config").get("projector_type") or config_dict.get("projector_type")
    if projector in (None, "dflash"):
        return None
    if projector == "dspark":
        return (
            'a SpecForge package (projector_type "dspark")',
            "Whether its anchor position predicts is not certain: use a DeepSpec or speculators export.",
        )
    return f"a drafter with another projector (projector_type {projector!r})", _SUPPORTED


def _deepseek(config_dict: dict[str, Any]) -> Reason:
    layers = _section(config_dict, "transformer_layer_config")
    names = [*_kind_names(config_dict), str(layers.get("model_type", ""))]
    experts = any(section.get("n_routed_experts") for section in (config_dict, layers))
    if experts or any("deepseek" in name.lower() for name in names):
        return (
            "a mixture-of-experts drafter of the DeepSeek kind",
            "Only dense draft layers (Qwen3, Gemma4) can be built.",
        )
    return None


def _kind_names(config_dict: dict[str, Any]) -> list[str]:
    """The strings by which a config says what it is."""
    types = (config_dict.get(key) for key in ("speculators_model_type", "model_type"))
    return [*_architectures(config_dict), *(name for name in types if isinstance(name, str))]


def _architectures(config_dict: dict[str, Any]) -> list[str]:
    return [name for name in config_dict.get("architectures") or () if isinstance(name, str)]


def _section(config_dict: dict[str, Any], name: str) -> dict[str, Any]:
    section = config_dict.get(name)
    return section if isinstance(section, dict) else {}


def _major(version: Any) -> int:
    """The leading number of a version written as a number or a string; 1 where there is none."""
    head = str(version).lstrip("v").split(".")[0]
    return int(head) if head.isdigit() else 1
