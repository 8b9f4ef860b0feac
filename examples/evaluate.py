"""Measure a drafter: acceptance length, speed against plain decoding, and whether the texts are the same.

python examples/evaluate.py
python examples/evaluate.py --target Qwen/Qwen3-0.6B --drafter one another --prompts gsm8k.jsonl humaneval.jsonl

`publish.py` takes the file that this writes.
"""

import argparse

from dspark_hf.evaluation import EvaluationSettings, run_evaluation

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--target", help="repository or folder of the target (default: SmolLM2-135M-Instruct)")
parser.add_argument("--drafter", nargs="+", help="one or more for it (default: the one that is known for the target)")
parser.add_argument("--dtype", default="bfloat16")
parser.add_argument("--device", default="cpu")
parser.add_argument("--prompts", nargs="+", help="JSON lines with prompt, a file for each dataset (default: built-in)")
parser.add_argument("--num-prompts", type=int, default=2, help="of each dataset")
parser.add_argument("--max-new-tokens", type=int, default=64)
parser.add_argument("--results", default="results.json", help="file for all numbers")
arguments = parser.parse_args()

report = run_evaluation(
    EvaluationSettings(
        target=arguments.target,
        drafter=arguments.drafter,
        dtype=arguments.dtype,
        device=arguments.device,
        prompts=arguments.prompts,
        num_prompts=arguments.num_prompts,
        max_new_tokens=arguments.max_new_tokens,
        json=arguments.results,
    )
)

# The tables are printed; the same numbers are in the report, by drafter and dataset.
for name, datasets in report["drafters"].items():
    numbers = datasets["all"]
    acceptance_length = numbers["drafts"]["acceptance_length"]
    speed = numbers["speed"]["auto"]["ratio_to_plain"]
    print(f"{name}: {acceptance_length:.2f} tokens per round of a full draft, × {speed:.2f} as fast as plain decoding")
