"""A model sharded by fully_shard (FSDP2) over two processes, which run this file, trains and acts as a whole one."""

from __future__ import annotations

import copy
import os
import sys
import traceback

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.modules.toys import CONTROL, TOKENIZER, WIDTH, games, heads, rows
from tests.processes import Program
from torchrl_lang import _ranks
from torchrl_lang.modules import (
    FeatureEmbedding,
    RowTokenActor,
    TiedQValueHead,
    UtteranceActor,
    ValueGuidance,
    causal_lm,
    language_actor,
    qvalue_module,
    value_module,
    with_features,
)
from torchrl_lang.modules.sharding import SharedHeads, gathered, unshard
from torchrl_lang.objectives import BCLoss, ILQLLoss, PPOLoss
from torchrl_lang.training import train_steps
from torchrl_lang.transforms import frozen_copy

K, CLOSE = 4, {"rtol": 1e-3, "atol": 2e-4}


def losses_read(n=8):
    """Rows with all that the losses read, of different lengths."""
    batch = games(n)
    batch["terminated"] = torch.arange(n)[:, None] % 2 == 0
    batch["advantage"] = batch["value_target"] = batch["token_reward"].sin()
    return seen(batch)


def tied_head(lm):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return TiedQValueHead(WIDTH, lm.get_output_embeddings(), detach_embedding=False)


def seeing_actor(lm, positions):
    """An actor that reads two features of three numbers before a row."""
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return with_features(language_actor(lm), FeatureEmbedding(3, WIDTH, positions=positions))


def seen(batch):
    """The rows with features, some of them masked."""
    g = torch.Generator().manual_seed(3)
    n = len(batch)
    return batch.update(
        {"features": torch.randn(n, 2, 3, generator=g), "features_mask": torch.rand(n, 2, generator=g) < 0.7}
    )


def losses_over(lm):
    """Every kind of loss, the Q values both with weights of their own and tied to the embedding."""
    (q, v), actor = heads(), language_actor(lm)
    policy = UtteranceActor(actor, CONTROL, K, seed=0)
    return {
        "bc": BCLoss(actor, reduction="sum"),
        "bc with features": BCLoss(seeing_actor(lm, positions=False), reduction="sum"),
        "bc in pieces": BCLoss(actor, reduction="sum", logits_chunk=5),
        "ilql": ILQLLoss(actor, qvalue_module(q), value_module(v), reduction="sum"),
        "tied": ILQLLoss(actor, qvalue_module(tied_head(lm)), value_module(v), reduction="sum", logits_chunk=5),
        "ppo": PPOLoss(policy, value_module(v), reduction="sum", normalize_advantage=False, logits_chunk=5),
    }


def policies_over(lm):
    """Sampling, greedy with values, and beams."""
    q, v = heads()
    guidance = ValueGuidance(tied_head(lm), v, beta=1.0, clip=1.0)
    actor = language_actor(lm)
    return [
        UtteranceActor(actor, CONTROL, K, seed=0, value=v),
        UtteranceActor(actor, CONTROL, K, method="greedy", guidance=guidance),
        UtteranceActor(seeing_actor(lm, positions=False), CONTROL, K, seed=0),
        UtteranceActor(seeing_actor(lm, positions=True), CONTROL, K, seed=0, cached=False),
        UtteranceActor(actor, CONTROL, K, method="beam", cached=False, guidance=ValueGuidance(q, beta=1.0)),
    ]


def gradients(losses, optimizer, batch):
    """Of each loss, for each parameter of the language model; whole tensors."""
    found, parameters = {}, optimizer.param_groups[0]["params"]
    for name, loss in losses.items():
        optimizer.zero_grad()
        out = loss(batch)
        sum(value for key, value in out.items() if key.startswith("loss_")).backward()
        found[name] = [whole(parameter.grad) for parameter in parameters]
    return found


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def train(optimizers, losses, twins, rank):
    """The mean of both processes' gradients is half of that of all rows."""
    batch = losses_read()
    mine, expected = gradients(losses, optimizers[0], batch[rank::2]), gradients(twins, optimizers[1], batch)
    for name, grads in expected.items():
        for at, (found, grad) in enumerate(zip(mine[name], grads, strict=True)):
            torch.testing.assert_close(found, grad / 2, **CLOSE, msg=lambda m, at=at, name=name: f"{name} {at}: {m}")
    for optimizer in optimizers:
        optimizer.step()


def act(policies, twins, rank):
    """Each process with rows of its own, and another number of them."""
    for policy, twin in zip(policies, twins, strict=True):
        for length in (5, 9, 9):
            batch = seen(rows(n=3 + 2 * rank, width=16, longest=length, seed=rank))
            if length == 9 and rank:
                batch["done"] = torch.ones(5, 1, dtype=torch.bool)
            said, expected = policy(batch.clone()), twin(batch.clone())
            assert torch.equal(said["action"], expected["action"])
            torch.testing.assert_close(said["token_log_prob"], expected["token_log_prob"], **CLOSE)
        batch = seen(rows(n=3, width=16, longest=9, seed=rank))
        action = torch.tensor([0, 3, CONTROL.end_of_action, CONTROL.pad]).expand(3, K)
        log_prob, expected = (each.get_dist(batch).log_prob(action) for each in (policy, twin))
        torch.testing.assert_close(log_prob, expected, **CLOSE)
    batch = losses_read()[rank::2]
    found, expected = (RowTokenActor(each[0]).get_dist(batch).entropy() for each in (policies, twins))
    torch.testing.assert_close(found, expected, **CLOSE)


def compile_nothing(lm):
    """Compiled code would read weights that were gathered before."""
    compiled = []
    double = torch.compile(lambda x: 2 * x, backend=lambda graph, inputs: compiled.append(graph) or graph.forward)
    with gathered([lm]):
        assert double(torch.ones(1)) == 2
    assert not compiled


def share_heads(mesh, rank):
    """Value heads of which each process keeps a part learn as whole ones, also where one of them has no decision."""
    batch = losses_read()
    for key in ("agent_mask", "token_reward"):
        batch[key][1::2] = 0
    for name in ("ilql", "tied", "ppo"):
        _ranks._place = (0, 1)
        lm = model_of("gpt2")
        loss, twin = (losses_over(model)[name] for model in (lm, copy.deepcopy(lm)))
        for each in (loss, twin):
            each.reduction = "mean"
        list(train_steps(twin, lambda: batch, torch.optim.SGD(twin.parameters(), 0.1), steps=3))
        _ranks._place = (rank, 2)
        networks = [key for key in loss._modules if "value_network" in key]
        heads = SharedHeads(loss, networks, mesh)
        parts = set(heads.parts.values())
        assert all(weight in parts for key in networks for weight in loss._modules[key].parameters())
        assert not any(weight.untyped_storage().nbytes() for weight in heads.parts)
        assert sum(part.to_local().numel() for part in parts) < 0.6 * sum(w.numel() for w in heads.parts)
        list(train_steps(loss, lambda: batch[rank::2], torch.optim.SGD(loss.parameters(), 0.1), steps=3))
        assert not any(weight.untyped_storage().nbytes() for weight in heads.parts)
        unshard(keep=True)
        for (key, weight), expected in zip(loss.named_parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(weight, expected, msg=lambda m, key=key: f"{name} {key}: {m}")  # noqa: B023
    _ranks._place = (0, 1)


def refuse(mesh):
    """What cannot work says so."""
    batch, lm, tied = losses_read(), model_of("gpt2"), model_of("gpt2")
    policy, whole_actor = UtteranceActor(language_actor(lm), CONTROL, K), BCLoss(language_actor(tied))
    around = BCLoss(fully_shard(language_actor(model_of("gpt2")), mesh=mesh))
    fully_shard(lm, mesh=mesh, reshard_after_forward=True)
    fully_shard(tied.base_model, mesh=mesh)
    for loss, message in (
        (around, "has not been gathered"),
        (BCLoss(policy.decoder.actor), "sharded again before it is read"),
        (whole_actor, "head is tied to the embedding"),
    ):
        with pytest.raises(RuntimeError, match=message):
            loss(batch)
    with pytest.raises(ValueError, match="cannot be copied: do so before"):
        frozen_copy(policy)


def model_of(kind):
    shape = {"vocab_size": TOKENIZER.vocab_size, "layers": 2, "width": WIDTH, "heads": 2, "max_length": 24}
    return causal_lm(kind, **shape, initializer_range=0.3)


def main(rank):
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    for kind in ("gpt2", "llama"):
        lm = model_of(kind)
        twin = copy.deepcopy(lm)
        before = [(losses_over(model), policies_over(model)) for model in (lm, twin)]
        for block in lm.base_model.h if kind == "gpt2" else lm.base_model.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(lm, mesh=mesh)
        after = [(losses_over(model), policies_over(model)) for model in (lm, twin)]
        optimizers = [torch.optim.SGD(m.parameters(), lr=lr) for m, lr in ((lm, 0.02), (twin, 0.01))]
        for (losses, policies), (twin_losses, twin_policies) in (before, after) if kind == "gpt2" else (after,):
            train(optimizers, losses, twin_losses, rank)
            number = None if kind == "gpt2" else 3
            act(policies[:number], twin_policies[:number], rank)
    compile_nothing(lm)
    share_heads(mesh, rank)
    refuse(mesh)


@pytest.mark.slow
def test_two_processes_that_share_a_model(tmp_path):
    workers = [Program("-m", "tests.modules.test_sharding", rank, tmp_path / "store") for rank in range(2)]
    try:
        assert [worker.wait(240) for worker in workers] == [0, 0], "\n".join(worker.stderr for worker in workers)
    finally:
        for worker in workers:
            worker.kill()


if __name__ == "__main__":
    torch.set_num_threads(1)
    rank = int(sys.argv[1])
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
    try:
        main(rank)
        dist.barrier()
        code = 0
    except BaseException:
        traceback.print_exc()
        code = 1
    os._exit(code)  # the other process may wait for this one, and gloo's threads may abort an ordinary shutdown
