"""The drafter: backbone with KV injection, Markov heads, confidence head. No decoding, no loss.

Shapes: B batch, T new context positions, S block positions, H `hidden_size`, V `vocab_size`, Vd `draft_vocab_size`,
r `markov_rank`, m taps of width Ht. Equations are those of the DSpark paper (arXiv 2607.05147, section 3) and of
DFlash (arXiv 2602.06036):

    context features       C = RMSNorm(W_c [h_l1; ...; h_lm])
    keys, values           [W_K C ; W_K X], [W_V C ; W_V X]      queries from the block X alone
    draft distribution     p_k(v) ~ exp(U_k(v) + B_k(v))         U_k from the backbone, B_k from the Markov head
    confidence             c_k = sigmoid(w . [h_k ; W1[x_{k-1}]])
"""

import json
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_outputs import BaseModelOutput
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import GENERATION_CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from .calibration import CALIBRATION_NAME, Calibration
from .checkpoints import read_checkpoint, read_config
from .checkpoints.files import optional_file, with_variant
from .configuration_dspark import DSparkConfig
from .draft_cache import DraftCache
from .registry import find_drafter
from .trace import Trace, recording

# Arguments of `from_pretrained` that say where the files are, and not how to build the model.
HUB_ARGUMENTS = ("revision", "token", "cache_dir", "local_files_only", "force_download", "proxies", "subfolder")
# Of those, what also holds for the repository of the target.
_TARGET_HUB_ARGUMENTS = ("token", "cache_dir", "local_files_only")
_PUSH_ARGUMENTS = ["repo_id", "commit_message", "commit_description", "private", "token", "create_pr", "revision"]
_PUSH_ARGUMENTS += ["max_shard_size", "tags"]
# Arguments of `from_pretrained` that are named like a config field and mean the loading.
_MODEL_ARGUMENTS = ("dtype", "quantization_config")
# What a drafter says in `generation_config.json`.
_DRAFTING_SETTINGS = ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")


class DraftRMSNorm(nn.Module):
    """RMSNorm with float32 statistics. Gemma multiplies by the weight before casting back, the others after."""

    def __init__(self, dim: int, eps: float, scale_in_float32: bool = False, with_weight: bool = True):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim)) if with_weight else None
        self.eps = eps
        self.scale_in_float32 = scale_in_float32

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        dtype = hidden_states.dtype
        normed = hidden_states.float()
        normed = normed * torch.rsqrt(normed.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.weight is None:
            return normed.to(dtype)
        if self.scale_in_float32:
            return (normed * self.weight.float()).to(dtype)
        return self.weight * normed.to(dtype)


class DraftRotaryEmbedding(nn.Module):
    """Cosines and sines of the draft layers. Frequencies come from the config alone: no buffer, nothing to load."""

    def __init__(self, config: DSparkConfig):
        super().__init__()
        self.config = config
        self._frequencies: dict[torch.device, tuple[torch.Tensor, float]] = {}

    def forward(self, position_ids: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """`[B, N]` positions to cos and sin, each `[B, 1, N, head_dim]`."""
        device = position_ids.device
        if device not in self._frequencies:
            self._frequencies[device] = _rope_frequencies(self.config, device)
        frequencies, scaling = self._frequencies[device]
        angles = position_ids[:, None, :, None].float() * frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return (angles.cos() * scaling).to(dtype), (angles.sin() * scaling).to(dtype)


def _rope_frequencies(config: DSparkConfig, device: torch.device) -> tuple[torch.Tensor, float]:
    parameters = config.rope_parameters
    rope_type = parameters.get("rope_type", "default")
    half = config.head_dim // 2
    if rope_type in ("default", "proportional"):
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device) / config.head_dim
        frequencies = parameters["rope_theta"] ** -exponents
        if rope_type == "proportional":
            frequencies[int(parameters.get("partial_rotary_factor", 1.0) * half) :] = 0.0
        return frequencies, 1.0
    return ROPE_INIT_FUNCTIONS[rope_type](config, device)


def _rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = states.chunk(2, dim=-1)
    return states * cos + torch.cat((-second, first), dim=-1) * sin


def eager_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention by its definition, softmax in float32. Query heads are grouped, so that no key is repeated."""
    batch, num_heads, num_queries, head_dim = query.shape
    grouped = query.reshape(batch, key.shape[1], -1, num_queries, head_dim)
    weights = grouped @ key.unsqueeze(2).transpose(-1, -2) * scaling
    if attention_mask is not None:
        weights = weights + attention_mask.unsqueeze(2)
    weights = weights.softmax(dim=-1, dtype=torch.float32).to(query.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    output = (weights @ value.unsqueeze(2)).reshape(batch, num_heads, num_queries, value.shape[-1])
    return output.transpose(1, 2).contiguous(), weights.reshape(batch, num_heads, num_queries, -1)


class BlockMasks:
    """Additive masks of one forward pass, `[B or 1, 1, S, keys]`, made once per kind of layer.

    A full layer needs none, unless the caller's padding mask has a zero: block positions see all of the context and
    each other, in both directions. A sliding layer sees `sliding_window` context positions, counted from the anchor
    or from each query, and its own block causally unless the config says otherwise. With `context_window`, no layer
    sees more context positions than that.

    Args:
        padding_mask: `[B, keys]`, 0 at padding; `None` without padding.
        key_lengths: `[B]`, keys of each row, its block last; `None`: all of them.
        fewest_keys: the smallest of `key_lengths`, known without asking the device.
    """

    def __init__(
        self,
        config: DSparkConfig,
        padding_mask: torch.Tensor | None,
        block_length: int,
        dtype: torch.dtype,
        key_lengths: torch.Tensor | None = None,
        fewest_keys: int = 0,
    ):
        self.config = config
        self.fewest_keys = fewest_keys
        self.padding_mask = padding_mask
        self.key_lengths = key_lengths
        self.block_length = block_length
        self.dtype = dtype
        self._made: dict[tuple[str, int], torch.Tensor | None] = {}

    def first_key(self, num_keys: int) -> int:
        """How many keys, the oldest, nothing in the block sees: they may be left out."""
        window = self.config.context_window
        if window is None:
            return 0
        fewest = num_keys if self.key_lengths is None else self.fewest_keys
        return max(0, fewest - self.block_length - window)

    def attend(
        self, attention: "DraftAttention", query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """`[B, heads, S, head_dim]` queries over what each may see: `[B, S, heads, head_dim]`."""
        first = self.first_key(keys.shape[-2])
        keys, values = keys[:, :, first:], values[:, :, first:]
        mask = self.get(attention.layer_type, keys.shape[-2], keys.device, first)
        return attention.attend(query, keys, values, mask)

    def get(self, layer_type: str, num_keys: int, device: torch.device, first: int = 0) -> torch.Tensor | None:
        """The mask over `num_keys` keys, before which `first` were left out."""
        if (layer_type, num_keys) not in self._made:
            self._made[layer_type, num_keys] = self._make(layer_type, num_keys, device, first)
        return self._made[layer_type, num_keys]

    def _make(self, layer_type: str, num_keys: int, device: torch.device, first: int) -> torch.Tensor | None:
        visible = None
        if layer_type == "sliding_attention" or self.key_lengths is not None:
            visible = self._visible(layer_type, num_keys, device, first)[:, None]
        if self.padding_mask is not None:
            # A host cache may hand out fewer keys than the mask covers: the newest ones.
            padding = self.padding_mask[:, None, None, -num_keys:].bool().to(device)
            visible = padding if visible is None else visible & padding
        if visible is None:
            return None
        mask = torch.zeros(visible.shape, dtype=self.dtype, device=device)
        mask = mask.masked_fill(~visible, torch.finfo(self.dtype).min)
        return mask.expand(-1, -1, self.block_length, -1)

    def _visible(self, layer_type: str, num_keys: int, device: torch.device, first: int) -> torch.Tensor:
        """`[B or 1, S, keys]` booleans; positions are counted from the anchor, so that context has negative ones."""
        if self.key_lengths is None:
            ends = torch.tensor([num_keys], device=device)
        else:
            ends = self.key_lengths.to(device) - first
        query = torch.arange(self.block_length, device=device)[:, None]
        key = torch.arange(num_keys, device=device) - (ends[:, None, None] - self.block_length)
        return self._sees(layer_type, query, key).expand(-1, self.block_length, -1)

    def _sees(self, layer_type: str, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Whether a query of the block sees a key, both by their positions from the anchor: context has negative
        ones. The shapes are broadcast."""
        visible = key < self.block_length
        if self.config.context_window is not None:
            visible = visible & (key >= -self.config.context_window)
        if layer_type == "sliding_attention":
            window = self.config.sliding_window
            if self.config.sliding_window_origin == "anchor":
                visible = visible & ((key >= 0) | (key >= -window))
            else:
                visible = visible & (query - key < window)
            if self.config.sliding_block_causal:
                visible = visible & (key <= query)
        return visible


class DraftAttention(nn.Module):
    """Attention from the block to context and block (KV injection, DFlash section 3)."""

    is_causal = False

    def __init__(self, config: DSparkConfig, layer_idx: int):
        super().__init__()
        gemma = config.backbone == "gemma4"
        width, heads = config.hidden_size, config.num_attention_heads
        self.config = config
        self.layer_idx = layer_idx
        self.layer_type = config.layer_types[layer_idx]
        self.head_dim = config.head_dim
        self.num_key_value_groups = heads // config.num_key_value_heads
        self.scaling = 1.0 if gemma else config.head_dim**-0.5
        self.q_proj = nn.Linear(width, heads * self.head_dim, bias=config.attention_bias)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * self.head_dim, bias=config.attention_bias)
        self.v_proj = None
        if not (gemma and config.attention_k_eq_v):
            self.v_proj = nn.Linear(width, config.num_key_value_heads * self.head_dim, bias=config.attention_bias)
        self.o_proj = nn.Linear(heads * self.head_dim, width, bias=config.attention_bias)
        self.q_norm = DraftRMSNorm(self.head_dim, config.rms_norm_eps, scale_in_float32=gemma)
        self.k_norm = DraftRMSNorm(self.head_dim, config.rms_norm_eps, scale_in_float32=gemma)
        self.v_norm = DraftRMSNorm(self.head_dim, config.rms_norm_eps, with_weight=False) if gemma else None

    def keys_and_values(
        self, states: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`[B, N, H]` to keys (normed, rotated) and values, each `[B, kv_heads, N, head_dim]`."""
        shape = (*states.shape[:2], -1, self.head_dim)
        keys = self.k_proj(states).view(shape)
        values = keys if self.v_proj is None else self.v_proj(states).view(shape)
        if self.v_norm is not None:
            values = self.v_norm(values)
        return _rotate(self.k_norm(keys).transpose(1, 2), *rotary), values.transpose(1, 2)

    def forward(
        self,
        hidden_states: torch.Tensor,
        context: torch.Tensor | None,
        rotary: tuple[torch.Tensor, torch.Tensor],
        masks: BlockMasks,
        cache: Any,
    ) -> torch.Tensor:
        """`[B, S, H]` block and `[B, T, H]` context features to `[B, S, H]`; `rotary` spans T + S positions."""
        batch, block_length, _ = hidden_states.shape
        source = hidden_states if context is None else torch.cat((context, hidden_states), dim=1)
        query = self.q_norm(self.q_proj(hidden_states).view(batch, block_length, -1, self.head_dim)).transpose(1, 2)
        query = _rotate(query, rotary[0][:, :, -block_length:], rotary[1][:, :, -block_length:])
        keys, values = self.keys_and_values(source, rotary)
        if cache is not None:
            keys, values = cache.update(keys, values, self.layer_idx)
        output = masks.attend(self, query, keys, values)
        return self.o_proj(output.reshape(batch, block_length, -1))

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Queries and keys `[B, heads or kv_heads, N, head_dim]`, additive mask: `[B, queries, heads, head_dim]`."""
        dropout = self.config.attention_dropout if self.training else 0.0
        output, _ = self._kernel(mask)(self, query, keys, values, mask, scaling=self.scaling, dropout=dropout)
        return output

    def _kernel(self, mask: torch.Tensor | None) -> Callable:
        implementation = self.config._attn_implementation
        # Flash kernels take no arbitrary mask: the few passes that need one go through sdpa.
        if mask is not None and "flash" in (implementation or ""):
            implementation = "sdpa"
        if implementation == "eager":
            return eager_attention_forward
        return ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)


class DraftMLP(nn.Module):
    def __init__(self, config: DSparkConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(hidden_states)) * self.up_proj(hidden_states))


class Qwen3DraftLayer(nn.Module):
    """Pre-norm draft layer."""

    def __init__(self, config: DSparkConfig, layer_idx: int):
        super().__init__()
        self.self_attn = DraftAttention(config, layer_idx)
        self.mlp = DraftMLP(config)
        self.input_layernorm = DraftRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = DraftRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden_states: torch.Tensor, *attention_inputs: Any) -> torch.Tensor:
        hidden_states = hidden_states + self.self_attn(self.input_layernorm(hidden_states), *attention_inputs)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class Gemma4DraftLayer(nn.Module):
    """Draft layer with norms on both sides of attention and MLP, and a stored scale on its output."""

    def __init__(self, config: DSparkConfig, layer_idx: int):
        super().__init__()
        self.self_attn = DraftAttention(config, layer_idx)
        self.mlp = DraftMLP(config)
        norm = partial(DraftRMSNorm, config.hidden_size, config.rms_norm_eps, scale_in_float32=True)
        self.input_layernorm = norm()
        self.post_attention_layernorm = norm()
        self.pre_feedforward_layernorm = norm()
        self.post_feedforward_layernorm = norm()
        self.register_buffer("layer_scalar", torch.ones(1))

    def forward(self, hidden_states: torch.Tensor, *attention_inputs: Any) -> torch.Tensor:
        attended = self.self_attn(self.input_layernorm(hidden_states), *attention_inputs)
        hidden_states = hidden_states + self.post_attention_layernorm(attended)
        mixed = self.mlp(self.pre_feedforward_layernorm(hidden_states))
        return (hidden_states + self.post_feedforward_layernorm(mixed)) * self.layer_scalar


DRAFT_LAYERS = {"qwen3": Qwen3DraftLayer, "gemma4": Gemma4DraftLayer}


class VanillaMarkovHead(nn.Module):
    """B_k = W2 W1[x_{k-1}]: a low-rank bigram bias (paper, section 3.2)."""

    def __init__(self, config: DSparkConfig):
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, config.draft_vocab_size, bias=False)

    def initial_state(self, batch_size: int) -> torch.Tensor | None:
        """The recurrent state before a block, `[B, r]`; `None` where the head has no memory."""
        return None

    def latent(
        self, previous_ids: torch.Tensor, hidden_states: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What W2 is applied to, `[B, r]`, and the next state: all of the head but its largest product."""
        return self.markov_w1(previous_ids), state

    def forward(
        self, previous_ids: torch.Tensor, hidden_states: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`[B]` previous tokens, `[B, H]` backbone state, recurrent state to a `[B, Vd]` bias and the next state."""
        latent, state = self.latent(previous_ids, hidden_states, state)
        return self.markov_w2(latent), state


class GatedMarkovHead(VanillaMarkovHead):
    """B_k = W2 (sigmoid(W_g [h_k ; W1[x_{k-1}]]) * W1[x_{k-1}])."""

    def __init__(self, config: DSparkConfig):
        super().__init__(config)
        self.gate_proj = nn.Linear(config.hidden_size + config.markov_rank, config.markov_rank)

    def latent(
        self, previous_ids: torch.Tensor, hidden_states: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        latent = self.markov_w1(previous_ids)
        gate = self.gate_proj(torch.cat((hidden_states, latent), dim=-1)).sigmoid()
        return gate * latent, state


class RNNMarkovHead(VanillaMarkovHead):
    """z = W_z [s_{k-1} ; W1[x_{k-1}] ; h_k] = [g ; c ; o], s_k = sigmoid(g) s_{k-1} + (1 - sigmoid(g)) tanh(c),
    B_k = W2 tanh(o), s_0 = 0 at every block."""

    def __init__(self, config: DSparkConfig):
        super().__init__(config)
        self.joint_proj = nn.Linear(2 * config.markov_rank + config.hidden_size, 3 * config.markov_rank)

    def initial_state(self, batch_size: int) -> torch.Tensor:
        return self.joint_proj.weight.new_zeros(batch_size, self.markov_w1.embedding_dim)

    def latent(
        self, previous_ids: torch.Tensor, hidden_states: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        assert state is not None
        joint = self.joint_proj(torch.cat((state, self.markov_w1(previous_ids), hidden_states), dim=-1))
        gate, candidate, output = joint.chunk(3, dim=-1)
        gate = gate.sigmoid()
        state = gate * state + (1 - gate) * candidate.tanh()
        return output.tanh(), state


MARKOV_HEADS = {"vanilla": VanillaMarkovHead, "gated": GatedMarkovHead, "rnn": RNNMarkovHead}


def _applied(linear: nn.Module, states: torch.Tensor) -> torch.Tensor:
    """A linear layer on `[..., H]` states as on a matrix of them. Of a part of each row, be it of a single row,
    PyTorch multiplies one row after the other on a CPU, each with a copy of the whole weight."""
    return linear(states.reshape(-1, states.shape[-1])).unflatten(0, states.shape[:-1])


class ConfidenceHead(nn.Module):
    """Logit of the chance that a draft token survives, given that all before it do (paper, section 3.3)."""

    def __init__(self, config: DSparkConfig):
        super().__init__()
        self.with_markov = config.confidence_head_with_markov
        self.proj = nn.Linear(config.hidden_size + (config.markov_rank if self.with_markov else 0), 1)

    def forward(self, hidden_states: torch.Tensor, latent: torch.Tensor | None) -> torch.Tensor:
        """`[..., H]` states and `[..., r]` W1 rows of the previous tokens to `[...]` logits in float32."""
        features = hidden_states if latent is None else torch.cat((hidden_states, latent), dim=-1)
        return self.proj(features).squeeze(-1).float()


class DSparkDrafter(PreTrainedModel):
    """A DSpark (or DFlash) drafter: proposes a block of tokens from a target's hidden states.

    It is handed to the target: `target.generate(..., assistant_model=drafter)`. `generation_config` holds its
    settings, named as in transformers: `num_assistant_tokens` (default: all that a block gives),
    `assistant_confidence_threshold` (default: off) and `num_assistant_tokens_schedule` (default: `"auto"`).
    `calibration` holds the temperatures of its confidences, where `dspark_calibration.json` lies beside it;
    `cost_model`, a [`~dspark_hf.cost_model.CostModel`], prices that schedules shall go by instead of the clock.
    """

    config: DSparkConfig
    config_class = DSparkConfig
    d2t: torch.Tensor
    base_model_prefix = "drafter"
    main_input_name = "noise_embeds"
    _no_split_modules = ["Qwen3DraftLayer", "Gemma4DraftLayer"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True
    # Known companions of some formats that drafting does not need; everything else left over is an error.
    _keys_to_ignore_on_load_unexpected = [r"^t2d$", r"^verifier_(lm_head|norm)\."]  # noqa: RUF012

    def __init__(self, config: DSparkConfig):
        super().__init__(config)
        self.generation_config = GenerationConfig()
        self.calibration: Calibration | None = None
        self.cost_model: Any = None
        gemma = config.backbone == "gemma4"
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size) if config.own_embed_tokens else None
        self.fc = nn.Linear(len(config.target_layer_ids) * config.target_hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = DraftRMSNorm(config.hidden_size, config.rms_norm_eps, scale_in_float32=gemma)
        layer = DRAFT_LAYERS[config.backbone]
        self.layers: Any = nn.ModuleList([layer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = DraftRMSNorm(config.hidden_size, config.rms_norm_eps, scale_in_float32=gemma)
        self.rotary_emb = DraftRotaryEmbedding(config)
        self.lm_head = None
        if config.own_lm_head:
            self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.markov_head = MARKOV_HEADS[config.markov_head_type](config) if config.has_markov_head else None
        self.confidence_head = ConfidenceHead(config) if config.enable_confidence_head else None
        if config.has_reduced_vocabulary:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
        self.post_init()

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls, pretrained_model_name_or_path: str | os.PathLike, *model_args: Any, config: Any = None, **kwargs: Any
    ) -> Any:
        """Opens a drafter in our format or in any published one (see `dspark_hf.checkpoints`).

        Takes the arguments of [`~transformers.PreTrainedModel.from_pretrained`]; those named like a config field
        change it. Weights come from safetensors only; no code from the repository is run.

        Raises:
            OSError: no such folder, repository or file.
            UnsupportedCheckpointError: something else than a drafter is there (the message says what).
            CheckpointFieldError: a field of the config is missing or impossible.
            IncompleteCheckpointError: tensors are missing, left over or misshapen (the message names them).
        """
        if pretrained_model_name_or_path is None:
            raise ValueError("`from_pretrained` needs a folder or repository; build an empty drafter with its class.")
        location = {name: kwargs[name] for name in HUB_ARGUMENTS if name in kwargs}
        kwargs.pop("code_revision", None)  # no code is ever taken from a repository
        checkpoint = read_checkpoint(pretrained_model_name_or_path, variant=kwargs.get("variant"), **location)
        config = _resolve_config(checkpoint.config, config, location, kwargs)
        checkpoint.require(cls.tensor_shapes(config))
        kwargs["use_safetensors"] = True
        loaded = super().from_pretrained(pretrained_model_name_or_path, *model_args, config=config, **kwargs)
        drafter = loaded[0] if isinstance(loaded, tuple) else loaded
        drafter.generation_config = _read_generation_config(pretrained_model_name_or_path, location)
        drafter.calibration = _read_calibration(pretrained_model_name_or_path, location, drafter.config)
        return loaded

    @classmethod
    def for_target(cls, target: Any, **kwargs: Any) -> Any:
        """Opens the drafter that is known for a target, or for the model that the target was made from.

        Args:
            target: a loaded model, whose dtype and device are then the defaults; a config, hub id or folder.
            kwargs: as for `from_pretrained`.

        Raises:
            UnknownTargetError: no drafter is known for it, or none that can be used (the message says what to do).
            AlignmentError: the drafter does not fit: the target is not what its name or its card say.
            Others: as `from_pretrained`.
        """
        location = {name: kwargs[name] for name in _TARGET_HUB_ARGUMENTS if name in kwargs}
        match = find_drafter(target, **location)
        if isinstance(target, PreTrainedModel) and target.device.type != "meta":  # offloaded
            kwargs = {"dtype": target.dtype, "device_map": target.device, **kwargs}
        loaded = cls.from_pretrained(match.pair.location, **kwargs)
        match.confirm(target, (loaded[0] if isinstance(loaded, tuple) else loaded).config, **location)
        return loaded

    def save_pretrained(  # type: ignore[override]
        self,
        save_directory: str | os.PathLike,
        is_main_process: bool = True,
        state_dict: dict | None = None,
        push_to_hub: bool = False,
        **kwargs: Any,
    ) -> None:
        """Writes our format: `config.json`, `generation_config.json`, safetensors, and the calibration if there is
        one.

        Takes the arguments of [`~transformers.PreTrainedModel.save_pretrained`].
        """
        super().save_pretrained(save_directory, is_main_process=is_main_process, state_dict=state_dict, **kwargs)
        if not is_main_process:
            return
        _remove_weights_of_before(Path(save_directory), kwargs.get("variant"))
        # Before any push, which `super` would do without this file.
        self.generation_config.save_pretrained(save_directory)
        if self.calibration is not None:
            self.calibration.save(save_directory)
        else:
            # One that is there was measured with the weights that stood there before.
            Path(save_directory, CALIBRATION_NAME).unlink(missing_ok=True)
        if push_to_hub:
            options = {name: kwargs[name] for name in _PUSH_ARGUMENTS if name in kwargs}
            repo_id = options.pop("repo_id", os.path.basename(os.path.normpath(save_directory)))
            self.push_to_hub(repo_id, **options)

    def get_input_embeddings(self) -> nn.Module | None:  # type: ignore[override]
        return self.embed_tokens

    def get_output_embeddings(self) -> nn.Module | None:
        return self.lm_head

    def trace(self) -> AbstractContextManager[Trace]:
        """`with drafter.trace() as trace:` records every `generate` call with this drafter in the current context.

        A trace belongs to the context (thread or task) that opened it: open it inside the thread that generates.
        """
        return recording(self)

    def forward(
        self,
        noise_embeds: torch.Tensor,
        context_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        masks: BlockMasks | None = None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        """The backbone over one block. Argument names are those of transformers for this kind of drafter.

        Args:
            noise_embeds: `[B, S, H]` embeddings of anchor and masks.
            context_hidden_states: `[B, T, m * Ht]` tapped hidden states of new context positions, in the order of
                `target_layer_ids`; `None` where nothing is new.
            attention_mask: `[B, cached + T + S]`, 0 at padding; `None` without padding.
            position_ids: `[B, T + S]` positions of the new context and the block; `None`: consecutive, behind what
                the cache holds.
            cache: a [`DraftCache`] (or a `DFlashCache` of transformers); it is handed context and block together,
                and the caller keeps the context only.
            past_key_values: the name of `cache` until transformers 5.24.
            masks: who sees whom, in place of the rule for one block; training passes many of them side by side.

        Returns:
            `last_hidden_state`: `[B, S, H]`, after the final norm.
        """
        cache = cache if cache is not None else past_key_values
        batch, block_length, _ = noise_embeds.shape
        num_new = block_length + (0 if context_hidden_states is None else context_hidden_states.shape[1])
        if position_ids is None:
            past = 0 if cache is None else cache.get_seq_length()
            position_ids = torch.arange(past, past + num_new, device=noise_embeds.device).expand(batch, -1)
        if position_ids.shape[-1] != num_new:
            raise ValueError(
                f"`position_ids` must span the {num_new} new positions (context and block), "
                f"got {position_ids.shape[-1]}."
            )
        context = None if context_hidden_states is None else self.project_context(context_hidden_states)
        rows = (cache.key_lengths, cache.fewest_keys) if isinstance(cache, DraftCache) else (None, 0)
        if masks is None:
            masks = BlockMasks(self.config, attention_mask, block_length, noise_embeds.dtype, *rows)
        rotary = self.rotary_emb(position_ids, noise_embeds.dtype)
        hidden_states = noise_embeds
        for layer in self.layers:
            hidden_states = layer(hidden_states, context, rotary, masks, cache)
        return BaseModelOutput(last_hidden_state=self.norm(hidden_states))

    def project_context(self, context_hidden_states: torch.Tensor) -> torch.Tensor:
        """`[B, T, m * Ht]` tapped hidden states to `[B, T, H]` context features, the same for every layer."""
        return self.hidden_norm(_applied(self.fc, context_hidden_states))

    def append_context(
        self, context_hidden_states: torch.Tensor, position_ids: torch.Tensor, cache: DraftCache
    ) -> None:
        """Commits `[B, T, m * Ht]` tapped hidden states at `[B, T]` positions to the cache, without drafting.

        Where rows are uneven, `cache.expect` comes first, and `cache.commit` after.
        """
        context = self.project_context(context_hidden_states)
        rotary = self.rotary_emb(position_ids, context.dtype)
        for index, layer in enumerate(self.layers):
            cache.update(*layer.self_attn.keys_and_values(context, rotary), index)
        if cache.key_lengths is None:
            cache.commit(context.shape[1])

    def base_logits(self, hidden_states: torch.Tensor, lm_head: nn.Module) -> torch.Tensor:
        """U: `[..., H]` backbone states to `[..., Vd]` logits, in the dtype of `lm_head`."""
        weight = getattr(lm_head, "weight", None)
        if weight is not None and weight.is_floating_point() and not weight.is_meta:
            # A borrowed head may live on another device, in another dtype.
            hidden_states = hidden_states.to(weight.device, weight.dtype)
        logits = _applied(lm_head, hidden_states)
        if self.config.logits_multiplier != 1.0:
            logits = logits * self.config.logits_multiplier
        cap = self.config.final_logit_softcapping
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def confidence(self, hidden_states: torch.Tensor, previous_ids: torch.Tensor, position: int = 0) -> torch.Tensor:
        """c_k: `[B, n, H]` states and the `[B, n]` tokens before each position to `[B, n]` probabilities, float32.

        Args:
            position: the draft position of the first one, from 0: each has its temperature, once calibrated.
        """
        logits = self.confidence_logits(hidden_states, previous_ids)
        if self.calibration is not None:
            logits = self.calibration.applied(logits, position)
        return logits.sigmoid()

    def confidence_logits(self, hidden_states: torch.Tensor, previous_ids: torch.Tensor) -> torch.Tensor:
        """`[..., H]` states and `[...]` tokens before each position to `[...]` logits, float32, before calibration."""
        assert self.confidence_head is not None
        latent = None
        if self.confidence_head.with_markov:
            assert self.markov_head is not None
            latent = self.markov_head.markov_w1(previous_ids)
        return self.confidence_head(hidden_states, latent)

    @classmethod
    def tensor_shapes(cls, config: DSparkConfig) -> dict[str, list[int]]:
        """The shape of each tensor that a file of such a drafter holds, by name; nothing is allocated."""
        with torch.device("meta"):
            return {name: list(tensor.shape) for name, tensor in cls(config).state_dict().items()}

    @property
    def proposed_ids(self) -> torch.Tensor:
        """`[draft_vocab_size]` token ids of the head's rows."""
        return self.to_target_ids(torch.arange(self.config.draft_vocab_size, device=self.device))

    def to_target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Indices of the head's rows to token ids; the same where the drafter proposes the whole vocabulary."""
        return draft_ids + self.d2t[draft_ids] if self.config.has_reduced_vocabulary else draft_ids


def _remove_weights_of_before(folder: Path, variant: str | None) -> None:
    """Of one file of weights and the index of several, only the newer one is meant: who opens the folder would take
    the single file, whatever it is of."""
    single, index = (folder / with_variant(name, variant) for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME))
    if single.exists() and index.exists():
        older = single if index.stat().st_mtime_ns > single.stat().st_mtime_ns else index
        older.unlink()


def _read_generation_config(source: str | os.PathLike, location: dict) -> GenerationConfig:
    """The drafter's own settings where the checkpoint has some; the defaults otherwise."""
    path = optional_file(source, GENERATION_CONFIG_NAME, **location)
    if path is None:
        return GenerationConfig()
    with open(path, encoding="utf-8") as file:
        try:
            settings = json.load(file)
        except json.JSONDecodeError as error:
            raise OSError(
                f"{path} is not a valid JSON file ({error}). Mend it, or delete it: it is optional."
            ) from error
    # A foreign checkpoint may carry its target's sampling settings, which are not the drafter's to say.
    return GenerationConfig(**{name: settings[name] for name in _DRAFTING_SETTINGS if settings.get(name) is not None})


def _read_calibration(source: str | os.PathLike, location: dict, config: DSparkConfig) -> Calibration | None:
    """The calibration beside the checkpoint, if it is one of this drafter."""
    calibration = Calibration.load(source, **location)
    if calibration is not None and len(calibration.temperatures) != config.num_draft_tokens:
        raise OSError(
            f"{CALIBRATION_NAME} of {source} has {len(calibration.temperatures)} temperatures, but the drafter "
            f"proposes {config.num_draft_tokens} tokens. It belongs to another one: delete it, or write it anew with "
            "`dspark-hf calibrate`."
        )
    return calibration


def _resolve_config(
    found: DSparkConfig, given: DSparkConfig | str | os.PathLike | None, location: dict, kwargs: dict[str, Any]
) -> DSparkConfig:
    """The checkpoint's config or the caller's, with the fields that `kwargs` names changed (and taken out of it)."""
    if isinstance(given, (str, os.PathLike)):
        given = read_config(given, found, **location)
    settings = (found if given is None else given).to_dict()
    changed = {name: kwargs.pop(name) for name in list(kwargs) if name in settings and name not in _MODEL_ARGUMENTS}
    if given is not None and not changed:
        return given
    config = DSparkConfig.from_dict({**settings, **changed})
    config._attn_implementation = (found if given is None else given)._attn_implementation
    return config


__all__ = ["DSparkDrafter"]
