"""The trunk reads a row up to the last state of which a loss says something, and no further."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from tests.objectives.conftest import LOSSES, VOCAB, make_bc, make_ilql, make_oreo, make_qsft, make_rows
from torchrl_lang.modules.actor import split_actor
from torchrl_lang.objectives import policy
from torchrl_lang.objectives.networks import gather_inputs
from torchrl_lang.training import total_loss

# Positions:            0  1  2  3  4  5  6  7
AGENT = torch.tensor(
    [
        [0, 1, 1, 0, 0, 0, 0, 0],  # ended: its last decision is at 1
        [0, 1, 1, 0, 0, 0, 0, 0],  # not ended: bootstraps from its last token
        [0, 0, 0, 0, 1, 0, 0, 0],  # ended with its last token, a decision at 3
        [0, 0, 0, 0, 0, 0, 0, 0],  # nothing to learn, but a model wants something to read
    ]
).bool()
LENGTH = torch.tensor([6, 6, 5, 4])
ENDED = torch.tensor([True, False, True, True])


def rows():
    attention = torch.arange(8) < LENGTH[:, None]
    return TensorDict(
        tokens=torch.arange(32).reshape(4, 8) % (VOCAB - 1) * attention + attention,
        attention_mask=attention,
        agent_mask=AGENT,
        token_reward=AGENT.float(),
        terminated=ENDED[:, None],
        batch_size=[4],
    )


def lengths_read(loss):
    seen = []
    trunk = split_actor(loss.actor_network).trunk
    hook = trunk.register_forward_pre_hook(lambda _, args: seen.append(args[0]["attention_mask"].sum(-1).tolist()))
    loss(rows())
    hook.remove()
    return seen


@pytest.mark.parametrize("make", [make_ilql, make_bc])
def test_up_to_the_last_decision_or_the_state_that_bootstraps(make):
    expected = [2, 6, 4, 1] if make is make_ilql else [2, 2, 4, 1]  # copying bootstraps from nothing
    assert lengths_read(make()) == [expected]
    expected = [5, 6, 4, 3] if make is make_ilql else [5, 5, 4, 3]  # all but the last token are followed by one
    assert lengths_read(make(transition_weight=0.5)) == [expected]


@pytest.mark.parametrize("name", [name for name, make in LOSSES.items() if not make().transition_weight])
def test_what_stands_behind_changes_nothing(name):
    batch = make_rows()
    batch["terminated"][:] = True
    behind = batch["agent_mask"].flip(-1).cummax(-1).values.flip(-1).logical_not() & batch["attention_mask"]
    assert behind.any()
    other = batch.clone()
    other["tokens"] = torch.where(behind, (batch["tokens"] + 3) % VOCAB, batch["tokens"])
    found = []
    for rows_ in (batch, other):
        loss = LOSSES[name]()
        total_loss(loss(rows_)).backward()
        found.append([p.grad for p in loss.parameters() if p.grad is not None])
    for mine, its in zip(*found, strict=True):
        torch.testing.assert_close(its, mine)


@pytest.mark.parametrize("chunk", [None, 3])
@pytest.mark.parametrize("make", [make_oreo, make_qsft])
def test_the_environments_term_reads_no_token_of_the_agent(make, chunk, monkeypatch):
    """Its logits are of the environment's real tokens, but for the first of a row, which nothing predicts."""
    seen, batch = [], make_rows()
    read = lambda keys, rows, index: seen.append(index.tolist()) or gather_inputs(keys, rows, index)  # noqa: E731
    monkeypatch.setattr(policy, "gather_inputs", read)
    loss = make(transition_weight=0.5, logits_chunk=chunk)
    assert loss(batch)["loss_transition"] > 0
    theirs = (batch["attention_mask"] & ~batch["agent_mask"])[:, 1:]
    places = torch.nn.functional.pad(theirs, (0, 1)).flatten().nonzero().flatten()
    assert seen == [places.tolist()]
    batch["collector", "mask"] = torch.arange(6) % 3 > 0
    loss(batch)
    assert seen[1] == [place for place in seen[0] if place // batch["tokens"].shape[1] % 3 > 0]


@pytest.mark.parametrize("chunk", [None, 3])
@pytest.mark.parametrize("make", [make_oreo, make_qsft])
def test_an_environment_that_says_nothing(make, chunk):
    batch = make_rows()
    batch["agent_mask"] = batch["attention_mask"] & (torch.arange(batch["tokens"].shape[1]) > 0)
    loss = make(transition_weight=0.5, logits_chunk=chunk)
    out = loss(batch)
    assert out["loss_transition"] == 0
    total_loss(out).backward()
    assert all(p.grad.isfinite().all() for p in loss.parameters() if p.grad is not None)


def test_the_rows_stay_as_they_were():
    batch = rows()
    before = batch.clone()
    make_ilql()(batch)
    assert (batch == before).all()
