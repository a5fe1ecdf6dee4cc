"""Walks in a corridor from places drawn by chance: straight ones of as many turns as it takes, some cut off."""

import pytest
import torch

from torchrl_lang.envs.games import CorridorEnv


@pytest.fixture
def corridor():
    """A corridor of a batch size."""
    return lambda batch_size: CorridorEnv(8, max_turns=4, batch_size=batch_size, device="cpu")


@pytest.fixture
def straight():
    """A policy of a corridor that always moves right."""

    def make(env):
        move = torch.tensor([*env.tokenizer.encode("r"), env.tokenizer.control.end_of_action])
        return lambda td: td.set("action", move.expand(*td.batch_size, 2))

    return make
