"""Models with random weights: what they cost depends on their shape only, and no download is needed."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, Qwen3Config

from ..checkpoints import refuse_missing_folder
from ..configuration_dspark import DSparkConfig
from ..modeling_dspark import DSparkDrafter

_QWEN3: dict[str, Any] = {
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    },
    "qwen3-1.7b": {
        **_QWEN3,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
    },
    "qwen3-4b": {
        **_QWEN3,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
    },
    "qwen3-8b": {
        **_QWEN3,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
    },
}

# Far above what the layers add to the residual stream, so that the embedding decides the next token.
_EMBEDDING_STD = 8.0
# Of the published drafters (paper, section 5).
_NUM_TAPS = 5


def random_target(shape: str, dtype: torch.dtype, device: str, seed: int = 0) -> PreTrainedModel:
    """A target that writes a fixed, endless, unforeseeable text with wide margins, at the full cost of its shape.

    The usual random weights would not do: their logits are so close to each other that in half precision a block pass
    and a one-token pass choose different tokens. Here the next token is a fixed function of the last one, which runs
    through the whole vocabulary before it repeats itself.

    Args:
        shape: a key of `SHAPES`, or a hub id or folder with a config. Embedding and head are not tied in any case.

    Raises:
        OSError: the folder is not there, or the hub has no such model.
    """
    torch.manual_seed(seed)
    with torch.device(device):
        target = AutoModelForCausalLM.from_config(_config(shape), dtype=dtype)
    _chain_tokens(target)
    target.generation_config.eos_token_id = None
    target.generation_config.pad_token_id = 0
    return target.eval()


def _config(shape: str) -> PreTrainedConfig:
    if shape in SHAPES:
        config: PreTrainedConfig = Qwen3Config(**SHAPES[shape])
    else:
        refuse_missing_folder(shape)
        config = AutoConfig.from_pretrained(shape)
    config.tie_word_embeddings = False
    return config


@torch.no_grad()
def _chain_tokens(target: PreTrainedModel) -> None:
    """Makes each token call for the next one in a random cycle through the vocabulary."""
    embedding: Any = target.get_input_embeddings().weight  # (vocabulary, hidden)
    head: Any = target.get_output_embeddings().weight
    embedding.normal_(std=_EMBEDDING_STD)
    order = torch.randperm(head.shape[0], device=embedding.device)
    predecessors = torch.empty_like(order)
    predecessors[order.roll(-1)] = order
    head.copy_(embedding[predecessors] / _EMBEDDING_STD)


def random_drafter(target: PreTrainedModel, num_layers: int, seed: int = 0) -> DSparkDrafter:
    """A drafter of the published shape (blocks of 7, Markov rank 256, five taps) with random weights for a target, on
    its device and in its dtype."""
    config = target.config.get_text_config(decoder=True)
    draft_config = DSparkConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        max_position_embeddings=config.max_position_embeddings,
        mask_token_id=config.vocab_size - 1,
        target_layer_ids=_taps(config.num_hidden_layers),
        num_target_layers=config.num_hidden_layers,
    )
    torch.manual_seed(seed)
    with torch.device(target.device):
        return AutoModel.from_config(draft_config, dtype=target.dtype).eval()


def _taps(num_layers: int) -> list[int]:
    """Layers spread evenly over all but the last one, which cannot be tapped."""
    last = num_layers - 2
    return sorted({round(last * (i + 0.5) / _NUM_TAPS) for i in range(_NUM_TAPS)})
