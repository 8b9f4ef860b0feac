"""Chat in the terminal: text appears as it is accepted, often several tokens at a time.

python examples/streaming_chat.py
python examples/streaming_chat.py --target Qwen/Qwen3-4B --drafter deepseek-ai/dspark_qwen3_4b_block7 --device cuda
"""

import argparse
import sys

from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

from dspark_hf import DSparkDrafter
from dspark_hf.demo_weights import DRAFTER_FOLDER, fetch_demo_target

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--target", help="repository or folder of the target (default: SmolLM2-135M-Instruct)")
parser.add_argument("--drafter", default=DRAFTER_FOLDER, help="repository or folder of its drafter")
parser.add_argument("--dtype", default="bfloat16")
parser.add_argument("--device", default="cpu")
parser.add_argument("--max-new-tokens", type=int, default=256, help="of each answer")
arguments = parser.parse_args()

target_id = arguments.target or fetch_demo_target()
tokenizer = AutoTokenizer.from_pretrained(target_id)
model = AutoModelForCausalLM.from_pretrained(target_id, dtype=arguments.dtype, device_map=arguments.device)
drafter = DSparkDrafter.from_pretrained(arguments.drafter, dtype=arguments.dtype, device_map=arguments.device)
streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)

messages = []
print("Ask something; Ctrl-D ends the chat.")
print("> ", end="", flush=True)
for line in sys.stdin:
    messages.append({"role": "user", "content": line.strip()})
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with drafter.trace() as trace:
        output = model.generate(
            **inputs.to(model.device),
            assistant_model=drafter,
            max_new_tokens=arguments.max_new_tokens,
            do_sample=False,
            streamer=streamer,
        )
    answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    messages.append({"role": "assistant", "content": answer})
    summary = trace.summary()
    print(f"[{summary.acceptance_length:.2f} tokens per round, {summary.tokens_per_second:.0f} per second]")
    print("> ", end="", flush=True)
