"""Gradients of two processes are averaged when a loss is called through its DistributedDataParallel wrapper."""

from __future__ import annotations

from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes
from torch.nn.parallel import DistributedDataParallel

from tests.objectives.models import LOSSES, make_ilql, make_rows, rows_for, total

pytestmark = pytest.mark.slow

# What a term of weight zero would train gets no gradient.
UNUSED = {
    "ilql without the term of V": partial(make_ilql, value_weight=0.0),
    "ilql without the terms of Q": partial(make_ilql, qvalue_weight=0.0, cql_weight=0.0),
}


def shares(rows, rank):
    """This process's rows: every other one; one without an action, or the others; none, or all."""
    return rows[rank::2], rows[1:] if rank else rows[:1], rows if rank else rows[:0]


def gradients(loss):
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in loss.named_parameters()}


def compare(name, make, rows, rank, **options):
    """The mean of both processes' gradients is half of that of all rows."""
    whole, wrapped = make(reduction="sum"), DistributedDataParallel(make(reduction="sum"), **options)
    total(whole(rows)).backward()
    expected = {name: grad / 2 for name, grad in gradients(whole).items()}
    for number, share in enumerate(shares(rows, rank)):
        wrapped.zero_grad()
        total(wrapped(share)).backward()
        torch.testing.assert_close(
            gradients(wrapped.module), expected, rtol=1e-4, atol=1e-5, msg=lambda text, n=number: f"{name}, {n}: {text}"
        )


def work(rank, store):
    torch.set_num_threads(1)
    # Nothing else ends a process that waits for another one after its parent was killed.
    dist.init_process_group("gloo", f"file://{store}", timedelta(minutes=2), world_size=2, rank=rank)
    for name, make in LOSSES.items():
        options = {"static_graph": True} if name == "archer-own-trunks" else {}  # it does not read the policy
        compare(name, make, rows_for(name), rank, **options)
    for name, make in UNUSED.items():
        compare(name, make, make_rows(), rank, static_graph=True)
    dist.barrier()  # neither may leave while the other still talks to it


def test_two_processes_average_the_gradients_of_every_loss(tmp_path):
    start_processes(work, (tmp_path / "store",), nprocs=2, start_method="fork")
