"""The target's attention inside verification passes: equal to transformers' own, and nobody else's."""

import threading
from functools import cache
from itertools import product
from random import Random
from types import SimpleNamespace
from unittest.mock import patch

import kit
import pytest
import torch
from torch.nn.functional import pad
from transformers import DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dspark_hf import UnsupportedGenerationError, target_attention
from dspark_hf._compat import CACHE_NAME
from dspark_hf.target_attention import Unpadded, attending, invariant_width, takes_unpadded

MODES = ["packed", "invariant"]
HALF_AND_FLOAT = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)


def attention_layer(num_groups, **attributes):
    return SimpleNamespace(num_key_value_groups=num_groups, is_causal=True, **attributes)


def states(batch_size, num_heads, num_key_value_heads, num_queries, num_keys, head_dim=16, dtype=torch.float32):
    """Random queries as projections leave them, and keys and values as views of larger buffers."""
    generator = torch.Generator().manual_seed(num_queries * 1000 + num_keys)

    def random(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    query = random(batch_size, num_queries, num_heads, head_dim).transpose(1, 2)
    buffer = (batch_size, num_key_value_heads, num_keys + 5, head_dim)
    return query, random(*buffer)[:, :, :num_keys], random(*buffer)[:, :, :num_keys]


def masks(batch_size, num_heads, num_queries, num_keys):
    """Every kind of mask that a pass may bring, by name."""
    causal = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)[None, None]
    padded = causal.repeat(batch_size, 1, 1, 1)
    padded[0, :, :, :2] = False
    added = torch.zeros(padded.shape).masked_fill(~padded, torch.finfo(torch.float32).min)
    added[..., 3] += 0.5
    by_head = added.repeat(1, num_heads, 1, 1) + torch.arange(num_heads)[:, None, None] * torch.eye(num_keys)[5]
    return {
        "shared": causal,
        "by_row": padded,
        "added": added,
        "by_head": by_head,
        "keys_only": padded[:, :, -1:],
        "keys_only_by_head": by_head[:, :, -1:],
    }


def stock(*args, **kwargs):
    return sdpa_attention_forward(*args, **kwargs)[0]


def ours(layer, query, key, value, mask, mode="packed", **kwargs):
    with attending(mode):
        return ALL_ATTENTION_FUNCTIONS["sdpa"](layer, query, key, value, mask, **kwargs)


class TestSameAttention:
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("num_queries", [1, 2, 7])
    @pytest.mark.parametrize("heads", [(4, 2), (6, 1), (4, 4)], ids=["grouped", "one_key_head", "ungrouped"])
    @pytest.mark.parametrize("kind", ["shared", "by_row", "added", "by_head", "keys_only", "keys_only_by_head"])
    def test_masked_attention_equals_transformers_own(self, kind, heads, num_queries, mode):
        mask = masks(2, heads[0], num_queries, 19)[kind]
        query, key, value = states(2, *heads, num_queries, 19)
        layer = attention_layer(heads[0] // heads[1])
        output, weights = ours(layer, query, key, value, mask, mode, scaling=0.3)
        expected = stock(layer, query, key, value, mask, scaling=0.3)
        assert weights is None
        assert output.shape == expected.shape and output.is_contiguous()
        torch.testing.assert_close(output, expected)

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("num_queries", [1, 19])
    def test_attention_without_a_mask_equals_transformers_own(self, num_queries, dtype, mode):
        query, key, value = states(2, 4, 2, num_queries, 19, dtype=dtype)
        output, _ = ours(attention_layer(2), query, key, value, None, mode)
        expected = stock(attention_layer(2), query, key, value, None)
        torch.testing.assert_close(output, expected, rtol=0, atol=2 * torch.finfo(dtype).eps)

    def test_keys_are_not_copied(self):
        query, key, value = states(1, 4, 2, 3, 19)
        with patch.object(target_attention, "scaled_dot_product_attention", wraps=torch.empty) as kernel:
            kernel.side_effect = lambda query, key, value, **_: query
            ours(attention_layer(2), query, key, value, masks(1, 4, 3, 19)["shared"])
        _, seen_key, seen_value = kernel.call_args.args
        assert seen_key is key and seen_value is value

    def test_layers_share_one_packed_mask(self):
        query, key, value = states(1, 4, 2, 3, 19)
        mask, other = (masks(1, 4, 3, 19)[kind] for kind in ("shared", "by_row"))
        with (
            attending("packed"),
            patch.object(target_attention, "_packed_mask", wraps=target_attention._packed_mask) as packed_mask,
        ):
            for given in (mask, other, mask, other):
                output, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](attention_layer(2), query, key, value, given)
                torch.testing.assert_close(output, stock(attention_layer(2), query, key, value, given))
        assert packed_mask.call_count == 2

    def test_masks_of_many_shapes_do_not_pile_up(self):
        with attending("packed"):
            for num_keys in range(19, 40):
                query, key, value = states(1, 4, 2, 3, num_keys)
                mask = masks(1, 4, 3, num_keys)["shared"]
                output, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](attention_layer(2), query, key, value, mask)
                torch.testing.assert_close(output, stock(attention_layer(2), query, key, value, mask))
            attention = target_attention._attending.get()
            assert len(attention._packed_masks) <= 4


@pytest.fixture(params=[1, 2], ids="threads_{}".format)
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
class TestInvariantAttention:
    """Bits of a row: the same whatever the other rows of the pass are, and whatever keys follow its own."""

    # At the ends of vectors, of the blocks of keys, and where a product's sum over the keys is cut in two.
    POSITIONS = (0, 1, 15, 16, 64, 200, 300, 505, 511, 512, 600, 1023, 1100)
    # Many heads: rounding to half precision hides most differences.
    BATCH_SIZE, NUM_KEY_VALUE_HEADS, HEAD_DIM = 4, 6, 64

    def row(self, position, start, width, num_keys, num_groups, dtype):
        """`[B, 1, H, D]`: attention at `position`, from a pass over `width` positions from `start` on."""
        query, key, value = self.states(num_groups, dtype)
        mask = torch.arange(num_keys) <= torch.arange(start, start + width)[:, None]
        key, value = key[:, :, :num_keys], value[:, :, :num_keys]
        query = query[:, :, start : start + width]
        output, _ = ours(attention_layer(num_groups), query, key, value, mask[None, None], "invariant")
        return output[:, position - start : position - start + 1]

    @staticmethod
    @cache
    def states(num_groups, dtype):
        owner = TestInvariantAttention
        num_heads = owner.NUM_KEY_VALUE_HEADS * num_groups
        query, *_ = states(owner.BATCH_SIZE, num_heads, 1, 1150, 1, owner.HEAD_DIM, dtype)
        _, key, value = states(owner.BATCH_SIZE, 1, owner.NUM_KEY_VALUE_HEADS, 1, 2048, owner.HEAD_DIM, dtype)
        return query, key, value

    @pytest.mark.parametrize("num_groups", [1, 3])
    @HALF_AND_FLOAT
    def test_rows_do_not_depend_on_the_pass(self, dtype, num_groups):
        widths = Random(0)
        for position in self.POSITIONS:
            alone = self.row(position, position, 1, position + 1, num_groups, dtype)
            for width in (2, 3, 5, 7, 8, 12):
                start = max(0, position - widths.randrange(width))
                row = self.row(position, start, width, start + width, num_groups, dtype)
                assert torch.equal(row, alone), f"position {position} in a pass over {start}..{start + width - 1}"

    @HALF_AND_FLOAT
    def test_rows_do_not_depend_on_masked_keys(self, dtype):
        for position in self.POSITIONS:
            alone = self.row(position, position, 1, position + 1, 3, dtype)
            for num_keys in (position + 2, position + 40, 1536, 2048):
                assert torch.equal(self.row(position, position, 1, num_keys, 3, dtype), alone)

    @HALF_AND_FLOAT
    def test_rows_of_a_sliding_window_do_not_depend_on_the_keys_before_it(self, dtype):
        query, key, value = self.states(3, dtype)
        window = (torch.arange(2048) > 600) & (torch.arange(2048) <= 1100)
        rows = [
            ours(
                attention_layer(3),
                query[:, :, 1100:1101],
                key[:, :, first:last],
                value[:, :, first:last],
                window[None, None, None, first:last],
                "invariant",
            )[0]
            for first, last in ((512, 1101), (0, 1101), (512, 2048), (0, 2048))
        ]
        assert all(torch.equal(row, rows[0]) for row in rows)

    def test_a_full_block_of_keys_is_not_copied(self):
        query, key, value = states(1, 4, 2, 3, 1024)
        with patch.object(target_attention, "scaled_dot_product_attention") as kernel:
            kernel.side_effect = lambda query, key, value, **_: query
            ours(attention_layer(2), query, key, value, masks(1, 4, 3, 1024)["shared"], "invariant")
        _, seen_key, seen_value = kernel.call_args.args
        assert seen_key is key and seen_value is value


class TestInvariantWidth:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_a_single_token_in_half_precision_takes_a_dummy(self, dtype):
        assert [invariant_width(width, 1, dtype) for width in (1, 2, 3)] == [2, 2, 3]
        assert [invariant_width(width, 2, dtype) for width in (1, 2, 3)] == [1, 2, 3]

    @pytest.mark.parametrize(("batch_size", "multiple"), [(1, 4), (2, 2), (3, 4), (4, 1), (6, 2), (8, 1)])
    def test_tokens_in_float32_come_in_fours(self, batch_size, multiple):
        for width in range(1, 10):
            padded = invariant_width(width, batch_size, torch.float32)
            assert padded % multiple == 0 and 0 <= padded - width < multiple


def positions_of(widths):
    """Row and column of each token of an unpadded pass."""
    return [(row, k) for row, width in enumerate(widths) for k in range(width)]


class TestUnpadded:
    """The tokens of rows of different widths as one row, which part in attention only."""

    WIDTHS = ([3, 1, 2], [17, 1, 1, 1, 2, 1], [1, 9], [4, 4, 1, 1, 1, 1, 1, 12], [5, 5])

    @pytest.mark.parametrize("widths", WIDTHS, ids=str)
    def test_states_go_there_and_back(self, widths):
        unpadded = Unpadded.of(widths, torch.device("cpu"))
        flat = torch.arange(1.0, 1 + 2 * sum(widths)).view(1, -1, 2)
        rows = unpadded.padded(flat)
        assert rows.shape == (len(widths), max(widths), 2)
        for token, (row, k) in enumerate(positions_of(widths)):
            assert rows[row, k].tolist() == flat[0, token].tolist()
        assert rows.count_nonzero() == flat.numel()
        assert torch.equal(unpadded.flat(rows), flat)

    @pytest.mark.parametrize("kind", ["by_row", "added", "by_head"])
    @pytest.mark.parametrize("heads", [(4, 2), (4, 4)], ids=["grouped", "ungrouped"])
    @pytest.mark.parametrize("widths", WIDTHS, ids=str)
    def test_every_token_attends_as_in_a_padded_pass(self, widths, heads, kind):
        num_rows, width = len(widths), max(widths)
        query, key, value = states(num_rows, *heads, width, 19 + width)
        mask = masks(num_rows, heads[0], width, 19 + width)[kind]
        layer, unpadded = attention_layer(heads[0] // heads[1]), Unpadded.of(widths, query.device)
        expected = stock(layer, query, key, value, mask, scaling=0.3)
        flat = unpadded.flat(query.transpose(1, 2)).transpose(1, 2)
        with attending("packed", unpadded):
            output, weights = ALL_ATTENTION_FUNCTIONS["sdpa"](layer, flat, key, value, mask, scaling=0.3)
        assert weights is None
        assert output.shape == (1, sum(widths), heads[0], 16)
        for token, (row, k) in enumerate(positions_of(widths)):
            torch.testing.assert_close(output[0, token], expected[row, k])

    def test_one_wide_row_does_not_widen_the_others(self):
        widths = [17, *[1] * 7]
        query, key, value = states(8, 4, 2, 17, 40)
        unpadded = Unpadded.of(widths, query.device)
        flat = unpadded.flat(query.transpose(1, 2)).transpose(1, 2)
        with (
            attending("packed", unpadded),
            patch.object(target_attention, "scaled_dot_product_attention", wraps=torch.empty) as kernel,
        ):
            kernel.side_effect = lambda query, key, value, **_: query
            mask = masks(8, 4, 17, 40)["by_row"]
            ALL_ATTENTION_FUNCTIONS["sdpa"](attention_layer(2), flat, key, value, mask)
        # Two query heads for each of key and value.
        assert [call.args[0].shape[:3] for call in kernel.call_args_list] == [(8, 2, 2), (1, 2, 32)]

    def test_not_where_something_looks_beyond_its_token_elsewhere(self, monkeypatch):
        assert takes_unpadded(kit.target())
        assert not takes_unpadded(kit.target(attn_implementation="eager"))
        model = kit.new_target()
        model._supports_attention_backend = False
        assert not takes_unpadded(model)
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", stock)
        assert not takes_unpadded(kit.target())
        unpadded = Unpadded.of([2, 1], torch.device("cpu"))
        with pytest.raises(UnsupportedGenerationError, match="rows of a batch"), attending("packed", unpadded):
            pass


class TestHandedOn:
    """Calls that we do not know better reach transformers' function with all their arguments."""

    @pytest.mark.parametrize(
        ("layer", "kwargs"),
        [
            ({}, {"dropout": 0.5}),
            ({}, {"is_causal": False}),
            ({"is_causal": False}, {}),
            ({}, {"position_bias": torch.zeros(1, 4, 3, 19)}),
            ({}, {"softcap": 30.0}),
            ({}, {"s_aux": torch.zeros(4)}),
            ({}, {"output_attentions": True}),
            ({"num_key_value_groups": None}, {}),
            ({"num_key_value_groups": 4}, {}),
        ],
        ids=lambda given: "-".join(given) or "plain",
    )
    def test_unknown_arguments(self, layer, kwargs):
        query, key, value = states(1, 4, 2, 3, 19)
        layer = SimpleNamespace(**{"num_key_value_groups": 2, "is_causal": True, **layer})
        mask = masks(1, 4, 3, 19)["shared"]
        self.assert_handed_on(layer, query, key, value, mask, kwargs)
        with pytest.raises(UnsupportedGenerationError, match="SimpleNamespace attends in a way"):
            ours(layer, query, key, value, mask, "invariant", **kwargs)

    @pytest.mark.parametrize(
        "change",
        [
            lambda q, k, v, m: (q, k, v[..., :8], m),
            lambda q, k, v, m: (q, k, v, m[..., :1]),
            lambda q, k, v, m: (q, k, v, m[0]),
            lambda q, k, v, m: (q.requires_grad_(), k, v, m),
            lambda q, k, v, m: (q.repeat(1, 1, 50, 1), k, v, m.repeat(1, 1, 50, 1)),
            lambda q, k, v, m: (q, k[:, :, :3], v[:, :, :3], None),
        ],
        ids=["value_dim", "mask_length", "mask_dims", "training", "long_chunk", "prefill"],
    )
    def test_other_shapes(self, change):
        given = change(*states(1, 4, 2, 3, 19), masks(1, 4, 3, 19)["shared"])
        self.assert_handed_on(attention_layer(2), *given, {})

    def assert_handed_on(self, layer, query, key, value, mask, kwargs):
        marker = object()
        with (
            patch.object(target_attention, "sdpa_attention_forward", return_value=marker) as stock,
            patch.dict(target_attention.AttentionInterface._global_mapping, sdpa=stock),
        ):
            assert ours(layer, query, key, value, mask, scaling=0.3, **kwargs) is marker
        stock.assert_called_once_with(layer, query, key, value, mask, scaling=0.3, **kwargs)


@cache
def invariant_target(dtype):
    """Large enough for its linear layers to have other kernels for one token than for several."""
    sizes = {"hidden_size": 384, "intermediate_size": 1536, "num_attention_heads": 6, "head_dim": 64}
    return kit.new_target("llama", **sizes, initializer_range=0.05).to(dtype)


@torch.no_grad()
def decode_in_passes(target, ids, widths):
    """Logits and final keys of `ids [B, S]`, decoded behind their first ten tokens in passes of these widths."""
    cache, logits = DynamicCache(config=target.config), []
    target(ids[:, :10], **{CACHE_NAME: cache})
    position = 10
    for width in widths:
        given = ids[:, position : position + width]
        num_dummies = invariant_width(width, len(ids), target.dtype) - width
        with attending("invariant"):
            output = target(pad(given, (0, num_dummies), value=7), **{CACHE_NAME: cache})
        logits.append(output.logits[:, :width])
        position += width
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys[:, :, :position], layer.values[:, :, :position]
    return torch.cat(logits, dim=1), torch.stack([layer.keys for layer in cache.layers])


@pytest.mark.usefixtures("threads")
class TestInvariantPasses:
    @pytest.mark.parametrize("batch_size", [1, 3])
    @HALF_AND_FLOAT
    def test_states_and_logits_do_not_depend_on_the_widths(self, dtype, batch_size):
        target = invariant_target(dtype)
        ids = torch.randint(kit.VOCAB, (batch_size, 34), generator=torch.Generator().manual_seed(0))
        expected = decode_in_passes(target, ids, [1] * 24)
        for widths in ([2] * 12, [7, 1, 5, 11], [24]):
            for given, known in zip(decode_in_passes(target, ids, widths), expected, strict=True):
                assert torch.equal(given, known), widths


def pass_after_prefill(target, num_tokens, mode):
    """Logits of a pass over `num_tokens` tokens behind the prompt of the kit."""
    ids = torch.tensor([[*kit.PROMPT, *range(1, num_tokens + 1)]])
    cache = DynamicCache(config=target.config)
    with torch.no_grad():
        target(ids[:, : len(kit.PROMPT)], **{CACHE_NAME: cache})
        if mode is None:
            return target(ids[:, len(kit.PROMPT) :], **{CACHE_NAME: cache}).logits
        with attending(mode):
            return target(ids[:, len(kit.PROMPT) :], **{CACHE_NAME: cache}).logits


class TestModels:
    # Gemma 2 caps its scores, which "sdpa" cannot do: from 5.24 on it does not use it, before that it leaves them out.
    @pytest.mark.parametrize(
        ("family", "mode"), [pair for pair in product(kit.FAMILIES, MODES) if pair != ("gemma2", "invariant")]
    )
    @pytest.mark.parametrize("num_tokens", [1, 5])
    def test_a_pass_equals_the_stock_pass(self, family, num_tokens, mode):
        target = kit.target(family)
        torch.testing.assert_close(
            pass_after_prefill(target, num_tokens, mode), pass_after_prefill(target, num_tokens, None)
        )

    def test_other_implementations_are_left_alone(self):
        target = kit.target("llama", attn_implementation="eager")
        assert torch.equal(pass_after_prefill(target, 5, "packed"), pass_after_prefill(target, 5, None))


class TestOverride:
    """The function in the shared interface is there while a block is open, and in nobody's way."""

    def test_it_goes_with_the_last_block(self):
        with attending("packed"):
            with attending("packed"):
                pass
            assert ALL_ATTENTION_FUNCTIONS["sdpa"] is target_attention._sdpa
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward
        assert "sdpa" not in ALL_ATTENTION_FUNCTIONS._local_mapping

    def test_it_goes_with_an_error(self):
        with pytest.raises(ZeroDivisionError), attending("packed"):
            raise ZeroDivisionError
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward
        assert target_attention._attending.get() is None

    def test_somebody_elses_override_stays(self):
        def theirs():
            pass

        ALL_ATTENTION_FUNCTIONS["sdpa"] = theirs
        try:
            with attending("packed"):
                assert ALL_ATTENTION_FUNCTIONS["sdpa"] is theirs
            assert ALL_ATTENTION_FUNCTIONS["sdpa"] is theirs
            with pytest.raises(UnsupportedGenerationError, match="Another function"), attending("invariant"):
                pass
        finally:
            del ALL_ATTENTION_FUNCTIONS["sdpa"]

    def test_an_override_that_comes_meanwhile_stays_and_may_call_on(self):
        query, key, value = states(1, 4, 2, 3, 19)
        mask = masks(1, 4, 3, 19)["shared"]
        try:
            with attending("packed"):
                before = ALL_ATTENTION_FUNCTIONS["sdpa"]
                ALL_ATTENTION_FUNCTIONS["sdpa"] = theirs = lambda *args: before(*args)
            assert ALL_ATTENTION_FUNCTIONS["sdpa"] is theirs
            with attending("packed"):
                output, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](attention_layer(2), query, key, value, mask)
            torch.testing.assert_close(output, stock(attention_layer(2), query, key, value, mask))
            ALL_ATTENTION_FUNCTIONS["sdpa"] = before
            with attending("packed"):
                pass
            assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward
        finally:
            ALL_ATTENTION_FUNCTIONS._local_mapping.pop("sdpa", None)

    def test_a_registered_function_is_used_by_everybody(self):
        marker = object()
        query, key, value = states(1, 4, 2, 3, 19)
        with patch.dict(target_attention.AttentionInterface._global_mapping, sdpa=lambda *args, **kwargs: marker):
            assert ours(attention_layer(2), query, key, value, None) is marker
        with (
            attending("packed"),
            patch.dict(target_attention.AttentionInterface._global_mapping, sdpa=lambda *args, **kwargs: marker),
        ):
            assert ours(attention_layer(2), query, key, value, None) is marker

    def test_other_threads_are_untouched(self):
        target, results = kit.target(), {}
        expected = pass_after_prefill(target, 5, None)
        inside, done = threading.Event(), threading.Event()

        def other():
            inside.wait(60)
            with patch.object(target_attention, "_packed", side_effect=AssertionError("packed in another thread")):
                results["other"] = pass_after_prefill(target, 5, None)
            done.set()

        thread = threading.Thread(target=other)
        thread.start()
        with attending("packed"):
            inside.set()
            assert done.wait(60)
        thread.join()
        assert torch.equal(results["other"], expected)

    def test_compiled_passes_keep_transformers_attention(self):
        query, key, value = states(1, 4, 2, 3, 19)
        mask = masks(1, 4, 3, 19)["shared"]

        @torch.compile(backend="eager", fullgraph=True)
        def attend(query, key, value):
            return ALL_ATTENTION_FUNCTIONS["sdpa"](layer, query, key, value, mask)[0]

        layer = attention_layer(2)
        with torch.no_grad(), attending("packed"):
            output = attend(query, key, value)
        assert torch.equal(output, stock(layer, query, key, value, mask))
