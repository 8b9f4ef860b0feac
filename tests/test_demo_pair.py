"""The demo pair on real prompts: in float32 the text is plain generation's, token for token.

The prompts are held-out ones of GSM8K (MIT), HumanEval (MIT), MBPP (CC-BY 4.0), MATH-500 (MIT), MT-Bench (Apache 2.0)
and Arena-Hard v2 (Apache 2.0).
"""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dspark_hf import DSparkDrafter
from dspark_hf.demo_weights import DRAFTER_FOLDER, cached_demo_target

PROMPTS = [
    json.loads(line)
    for line in (Path(__file__).parent / "data" / "equality_prompts.jsonl").read_text(encoding="utf-8").splitlines()
]


@pytest.fixture(scope="module")
def pair():
    folder = cached_demo_target()
    if folder is None:
        pytest.skip("the demo's target is not cached: run `dspark-hf demo` first")
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    drafter = DSparkDrafter.from_pretrained(DRAFTER_FOLDER, dtype=torch.float32)
    return target, drafter, AutoTokenizer.from_pretrained(folder)


@pytest.mark.slow
@pytest.mark.parametrize("row", PROMPTS, ids=[f"{row['dataset']}-{row['index']}" for row in PROMPTS])
def test_greedy_text_is_that_of_plain_generation(pair, row):
    target, drafter, tokenizer = pair
    messages = [{"role": "user", "content": row["prompt"]}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    plain = target.generate(**inputs, max_new_tokens=64, do_sample=False)
    with drafter.trace() as trace:
        drafted = target.generate(**inputs, max_new_tokens=64, do_sample=False, assistant_model=drafter)
    assert sum(len(r.proposed) for r in trace.rounds) > 0
    assert sum(r.accepted for r in trace.rounds) > 0
    assert torch.equal(plain, drafted)
