"""Make a drafter's confidences true, measure what rounds cost here, and let schedules decide by both.

python examples/calibrate_and_schedule.py
python examples/calibrate_and_schedule.py --target T --drafter D --prompts my-prompts.jsonl --output D

The default schedule, "auto", learns both while it decodes. This is for a static threshold, for decisions that do not
depend on the clock, and to see how far a confidence head is to be trusted.
"""

import argparse
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from dspark_hf import DSparkDrafter, calibrate
from dspark_hf.cost_model import profile_costs
from dspark_hf.demo_weights import DRAFTER_FOLDER, fetch_demo_target
from dspark_hf.prompt_files import PROMPTS_FILE, evenly_spread, read_prompts

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--target", help="repository or folder of the target (default: SmolLM2-135M-Instruct)")
parser.add_argument("--drafter", default=DRAFTER_FOLDER, help="repository or folder of its drafter")
parser.add_argument("--dtype", default="bfloat16")
parser.add_argument("--device", default="cpu")
parser.add_argument("--prompts", default=PROMPTS_FILE, help="JSON lines with prompt (default: 24 of the package)")
parser.add_argument("--num-prompts", type=int, help="evenly over the file (default: all)")
parser.add_argument("--max-new-tokens", type=int, default=64, help="of each prompt")
parser.add_argument("--output", help="folder for the calibration (default: it is not kept)")
arguments = parser.parse_args()

target_id = arguments.target or fetch_demo_target()
tokenizer = AutoTokenizer.from_pretrained(target_id)
model = AutoModelForCausalLM.from_pretrained(target_id, dtype=arguments.dtype, device_map=arguments.device)
drafter = DSparkDrafter.from_pretrained(arguments.drafter, dtype=arguments.dtype, device_map=arguments.device)
prompts = [row.prompt for row in evenly_spread(read_prompts(Path(arguments.prompts)), arguments.num_prompts)]

# Every other prompt is for the report: errors before and after are of drafts that the fit has not seen.
drafter.calibration = calibrate(drafter, model, prompts, tokenizer, max_new_tokens=arguments.max_new_tokens)
print("expected calibration error: {:.1%} before, {:.1%} after".format(*drafter.calibration.ece))
if arguments.output:
    print("wrote", drafter.calibration.save(arguments.output))

drafter.cost_model = profile_costs(model, drafter)
gains = drafter.cost_model.speed_ups(num_rows=1, acceptance=0.8)
print(f"if 80 % of draft tokens were accepted, the best draft would have {gains.index(max(gains))} tokens here")

messages = [{"role": "user", "content": prompts[0]}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
for schedule in ("constant", "confidence", "hardware", "auto"):
    with drafter.trace() as trace:
        model.generate(
            **inputs.to(model.device),
            assistant_model=drafter,
            num_assistant_tokens_schedule=schedule,
            max_new_tokens=arguments.max_new_tokens,
            do_sample=False,
        )
    summary = trace.summary()
    verified, accepted = summary.verified_per_round, summary.acceptance_length
    print(f"{schedule:10} {verified:.2f} tokens verified a round, {accepted:.2f} written (with the target's own)")
