"""One of two processes that take a training step through DistributedDataParallel; run as a script."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.nn.parallel import DistributedDataParallel

from tests.objectives.conftest import make_ilql, make_rows, total

if __name__ == "__main__":
    rank, store, out = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    loss = make_ilql(reduction="sum")
    wrapped = DistributedDataParallel(loss)
    total(wrapped(make_rows()[rank::2])).backward()
    if rank == 0:
        grads = {name: p.grad.contiguous() for name, p in loss.named_parameters() if p.grad is not None}
        # Tied weights come once by name; safetensors wants memory of its own for each.
        save_file({name: grad.clone() for name, grad in grads.items()}, out)
    # Neither may leave while the other still talks to it, and gloo's threads may abort an ordinary shutdown.
    dist.barrier()
    os._exit(0)
