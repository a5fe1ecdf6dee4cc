"""TorchRL's own Trainer on rows: it counts what was played or read, and learns from every row once an epoch."""

from __future__ import annotations

import pytest
import torch
from torchrl.collectors import Collector
from torchrl.objectives import SoftUpdate
from torchrl.trainers import TargetNetUpdaterHook, Trainer

from tests.objectives.models import LOSSES, rows_for
from torchrl_lang.data import EpisodeRows, row_buffer
from torchrl_lang.envs.games import CorridorEnv
from torchrl_lang.modules import UtteranceActor, ValueHead, causal_lm, language_actor, value_module
from torchrl_lang.objectives import PPOLoss
from torchrl_lang.training import EpisodeRowsHook, OfflineCollector, adamw

OPTIONS = {"frame_skip": 1, "progress_bar": False}


def watched(loss):
    """The loss, and the batches that it is called with."""
    seen = []
    loss.register_forward_pre_hook(lambda _, args: seen.append(args[0].clone()))
    return loss, seen


def targets_of(loss):
    """The target parameters and what they follow, by name; copies."""
    names = {name.split(".")[0] for name in loss.state_dict() if name.startswith("target_")}
    return {
        name: [getattr(loss, key).data.clone().flatten_keys(".") for key in (name, name.removeprefix("target_"))]
        for name in names
    }


@pytest.mark.parametrize("name", ["bc-in-pieces", "ilql-tied", "qsft-rest", "oreo-own-trunk", "chai"])
def test_a_loss_on_a_data_set(name):
    rows = rows_for(name, 24)
    loss, seen = watched(LOSSES[name]())
    before = [p.detach().clone() for p in loss.parameters()]
    collector = OfflineCollector(row_buffer(rows, 8, trim=False))
    trainer = Trainer(collector=collector, total_frames=48, optim_steps_per_batch=1, loss_module=loss,
                      optimizer=adamw(loss, 1e-3), seed=3, **OPTIONS)  # fmt: skip
    if targets_of(loss):
        TargetNetUpdaterHook(SoftUpdate(loss, tau=0.1)).register(trainer, "target")
    expected = {key: target for key, (target, _) in targets_of(loss).items()}

    def follow():
        for key, (_, online) in targets_of(loss).items():
            expected[key].lerp_(online, 0.1)

    trainer.register_op("post_optim", follow)
    trainer.train()
    assert trainer.collected_frames == 48
    assert len(seen) == 6
    found = torch.cat([batch["tokens"] for batch in seen])
    for epoch in (found[:24], found[24:]):  # every row once in each of the two epochs
        assert sorted(epoch.tolist()) == sorted(rows["tokens"].tolist())
    assert all(not torch.equal(a, b) for a, b in zip(before, loss.parameters(), strict=True))
    for key, (target, online) in targets_of(loss).items():
        torch.testing.assert_close(dict(target.items()), dict(expected[key].items()))
        assert any(not torch.equal(value, online[leaf]) for leaf, value in target.items())
    other = OfflineCollector(row_buffer(rows, 8, trim=False))
    other.load_state_dict(collector.state_dict())
    assert torch.equal(next(iter(other))["tokens"], next(iter(collector))["tokens"])


@pytest.mark.parametrize("steps", [None, 2])
def test_ppo_counts_turns_and_learns_from_each_row_once_an_epoch(steps):
    """Batches of one turn: in some no episode ends."""
    env = CorridorEnv(length=3, batch_size=[8], seed=0)
    lm = causal_lm(vocab_size=env.tokenizer.vocab_size, layers=1, width=16, heads=2, max_length=64)
    policy = UtteranceActor(language_actor(lm), env.tokenizer.control, env.action_length, seed=0)
    loss, seen = watched(PPOLoss(policy, value_module(ValueHead(16))))
    collector = Collector(env, policy, frames_per_batch=8, total_frames=160)
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
    assert 0 < len(made) < 20
    assert all(len(rows) for rows in made)
    number = sum(len(rows) for rows in made)
    assert number > 4
    if steps is None:
        assert sum(len(batch) for batch in seen) == 2 * number
    else:
        assert len(seen) == sum(2 * min(steps, -(-len(rows) // 4)) for rows in made)
    assert hook.state_dict() == {"made": 20}
