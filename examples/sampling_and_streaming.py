"""Sample with a confidence threshold, and stream the text as it is committed.

python examples/sampling_and_streaming.py
python examples/sampling_and_streaming.py --temperature 1.0 --seed 1
"""

import argparse

from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer, set_seed

from dspark_hf import DSparkDrafter
from dspark_hf.demo_weights import DRAFTER_FOLDER, fetch_demo_target

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--target", help="repository or folder of the target (default: SmolLM2-135M-Instruct)")
parser.add_argument("--drafter", default=DRAFTER_FOLDER, help="repository or folder of its drafter")
parser.add_argument("--dtype", default="bfloat16")
parser.add_argument("--device", default="cpu")
parser.add_argument("--max-new-tokens", type=int, default=96)
parser.add_argument("--temperature", type=float, default=0.7)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--prompt", default="Write a Python function that reverses a list, and explain it.")
arguments = parser.parse_args()

target_id = arguments.target or fetch_demo_target()
tokenizer = AutoTokenizer.from_pretrained(target_id)
model = AutoModelForCausalLM.from_pretrained(target_id, dtype=arguments.dtype, device_map=arguments.device)
drafter = DSparkDrafter.from_pretrained(arguments.drafter, dtype=arguments.dtype, device_map=arguments.device)

# For every call with this drafter; an argument of the same name in one call wins over it. This schedule looks at no
# clock, as "auto" does, so the same seed gives the same text.
drafter.generation_config.num_assistant_tokens_schedule = "confidence"
drafter.generation_config.assistant_confidence_threshold = 0.3

messages = [{"role": "user", "content": arguments.prompt}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)

set_seed(arguments.seed)
with drafter.trace() as trace:
    model.generate(
        **inputs.to(model.device),
        assistant_model=drafter,
        do_sample=True,
        temperature=arguments.temperature,
        top_p=0.95,
        max_new_tokens=arguments.max_new_tokens,
        stop_strings=["\n\n\n"],
        tokenizer=tokenizer,
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
    )

for number, record in enumerate(trace.rounds[:5]):
    print(f"round {number}: proposed {tokenizer.decode(record.proposed)!r}, accepted {record.accepted}")
