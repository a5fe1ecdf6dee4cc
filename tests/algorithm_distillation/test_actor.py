"""Acting with a context: cached as uncached, positions of training, no input but the context, prompts."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchrl.envs.utils import ExplorationType, set_exploration_type

from tests.algorithm_distillation.models import EPISODE, model, windows
from torchrl_lang.algorithm_distillation import Continuous, HistoryActor, PromptedPolicy

STREAMS = 6


def observation_of(made, random):
    if isinstance(made.observation, Continuous):
        return torch.randn(STREAMS, made.observation.size, generator=random)
    return torch.stack([torch.randint(n, (STREAMS,), generator=random) for n in made.observation.sizes], -1)


def play(made, actors, steps=60, seed=0):
    """Actors side by side in streams whose episodes end at different steps; yields the parameters of their actions.

    All of them observe the rewards of the first one's actions.
    """
    random = torch.Generator().manual_seed(seed)
    parameters = []
    made.action_head.register_forward_hook(lambda module, inputs, output: parameters.append(output))
    clock = torch.zeros(STREAMS, dtype=torch.int64)
    for _ in range(steps):
        parameters.clear()
        seen = observation_of(made, random)
        actions = [actor.act(seen) for actor in actors]
        yield parameters, actions
        reward = torch.randn(STREAMS, generator=random)
        done = (torch.rand(STREAMS, generator=random) < 0.25) | (clock == EPISODE - 1)
        clock = torch.where(done, 0, clock + 1)
        for actor in actors:
            actor.observe(reward, done)


@pytest.mark.parametrize(("context", "cache"), [(EPISODE, True), (8, True), (8, False)])
def test_it_reads_a_window_of_the_last_episodes(made, context, cache):
    """The window is kept in a plain list: of one stream, without what the actor uses."""
    actor, lengths = HistoryActor(made, context=context, cache=cache, seed=1), set()
    actor.begin(STREAMS)
    rows, columns = windows(made, rows=STREAMS, length=30), ("observation", "episode_step")
    kept = [[] for _ in range(STREAMS)]
    parameters = []
    made.action_head.register_forward_hook(lambda module, inputs, output: parameters.append(output))
    actor._context.clock = rows["episode_step"][:, 0].clone()
    for t in range(30):
        parameters.clear()
        action = actor.act(rows["observation"][:, t])
        (found,) = parameters
        for n, steps in enumerate(kept):
            if len(steps) == context:
                del steps[0]
                while steps and steps[0]["episode_step"] != 0:
                    del steps[0]
            now = rows[n, t].select(*columns).set("action", torch.zeros_like(action[n])).set("reward", torch.zeros(1))
            with torch.no_grad():
                expected = made(torch.stack([*steps, now], 0))["action_parameters"][-1]
            torch.testing.assert_close(found[n], expected, atol=1e-5, rtol=1e-5)
            steps.append(now.set("action", action[n]).set("reward", rows["reward"][n, t]))
        actor.observe(rows["reward"][:, t, 0], rows["done"][:, t, 0])
        lengths.add(tuple(actor._context.length.tolist()))
    assert any(len(set(found)) > 3 for found in lengths), "the streams are in lockstep"


def test_prompting_equals_having_acted(made):
    """After whole episodes, a prompt leaves the actor as if it had acted so."""
    acted = HistoryActor(made, temperature=0)
    rows = windows(made, rows=STREAMS, length=8)
    rows["episode_step"][:] = torch.arange(8) % 4
    rows["done"][:] = (torch.arange(8) % 4 == 3)[:, None]
    prompted = PromptedPolicy(HistoryActor(made, temperature=0), rows)
    for actor in (acted, prompted, prompted):  # it is prompted at every beginning
        actor.begin(STREAMS)
    for t in range(8):
        acted.act(rows["observation"][:, t])
        acted._action = rows["action"][:, t]
        acted.observe(rows["reward"][:, t, 0], rows["done"][:, t, 0])
    for parameters, _ in play(made, [acted, prompted], 30):
        torch.testing.assert_close(*parameters, atol=1e-5, rtol=1e-5)


def test_after_a_part_of_an_episode_comes_a_new_one(made):
    actor = HistoryActor(made)
    actor.begin(STREAMS)
    actor.prompt(windows(made, rows=STREAMS, length=3))
    actor.act(observation_of(made, torch.Generator()))
    assert (actor._context.steps["episode_step"][:, 3] == 0).all()
    assert (actor._context.length == 3).all()


def test_samples_have_the_probabilities_of_the_model():
    made, parameters = model(), []
    actor = HistoryActor(made, temperature=2.0, seed=0)
    actor.begin(20_000)
    made.action_head.register_forward_hook(lambda module, inputs, output: parameters.append(output))
    action = actor.act(torch.ones(20_000, 2, dtype=torch.int64))
    assert torch.allclose(action.bincount(minlength=5) / 20_000, (parameters[0][0] / 2).softmax(-1), atol=0.02)


def test_observations_and_rewards_of_other_dtypes_are_converted(made):
    """Gymnasium's observations are often float64 or int32."""
    rows, actions = windows(made, rows=STREAMS, length=4), []
    for dtype in (rows["observation"].dtype, torch.int32 if made.action_head.is_discrete else torch.float64):
        actor = HistoryActor(made, temperature=0)
        actor.begin(STREAMS)
        for step in rows.unbind(1):
            actions.append(actor.act(step["observation"].to(dtype)))
            actor.observe(step["reward"][:, 0].double(), step["done"][:, 0])
    assert all(map(torch.equal, actions[:4], actions[4:]))


@pytest.mark.parametrize("temperature", [0.0, 20.0])
def test_temperature_zero_or_deterministic_exploration_takes_the_most_likely_action(made, temperature):
    """As of LanguageHistoryPolicy, so that one evaluation loop is greedy with both."""
    actor = HistoryActor(made, temperature=temperature, seed=0)
    actor.begin(STREAMS)
    with set_exploration_type(ExplorationType.DETERMINISTIC if temperature else ExplorationType.RANDOM):
        for parameters, actions in play(made, [actor], 5):
            most_likely = parameters[0].argmax(-1) if made.action_head.is_discrete else parameters[0][:, :2]
            assert torch.equal(actions[0], most_likely)


class OtherDevice(TorchDispatchMode):
    """The meta device in place of a GPU: an operation on two devices raises; values are 0, and a search finds none."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found, aten = kwargs or {}, torch.ops.aten
        given = [value for value in tree_leaves((args, found)) if isinstance(value, torch.Tensor)]
        if not any(value.is_meta for value in given):
            return function(*args, **found)
        if function is aten._to_copy.default and str(found.get("device")) == "cpu":
            return torch.zeros(args[0].shape, dtype=args[0].dtype)
        same = all(value.is_meta for value in given if value.ndim)
        assert same or function is aten.copy_.default, f"{function} on two devices"
        if function is aten._local_scalar_dense.default:
            return False if args[0].dtype == torch.bool else 0
        if function is aten.nonzero.default:
            return args[0].new_empty((0, args[0].ndim), dtype=torch.int64)
        return function(*args, **found)


@pytest.mark.parametrize(("cache", "temperature"), [(True, 1.0), (False, 0.0)])
def test_an_environment_may_be_on_another_device(made, cache, temperature):
    rows = windows(made, rows=STREAMS, length=3)
    actor = HistoryActor(made.to("meta"), temperature=temperature, cache=cache, seed=0)
    with OtherDevice():
        actor.begin(STREAMS)
        actor.prompt(rows)
        for step in rows.unbind(1)[:2]:
            action = actor.act(step["observation"])
            assert (action.shape, action.device.type) == (step["action"].shape, "cpu")
            actor.observe(step["reward"][:, 0], step["done"][:, 0])
    assert actor._context.steps["reward"].is_meta
    assert actor._context.clock.is_meta
