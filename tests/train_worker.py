"""A short training run for tests that start processes: prints the loss of every step as JSON. Not a test itself."""

import json
import sys
from pathlib import Path

import torch
from test_training import responses, train

from dspark_hf.training.run import part_processes

torch.set_num_threads(1)
folder, batch_size, drawn = Path(sys.argv[1]), int(sys.argv[2]), bool(sys.argv[3])
# Of five rows, two processes are given six.
settings = {"eval_rows": responses()[:5], "eval_strategy": "steps", "eval_steps": 4, "per_device_eval_batch_size": 1}
settings |= {"per_device_train_batch_size": batch_size, "sample_positions": drawn}
trainer = train(folder, max_steps=4, **settings)
if trainer.args.process_index == 0:
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    (evaluated,) = (entry for entry in trainer.state.log_history if "eval_loss" in entry)
    weights = {name: tensor.tolist() for name, tensor in trainer.drafter.state_dict().items()}
    (folder / "result.json").write_text(json.dumps({"history": history, "weights": weights, "evaluated": evaluated}))
part_processes()
