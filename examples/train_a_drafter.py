"""Train a drafter for a target that has none: the target's own responses first, then the drafter.

python examples/train_a_drafter.py
python examples/train_a_drafter.py --target Qwen/Qwen3-0.6B --prompts chats.jsonl --max-steps 20000

The defaults take some minutes on a CPU and show how it goes. A drafter that is worth its time needs thousands of
prompts, and hours: `train_smollm2.py` is such a run.
"""

import argparse
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from dspark_hf import DSparkDrafter
from dspark_hf.data import DataSettings, run_data
from dspark_hf.demo_weights import fetch_demo_target
from dspark_hf.prompt_files import PROMPTS_FILE
from dspark_hf.training.run import TrainSettings, run_training

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--target", help="repository or folder of the target (default: SmolLM2-135M-Instruct)")
parser.add_argument("--dtype", default="bfloat16", help="of the target")
parser.add_argument("--prompts", default=str(PROMPTS_FILE), help="JSON lines with prompt (default: 24 of the package)")
parser.add_argument("--max-new-tokens", type=int, default=128, help="of a response")
parser.add_argument("--max-steps", type=int, default=60)
parser.add_argument("--draft-vocab-size", type=int, default=4096, help="ids that the drafter may propose")
parser.add_argument("--output-dir", default="my-drafter")
arguments = parser.parse_args()

folder = Path(arguments.output_dir)
folder.mkdir(parents=True, exist_ok=True)

# A run that was interrupted goes on, here and in the training: start it again with the same folder.
responses = run_data(
    DataSettings(
        target=arguments.target,
        dtype=arguments.dtype,
        prompts=[arguments.prompts],
        output=str(folder / "responses.jsonl"),
        max_new_tokens=arguments.max_new_tokens,
    )
)
run_training(
    TrainSettings(
        target=arguments.target,
        target_dtype=arguments.dtype,
        data=[str(responses)],
        output_dir=str(folder),
        bf16=True,
        max_steps=arguments.max_steps,
        draft_vocab_size=arguments.draft_vocab_size,
        feature_cache="memory",  # the target runs once for each response
    )
)

target_id = arguments.target or fetch_demo_target()
model = AutoModelForCausalLM.from_pretrained(target_id, dtype=arguments.dtype)
drafter = DSparkDrafter.from_pretrained(folder, dtype=arguments.dtype)
tokenizer = AutoTokenizer.from_pretrained(target_id)
messages = [{"role": "user", "content": "What is 12 times 12?"}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
with drafter.trace() as trace:
    model.generate(**inputs, assistant_model=drafter, max_new_tokens=arguments.max_new_tokens, do_sample=False)
print(f"the new drafter: {trace.summary().acceptance_length:.2f} tokens per round")
