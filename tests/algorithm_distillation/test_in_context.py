"""In-context evaluation against plain loops over one stream, and what the baselines earn."""

from functools import partial

import pytest
import torch
from torchrl.envs import ParallelEnv, SerialEnv, TransformedEnv

from torchrl_lang.algorithm_distillation import OptimalPolicy, RandomPolicy, episode_returns, evaluate_in_context
from torchrl_lang.algorithm_distillation.sources import LinearDecay, NoisyExpert, QLearning
from torchrl_lang.envs.grids import DarkKeyDoorEnv, DarkRoomEnv


class Scripted:
    """Plays a fixed list of actions in every stream, and keeps what it observes."""

    def __init__(self, actions):
        self.actions = actions

    def begin(self, streams):
        self.seen, self.step = [], 0
        self.streams = streams

    def act(self, observation):
        assert observation.shape == (self.streams, 2)
        self.seen.append(observation)
        return self.actions[:, self.step]

    def observe(self, reward, done, terminated=None):
        assert reward.shape == done.shape == (self.streams,)
        self.seen.append((reward, done))
        self.step += 1


def plain_returns(task, actions, episodes):
    """One stream, in an environment of its own."""
    env = DarkKeyDoorEnv(2, task=task, start=(0, 0), episode_length=6, batch_size=[1])
    returns, total, observed = [], 0.0, env.reset()
    for action in actions.tolist():
        following = env.step(observed.clone().set("action", torch.tensor([action])))["next"]
        total += float(following["reward"])
        if following["done"]:
            returns.append(total)
            total = 0.0
        observed = env.maybe_reset(following)
    return returns[:episodes]


def test_returns_equal_plain_loops():
    """Episodes end at different steps: some with the door, others at their limit."""
    tasks = torch.arange(16)
    actions = torch.randint(5, (16, 40), generator=torch.Generator().manual_seed(0))
    env = DarkKeyDoorEnv(2, task=tasks.view(4, 4), start=(0, 0), episode_length=6, batch_size=[4, 4])
    policy = Scripted(actions)
    returns = evaluate_in_context(env, policy, 5)
    expected = [plain_returns(task, row, 5) for task, row in zip(tasks.tolist(), actions, strict=True)]
    assert returns.flatten(0, -2).tolist() == expected
    assert policy.step < 40
    assert len({tuple(done.tolist()) for _, done in policy.seen[1::2]}) > 4, "the streams are in lockstep"


def test_the_optimal_policy_takes_every_optimal_action():
    env = DarkRoomEnv(3, task=torch.zeros(2000, dtype=torch.int64), batch_size=[2000])
    env.reset()
    policy = OptimalPolicy(env, seed=0)
    counts = policy.act(torch.zeros(2000, 2)).bincount(minlength=5)
    assert counts[[0, 2, 4]].tolist() == [0, 0, 0]
    assert (counts[[1, 3]] > 900).all()


def test_a_seed_determines_the_returns_whatever_was_drawn_before():
    env = DarkRoomEnv(3, task=torch.arange(9), batch_size=[9], start="random")
    policy = RandomPolicy(5, seed=4)
    first = evaluate_in_context(env, policy, 3, seed=1)
    drawn = policy.random.uniform((3,))
    assert torch.equal(first, evaluate_in_context(env, policy, 3, seed=1))
    assert not torch.equal(first, evaluate_in_context(env, policy, 3, seed=2))
    assert torch.equal(drawn, RandomPolicy(5, seed=4).random.uniform((3,))), "the evaluation moved the generator"


def test_tasks_that_change_between_episodes_are_refused():
    together = [side_by_side(2, partial(DarkRoomEnv, 3, batch_size=[])) for side_by_side in (SerialEnv, ParallelEnv)]
    for env in (DarkRoomEnv(3, batch_size=[4]), *map(TransformedEnv, [DarkRoomEnv(3, batch_size=[4]), *together])):
        with pytest.raises(ValueError, match="DarkRoomEnv draws a task for each episode"):
            evaluate_in_context(env, RandomPolicy(5), 2)
    assert all(env.is_closed for env in together)
    with pytest.raises(ValueError, match="episodes must be an integer of at least 1"):
        evaluate_in_context(DarkRoomEnv(3, task=0), RandomPolicy(5), 0)


def test_environments_of_one_row_each_side_by_side():
    """A ``SerialEnv``, as of Gymnasium's environments: each has its task, and the returns are those of one batch."""
    env = SerialEnv(9, [partial(DarkRoomEnv, 3, task=task, batch_size=[], episode_length=4) for task in range(9)])
    together = DarkRoomEnv(3, task=torch.arange(9), batch_size=[9], episode_length=4)
    returns = [evaluate_in_context(each, RandomPolicy(5), 3, seed=1) for each in (env, together)]
    assert returns[0].shape == (9, 3)
    assert torch.equal(*returns)


@pytest.mark.parametrize("algorithm", [NoisyExpert, QLearning])
def test_returns_of_a_source_equal_plain_loops(algorithm):
    env = DarkRoomEnv(3, task=torch.arange(4)[:, None], batch_size=[4, 2], reward="once", episode_length=7)
    steps = algorithm(env, 60, decay=LinearDecay(1, 0.5)).history()
    returns = episode_returns(steps, 5)
    for task in range(4):
        for stream in range(2):
            plain = [0.0] * 100
            for step in steps[task, stream].unbind(0):
                plain[int(step["episode"])] += float(step["reward"])
            assert returns[task, stream].tolist() == plain[:5]
    completed = int(steps["done"].sum((-2, -1)).min())
    episode_returns(steps, completed)
    with pytest.raises(ValueError, match=f"{completed + 1} completed ones"):
        episode_returns(steps, completed + 1)
