"""A drafter for the demo's target: prompts, its responses, training; from the package's drafter on, or `--new`.

python examples/train_smollm2.py
python examples/train_smollm2.py --vary gsm8k.jsonl humaneval.jsonl --minutes 90 --data more-responses.jsonl.gz
python examples/train_smollm2.py --num-prompts 600 --minutes 20

On a 2-core CPU the defaults take about four hours; a run that was interrupted goes on where it was. Compare with the
drafter of the package afterwards:

dspark-hf eval --drafter smollm2-drafter/bfloat16 --prompts held-out.jsonl
"""

import argparse
import json
from itertools import islice
from pathlib import Path

import assistant_prompts
import function_prompts
import template_prompts
import torch
import varied_prompts

from dspark_hf import DSparkDrafter
from dspark_hf.data import DataSettings, run_data
from dspark_hf.demo_weights import DRAFTER_FOLDER
from dspark_hf.training.run import TrainSettings, run_training

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--output-dir", default="smollm2-drafter")
parser.add_argument("--num-prompts", type=int, default=4400, help="made by template; 0: only --data")
parser.add_argument("--num-assistant-prompts", type=int, default=1800, help="of more kinds, many with a text")
parser.add_argument("--num-function-prompts", type=int, default=1200, help="made of functions of installed packages")
parser.add_argument("--vary", nargs="*", default=[], help="files of prompts to make new ones from")
parser.add_argument("--num-varied", type=int, default=700, help="made from each of those files")
parser.add_argument("--prompts", nargs="*", default=[], help="files with more prompts, such as gym_prompts.py makes")
parser.add_argument("--num-self-prompts", type=int, default=1600, help="written by the target")
parser.add_argument("--max-new-tokens", type=int, default=200, help="of a response")
parser.add_argument("--data", nargs="*", default=[], help="files with more responses")
parser.add_argument("--exclude", nargs="*", default=[], help="files of prompts that must not be learned from")
parser.add_argument("--minutes", type=float, default=75.0, help="of training")
parser.add_argument("--new", action="store_true", help="a new drafter; default: go on with the package's")
arguments = parser.parse_args()

folder = Path(arguments.output_dir)
folder.mkdir(parents=True, exist_ok=True)
data = [*arguments.data]
if arguments.num_prompts or arguments.prompts:
    rows = [
        *islice(template_prompts.prompts(), arguments.num_prompts),
        *islice(assistant_prompts.prompts(), arguments.num_assistant_prompts),
        *islice(function_prompts.prompts(), arguments.num_function_prompts),
        *(row for file in arguments.vary for row in islice(varied_prompts.prompts([file]), arguments.num_varied)),
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    responses = DataSettings(
        prompts=[str(folder / "prompts.jsonl"), *arguments.prompts],
        self_prompts=arguments.num_self_prompts,
        # Beginnings to go on from: left alone, a small target asks the same questions again and again.
        self_openings=str(Path(__file__).with_name("prompt_openings.txt")),
        exclude=arguments.exclude or None,
        output=str(folder / "responses.jsonl"),
        max_new_tokens=arguments.max_new_tokens,
        dtype="bfloat16",
        batch_size=96,
    )
    data.append(str(run_data(responses)))

# A chat needs many words: with 8,192 ids, every eighth token of the target could not be drafted.
shape = {"draft_vocab_size": 16384}
if arguments.new:
    # The last two of 30 layers to start from; features from all over the depth.
    shape |= {"block_size": 8, "init_layer_ids": [28, 29], "target_layer_ids": [1, 7, 13, 20, 26]}
    shape |= {"markov_rank": 64, "markov_head_type": "gated"}
else:
    shape |= {"drafter": str(DRAFTER_FOLDER)}
run_training(
    TrainSettings(
        output_dir=str(folder),
        data=data,
        max_seconds=60 * arguments.minutes,
        # The target runs once for each text; its states are kept for the next epochs and the next run.
        feature_cache=str(folder / "features"),
        bf16=True,
        per_device_train_batch_size=8,
        num_anchors=64,
        learning_rate=6e-4,
        # Takes a sixth of a step of this size, and is worth it (model_cards/smollm2-135m-dspark).
        muon=hasattr(torch.optim, "Muon"),
        # A third less time for a step, and as good per step.
        sample_positions=True,
        # The demo decodes greedily: the text itself counts for more than in the paper.
        cross_entropy_weight=1.0,
        save_strategy="steps",
        save_steps=100,
        **shape,
    )
)
# Half precision for use: half the size, and faster.
drafter = DSparkDrafter.from_pretrained(folder, dtype=torch.bfloat16)
drafter.save_pretrained(folder / "bfloat16")
print("wrote", folder / "bfloat16")
