"""The drafter: cached drafting, masks, heads, borrowed and own weights, saving and loading."""

import itertools
import warnings
from collections.abc import Sequence

import pytest
import torch
from conftest import FIXTURES, embed, head_of, load_pair, load_target
from kit import MASK, PROMPT, VOCAB, inputs, new_drafter, new_target
from transformers import AutoConfig, AutoModel, DynamicCache, PreTrainedModel

from dspark_hf import (
    DraftVocabularyMap,
    DSparkCandidateGenerator,
    DSparkConfig,
    DSparkDrafter,
    SpeculativeDecoding,
    UnsupportedGenerationError,
)
from dspark_hf._compat import CACHE_NAME
from dspark_hf.draft_cache import DraftCache

MARKOV_HEADS = ["none", "vanilla", "gated", "rnn"]
FORMATS = [
    "deepspec_qwen3_gated",
    "deepspec_gemma4",
    "speculators_dspark_reduced",
    "speculators_dspark_swa",
    "zlab_dflash",
]
SLIDING = {"num_hidden_layers": 1, "layer_types": ["sliding_attention"], "sliding_window": 4}
# The window counts from the anchor or from each position; the block is causal or not.
WINDOWS = list(itertools.product(["anchor", "query"], [True, False]))


def assert_near(actual: torch.Tensor, expected: torch.Tensor, atol: float = 1e-4) -> None:
    torch.testing.assert_close(actual, expected, atol=atol, rtol=0)


def features_of(drafter: DSparkDrafter, length: int, seed: int = 0) -> torch.Tensor:
    """`[1, T, m * Ht]` random tapped states."""
    width = len(drafter.config.target_layer_ids) * drafter.config.target_hidden_size
    return torch.randn(1, length, width, generator=torch.Generator().manual_seed(seed))


def block_of(drafter: DSparkDrafter, seed: int = 1) -> torch.Tensor:
    """`[1, S, H]` random block embeddings."""
    config = drafter.config
    return torch.randn(1, config.block_size, config.hidden_size, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def draft_from_scratch(target: PreTrainedModel, drafter: DSparkDrafter, ids: list[int]) -> list[int]:
    """The greedy draft after `ids`, with neither cache nor hooks; the last id is the anchor."""
    config, first = drafter.config, drafter.config.first_draft_slot
    states = target(torch.tensor([ids[:-1]]), output_hidden_states=True, use_cache=False).hidden_states
    context = torch.cat([states[i + 1] for i in config.target_layer_ids], dim=-1)
    block = embed(drafter, target, [ids[-1], *[config.mask_token_id] * (config.block_size - 1)])
    hidden = drafter(block, context).last_hidden_state[0]
    base = drafter.base_logits(hidden, head_of(drafter, target))
    previous, tokens = torch.tensor([ids[-1]]), []
    state = None if drafter.markov_head is None else drafter.markov_head.initial_state(1)
    for slot in range(config.block_size):
        logits = base[slot]
        if drafter.markov_head is not None:
            bias, state = drafter.markov_head(previous, hidden[slot : slot + 1], state)
            logits = logits + bias[0]
        if slot >= first:
            previous = drafter.to_target_ids(logits.argmax()[None])
            tokens.append(int(previous))
    return tokens


def draft_after(target: PreTrainedModel, drafter: DSparkDrafter, prompt: Sequence[int] = PROMPT) -> list[int]:
    """The first draft of a call whose first token, the anchor, is the last of `prompt`."""
    with DSparkCandidateGenerator(drafter, target) as generator:
        with generator.listening(prefill=True), torch.no_grad():
            target(torch.tensor([prompt[:-1]]), use_cache=False)
        return generator.draft(torch.tensor([prompt]), 99).token_ids[0].tolist()


class TestCache:
    """The draft cache is a shortcut: with or without, everything is the same."""

    @pytest.mark.parametrize("offset", [0, 20_000])
    @pytest.mark.parametrize("length", [1, 2, 17, 300])
    @pytest.mark.parametrize("window", [None, 4])
    @torch.no_grad()
    def test_a_block_over_cached_context_equals_one_pass_over_all_of_it(self, length, offset, window):
        kinds = ["full_attention"] * 2 if window is None else ["sliding_attention", "full_attention"]
        drafter = new_drafter(layer_types=kinds, sliding_window=window, max_position_embeddings=32768)
        features, block = features_of(drafter, length), block_of(drafter)
        positions = torch.arange(offset, offset + length + drafter.config.block_size)[None]
        expected = drafter(block, features, position_ids=positions).last_hidden_state
        for first in {0, length // 2, length - 1, length}:
            cache = DraftCache(2)
            if first:
                drafter.append_context(features[:, :first], positions[:, :first], cache)
            rest = features[:, first:] if first < length else None
            actual = drafter(block, rest, position_ids=positions[:, first:], cache=cache).last_hidden_state
            assert_near(actual, expected)

    @torch.no_grad()
    def test_positions_default_to_those_behind_the_cache(self):
        drafter, cache = new_drafter(), DraftCache(2)
        features, block = features_of(drafter, 9), block_of(drafter)
        drafter.append_context(features[:, :6], torch.arange(6)[None], cache)
        actual = drafter(block, features[:, 6:], cache=cache).last_hidden_state
        assert_near(actual, drafter(block, features).last_hidden_state)

    def test_positions_of_another_length_are_refused(self):
        drafter = new_drafter()
        with pytest.raises(ValueError, match="must span the 7 new positions"):
            drafter(block_of(drafter), features_of(drafter, 3), position_ids=torch.arange(6)[None])

    @pytest.mark.parametrize("implementation", ["sdpa", "eager"])
    @torch.no_grad()
    def test_positions_matter_only_relative_to_each_other(self, implementation):
        drafter = new_drafter(attn_implementation=implementation)
        features, block = features_of(drafter, 5), block_of(drafter)
        near = drafter(block, features).last_hidden_state
        far = drafter(block, features, position_ids=torch.arange(1000, 1009)[None]).last_hidden_state
        shifted = torch.cat((torch.arange(5), torch.arange(6, 10)))[None]
        assert_near(far, near, atol=1e-3)
        assert (drafter(block, features, position_ids=shifted).last_hidden_state - near).abs().max() > 1e-2

    @pytest.mark.parametrize("prompt_length", [1, 2, 17, 300])
    @pytest.mark.parametrize(
        "name",
        [
            "deepspec_qwen3_rnn",
            "deepspec_gemma4",
            "speculators_dspark_noanchor",
            "speculators_dspark_swa",
            "zlab_dflash",
        ],
    )
    def test_every_draft_of_a_call_equals_one_from_scratch(self, name, prompt_length):
        target, drafter = load_pair(name)
        ids = torch.randint(1, 120, (1, prompt_length), generator=torch.Generator().manual_seed(prompt_length))
        with drafter.trace() as trace:
            output = target.generate(ids, assistant_model=drafter, do_sample=False, max_new_tokens=24)[0].tolist()
        length = prompt_length + 1
        for round_ in trace.rounds:
            expected = draft_from_scratch(target, drafter, output[:length])
            assert round_.proposed == expected[: prompt_length + 24 - length - 1]
            length += round_.num_new_tokens
        assert length == len(output)

    @pytest.mark.parametrize("accepted", range(5))
    @torch.no_grad()
    def test_after_a_partial_accept_it_holds_exactly_the_committed_context(self, accepted):
        target, drafter, ids, cache = new_target("qwen3"), new_drafter(), [*PROMPT], DynamicCache()
        with DSparkCandidateGenerator(drafter, target) as generator:
            with generator.listening(prefill=True):
                target(torch.tensor([ids[:-1]]), **{CACHE_NAME: cache})
            for _ in range(3):
                draft = generator.draft(torch.tensor([ids]), 99).token_ids[0].tolist()
                assert len(draft) == 4
                with generator.listening():
                    target(torch.tensor([[ids[-1], *draft]]), **{CACHE_NAME: cache})
                # The target keeps `accepted` of the draft and adds a token of its own.
                generator.commit(1 + accepted)
                if accepted < 4:
                    cache.crop(accepted - 4)
                ids = [*ids, *draft[:accepted], 7]
            generator.draft(torch.tensor([ids]), 99)
            kept = generator.cache
            states = target(torch.tensor([ids[:-1]]), output_hidden_states=True, use_cache=False).hidden_states
            context = torch.cat([states[i + 1] for i in drafter.config.target_layer_ids], dim=-1)
            fresh = DraftCache(2)
            drafter.append_context(context, torch.arange(len(ids) - 1)[None], fresh)
            assert kept.length == fresh.length == len(PROMPT) - 1 + 3 * (1 + accepted)
            for layer in range(2):
                assert_near(torch.stack(kept.layer(layer)), torch.stack(fresh.layer(layer)))

    @torch.no_grad()
    def test_block_keys_never_persist(self):
        drafter, cache = new_drafter(), DraftCache(2)
        features, block = features_of(drafter, 6), block_of(drafter)
        drafter.append_context(features, torch.arange(6)[None], cache)
        before = [states.clone() for layer in range(2) for states in cache.layer(layer)]
        expected = drafter(block, cache=cache).last_hidden_state
        # Another block, then one that would poison everything: neither leaves a trace.
        drafter(block_of(drafter, seed=2), cache=cache)
        drafter(torch.full_like(block, torch.nan), cache=cache)
        assert cache.length == 6
        after = [states for layer in range(2) for states in cache.layer(layer)]
        assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
        assert torch.equal(drafter(block, cache=cache).last_hidden_state, expected)

    def test_reading_a_layer_before_any_pass_is_an_error(self):
        with pytest.raises(IndexError, match="Layer 0"):
            DraftCache(1).layer(0)

    @torch.no_grad()
    def test_it_grows_without_losing_context(self):
        cache, states = DraftCache(1), torch.randn(1, 2, 500, 8)
        for start in range(0, 500, 7):
            chunk = states[:, :, start : start + 7]
            cache.update(chunk, -chunk, 0)
            cache.commit(chunk.shape[2])
        assert torch.equal(cache.layer(0)[0], states)
        assert torch.equal(cache.layer(0)[1], -states)


def visible_positions(drafter: DSparkDrafter, num_context: int, padding: torch.Tensor | None = None) -> torch.Tensor:
    """`[S, T + S]`: whether a block position of a one-layer drafter depends on each position's input, by gradient."""
    features = features_of(drafter, num_context).requires_grad_()
    block = block_of(drafter).requires_grad_()
    states = drafter(block, features, attention_mask=padding).last_hidden_state[0]
    direction = torch.randn(states.shape[-1], generator=torch.Generator().manual_seed(3))
    rows = []
    for state in states:
        gradients = torch.autograd.grad((state * direction).sum(), (features, block), retain_graph=True)
        rows.append(torch.cat([gradient[0].abs().sum(-1) > 0 for gradient in gradients]))
    return torch.stack(rows)


def window_by_definition(origin: str, causal: bool, window: int, block_size: int, num_context: int) -> torch.Tensor:
    """`[S, T + S]` booleans, one by one."""
    mask = torch.zeros(block_size, num_context + block_size, dtype=torch.bool)
    for slot in range(block_size):
        query = num_context + slot
        for key in range(num_context + block_size):
            if key >= num_context:  # the block: in a window of the query, everything is near unless W is shorter
                in_reach = origin == "anchor" or query - key < window
                mask[slot, key] = in_reach and (key <= query or not causal)
            elif origin == "anchor":
                mask[slot, key] = key >= num_context - window
            else:
                mask[slot, key] = query - key < window
    return mask


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
class TestMasks:
    """Which inputs a block position depends on."""

    def test_a_full_layer_sees_all_context_and_the_whole_block_in_both_directions(self, implementation):
        drafter = new_drafter(num_hidden_layers=1, attn_implementation=implementation)
        assert bool(visible_positions(drafter, 9).all())

    @pytest.mark.parametrize("num_context", [0, 2, 9])
    @pytest.mark.parametrize("window", [1, 2, 4, 20])
    @pytest.mark.parametrize(("origin", "causal"), WINDOWS)
    def test_a_sliding_layer_sees_its_window(self, origin, causal, window, num_context, implementation):
        settings = {**SLIDING, "sliding_window": window}
        drafter = new_drafter(
            **settings, sliding_window_origin=origin, sliding_block_causal=causal, attn_implementation=implementation
        )
        expected = window_by_definition(origin, causal, window, drafter.config.block_size, num_context)
        # A position's own input reaches it through the residual in any case.
        expected[:, num_context:] |= torch.eye(drafter.config.block_size, dtype=torch.bool)
        assert torch.equal(visible_positions(drafter, num_context), expected)

    @pytest.mark.parametrize(("origin", "causal"), WINDOWS)
    @torch.no_grad()
    def test_a_sliding_layer_sees_the_same_through_the_cache(self, origin, causal, implementation):
        drafter = new_drafter(
            **SLIDING, sliding_window_origin=origin, sliding_block_causal=causal, attn_implementation=implementation
        )
        features, block, cache = features_of(drafter, 9), block_of(drafter), DraftCache(1)
        drafter.append_context(features[:, :7], torch.arange(7)[None], cache)
        actual = drafter(block, features[:, 7:], cache=cache).last_hidden_state
        assert_near(actual, drafter(block, features).last_hidden_state)

    @pytest.mark.parametrize("layer_type", ["full_attention", "sliding_attention"])
    def test_padding_is_never_seen(self, layer_type, implementation):
        settings = {**SLIDING, "layer_types": [layer_type], "sliding_window": 6, "sliding_block_causal": False}
        drafter = new_drafter(**settings, attn_implementation=implementation)
        padding = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1]])
        assert torch.equal(visible_positions(drafter, 8, padding), padding.bool().expand(4, -1))

    @torch.no_grad()
    def test_both_implementations_agree(self, implementation):
        drafter = new_drafter(attn_implementation=implementation)
        assert drafter.config._attn_implementation == implementation
        other = new_drafter(attn_implementation="sdpa" if implementation == "eager" else "eager")
        features, block = features_of(drafter, 9), block_of(drafter)
        assert_near(drafter(block, features).last_hidden_state, other(block, features).last_hidden_state, atol=1e-5)


class TestMarkovHead:
    """The bias of position k is a function of the token at k - 1, and of nothing later."""

    @pytest.mark.parametrize("sample_from_anchor", [True, False])
    def test_one_hot_w1_and_a_permutation_w2_draft_the_permutation_from_the_anchor(self, sample_from_anchor):
        target = new_target()
        drafter = new_drafter(markov_rank=VOCAB, sample_from_anchor=sample_from_anchor)
        follower = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(4))
        with torch.no_grad():
            drafter.markov_head.markov_w1.weight.copy_(torch.eye(VOCAB))
            drafter.markov_head.markov_w2.weight.zero_()
            drafter.markov_head.markov_w2.weight[follower, torch.arange(VOCAB)] = 1e4
        expected, token = [], PROMPT[-1]
        for _ in range(drafter.config.num_draft_tokens):
            token = int(follower[token])
            expected.append(token)
        assert draft_after(target, drafter) == expected

    @pytest.mark.parametrize("sample_from_anchor", [True, False])
    @torch.no_grad()
    def test_the_rnn_state_is_zero_at_every_block(self, sample_from_anchor):
        target = new_target()
        drafter = new_drafter(markov_head_type="rnn", sample_from_anchor=sample_from_anchor)
        states: list[torch.Tensor] = []
        drafter.markov_head.register_forward_pre_hook(lambda module, args: states.append(args[2]))
        with drafter.trace() as trace:
            target.generate(**inputs(), assistant_model=drafter, do_sample=False, max_new_tokens=30)
        block_size, full = drafter.config.block_size, drafter.config.num_draft_tokens
        blocks = [round_ for round_ in trace.rounds if len(round_.proposed) == full]
        assert len(blocks) > 2
        firsts = [states[i * block_size] for i in range(len(blocks))]
        assert all(not state.any() for state in firsts)
        assert sum(bool(state.any()) for state in states[: len(blocks) * block_size]) == len(blocks) * (block_size - 1)

    def test_the_bias_is_that_of_the_paper(self):
        for kind in ("vanilla", "gated", "rnn"):
            head = new_drafter(markov_head_type=kind).markov_head
            hidden, state, token = torch.randn(1, 32), torch.randn(1, 6), torch.tensor([11])
            w1, w2 = head.markov_w1.weight[11], head.markov_w2.weight
            bias, next_state = head(token, hidden, state if kind == "rnn" else None)
            if kind == "vanilla":
                expected = w2 @ w1
            elif kind == "gated":
                gate = head.gate_proj.weight @ torch.cat((hidden[0], w1)) + head.gate_proj.bias
                expected = w2 @ (gate.sigmoid() * w1)
            else:
                joint = head.joint_proj.weight @ torch.cat((state[0], w1, hidden[0])) + head.joint_proj.bias
                gate, candidate, output = joint[:6].sigmoid(), joint[6:12].tanh(), joint[12:]
                expected = w2 @ output.tanh()
                assert_near(next_state[0], gate * state[0] + (1 - gate) * candidate, atol=1e-6)
            assert_near(bias[0], expected, atol=1e-5)


class TestDraftLength:
    @pytest.mark.parametrize("name", ["deepspec_qwen3_rnn", "zlab_dflash", "speculators_dspark_noanchor"])
    def test_fewer_assistant_tokens_give_a_prefix_of_the_full_draft(self, name):
        target, drafter = load_pair(name)
        ids, full = torch.tensor([[*range(20, 40)]]), []
        for num_tokens in range(drafter.config.num_draft_tokens, 0, -1):
            with drafter.trace() as trace:
                target.generate(
                    ids,
                    assistant_model=drafter,
                    do_sample=False,
                    max_new_tokens=20,
                    num_assistant_tokens=num_tokens,
                )
            proposed = trace.rounds[0].proposed
            full = full or proposed
            assert len(proposed) == num_tokens
            assert proposed == full[:num_tokens]
        assert len(full) == drafter.config.num_draft_tokens

    @pytest.mark.parametrize("num_tokens", [0, 5])
    def test_a_number_that_a_block_cannot_give_is_refused(self, num_tokens):
        with pytest.raises(UnsupportedGenerationError, match="must be an integer from 1 to 4"):
            new_target().generate(**inputs(), assistant_model=new_drafter(), num_assistant_tokens=num_tokens)


class TestEmbeddingsAndHead:
    """A drafter uses its own table and head where it has them, and else the target's without a copy."""

    def test_own_ones_are_used(self):
        target, drafter = load_pair("deepspec_qwen3_gated")
        ids = [3, 7, 11, 40, 9, 20]
        own = draft_after(target, drafter, ids)
        assert own == draft_from_scratch(target, drafter, ids)
        for module in (target.get_input_embeddings(), target.get_output_embeddings()):
            assert not torch.equal(module.weight, drafter.lm_head.weight)
        handles = [
            module.register_forward_hook(lambda *_: pytest.fail("the target's was used"))
            for module in (target.get_output_embeddings(), target.get_input_embeddings())
        ]
        with DSparkCandidateGenerator(drafter, target) as generator:
            drafter.append_context(features_of(drafter, 5), torch.arange(5)[None], generator.cache)
            assert generator.draft(torch.tensor([ids]), 99).length == 7
        for handle in handles:
            handle.remove()

    @pytest.mark.parametrize("tied", [False, True], ids=["untied_target", "tied_target"])
    def test_borrowed_ones_are_the_targets_own_storage(self, tied, monkeypatch):
        target, drafter = new_target(tie_word_embeddings=tied), new_drafter()
        assert drafter.embed_tokens is None and drafter.lm_head is None
        assert not [name for name in drafter.state_dict() if "embed" in name or "lm_head" in name]
        pointers = {module.weight.data_ptr() for module in (target.get_input_embeddings(), target.lm_head)}
        assert len(pointers) == 2 - tied
        used, base_logits = set(), drafter.base_logits

        def record(hidden: torch.Tensor, lm_head: torch.nn.Module) -> torch.Tensor:
            used.add(lm_head.weight.data_ptr())
            return base_logits(hidden, lm_head)

        def record_table(module: torch.nn.Module, *_) -> None:
            used.add(module.weight.data_ptr())

        monkeypatch.setattr(drafter, "base_logits", record)
        handle = target.get_input_embeddings().register_forward_hook(record_table)
        draft_after(target, drafter)
        handle.remove()
        assert used == pointers

    @pytest.mark.parametrize("tied", [False, True], ids=["untied_target", "tied_target"])
    @torch.no_grad()
    def test_a_change_of_the_target_reaches_a_drafter_that_borrows(self, tied):
        target, drafter, ids = new_target(tie_word_embeddings=tied), new_drafter(), torch.tensor([PROMPT])
        with DSparkCandidateGenerator(drafter, target) as generator:
            with generator.listening(prefill=True):
                target(ids[:, :-1], use_cache=False)
            before = generator.draft(ids, 99).token_ids
            target.get_output_embeddings().weight.neg_()
            assert generator.draft(ids, 99).token_ids.tolist() != before.tolist()

    @pytest.mark.parametrize("scale", [None, 1.0, 3.0])
    @torch.no_grad()
    def test_the_scale_of_block_embeddings_is_applied_once(self, scale, monkeypatch):
        """Gemma's embedding module scales by itself: `None` takes what it gives, a number scales raw rows."""
        target = new_target("gemma3")
        drafter = new_drafter(embedding_scale=scale)
        blocks, forward = [], drafter.forward

        def record(noise_embeds: torch.Tensor, *args, **kwargs):
            blocks.append(noise_embeds)
            return forward(noise_embeds, *args, **kwargs)

        monkeypatch.setattr(drafter, "forward", record)
        draft_after(target, drafter)
        rows = target.get_input_embeddings().weight[torch.tensor([PROMPT[-1], MASK, MASK, MASK])]
        factor = 32**0.5 if scale is None else scale
        assert_near(blocks[0][0], rows * factor)


def settings_of(drafter: DSparkDrafter) -> dict:
    """Everything in a config that describes the model, not the file."""
    skipped = {"transformers_version", "_name_or_path", "architectures"}
    return {key: value for key, value in drafter.config.to_dict().items() if key not in skipped}


def assert_same_drafter(actual: DSparkDrafter, expected: DSparkDrafter) -> None:
    ours, theirs = actual.state_dict(), expected.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype
        assert torch.equal(ours[name], tensor), name
    assert settings_of(actual) == settings_of(expected)


def drafter_to_save(kind: str) -> DSparkDrafter:
    if kind in FORMATS:
        return DSparkDrafter.from_pretrained(FIXTURES / kind)
    confidence_head_with_markov = kind != "none"
    return new_drafter(markov_head_type=kind, confidence_head_with_markov=confidence_head_with_markov)


class TestSaving:
    @pytest.mark.parametrize("kind", [*MARKOV_HEADS, *FORMATS])
    def test_a_round_trip_keeps_weights_config_and_settings(self, kind, tmp_path):
        drafter = drafter_to_save(kind)
        drafter.generation_config.num_assistant_tokens = 3
        if drafter.confidence_head is not None:
            drafter.generation_config.assistant_confidence_threshold = 0.25
        drafter.save_pretrained(tmp_path)
        loaded = DSparkDrafter.from_pretrained(tmp_path)
        assert_same_drafter(loaded, drafter)
        assert loaded.generation_config.num_assistant_tokens == 3
        assert loaded.generation_config.assistant_confidence_threshold == (
            None if drafter.confidence_head is None else 0.25
        )

    @pytest.mark.parametrize("kind", ["rnn", "deepspec_gemma4", "speculators_dspark_reduced"])
    def test_a_second_round_trip_changes_no_file(self, kind, tmp_path):
        drafter_to_save(kind).save_pretrained(tmp_path / "first")
        DSparkDrafter.from_pretrained(tmp_path / "first").save_pretrained(tmp_path / "second")
        for file in sorted((tmp_path / "first").iterdir()):
            assert (tmp_path / "second" / file.name).read_bytes() == file.read_bytes()

    @pytest.mark.parametrize("kind", ["gated", "deepspec_gemma4", "speculators_dspark_reduced"])
    def test_shards_are_put_together_again(self, kind, tmp_path):
        drafter = drafter_to_save(kind)
        drafter.save_pretrained(tmp_path, max_shard_size="20KB")
        assert len(list(tmp_path.glob("*.safetensors"))) > 2
        assert_same_drafter(DSparkDrafter.from_pretrained(tmp_path), drafter)

    @pytest.mark.parametrize("kind", FORMATS)
    def test_a_converted_drafter_proposes_the_same(self, kind, tmp_path):
        target, drafter = load_pair(kind)
        drafter.save_pretrained(tmp_path)
        converted = DSparkDrafter.from_pretrained(tmp_path).eval()
        ids = [*range(30, 50)]
        assert draft_after(target, converted, ids) == draft_after(target, drafter, ids)

    @pytest.mark.parametrize("kind", ["vanilla", "speculators_dspark_reduced"])
    def test_auto_classes_know_it(self, kind, tmp_path):
        drafter = drafter_to_save(kind)
        drafter.save_pretrained(tmp_path)
        assert type(AutoConfig.from_pretrained(tmp_path)) is DSparkConfig
        loaded = AutoModel.from_pretrained(tmp_path)
        assert type(loaded) is DSparkDrafter
        assert_same_drafter(loaded, drafter)


class TestLoading:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("name", ["speculators_dspark_reduced", "deepspec_gemma4"])
    def test_the_dtype_is_that_asked_for_but_offsets_stay_whole_numbers(self, name, dtype):
        drafter, original = DSparkDrafter.from_pretrained(FIXTURES / name, dtype=dtype), load_pair(name)[1]
        for key, tensor in drafter.state_dict().items():
            assert tensor.dtype == (torch.int64 if key == "d2t" else dtype), key
            assert torch.equal(tensor, original.state_dict()[key].to(tensor.dtype)), key

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("name", FORMATS)
    def test_it_drafts_in_a_lower_precision_than_its_target(self, name, dtype):
        target, drafter = load_target(name), DSparkDrafter.from_pretrained(FIXTURES / name, dtype=dtype)
        ids = torch.tensor([[*range(30, 50)]])
        with drafter.trace() as trace:
            output = target.generate(ids, assistant_model=drafter, do_sample=False, max_new_tokens=24)
        assert output.tolist() == target.generate(ids, do_sample=False, max_new_tokens=24).tolist()
        assert sum(r.accepted for r in trace.rounds) > 0

    @pytest.mark.parametrize("device_map", [{"": "cpu"}, "cpu", "auto"], ids=str)
    def test_a_device_map_is_followed(self, device_map):
        drafter = DSparkDrafter.from_pretrained(FIXTURES / "speculators_dspark_reduced", device_map=device_map)
        assert_same_drafter(drafter, DSparkDrafter.from_pretrained(FIXTURES / "speculators_dspark_reduced"))
        target = load_target("speculators_dspark_reduced")
        ids = torch.tensor([[*range(30, 50)]])
        with drafter.trace() as trace:
            target.generate(ids, assistant_model=drafter, do_sample=False, max_new_tokens=12)
        assert sum(r.accepted for r in trace.rounds) > 0

    def test_loading_information_can_be_asked_for(self):
        drafter, info = DSparkDrafter.from_pretrained(FIXTURES / "zlab_dflash", output_loading_info=True)
        assert isinstance(drafter, DSparkDrafter)
        assert not info["missing_keys"] and not info["unexpected_keys"]

    def test_a_loaded_drafter_is_in_evaluation_mode(self):
        assert not DSparkDrafter.from_pretrained(FIXTURES / "zlab_dflash").training


def overflowing_fc() -> DSparkDrafter:
    drafter = new_drafter().to(torch.float16)
    with torch.no_grad():
        drafter.fc.weight.mul_(6e4)
    return drafter


def nan_in_the_norm() -> DSparkDrafter:
    drafter = new_drafter()
    with torch.no_grad():
        drafter.norm.weight[3] = torch.nan
    return drafter


class TestOverflow:
    """A drafter whose states are not finite steps aside, says so once, and costs no token."""

    @pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
    @pytest.mark.parametrize("broken", [overflowing_fc, nan_in_the_norm])
    def test_states_that_overflow_draft_nothing_and_warn_once(self, broken, do_sample):
        target, drafter = new_target(), broken()
        torch.manual_seed(5)
        with warnings.catch_warnings(record=True) as caught, drafter.trace() as trace:
            warnings.simplefilter("always")
            output = target.generate(**inputs(), assistant_model=drafter, do_sample=do_sample, max_new_tokens=12)
        assert len([w for w in caught if "overflow" in str(w.message)]) == 1
        assert len(trace.rounds) == 11
        assert not any(r.proposed for r in trace.rounds)
        torch.manual_seed(5)
        assert output.tolist() == target.generate(**inputs(), do_sample=do_sample, max_new_tokens=12).tolist()

    @pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
    def test_a_markov_bias_of_nan_costs_no_token(self, do_sample):
        target, drafter = new_target(), new_drafter()
        with torch.no_grad():
            drafter.markov_head.markov_w2.weight.fill_(torch.nan)
        with pytest.warns(UserWarning, match="overflow"):
            output = target.generate(**inputs(), assistant_model=drafter, do_sample=do_sample, max_new_tokens=12)
        assert output.shape[1] == len(PROMPT) + 12
        if not do_sample:
            assert output.tolist() == target.generate(**inputs(), do_sample=False, max_new_tokens=12).tolist()

    @pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
    @pytest.mark.parametrize("part", ["lm_head", "markov_head.markov_w2"])
    def test_logits_that_overflow_draft_nothing_and_warn_once(self, part, do_sample):
        target, drafter = new_target(), new_drafter(own_lm_head=True).to(torch.float16)
        with torch.no_grad():
            drafter.get_submodule(part).weight.copy_(6e4 * drafter.get_submodule(part).weight.sign())
        with drafter.trace() as trace, pytest.warns(UserWarning, match="overflow") as caught:
            target.generate(**inputs(), assistant_model=drafter, do_sample=do_sample, max_new_tokens=12)
        assert len(caught) == 1
        assert not any(r.proposed for r in trace.rounds)

    def test_a_confidence_of_nan_ends_the_draft(self):
        target, drafter = new_target(), new_drafter()
        with torch.no_grad():
            drafter.confidence_head.proj.bias.fill_(torch.nan)
        with drafter.trace() as trace:
            output = target.generate(
                **inputs(),
                assistant_model=drafter,
                assistant_confidence_threshold=0.1,
                do_sample=False,
                max_new_tokens=12,
            )
        assert not any(r.proposed for r in trace.rounds)
        assert output.tolist() == target.generate(**inputs(), do_sample=False, max_new_tokens=12).tolist()


CONFIDENCE_HEADS = {
    "no_confidence": {"enable_confidence_head": False, "confidence_head_with_markov": False},
    "confidence_of_state": {"enable_confidence_head": True, "confidence_head_with_markov": False},
    "confidence_of_state_and_token": {"enable_confidence_head": True, "confidence_head_with_markov": True},
}


@pytest.mark.parametrize("sample_from_anchor", [True, False], ids=["from_anchor", "from_masks"])
@pytest.mark.parametrize("confidence", CONFIDENCE_HEADS)
@pytest.mark.parametrize("markov", MARKOV_HEADS)
class TestOptionMatrix:
    def test_it_builds_and_drafts_or_says_why_not(self, markov, confidence, sample_from_anchor):
        settings = {
            "markov_head_type": markov,
            "sample_from_anchor": sample_from_anchor,
            **CONFIDENCE_HEADS[confidence],
        }
        if markov == "none" and confidence == "confidence_of_state_and_token":
            with pytest.raises(ValueError, match="no Markov head to read"):
                new_drafter(**settings)
            return
        target, drafter = new_target(), new_drafter(**settings)
        assert draft_after(target, drafter) == draft_from_scratch(target, drafter, [*PROMPT])
        with drafter.trace() as trace:
            output = target.generate(**inputs(), assistant_model=drafter, do_sample=False, max_new_tokens=16)
        assert output.tolist() == target.generate(**inputs(), do_sample=False, max_new_tokens=16).tolist()
        proposed = trace.rounds[0].proposed
        assert len(proposed) == (4 if sample_from_anchor else 3)
        assert (trace.rounds[0].confidence is None) == (confidence == "no_confidence")

    def test_a_threshold_needs_a_confidence_head(self, markov, confidence, sample_from_anchor):
        if confidence != "no_confidence":
            return
        drafter = new_drafter(
            markov_head_type=markov, sample_from_anchor=sample_from_anchor, **CONFIDENCE_HEADS[confidence]
        )
        with pytest.raises(UnsupportedGenerationError, match="has no confidence head"):
            new_target().generate(**inputs(), assistant_model=drafter, assistant_confidence_threshold=0.5)


class TestRejectedConfigs:
    @pytest.mark.parametrize(
        ("settings", "reason"),
        [
            ({"markov_rank": 0}, "`markov_rank`"),
            ({"markov_head_type": "lstm"}, "`markov_head_type` must be one of"),
            ({"block_size": 1, "sample_from_anchor": False}, "at least 2"),
            ({"block_size": 0}, "at least 1"),
            ({"mask_token_id": VOCAB}, "`mask_token_id` must lie in the vocabulary"),
            ({"mask_token_id": -1}, "`mask_token_id` must lie in the vocabulary"),
            ({"mask_token_id": None}, "`mask_token_id` must lie in the vocabulary"),
            ({"target_layer_ids": []}, "non-empty list"),
            ({"target_layer_ids": [2, 0]}, "must be ascending"),
            ({"target_layer_ids": [0, 0]}, "must be ascending"),
            ({"target_layer_ids": [-2, 0]}, "must be -1"),
            ({"target_layer_ids": [0, 3]}, "must stay below the last decoder layer"),
            ({"draft_vocab_size": VOCAB + 1, "own_lm_head": True}, "cannot exceed `vocab_size`"),
            ({"hidden_size": 16, "target_hidden_size": 32}, "must equal `target_hidden_size`"),
            ({"layer_types": ["sliding_attention"] * 2}, "`sliding_window` is not set"),
            ({"layer_types": ["full_attention"]}, "for each of the 2 draft layers"),
            ({"sliding_window_origin": "end"}, "`sliding_window_origin` must be one of"),
            ({"num_attention_heads": 3}, "must be a multiple of `num_key_value_heads`"),
            ({"backbone": "mamba"}, "`backbone` must be one of"),
            ({"num_hidden_layers": 0}, "`num_hidden_layers` must be a positive integer"),
        ],
    )
    def test_the_message_names_the_field(self, settings, reason):
        with pytest.raises(ValueError, match=reason):
            new_drafter(**settings)


class TestNothingLeft:
    """Processors may leave the drafter nothing to propose: the draft ends there, and the text is the target's."""

    @pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
    def test_a_draft_ends_where_processors_forbid_all_that_the_drafter_knows(self, do_sample):
        target, drafter = new_target(), new_drafter(own_embed_tokens=True, own_lm_head=True)
        known = torch.arange(VOCAB).where(torch.arange(VOCAB) > 0, -1)  # token 0 is unknown to the drafter
        vocabulary_map = DraftVocabularyMap(known, known, is_identity=False, num_common=VOCAB - 1, num_moved=0)
        arguments = {**inputs(), "do_sample": do_sample, "top_k": 1 if do_sample else None}
        first = int(target.generate(**arguments, max_new_tokens=1)[0, -1])
        # After the first token only token 0 may follow.
        arguments |= {"bad_words_ids": [[first, token] for token in range(1, VOCAB)], "max_new_tokens": 8}
        with drafter.trace() as trace:
            output = target.generate(
                **arguments, custom_generate=SpeculativeDecoding(drafter, vocabulary_map=vocabulary_map)
            )
        assert output.tolist() == target.generate(**arguments).tolist()
        assert output[0, len(PROMPT) :].tolist()[:2] == [first, 0]
        assert trace.rounds[0].proposed == []


def test_weights_of_an_earlier_saving_are_not_taken_for_those_of_the_next(tmp_path):
    drafter = new_drafter()
    shards = {"max_shard_size": "20KB"}
    for options in ({}, shards, {}, shards):
        with torch.no_grad():
            drafter.fc.weight += 1
        drafter.save_pretrained(tmp_path, **options)
        assert (tmp_path / "model.safetensors").exists() == (not options)
        assert (tmp_path / "model.safetensors.index.json").exists() == bool(options)
        assert torch.equal(DSparkDrafter.from_pretrained(tmp_path).fc.weight, drafter.fc.weight)
