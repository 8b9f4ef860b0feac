"""Target and drafter on different devices: only hidden states and token ids travel between them.

python examples/two_devices.py
python examples/two_devices.py --target-device cuda:0 --drafter-device cuda:1

Without options: the first two accelerators; with one, the drafter is on the CPU; with none, both are.
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dspark_hf import DSparkDrafter
from dspark_hf.demo_weights import DRAFTER_FOLDER, fetch_demo_target

devices = [*(f"cuda:{index}" for index in range(torch.cuda.device_count())), "cpu", "cpu"]

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--target", help="repository or folder of the target (default: SmolLM2-135M-Instruct)")
parser.add_argument("--drafter", default=DRAFTER_FOLDER, help="repository or folder of its drafter")
parser.add_argument("--target-device", default=devices[0])
parser.add_argument("--drafter-device", default=devices[1])
parser.add_argument("--dtype", default="bfloat16")
parser.add_argument("--max-new-tokens", type=int, default=64)
parser.add_argument("--prompt", default="Why is the sky blue? Explain it to a child.")
arguments = parser.parse_args()

target_id = arguments.target or fetch_demo_target()
tokenizer = AutoTokenizer.from_pretrained(target_id)
model = AutoModelForCausalLM.from_pretrained(target_id, dtype=arguments.dtype, device_map=arguments.target_device)
drafter = DSparkDrafter.from_pretrained(arguments.drafter, dtype=arguments.dtype, device_map=arguments.drafter_device)
print(f"target on {model.device}, drafter on {drafter.device}")
if model.device == drafter.device:
    print("Both are on one device, so nothing travels.")

messages = [{"role": "user", "content": arguments.prompt}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
inputs = inputs.to(model.device)

with drafter.trace() as trace:
    output = model.generate(
        **inputs, assistant_model=drafter, max_new_tokens=arguments.max_new_tokens, do_sample=False
    )

print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
summary = trace.summary()
print(f"\n{summary.num_new_tokens} tokens in {summary.num_rounds} rounds: {summary.acceptance_length:.2f} per round")
print(f"seconds: {summary.draft_seconds:.2f} of drafting, {summary.verify_seconds:.2f} of the target's passes")
