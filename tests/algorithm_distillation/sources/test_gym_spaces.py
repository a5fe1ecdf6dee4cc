"""Gymnasium tasks of all kinds of spaces, from the environment to a step of training."""

import copy
import json
from functools import partial

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.envs import SerialEnv, StepCounter, TransformedEnv

from torchrl_lang._random_stream import RandomStream
from torchrl_lang.algorithm_distillation import (
    ADLoss,
    ADTransformer,
    Continuous,
    Discrete,
    HistoryActor,
    HistoryWindows,
    LearningHistory,
    evaluate_in_context,
    load_history,
    record_history,
)
from torchrl_lang.algorithm_distillation.sources import DQN, PPO, GymTask, cart_pole
from torchrl_lang.envs.grids import DarkRoomEnv

gymnasium = pytest.importorskip("gymnasium")
spaces, wrappers = gymnasium.spaces, gymnasium.wrappers
VECTOR = spaces.Box(-1, 1, (3,))
WIDE = spaces.Box(np.array([[-1, -0.1]]), np.array([[1, 1 / 3]]), dtype=np.float64)
NESTED = spaces.Dict({"place": spaces.Box(0, 9, (2, 2), np.int64), "kind": spaces.Tuple([spaces.Discrete(3)])})


class Shown(gymnasium.Env):
    """Shows random observations; keeps them and the actions, which must be those of its space."""

    def __init__(self, observation, action):
        self.observation_space, self.action_space = copy.deepcopy((observation, action))
        self.shown, self.taken = [], []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        return self.show(), {}

    def show(self):
        self.shown.append(self.observation_space.sample())
        return self.shown[-1]

    def step(self, action):
        assert self.action_space.contains(action), action
        self.taken.append(action)
        return self.show(), 1.0, False, False, {}


SHOWN = {
    "start": (VECTOR, spaces.Discrete(3, start=2), Continuous(3), Discrete([3])),
    "shown-from": (spaces.Discrete(4, start=-2), spaces.Discrete(2), Discrete([4]), Discrete([2])),
    "double": (spaces.Box(-np.inf, 1, (3,), np.float64), WIDE, Continuous(3), Continuous(2)),
    "image": (spaces.Box(0, 255, (2, 2, 3), np.uint8), spaces.Discrete(2), Continuous(12), Discrete([2])),
    "one-number": (spaces.Box(-1, 1, ()), spaces.Discrete(2), Continuous(1), Discrete([2])),
    "nested": (NESTED, spaces.Discrete(2), Continuous(7), Discrete([2])),
    "numbers": (spaces.MultiDiscrete([2, 3]), spaces.MultiDiscrete([2, 3]), Continuous(5), Discrete([6])),
    "numbers-from": (VECTOR, spaces.MultiDiscrete([[2], [2]], start=[[1], [0]]), Continuous(3), Discrete([4])),
    "flags": (spaces.MultiBinary(3), spaces.MultiBinary([2, 2]), Continuous(3), Discrete([16])),
    "unbounded": (VECTOR, spaces.Box(-np.inf, np.inf, (2,)), Continuous(3), Continuous(2)),
    "half-bounded": (VECTOR, spaces.Box(0, np.inf, (2,)), Continuous(3), Continuous(2)),
    "half-bounded-numbers": (VECTOR, spaces.Box(np.float32([-1, -np.inf]), 1), Continuous(3), Continuous(2)),
}
OWN = {
    "FrozenLake-v1": (Discrete([16]), Discrete([4])),
    "Blackjack-v1": (Continuous(32 + 11 + 2), Discrete([2])),
}
ENTRIES = OWN | {f"{name}-v0": entries[2:] for name, entries in SHOWN.items()}
IS_DISCRETE = [name for name, (_, action) in ENTRIES.items() if isinstance(action, Discrete)]
SOURCES = {
    "dqn": partial(DQN, steps=32, frames=16, updates=1, width=8, batch_size=8),
    "ppo": partial(PPO, steps=32, frames=16, epochs=1, width=8, batch_size=8),
}


@pytest.fixture(scope="module", autouse=True)
def registered():
    names = [f"{name}-v0" for name in SHOWN] + ["Taken-v0"]
    for name, (observation, action, *_) in SHOWN.items():
        gymnasium.register(f"{name}-v0", partial(Shown, observation, action), max_episode_steps=5)
    gymnasium.register("Taken-v0", Shown)
    yield
    for name in names:
        del gymnasium.registry[name]


def task_of(name):
    return GymTask(name, {"max_episode_steps": 8})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "algorithm"), [(name, "ppo") for name in ENTRIES] + [(name, "dqn") for name in IS_DISCRETE]
)
def test_a_model_learns_from_the_history_of_any_task_and_acts_in_it(tmp_path, name, algorithm):
    task = task_of(name)
    recorded = record_history(tmp_path, SOURCES[algorithm]([task]), part=20)
    history = load_history(tmp_path)
    assert (recorded.steps == history.steps).all()
    assert history.steps["action_log_prob"].isfinite().all()
    env = task.make()
    model = ADTransformer.for_env(env, context=16, episode_length=8, width=8, heads=2)
    assert (model.observation, model.action) == ENTRIES[name]
    losses = ADLoss(model, reward_weight=1.0, observation_weight=1.0, log_prob_weight=1.0)(
        HistoryWindows(history, 16).buffer(batch_size=4).sample()
    )
    total = sum(losses[key] for key in losses.keys() if key.startswith("loss_"))
    total.backward()
    assert total.isfinite()
    returns = evaluate_in_context(SerialEnv(1, task.make), HistoryActor(model, seed=0), episodes=2)
    assert returns.isfinite().all()


def played(name):
    """A rollout of five steps, and what the environment showed and got in it."""
    env = task_of(f"{name}-v0").make()
    inner = env._env.unwrapped
    inner.shown.clear()  # TorchRL resets it once while it reads its spaces
    return env.rollout(5), inner.shown, inner.taken


@pytest.mark.parametrize("name", SHOWN)
def test_observations_are_numbers_from_0_on_or_what_gymnasium_flattens(name):
    space = SHOWN[name][0]
    rollout, shown, _ = played(name)
    assert len(shown) == 6
    for seen, own in zip(rollout["observation"], shown, strict=False):
        if isinstance(space, spaces.Discrete):
            assert seen.item() == own - space.start
        else:
            assert seen.tolist() == np.float32(spaces.flatten(space, own)).tolist()


@pytest.mark.parametrize("name", SHOWN)
def test_the_environment_gets_actions_of_its_space(name):
    space = SHOWN[name][1]
    rollout, _, taken = played(name)
    for given, got in zip(rollout["action"], taken, strict=True):
        if isinstance(space, spaces.Discrete):
            assert got == given.item() + space.start
        elif isinstance(space, spaces.Box):
            assert got.dtype == space.dtype
            assert (got == given.numpy().astype(space.dtype).reshape(space.shape).clip(space.low, space.high)).all()


@pytest.mark.parametrize("name", ["numbers", "numbers-from", "flags"])
def test_numbers_stand_for_all_combinations_in_order(name):
    action = SHOWN[name][1]
    env = task_of(f"{name}-v0").make()
    for number in range(env.action_spec.n):
        env.reset()
        env.step(env.rand_action().set("action", torch.tensor(number)))
    taken = [tuple(got.flatten().tolist()) for got in env._env.unwrapped.taken]
    assert len(set(taken)) == env.action_spec.n
    assert taken == sorted(taken)
    assert all(action.contains(got) for got in env._env.unwrapped.taken)


def test_unbounded_actions_are_normal_and_recorded_before_they_are_clipped():
    history = SOURCES["ppo"]([task_of("half-bounded-v0")]).history()
    assert (history["action"] < 0).any()
    source = SOURCES["ppo"]([task_of("unbounded-v0")])
    policy = source._learner(source.gym_tasks[0].make(), RandomStream(0)).policy
    td = policy(TensorDict(observation=torch.randn(3), batch_size=[]))
    expected = torch.distributions.Normal(td["loc"], td["scale"]).log_prob(td["action"]).sum()
    torch.testing.assert_close(td["action_log_prob"], expected)


def test_bounded_actions_stay_within_the_bounds():
    action = SOURCES["ppo"]([task_of("double-v0")]).history()["action"]
    low, high = (torch.as_tensor(bound).flatten().float() for bound in (WIDE.low, WIDE.high))
    assert ((action >= low) & (action <= high)).all()


def test_actions_that_are_not_finite_are_refused():
    env = task_of("unbounded-v0").make()
    td = env.reset()
    with pytest.raises(ValueError, match=r"unbounded-v0 got the action \[nan  1.\], expected finite numbers"):
        env.step(td.set("action", torch.tensor([torch.nan, 1.0])))
    steps = SOURCES["ppo"]([task_of("unbounded-v0")]).history()
    steps["action"][0, 0, 7, 1] = torch.inf
    with pytest.raises(ValueError, match=r"1 steps have a non-finite 'action' \(task 0, stream 0, step 7"):
        LearningHistory(steps, [{"task": 0}])


@pytest.mark.parametrize(
    ("observation", "action", "message"),
    [
        (VECTOR, spaces.MultiDiscrete([64, 17]), "has actions of MultiDiscrete.*at most 1024 combinations"),
        (VECTOR, spaces.MultiBinary(2000), "has actions of MultiBinary"),
        (VECTOR, spaces.Tuple([spaces.Discrete(2)]), "has actions of Tuple.*convert them with a wrapper"),
        (VECTOR, spaces.Box(0, 9, (2,), np.int64), "has actions of Box.*expected Discrete, Box of floats"),
        (spaces.Sequence(VECTOR), spaces.Discrete(2), "Taken-v0 has observations of Sequence.*flatten"),
        (spaces.Graph(VECTOR, None), spaces.Discrete(2), "has observations of Graph"),
    ],
)
def test_other_spaces_are_refused(observation, action, message):
    with pytest.raises(ValueError, match=message):
        GymTask("Taken-v0", {"observation": observation, "action": action}).make()


def test_a_model_of_a_gymnasium_task_needs_the_length_of_its_episodes():
    with pytest.raises(ValueError, match="GymWrapper does not have the length of its episodes: give"):
        ADTransformer.for_env(cart_pole().make(), context=10)
    with pytest.raises(ValueError, match="episode_length must be at least 1, got 0"):
        ADTransformer.for_env(cart_pole().make(), context=10, episode_length=0)
    room = TransformedEnv(DarkRoomEnv(3, episode_length=7), StepCounter())
    assert ADTransformer.for_env(room, context=10).episode_length == 7


# -- wrappers ----------------------------------------------------------------------------------------------------------


def halved(env):
    return wrappers.TransformReward(env, half)


def half(reward):
    return reward / 2


STACK = partial(wrappers.FrameStackObservation, stack_size=3)


@pytest.mark.slow
def test_wrappers_are_applied_in_order_and_described(tmp_path):
    task = GymTask("start-v0", wrappers=[halved, partial(wrappers.TransformReward, func=half), STACK])
    assert task.describe(0)["wrappers"] == [
        f"{__name__}.halved",
        {
            "partial": "gymnasium.wrappers.transform_reward.TransformReward",
            "args": [],
            "keywords": {"func": f"{__name__}.half"},
        },
        {
            "partial": "gymnasium.wrappers.stateful_observation.FrameStackObservation",
            "args": [],
            "keywords": {"stack_size": 3},
        },
    ]
    json.dumps(task.describe(0))
    source = SOURCES["dqn"]([task])
    history = record_history(tmp_path, source)
    assert history.steps["observation"].shape[-1] == 9
    assert (history.steps["reward"] == 0.25).all()
    assert load_history(tmp_path).tasks == source.tasks
    with pytest.raises(ValueError, match="begun with other tasks"):
        record_history(tmp_path, SOURCES["dqn"]([GymTask("start-v0", wrappers=[halved, STACK])]))


def test_a_wrapper_may_convert_what_would_be_refused():
    action = spaces.Box(0, 9, (2,), np.int64)
    task = GymTask("Taken-v0", {"observation": VECTOR, "action": action}, wrappers=[nearest])
    env = task.make()
    env.rollout(3)
    assert [got.dtype for got in env._env.unwrapped.taken] == [np.int64] * 3


def nearest(env):
    return wrappers.TransformAction(env, lambda action: action.round().astype(np.int64), spaces.Box(0, 9, (2,)))


@pytest.mark.parametrize(
    "wrapper", [lambda env: env, partial(wrappers.TransformReward, func=lambda reward: 0), object()]
)
def test_wrappers_that_cannot_be_described_are_refused(wrapper):
    with pytest.raises(ValueError, match="write it as a function of a module"):
        GymTask("CartPole-v1", wrappers=[wrapper])


def test_tasks_without_wrappers_are_described_as_before():
    assert "wrappers" not in cart_pole().describe(0)
