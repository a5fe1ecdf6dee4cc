"""TextWorld under TorchRL's collectors and batched environments; its processes end with them."""

from __future__ import annotations

import pytest
import torch
from torchrl.collectors import Collector
from torchrl.envs import RewardSum, TransformedEnv

from torchrl_lang.envs.textworld import RandomAdmissiblePlayer, TextWorldEnv
from torchrl_lang.schema import check_row

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
