"""Answer several prompts at once: every row accepts its own length, and leaves when it ends.

python examples/batch.py
python examples/batch.py "Name three rivers in Europe." "Why is the sky blue?"
"""

import argparse

from transformers import AutoModelForCausalLM, AutoTokenizer

from dspark_hf import DSparkDrafter
from dspark_hf.demo_weights import DRAFTER_FOLDER, fetch_demo_target

PROMPTS = [
    "What is 17 times 23? Reason step by step.",
    "Write a Python function that reverses a string.",
    "Name three rivers in Europe.",
]

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("prompts", nargs="*", default=PROMPTS)
parser.add_argument("--target", help="repository or folder of the target (default: SmolLM2-135M-Instruct)")
parser.add_argument("--drafter", default=DRAFTER_FOLDER, help="repository or folder of its drafter")
parser.add_argument("--dtype", default="bfloat16")
parser.add_argument("--device", default="cpu")
parser.add_argument("--max-new-tokens", type=int, default=96)
arguments = parser.parse_args()

target_id = arguments.target or fetch_demo_target()
# New tokens follow the prompt, so what fills up a short one stands on its left.
tokenizer = AutoTokenizer.from_pretrained(target_id, padding_side="left")
model = AutoModelForCausalLM.from_pretrained(target_id, dtype=arguments.dtype, device_map=arguments.device)
drafter = DSparkDrafter.from_pretrained(arguments.drafter, dtype=arguments.dtype, device_map=arguments.device)

inputs = tokenizer.apply_chat_template(
    [[{"role": "user", "content": prompt}] for prompt in arguments.prompts],
    add_generation_prompt=True,
    padding=True,
    return_tensors="pt",
    return_dict=True,
).to(model.device)

with drafter.trace() as trace:
    output = model.generate(
        **inputs, assistant_model=drafter, max_new_tokens=arguments.max_new_tokens, do_sample=False
    )

for prompt, row in zip(arguments.prompts, output[:, inputs["input_ids"].shape[1] :], strict=True):
    print(f"> {prompt}\n{tokenizer.decode(row, skip_special_tokens=True).strip()}\n")
summary = trace.summary()
print(f"{summary.num_new_tokens} tokens, {summary.acceptance_length:.2f} per row and pass of the target")
