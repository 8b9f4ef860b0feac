"""Train a drafter for a target that has none: the target's own responses first, then the drafter.

python examples/train_a_drafter.py
python examples/train_a_drafter.py --target Qwen/Qwen3-0.6B --prompts chats.jsonl --max-steps 20000

The defaults take some minutes on a CPU and show how it goes. A drafter that is worth its time needs thousands of
prompts, and hours: `train_smollm2.py` is such a run. Every twentieth prompt is held out for the table at the end.
"""

import argparse
import json
from itertools import islice
from pathlib import Path

from template_prompts import prompts

from dspark_hf.data import DataSettings, run_data
from dspark_hf.training.run import TrainSettings, run_training

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--target", help="repository or folder of the target (default: SmolLM2-135M-Instruct)")
parser.add_argument("--dtype", default="bfloat16", help="of the target")
parser.add_argument("--prompts", help="JSON lines with prompt (default: 60, made by template_prompts.py)")
parser.add_argument("--max-new-tokens", type=int, default=128, help="of a response")
parser.add_argument("--max-steps", type=int, default=60)
parser.add_argument("--draft-vocab-size", type=int, default=4096, help="ids that the drafter may propose")
parser.add_argument("--output-dir", default="my-drafter")
arguments = parser.parse_args()

folder = Path(arguments.output_dir)
folder.mkdir(parents=True, exist_ok=True)
file = arguments.prompts or str(folder / "prompts.jsonl")
if arguments.prompts is None:
    Path(file).write_text("".join(json.dumps(row) + "\n" for row in islice(prompts(), 60)), encoding="utf-8")

# A run that was interrupted goes on, here and in the training: start it again with the same folder.
responses = run_data(
    DataSettings(
        target=arguments.target,
        dtype=arguments.dtype,
        prompts=[file],
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
target = f"--target {arguments.target} " if arguments.target else ""
print(f"compare it: python examples/evaluate.py {target}--drafter {folder}")
