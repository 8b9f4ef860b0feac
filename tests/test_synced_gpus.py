"""Two processes that must pass through the target equally often (sharded parameters), though one stops early."""

import sys

import kit
import pytest
import torch
import torch.distributed
import torch.multiprocessing


def _generate(rank: int, folder: str) -> None:
    sys.stdout = sys.stderr  # nothing to say
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    target, drafter = kit.target(), kit.drafter()
    passes = 0

    def count(*args: object) -> None:
        nonlocal passes
        passes += 1

    handle = target.register_forward_hook(count)
    # The second process has a tenth of the tokens to write.
    settings = {"max_new_tokens": 4 if rank else 40, "do_sample": False}
    ours = target.generate(**kit.inputs(), **settings, assistant_model=drafter, synced_gpus=True)
    handle.remove()
    torch.save((ours, passes), f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
def test_the_one_that_is_done_keeps_the_other_company(tmp_path):
    torch.multiprocessing.spawn(_generate, args=(str(tmp_path),), nprocs=2)
    (long, long_passes), (short, short_passes) = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert long_passes == short_passes
    assert long.tolist() == kit.target().generate(**kit.inputs(), max_new_tokens=40, do_sample=False).tolist()
    assert short.tolist() == long[:, : len(kit.PROMPT) + 4].tolist()
