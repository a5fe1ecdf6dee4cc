"""What turns earn by transforms: in the reward and in the row, wherever the environment is, in any order."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import Binary
from torchrl.envs import Compose, ParallelEnv, SerialEnv, TransformedEnv

from torchrl_lang.data import rows_from_rollout
from torchrl_lang.envs import WordleEnv, check_language_env
from torchrl_lang.envs.wordle import RandomWordPlayer
from torchrl_lang.schema import check_row
from torchrl_lang.transforms import EntryReward, LivingCost, TurnRewardTransform

WORDS = ["crane", "slate", "purge", "mouse"]


class Told(WordleEnv):
    """Wordle that says how it ended."""

    def _task_observation(self, task):
        solved = self._rows.rows.token_reward.sum(-1) > -self._turns  # the guess that solves it costs nothing
        won, lost = self._terminated & solved, self._terminated & ~solved
        return {**super()._task_observation(task), "won": won[:, None], "lost": lost[:, None]}

    def _task_observation_spec(self):
        flags = {key: Binary(n=1, shape=(*self.batch_size, 1), dtype=torch.bool) for key in ("won", "lost")}
        return {**super()._task_observation_spec(), **flags}


class Brevity(TurnRewardTransform):
    """Pays by what is new in the row."""

    def earned(self, before, after):
        return 0.125 * (after["attention_mask"].sum(-1) - before["attention_mask"].sum(-1))


def game(n=4, seed=0):
    return Told(WORDS, batch_size=[n], max_tries=3, seed=seed)


def extras():
    return Compose(LivingCost(0.25), EntryReward({"won": 8.0, "lost": -4.0}), Brevity())


def player():
    return RandomWordPlayer(WORDS, seed=3)


def paid(n=4, seed=0):
    return TransformedEnv(game(n, seed), extras())


def by_hand(rows):
    """Rewards of rows of Wordle, from their masks: each try costs 1 unless it wins, then what :func:`paid` adds."""
    out = torch.zeros_like(rows["token_reward"])
    for row in range(len(rows)):
        ends = (rows["agent_mask"][row] & ~rows["agent_mask"][row].roll(-1)).nonzero().flatten().tolist()
        length = int(rows["attention_mask"][row].sum())
        begins = [1, *(int(i) for i in (rows["tokens"][row] == 31).nonzero().flatten() + 1)]
        won = rows["tokens"][row, length - 7 : length].tolist() == [26] * 5 + [31, 34]
        for turn, place in enumerate(ends):
            last = turn == len(ends) - 1
            new = (length if last else begins[turn + 1]) - begins[turn]
            out[row, place] = -1.0 - 0.25 + 0.125 * new
            if last:
                out[row, place] += 9.0 if won else -4.0
    assert (out > 0).any()
    assert (out < -2).any()
    return out


def test_the_rules_of_language_environments():
    check_language_env(paid(3), paid, utterances=("crane", "slate", "zzzzz", ""))


def test_rows_and_rewards_by_hand():
    steps = paid(8).rollout(9, player(), break_when_any_done=False)
    check_row(steps["next"].reshape(-1))
    rows = rows_from_rollout(steps, unfinished="drop")
    assert len(rows) > 8
    assert torch.equal(rows["token_reward"], by_hand(rows))
    # Turn by turn the row grows by the reward of the step, and what was there before stays.
    grown = (steps["next", "token_reward"] - steps["token_reward"]).sum(-1, keepdim=True)
    torch.testing.assert_close(grown, steps["next", "reward"])
    old = steps["attention_mask"]
    assert torch.equal(steps["next", "token_reward"][old], steps["token_reward"][old])


@pytest.mark.parametrize("kind", [SerialEnv, partial(ParallelEnv, mp_start_method="fork")])
def test_in_workers_and_over_them(kind):
    inside = kind(2, [partial(paid, 3, 0), partial(paid, 3, 1)])
    over = TransformedEnv(SerialEnv(2, [partial(game, 3, 0), partial(game, 3, 1)]), extras())
    rollouts = []
    for env in (inside, over):
        env.set_seed(0)
        rollouts.append(env.rollout(7, player(), break_when_any_done=False).clone())
        env.close()
    assert rollouts[0].shape == (2, 3, 7)
    for key in (("next", "reward"), ("next", "token_reward"), "token_reward"):
        assert torch.equal(rollouts[0][key], rollouts[1][key]), key
    rows = rows_from_rollout(rollouts[0], unfinished="drop")
    assert torch.equal(rows["token_reward"], by_hand(rows))


def test_errors():
    with pytest.raises(KeyError, match=r"reads 'invalid'.*offers="):
        TransformedEnv(game(), EntryReward({"invalid": -1.0})).reset()
    env = paid()
    td = env.reset()
    with pytest.raises(KeyError, match="Step the tensordict that reset"):
        env.step(TensorDict(action=player()(td)["action"], batch_size=[4]))
    with pytest.raises(ValueError, match=r"cost must lie in .*, got nan"):
        LivingCost(float("nan"))
    for weight in (float("nan"), "1"):
        with pytest.raises(ValueError, match=r"weights\['won'\] must lie in .*, got"):
            EntryReward({"lost": -1.0, "won": weight})
    with pytest.raises(RuntimeError, match="belongs into an environment"):
        LivingCost(1.0)(td)
