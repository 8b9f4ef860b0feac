"""Train a drafter for SmolLM2-135M-Instruct from its responses, on a CPU, and let it draft.

python examples/train_smollm2.py responses.jsonl.gz
python examples/train_smollm2.py responses.jsonl.gz --minutes 10 --from-demo

The responses are JSON lines with `prompt_ids` and `response_ids`. The same run as a command:

dspark-hf train --data responses.jsonl.gz --output-dir smollm2-drafter --max-seconds 2700 --bf16 True \\
    --feature-cache smollm2-drafter/features --block-size 6 --markov-rank 64 --draft-vocab-size 8192 \\
    --init-layer-ids 28 29 --target-layer-ids 1 7 13 20 26
"""

import argparse
from pathlib import Path

import torch

from dspark_hf import DSparkDrafter
from dspark_hf.demo_weights import DRAFTER_FOLDER
from dspark_hf.training.run import TrainSettings, run_training

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("data", nargs="+", help="JSON lines with prompt_ids and response_ids")
parser.add_argument("--output-dir", default="smollm2-drafter")
parser.add_argument("--minutes", type=float, default=45.0, help="of training")
parser.add_argument("--from-demo", action="store_true", help="go on with the demo's drafter instead of a new one")
arguments = parser.parse_args()

new = {
    "block_size": 6,
    "markov_rank": 64,
    "draft_vocab_size": 8192,
    # The last two of 30 layers; features from all over the depth.
    "init_layer_ids": [28, 29],
    "target_layer_ids": [1, 7, 13, 20, 26],
}
run_training(
    TrainSettings(
        output_dir=arguments.output_dir,
        data=arguments.data,
        max_seconds=60 * arguments.minutes,
        # The target runs once for each text; its states are kept for the next epochs and the next run.
        feature_cache=str(Path(arguments.output_dir) / "features"),
        bf16=True,
        per_device_train_batch_size=4,
        num_anchors=32,
        learning_rate=6e-4,
        # The demo decodes greedily: the text itself counts for more than in the paper.
        cross_entropy_weight=1.0,
        save_strategy="steps",
        save_steps=100,
        **({"drafter": str(DRAFTER_FOLDER)} if arguments.from_demo else new),
    )
)
# Half precision for use: half the size, and faster.
drafter = DSparkDrafter.from_pretrained(arguments.output_dir, dtype=torch.bfloat16)
drafter.save_pretrained(Path(arguments.output_dir) / "bfloat16")
print("wrote", Path(arguments.output_dir) / "bfloat16")
