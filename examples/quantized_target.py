"""A target in 4 or 8 bits, with its drafter in half precision.

pip install -e ".[bitsandbytes]"
python examples/quantized_target.py
python examples/quantized_target.py --target Qwen/Qwen3-8B --drafter deepseek-ai/dspark_qwen3_8b_block7 --device cuda

The drafter was trained on the target before it was quantized. Where the two still write alike, as many drafts are
accepted as before; the number at the end shows it. The text is that of the quantized target.
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from transformers.utils import is_bitsandbytes_available

from dspark_hf import DSparkDrafter
from dspark_hf.demo_weights import DRAFTER_FOLDER, fetch_demo_target

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--target", help="repository or folder of the target (default: SmolLM2-135M-Instruct)")
parser.add_argument("--drafter", default=DRAFTER_FOLDER, help="repository or folder of its drafter")
parser.add_argument("--bits", type=int, choices=(4, 8), default=4)
parser.add_argument("--dtype", default="bfloat16", help="of the drafter, and of what is computed")
parser.add_argument("--device", default="cpu")
parser.add_argument("--max-new-tokens", type=int, default=64)
parser.add_argument("--prompt", default="Explain in two sentences what a prime number is.")
arguments = parser.parse_args()
if not is_bitsandbytes_available():
    parser.exit(1, 'Quantized weights need bitsandbytes: pip install -e ".[bitsandbytes]"\n')

if arguments.bits == 4:
    dtype = getattr(torch, arguments.dtype)
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
else:
    quantization = BitsAndBytesConfig(load_in_8bit=True)
target_id = arguments.target or fetch_demo_target()
tokenizer = AutoTokenizer.from_pretrained(target_id)
model = AutoModelForCausalLM.from_pretrained(
    target_id, quantization_config=quantization, dtype=arguments.dtype, device_map=arguments.device
)
drafter = DSparkDrafter.from_pretrained(arguments.drafter, dtype=arguments.dtype, device_map=arguments.device)
print(f"target in {arguments.bits} bits: {model.get_memory_footprint() / 1e6:,.1f} MB")

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
