"""TorchRL's own Trainer on rows: it counts what was played or read, and learns from every row once an epoch."""

from __future__ import annotations

import pytest
import torch
from torchrl.collectors import Collector
from torchrl.objectives import SoftUpdate
from torchrl.trainers import TargetNetUpdaterHook, Trainer

from torchrl_lang.data import EpisodeRows, row_buffer, rows_from_rollout
from torchrl_lang.envs.games import CorridorEnv, CorridorPlayer
from torchrl_lang.modules import (
    QValueHead,
    UtteranceActor,
    ValueHead,
    causal_lm,
    language_actor,
    qvalue_module,
    value_module,
)
from torchrl_lang.objectives import ILQLLoss, PPOLoss
from torchrl_lang.training import EpisodeRowsHook, OfflineCollector, adamw

OPTIONS = {"frame_skip": 1, "progress_bar": False}


def model(env):
    torch.manual_seed(0)
    vocabulary = env.tokenizer.vocab_size
    lm = causal_lm(vocab_size=vocabulary, layers=1, width=16, heads=2, max_length=64, initializer_range=0.1)
    return language_actor(lm), vocabulary


def watched(loss):
    """The loss, and the batches that it is called with."""
    seen = []
    loss.register_forward_pre_hook(lambda _, args: seen.append(args[0].clone()))
    return loss, seen


def test_ilql_on_a_data_set():
    env = CorridorEnv(length=3, batch_size=[16], seed=0)
    steps = env.rollout(24, CorridorPlayer(env.tokenizer, 3), break_when_any_done=False)
    rows = rows_from_rollout(steps, unfinished="drop")[:24]
    actor, vocabulary = model(env)
    loss, seen = watched(ILQLLoss(actor, qvalue_module(QValueHead(16, vocabulary)), value_module(ValueHead(16))))
    before = [p.detach().clone() for p in loss.parameters()]
    collector = OfflineCollector(row_buffer(rows, 8, trim=False))
    trainer = Trainer(collector=collector, total_frames=48, optim_steps_per_batch=1, loss_module=loss,
                      optimizer=adamw(loss, 1e-3), seed=3, **OPTIONS)  # fmt: skip
    TargetNetUpdaterHook(SoftUpdate(loss, tau=0.1)).register(trainer, "target")
    trainer.train()
    assert trainer.collected_frames == 48
    assert len(seen) == 6
    found = torch.cat([batch["tokens"] for batch in seen])
    for epoch in (found[:24], found[24:]):  # every row once in each of the two epochs
        assert sorted(epoch.tolist()) == sorted(rows["tokens"].long().tolist())
    assert any(not torch.equal(a, b) for a, b in zip(before, loss.parameters(), strict=True))
    other = OfflineCollector(row_buffer(rows, 8, trim=False))
    other.load_state_dict(collector.state_dict())
    assert torch.equal(next(iter(other))["tokens"], next(iter(collector))["tokens"])


@pytest.mark.parametrize("steps", [None, 2])
def test_ppo_counts_turns_and_learns_from_each_row_once_an_epoch(steps):
    """Batches of one turn: in some no episode ends."""
    env = CorridorEnv(length=3, batch_size=[8], seed=0)
    actor, _ = model(env)
    policy = UtteranceActor(actor, env.tokenizer.control, env.action_length, seed=0)
    loss, seen = watched(PPOLoss(policy, value_module(ValueHead(16))))
    collector = Collector(env, policy, frames_per_batch=16, total_frames=160)
    rows_of, made = EpisodeRows(carry=["token_log_prob"]), []

    def process(rows):
        made.append(rows.clone())
        return loss.estimate(rows)

    trainer = Trainer(collector=collector, total_frames=160, optim_steps_per_batch=steps, num_epochs=2,
                      loss_module=loss, optimizer=adamw(loss, 1e-3), **OPTIONS)  # fmt: skip
    hook = EpisodeRowsHook(rows_of, 4, process=process)
    hook.register(trainer)
    trainer.train()
    assert trainer.collected_frames == 160
    assert 0 < len(made) <= 10
    number = sum(len(rows) for rows in made)
    assert number > 4
    if steps is None:
        assert sum(len(batch) for batch in seen) == 2 * number
    else:
        assert len(seen) == sum(2 * min(steps, -(-len(rows) // 4)) for rows in made)
    assert hook.state_dict() == {"made": 10}
