"""Answer a prompt with a drafter, and say how many tokens a pass of the target gave.

python examples/quickstart.py
python examples/quickstart.py --target Qwen/Qwen3-4B --drafter deepseek-ai/dspark_qwen3_4b_block7 --device cuda
"""

import argparse

from transformers import AutoModelForCausalLM, AutoTokenizer

from dspark_hf import DSparkDrafter
from dspark_hf.demo_weights import DRAFTER_FOLDER, fetch_demo_target

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--target", help="repository or folder of the target (default: SmolLM2-135M-Instruct)")
parser.add_argument("--drafter", default=DRAFTER_FOLDER, help="repository or folder of its drafter")
parser.add_argument("--dtype", default="bfloat16")
parser.add_argument("--device", default="cpu")
parser.add_argument("--max-new-tokens", type=int, default=96)
parser.add_argument(
    "--prompt", default="A train travels 60 km in 45 minutes. How fast is it in km/h? Think step by step."
)
arguments = parser.parse_args()

target_id = arguments.target or fetch_demo_target()
tokenizer = AutoTokenizer.from_pretrained(target_id)
model = AutoModelForCausalLM.from_pretrained(target_id, dtype=arguments.dtype, device_map=arguments.device)
drafter = DSparkDrafter.from_pretrained(arguments.drafter, dtype=arguments.dtype, device_map=arguments.device)

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
print("accepted at each position:", ", ".join(f"{rate:.0%}" for rate in summary.acceptance_rate_per_position))
