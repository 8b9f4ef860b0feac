"""Answer several prompts at once: every row accepts its own length, and leaves when it ends.

python examples/batch.py
"""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dspark_hf import DSparkDrafter
from dspark_hf.demo_weights import DRAFTER_FOLDER, fetch_demo_target

PROMPTS = [
    "What is 17 times 23? Reason step by step.",
    "Write a Python function that reverses a string.",
    "Name three rivers in Europe.",
]

target_id = fetch_demo_target()
tokenizer = AutoTokenizer.from_pretrained(target_id, padding_side="left")
model = AutoModelForCausalLM.from_pretrained(target_id, dtype=torch.bfloat16)
drafter = DSparkDrafter.from_pretrained(DRAFTER_FOLDER, dtype=torch.bfloat16)

inputs = tokenizer.apply_chat_template(
    [[{"role": "user", "content": prompt}] for prompt in PROMPTS],
    add_generation_prompt=True,
    padding=True,
    return_tensors="pt",
    return_dict=True,
)

with drafter.trace() as trace:
    output = model.generate(**inputs, assistant_model=drafter, max_new_tokens=96, do_sample=False)

for prompt, row in zip(PROMPTS, output[:, inputs["input_ids"].shape[1] :], strict=True):
    print(f"> {prompt}\n{tokenizer.decode(row, skip_special_tokens=True).strip()}\n")
summary = trace.summary()
print(f"{summary.num_new_tokens} tokens, {summary.acceptance_length:.2f} per row and pass of the target")
