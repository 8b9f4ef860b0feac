"""Publish a drafter with a card of what was measured. Nothing is sent without --push.

python examples/evaluate.py --results results.json
python examples/publish.py you/smollm2-drafter --results results.json
python examples/publish.py you/smollm2-drafter --results results.json --push

The token is that of `hf auth login`, or HF_TOKEN.
"""

import argparse

from dspark_hf import DSparkDrafter
from dspark_hf.demo_weights import DRAFTER_FOLDER
from dspark_hf.hub import push_drafter_to_hub

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("repo_id", nargs="?", default="you/smollm2-drafter", help="owner/name on the Hub")
parser.add_argument("--drafter", default=DRAFTER_FOLDER, help="repository or folder of the drafter")
parser.add_argument("--results", help="file of measurements (default: a card without them)")
parser.add_argument("--push", action="store_true", help="send it (default: a dry run)")
parser.add_argument("--public", action="store_true", help="a new repository can be seen by all (default: private)")
arguments = parser.parse_args()

report = push_drafter_to_hub(
    DSparkDrafter.from_pretrained(arguments.drafter),
    arguments.repo_id,
    results=arguments.results,
    private=not arguments.public,
    dry_run=not arguments.push,
)

print(report.card)
for name, size in report.files.items():
    print(f"{size:>12,} bytes  {name}")
print(f"pushed: {report.commit.commit_url}" if report.commit else f"dry run: {report.repo_id} was not touched")
