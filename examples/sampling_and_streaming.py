"""Sample with a confidence threshold and stream the text as it is committed.

python examples/sampling_and_streaming.py
"""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer, set_seed

from dspark_hf import DSparkDrafter
from dspark_hf.demo_weights import DRAFTER_FOLDER, fetch_demo_target

folder = fetch_demo_target()
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
drafter = DSparkDrafter.from_pretrained(DRAFTER_FOLDER, dtype=torch.bfloat16)

# For every call with this drafter; an argument of the same name in one call wins over it.
drafter.generation_config.assistant_confidence_threshold = 0.3

messages = [{"role": "user", "content": "Write a Python function that reverses a list, and explain it."}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)

set_seed(0)
with drafter.trace() as trace:
    model.generate(
        **inputs,
        assistant_model=drafter,
        do_sample=True,
        temperature=0.7,
        top_p=0.95,
        max_new_tokens=96,
        stop_strings=["\n\n\n"],
        tokenizer=tokenizer,
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
    )

for number, record in enumerate(trace.rounds[:5]):
    print(f"round {number}: proposed {tokenizer.decode(record.proposed)!r}, accepted {record.accepted}")
