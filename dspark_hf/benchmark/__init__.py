"""`dspark-hf bench`: what a drafter brings and what it costs, against plain generation and other ways to speed it up.

The methods (`methods.METHODS`) take turns on each prompt, in one process, in an order that rotates from turn to turn:
what slows the machine for a while slows all of them.

The built-in prompts (`prompts.jsonl`, one JSON object a line: `dataset`, `index`, `prompt`) are held out from the
training of the built-in drafter:

- `gsm8k`: GSM8K, test part, every 20th problem (Cobbe et al. 2021, MIT licence), with the usual request to reason
  step by step;
- `humaneval`: HumanEval, every 20th problem (Chen et al. 2021, MIT licence), with a request to solve it;
- `mt-bench`: MT-Bench, first turns, one of each of its eight categories (Zheng et al. 2023, Apache 2.0 licence).

Four more (`copy_heavy_prompts.jsonl`, `copy`), written for this benchmark, ask for text that stands in the prompt.
"""

from .running import run_benchmark
from .settings import BenchmarkSettings
from .sweep import SweepSettings, run_sweep

__all__ = ["BenchmarkSettings", "SweepSettings", "run_benchmark", "run_sweep"]
