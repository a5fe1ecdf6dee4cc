"""TextWorld under TorchRL's collectors and batched environments; its processes end with them."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torchrl.collectors import Collector, MultiSyncCollector
from torchrl.envs import ParallelEnv, RewardSum, SerialEnv, TransformedEnv

from torchrl_lang.envs.textworld import RandomAdmissiblePlayer, TextWorldEnv
from torchrl_lang.schema import ROW_KEYS, check_row

from .conftest import engines

torch.set_num_threads(1)

pytest.importorskip("textworld", reason="the extra 'textworld' is not installed")

pytestmark = pytest.mark.slow


def of_coin(games, tokenizer, **options):
    options = {"row_length": 400, "action_length": 4, "batch_size": [2], "seed": 0, "max_turns": 4, **options}
    return TextWorldEnv([games["coin"]], tokenizer, offers="admissible", workers=1, **options)


def test_collectors_and_transforms(games, tokenizer):
    before = engines()
    env = TransformedEnv(of_coin(games, tokenizer), RewardSum())
    player = RandomAdmissiblePlayer(seed=0)
    collector = Collector(env, player, frames_per_batch=20, total_frames=40, auto_register_policy_transforms=False)
    try:
        for batch in collector:
            check_row(batch.reshape(-1))
            assert batch["next", "done"].any()
    finally:
        collector.shutdown()
    assert engines() == before


def test_serial_and_parallel_environments(games, tokenizer):
    before = engines()
    make = partial(of_coin, games, tokenizer)
    serial = SerialEnv(2, make)
    parallel = ParallelEnv(2, make, mp_start_method="fork")
    rollouts = []
    for env in (serial, parallel):
        env.set_seed(0)
        rollouts.append(env.rollout(6, RandomAdmissiblePlayer(seed=0), break_when_any_done=False).clone())
        env.close()
    assert rollouts[0].batch_size == (2, 2, 6)
    check_row(rollouts[0].reshape(-1))
    for key in (*ROW_KEYS, ("next", "reward"), ("next", "won")):
        assert torch.equal(rollouts[0][key], rollouts[1][key]), key
    assert engines() == before


def test_multi_process_collectors(games, tokenizer):
    make = partial(of_coin, games, tokenizer)
    collector = MultiSyncCollector(
        [make],
        RandomAdmissiblePlayer(seed=0),
        frames_per_batch=16,
        total_frames=32,
        auto_register_policy_transforms=False,
    )
    try:
        batches = [batch.clone() for batch in collector]
    finally:
        collector.shutdown()
    assert [batch.numel() for batch in batches] == [16, 16]
    for batch in batches:
        check_row(batch.reshape(-1))
