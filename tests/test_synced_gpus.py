"""Two processes that must pass through the target equally often (sharded parameters), though one stops early."""

import sys

import kit
import pytest
import torch
import torch.distributed
import torch.multiprocessing


def _generate(rank: int, folder: str, settings: dict) -> None:
    sys.stdout = sys.stderr  # nothing to say
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    target, drafter = kit.target(), kit.drafter()
    passes = 0

    def count(*args: object) -> None:
        nonlocal passes
        passes += 1

    handle = target.register_forward_hook(count)
    mine = {name: values[rank] for name, values in settings.items()}
    ours = target.generate(**mine, do_sample=False, assistant_model=drafter, synced_gpus=True)
    ours = getattr(ours, "sequences", ours)
    handle.remove()
    torch.save((ours, passes), f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
def test_the_one_that_is_done_keeps_the_other_company(tmp_path):
    # The second process has a tenth of the tokens to write.
    settings = {name: [ids, ids] for name, ids in kit.inputs().items()} | {"max_new_tokens": [40, 4]}
    torch.multiprocessing.spawn(_generate, args=(str(tmp_path), settings), nprocs=2)
    (long, long_passes), (short, short_passes) = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert long_passes == short_passes
    assert long.tolist() == kit.target().generate(**kit.inputs(), max_new_tokens=40, do_sample=False).tolist()
    assert short.tolist() == long[:, : len(kit.PROMPT) + 4].tolist()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
def test_a_row_that_ended_early_on_one_process_alone(tmp_path):
    """Its last token takes one more pass, for the cache that is returned: of all processes, or of none."""
    ids = torch.cat((kit.inputs()["input_ids"], kit.inputs()["input_ids"].flip(1)))
    call = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    texts = kit.target().generate(**call, max_new_tokens=20, do_sample=False)[:, ids.shape[1] :].tolist()
    end = next(token for token in texts[0][2:9] if token not in texts[1])
    settings = {name: [values, values] for name, values in call.items()} | {"max_new_tokens": [20, 20]}
    settings |= {"eos_token_id": [end, kit.VOCAB - 1], "pad_token_id": [0, 0], "return_dict_in_generate": [True, True]}
    torch.multiprocessing.spawn(_generate, args=(str(tmp_path), settings), nprocs=2)
    (_, passes), (_, of_other) = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert passes == of_other
