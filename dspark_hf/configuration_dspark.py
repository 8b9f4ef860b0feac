"""Every setting of a DSpark drafter: meaning, default and check, in one place.

Foreign checkpoints (DeepSpec, z-lab DFlash, vLLM speculators) are translated into this config by
`dspark_hf.checkpoints`; nothing else in the package knows their key names.
"""

from typing import Any

from transformers import PreTrainedConfig

BACKBONES = ("qwen3", "gemma4")
MARKOV_HEADS = ("none", "vanilla", "gated", "rnn")
LAYER_TYPES = ("full_attention", "sliding_attention")
WINDOW_ORIGINS = ("query", "anchor")


class DSparkConfig(PreTrainedConfig):
    r"""Configuration of a [`DSparkDrafter`].

    Vocabulary and sizes:
        vocab_size (`int`): ids that the drafter can read (the target's vocabulary): rows of the embedding and of W1.
        draft_vocab_size (`int`, *optional*): ids that it can propose: rows of the head and of W2. `None`: all of them.
            A smaller one comes with the buffer `d2t`, offsets that turn a draft id into a target id.
        hidden_size (`int`): width of the draft layers. A drafter that borrows the target's embedding or head has the
            target's width.
        target_hidden_size (`int`, *optional*): width of the target's hidden states. `None`: `hidden_size`.
        intermediate_size (`int`): width of the MLPs.
        num_hidden_layers (`int`): draft layers. Unrelated to the number of taps.
        num_attention_heads, num_key_value_heads, head_dim (`int`): attention geometry of the draft layers.

    Backbone:
        backbone (`"qwen3"` or `"gemma4"`): the kind of draft layer. Free of the target's family.
        hidden_act (`str`), rms_norm_eps (`float`), attention_bias (`bool`), attention_dropout (`float`): as in
            transformers.
        attention_k_eq_v (`bool`): gemma4 only: values are the key projection before its norm and rotation.
        rope_parameters (`dict`): `rope_type`, `rope_theta` and what the type needs, as in transformers.
        max_position_embeddings (`int`): longest position the drafter was made for.
        layer_types (`list[str]`, *optional*): `"full_attention"` or `"sliding_attention"` per draft layer.
            `None`: all full.
        sliding_window (`int`, *optional*): context positions that a sliding layer sees.
        sliding_window_origin (`"query"` or `"anchor"`): a sliding layer counts its window back from each block
            position (z-lab) or, for the whole block, from the anchor (speculators).
        sliding_block_causal (`bool`): whether block positions of a sliding layer see only earlier block positions.
            Full layers always see the whole block, in both directions.
        context_window (`int`, *optional*): context positions that any layer sees at most, the newest ones. A drafter
            that was trained on short sequences keeps its acceptance, and its cost, at any depth. `None`: all.

    Drafting:
        block_size (`int`): positions of a block, the anchor included.
        mask_token_id (`int`): the id that stands at every block position but the anchor.
        sample_from_anchor (`bool`): `True` (DSpark): the anchor position predicts the first draft token, and a block
            gives `block_size` tokens. `False` (DFlash): only mask positions predict, `block_size - 1` tokens.
        target_layer_ids (`list[int]`): the tapped decoder layers, ascending; `k` is the output of decoder layer `k`
            (0-based), `-1` the embedding output. The last layer cannot be tapped: what training saw there is the raw
            residual, which transformers does not hand out.
        num_target_layers (`int`, *optional*): decoder layers of the target, to check pairs.
        markov_head_type (`"none"`, `"vanilla"`, `"gated"` or `"rnn"`), markov_rank (`int`): the sequential head.
        enable_confidence_head (`bool`): whether the drafter predicts how likely each draft token survives.
        confidence_head_with_markov (`bool`): whether that head also reads W1 of the previous token.

    Embedding and head:
        own_embed_tokens, own_lm_head (`bool`): whether the checkpoint has its own; otherwise the target's are used,
            without a copy; of its head the rows of the draft vocabulary.
        embedding_scale (`float`, *optional*): factor on raw embedding rows. `None`: what the target's embedding
            module gives, its own scaling included.
        logits_multiplier (`float`), final_logit_softcapping (`float`, *optional*): applied to the base logits, in
            this order, before the Markov bias.

    Special tokens:
        bos_token_id, eos_token_id, pad_token_id (`int`, *optional*): the target's, where the checkpoint says them.
            Drafting does not use them; pipelines compare them with the target's.

    Provenance:
        target_model_name_or_path, target_model_revision (`str`, *optional*): the model that it drafts for.
        source_format (`str`, *optional*): the format that it was read from.
        converted_from (`dict`, *optional*): the `config.json` of each format that it was converted from, by format:
            a conversion back gives the same file.

    Raises:
        ValueError: a field contradicts another one or its own range; the message names the field.
    """

    model_type = "dspark"

    vocab_size: int = 32000
    draft_vocab_size: int = None  # type: ignore[assignment]  # resolved below, as all fields marked like this
    hidden_size: int = 1024
    target_hidden_size: int = None  # type: ignore[assignment]
    intermediate_size: int = 3072
    num_hidden_layers: int = 5
    num_attention_heads: int = 16
    num_key_value_heads: int = None  # type: ignore[assignment]
    head_dim: int = None  # type: ignore[assignment]

    backbone: str = "qwen3"
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    attention_dropout: float = 0.0
    attention_k_eq_v: bool = False
    rope_parameters: dict = None  # type: ignore[assignment]
    max_position_embeddings: int = 32768
    initializer_range: float = 0.02
    layer_types: list[str] = None  # type: ignore[assignment]
    sliding_window: int = None  # type: ignore[assignment]
    sliding_window_origin: str = "anchor"
    sliding_block_causal: bool = True
    context_window: int | None = None

    block_size: int = 7
    mask_token_id: int = None  # type: ignore[assignment]
    sample_from_anchor: bool = True
    target_layer_ids: list[int] = None  # type: ignore[assignment]
    num_target_layers: int | None = None
    markov_head_type: str = "vanilla"
    markov_rank: int = 256
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True

    own_embed_tokens: bool = False
    own_lm_head: bool = False
    embedding_scale: float | None = None
    logits_multiplier: float = 1.0
    final_logit_softcapping: float | None = None

    target_model_name_or_path: str | None = None
    target_model_revision: str | None = None
    source_format: str | None = None
    converted_from: dict | None = None

    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.target_hidden_size is None:
            self.target_hidden_size = self.hidden_size
        if self.draft_vocab_size is None:
            self.draft_vocab_size = self.vocab_size
        if self.layer_types is None:
            self.layer_types = ["full_attention"] * self.num_hidden_layers
        if self.rope_parameters is None and "rope_theta" not in kwargs:
            self.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
        super().__post_init__(**kwargs)
        # A bare `DSparkConfig()` is what transformers builds to find a class's defaults: nothing to check there yet.
        if self.mask_token_id is not None or self.target_layer_ids is not None:
            self._check()

    @property
    def num_draft_tokens(self) -> int:
        """Tokens that one block gives: the largest useful `num_assistant_tokens`."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @property
    def first_draft_slot(self) -> int:
        """Block position of the first prediction: 0 where the anchor predicts, else 1."""
        return 0 if self.sample_from_anchor else 1

    @property
    def has_markov_head(self) -> bool:
        return self.markov_head_type != "none"

    @property
    def borrowed_parts(self) -> list[str]:
        """What comes from the target: "embedding", "head"."""
        owned = {"embedding": self.own_embed_tokens, "head": self.own_lm_head}
        return [part for part, is_owned in owned.items() if not is_owned]

    @property
    def has_reduced_vocabulary(self) -> bool:
        return self.draft_vocab_size != self.vocab_size

    def _check(self) -> None:
        self._check_sizes()
        self._check_taps()
        self._check_block()
        self._check_heads()
        self._check_windows()

    def _check_sizes(self) -> None:
        for field in (
            "vocab_size",
            "draft_vocab_size",
            "hidden_size",
            "target_hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
        ):
            value = getattr(self, field)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"`{field}` must be a positive integer, got {value!r}.")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"`num_attention_heads` ({self.num_attention_heads}) must be a multiple of `num_key_value_heads` "
                f"({self.num_key_value_heads})."
            )
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(
                f"`draft_vocab_size` ({self.draft_vocab_size}) cannot exceed `vocab_size` ({self.vocab_size})."
            )
        if self.backbone not in BACKBONES:
            raise ValueError(f"`backbone` must be one of {', '.join(BACKBONES)}, got {self.backbone!r}.")
        borrows = [name for name in ("own_embed_tokens", "own_lm_head") if not getattr(self, name)]
        if borrows and self.hidden_size != self.target_hidden_size:
            raise ValueError(
                f"`hidden_size` ({self.hidden_size}) must equal `target_hidden_size` ({self.target_hidden_size}) in a "
                f"drafter that borrows from its target ({', '.join(borrows)} false)."
            )

    def _check_taps(self) -> None:
        ids = self.target_layer_ids
        if not ids or not all(isinstance(i, int) for i in ids):
            raise ValueError(f"`target_layer_ids` must be a non-empty list of integers, got {ids!r}.")
        if list(ids) != sorted(set(ids)):
            raise ValueError(f"`target_layer_ids` must be ascending and without repetition, got {ids}.")
        if ids[0] < -1:
            raise ValueError(f"`target_layer_ids` must be -1 (the embedding output) or larger, got {ids}.")
        if self.num_target_layers is not None and ids[-1] >= self.num_target_layers - 1:
            raise ValueError(
                f"`target_layer_ids` {ids} must stay below the last decoder layer of the target "
                f"({self.num_target_layers - 1} of {self.num_target_layers}): its output is final-normed in "
                "transformers, while drafters are trained on the raw residual."
            )

    def _check_block(self) -> None:
        if not isinstance(self.block_size, int) or self.num_draft_tokens < 1:
            smallest = 1 if self.sample_from_anchor else 2
            raise ValueError(f"`block_size` must be an integer of at least {smallest}, got {self.block_size!r}.")
        if not isinstance(self.mask_token_id, int) or not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"`mask_token_id` must lie in the vocabulary of {self.vocab_size} ids, got {self.mask_token_id!r}. "
                "Another token (pad, for instance) is no substitute: the drafter was trained with this one."
            )

    def _check_heads(self) -> None:
        if self.markov_head_type not in MARKOV_HEADS:
            raise ValueError(
                f"`markov_head_type` must be one of {', '.join(MARKOV_HEADS)}, got {self.markov_head_type!r}."
            )
        if self.has_markov_head and (not isinstance(self.markov_rank, int) or self.markov_rank < 1):
            raise ValueError(
                f"`markov_rank` of a {self.markov_head_type} Markov head is {self.markov_rank!r}, "
                'expected a positive integer. Write `markov_head_type="none"` for a drafter without one.'
            )
        if self.enable_confidence_head and self.confidence_head_with_markov and not self.has_markov_head:
            raise ValueError(
                "`confidence_head_with_markov` is true, but the drafter has no Markov head to read "
                '(`markov_head_type="none"`). Set it to false, or `enable_confidence_head` to false.'
            )

    def _check_windows(self) -> None:
        if len(self.layer_types) != self.num_hidden_layers or set(self.layer_types) - set(LAYER_TYPES):
            raise ValueError(
                f"`layer_types` must name {' or '.join(LAYER_TYPES)} for each of the {self.num_hidden_layers} draft "
                f"layers, got {self.layer_types}."
            )
        if "sliding_attention" in self.layer_types and not self.sliding_window:
            raise ValueError("`layer_types` has sliding layers, but `sliding_window` is not set.")
        if self.sliding_window_origin not in WINDOW_ORIGINS:
            raise ValueError(
                f"`sliding_window_origin` must be one of {', '.join(WINDOW_ORIGINS)}, "
                f"got {self.sliding_window_origin!r}."
            )
        if self.context_window is not None and (not isinstance(self.context_window, int) or self.context_window < 1):
            raise ValueError(f"`context_window` must be a positive integer or None, got {self.context_window!r}.")


__all__ = ["DSparkConfig"]
