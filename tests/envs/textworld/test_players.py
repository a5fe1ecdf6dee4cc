"""Players that take what the environment offers, and data sets of their games."""

import pytest
import torch
from tensordict import TensorDict

from torchrl_lang.envs.textworld import ExpertPlayer, RandomAdmissiblePlayer

from .conftest import SPECS

torch.set_num_threads(1)
BEST = {"simple": 8.0, "coin": 1.0, "treasure": 1.0, "custom": 1.0, "cooking": 11.0}

pytest.importorskip("textworld", reason="the extra 'textworld' is not installed")

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("reused_engines")]


def test_the_expert_wins_every_kind_of_game(make_env):
    options = {"batch_size": [5], "row_length": 5000, "action_length": 16, "max_turns": 60}
    env = make_env(*SPECS, offers="expert", order="cycle", **options)
    td, won, earned = env.reset(), torch.zeros(5, 1, dtype=torch.bool), torch.zeros(5, 1)
    player = ExpertPlayer()
    while not td["done"].all():
        td = env.step(player(td))["next"]
        won, earned = won | td["won"], earned + td["reward"]
    assert won.all()
    assert not td["truncated"].any()
    assert earned.flatten().tolist() == [BEST[name] for name in SPECS]


def test_experts_err_by_row_with_commands_of_their_own_or_of_other_games():
    """The expert says 7 and can say row number + 10."""
    offered = TensorDict(
        expert_action=torch.full((400, 2), 7),
        admissible_action=torch.arange(400)[:, None, None].expand(400, 1, 2) + 10,
        admissible_mask=torch.ones(400, 1, dtype=torch.bool),
        batch_size=[400],
    )
    own = torch.arange(400) + 10
    for foreign in (0.0, 1.0):
        action = ExpertPlayer(epsilon=(0.0, 1.0), foreign=foreign, seed=0)(offered.clone())["action"][:, 0]
        assert (action[::2] == 7).all()
        assert ((action[1::2] == own[1::2]) == (foreign == 0)).all()
        assert (action[1::2] >= 10).all()
    half = ExpertPlayer(epsilon=0.5, foreign=0.5, seed=0)(offered)["action"][:, 0]
    assert (half == 7).float().mean().item() == pytest.approx(0.5, abs=0.125)  # five standard deviations
    assert (half == own).float().mean().item() == pytest.approx(0.25, abs=0.11)
    with pytest.raises(ValueError, match=r"epsilon\[1\]"):
        ExpertPlayer(epsilon=(0.1, 1.1))


def test_random_commands_are_admissible_and_uniform():
    n, commands = 4000, torch.arange(1, 7).reshape(3, 2)
    mask = torch.tensor([True, True, False])
    td = TensorDict({"admissible_action": commands.expand(n, 3, 2), "admissible_mask": mask.expand(n, 3)}, [n])
    action = RandomAdmissiblePlayer(seed=0)(td)["action"]
    first = (action == commands[0]).all(-1)
    assert (first | (action == commands[1]).all(-1)).all()
    assert first.float().mean().item() == pytest.approx(0.5, abs=0.04)  # five standard deviations
