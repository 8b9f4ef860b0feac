"""What only an accelerator can show: devices, dtypes, blocks decided at once, offloaded caches (`tests/run_gpu`)."""

from collections.abc import Iterator

import kit
import pytest
import torch
from kit import POSITIONS, PROMPT, assert_lossless, inputs
from transformers import PreTrainedModel

from dspark_hf import DSparkDrafter, SpeculativeDecoding
from dspark_hf._compat import CACHE_NAME

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator"),
]


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    """TF32 would make a block pass differ from single passes by more than rounding."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def pair(family: str = "llama", dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, DSparkDrafter]:
    return kit.new_target(family).to("cuda", dtype), kit.new_drafter().to("cuda", dtype)


def on_gpu(num_rows: int = 1) -> dict[str, torch.Tensor]:
    rows = [PROMPT[: len(PROMPT) - 2 * i] for i in range(num_rows)]
    ids = torch.tensor([[0] * (len(PROMPT) - len(row)) + [*row] for row in rows], device="cuda")
    mask = torch.tensor([[0] * (len(PROMPT) - len(row)) + [1] * len(row) for row in rows], device="cuda")
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("family", kit.FAMILIES)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_same_ids(family: str, cache: str):
    model, assistant = pair(family)
    assert_lossless(model, assistant, wrong_at=POSITIONS, cache_implementation=cache, **on_gpu())


@pytest.mark.parametrize("family", kit.FAMILIES)
def test_same_ids_in_a_batch(family: str):
    model, assistant = pair(family)
    call = {**on_gpu(3), "max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(**call)
    texts = [row[len(PROMPT) :].tolist() for row in plain]
    for wrong_at in POSITIONS:
        with assistant.trace() as trace, kit.knowing(texts, len(PROMPT), wrong_at, [0, 2, 4]):
            ours = model.generate(**call, assistant_model=assistant)
        assert ours.tolist() == plain.tolist()
        kit.assert_drafted(trace, wrong_at)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_half_precision_runs_and_drafts(dtype: torch.dtype, num_rows: int):
    model, assistant = pair(dtype=dtype)
    with assistant.trace() as trace:
        output = model.generate(**on_gpu(num_rows), assistant_model=assistant, max_new_tokens=24, do_sample=False)
    assert output.shape == (num_rows, len(PROMPT) + 24)
    assert kit.num_drafted(trace.rounds) > 0


@pytest.mark.parametrize("num_rows", [1, 3])
def test_sampling_is_reproducible_and_stays_in_the_vocabulary(num_rows: int):
    model, assistant = pair()
    call = {**on_gpu(num_rows), "do_sample": True, "top_k": 5, "temperature": 0.8, "max_new_tokens": 24}
    texts = []
    for _ in range(2):
        torch.manual_seed(3)
        texts.append(model.generate(**call, assistant_model=assistant).tolist())
    assert texts[0] == texts[1]
    assert max(map(max, texts[0])) < kit.VOCAB


def test_a_drafter_on_another_device():
    model, assistant = kit.new_target().to("cuda"), kit.new_drafter(own_embed_tokens=True, own_lm_head=True)
    assert_lossless(model, assistant, wrong_at=POSITIONS, **on_gpu())


def test_a_round_waits_for_the_device_once():
    model, assistant = pair()
    decoding = SpeculativeDecoding(assistant, num_assistant_tokens_schedule="constant")
    call = {**on_gpu(), "max_new_tokens": 24, "do_sample": False}
    model.generate(**call, custom_generate=decoding)
    with torch.profiler.profile() as profile:
        model.generate(**call, custom_generate=decoding)
    waits = sum(e.count for e in profile.key_averages() if e.key in ("aten::_local_scalar_dense", "aten::item"))
    with assistant.trace() as trace:
        model.generate(**call, custom_generate=decoding)
    # transformers' own preparations and the end of the call wait a few times more.
    assert waits <= 2 * len(trace.rounds) + 20


@pytest.mark.parametrize("kind", ["offloaded", "offloaded_static"])
def test_offloaded_caches(kind: str):
    model, assistant = pair()
    assert_lossless(model, assistant, wrong_at=POSITIONS, cache_implementation=kind, **on_gpu())


def test_the_returned_cache_goes_on():
    model, assistant = pair()
    call = {**on_gpu(), "do_sample": False, "return_dict_in_generate": True}
    first = model.generate(**call, assistant_model=assistant, max_new_tokens=8)
    call["input_ids"] = first.sequences
    call["attention_mask"] = torch.ones_like(first.sequences)
    again = model.generate(**call, **{CACHE_NAME: first[CACHE_NAME]}, assistant_model=assistant, max_new_tokens=8)
    plain = model.generate(**{k: v.to("cuda") for k, v in inputs().items()}, do_sample=False, max_new_tokens=16)
    assert again.sequences.tolist() == plain.tolist()
