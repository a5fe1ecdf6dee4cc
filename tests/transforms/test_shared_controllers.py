"""A shared controller is one controller in all processes, by whatever way it came there."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import warnings
from multiprocessing.reduction import ForkingPickler

import cloudpickle
import pytest
import torch

from tests.processes import METHOD
from torchrl_lang.modules.controllers import (
    AdaptiveKLController,
    LagrangeKLController,
    ScheduledKLController,
)


def make_controllers():
    return {
        "scheduled": ScheduledKLController([(0, 1.0), (10, 0.0)]),
        "adaptive": AdaptiveKLController(0.5, target=2.0, horizon=100),
        "lagrange": LagrangeKLController(0.5, target=2.0),
    }


def state_of(controller):
    return {name: value.tolist() for name, value in controller.state_dict().items()}


def serve(connection, controllers, pickled, unshared):
    """A worker: holds the controllers that came by pickle and those in the bytes, updates them, sends state."""
    held = {"pickle": controllers, "cloudpickle": cloudpickle.loads(pickled)}
    connection.send(warnings_of(cloudpickle.loads(unshared)))
    while (message := connection.recv()) is not None:
        way, name, kl = message
        if kl is not None:
            held[way][name].update(kl)
        connection.send(state_of(held[way][name]))


@pytest.fixture(scope="module")
def worker():
    """Shared controllers, a function that asks a spawned process about its own, and the warnings of an unshared one."""
    controllers = {name: controller.share_memory() for name, controller in make_controllers().items()}
    context = multiprocessing.get_context(METHOD)
    ours, theirs = context.Pipe()
    unshared = cloudpickle.dumps(make_controllers()["lagrange"])
    arguments = (theirs, controllers, cloudpickle.dumps(controllers), unshared)
    process = context.Process(target=serve, args=arguments, daemon=True)
    process.start()
    theirs.close()

    def ask(*message):
        ours.send(message)
        assert ours.poll(60)
        return ours.recv()

    assert ours.poll(120)
    warned = ours.recv()
    yield controllers, ask, warned
    ours.send(None)
    process.join(60)
    assert process.exitcode == 0
    for controller in controllers.values():  # a worker that leaves takes nothing with it
        assert state_of(cloudpickle.loads(cloudpickle.dumps(controller))) == state_of(controller)


@pytest.mark.parametrize("name", make_controllers())
@pytest.mark.parametrize("way", ["pickle", "cloudpickle"])
def test_updates_cross_between_processes_both_ways(worker, way, name):
    controllers, ask, _ = worker
    mine = controllers[name]
    start = state_of(mine)
    assert ask(way, name, None) == start
    mine.update(5.0)
    after_mine = state_of(mine)
    assert after_mine != start
    assert ask(way, name, None) == after_mine
    after_theirs = ask(way, name, 5.0)
    assert after_theirs != after_mine
    assert state_of(mine) == after_theirs


def test_a_checkpoint_loaded_here_is_seen_there(worker):
    controllers, ask, _ = worker
    other = LagrangeKLController(0.75, target=2.0)
    controllers["lagrange"].update(9.0)
    assert ask("pickle", "lagrange", None) != state_of(other)
    controllers["lagrange"].load_state_dict(other.state_dict())
    assert ask("pickle", "lagrange", None) == ask("cloudpickle", "lagrange", None) == state_of(other)


@pytest.mark.parametrize("dumps", [ForkingPickler.dumps, cloudpickle.dumps])
@pytest.mark.parametrize("name", make_controllers())
def test_a_pickled_copy_is_the_same_memory(name, dumps):
    mine = make_controllers()[name].share_memory()
    theirs = ForkingPickler.loads(dumps(mine))
    again = ForkingPickler.loads(dumps(theirs))
    for writer in (mine, theirs, again):
        before = state_of(mine)
        writer.update(5.0)
        assert state_of(mine) == state_of(theirs) == state_of(again) != before
    assert again.half().coef.dtype == mine.coef.dtype


def test_the_memory_goes_with_its_last_user():
    mine = LagrangeKLController(0.5, target=2.0).share_memory()
    pickled = cloudpickle.dumps(mine)
    theirs = copy.deepcopy(mine)
    del mine
    gc.collect()
    first, second = cloudpickle.loads(pickled), cloudpickle.loads(cloudpickle.dumps(theirs))
    first.update(7.0)
    assert state_of(second) == state_of(theirs) == {"coef": 1.0, "multiplier": 1.0}
    del first, second, theirs
    gc.collect()
    with pytest.raises(RuntimeError, match="shared memory"):
        cloudpickle.loads(pickled)


def test_a_compiled_reward_sees_later_updates():
    controller, compilations = LagrangeKLController(0.5, target=2.0).share_memory(), []

    def count(graph, inputs):
        compilations.append(graph)
        return graph

    torch.compiler.reset()
    adjust = torch.compile(lambda reward, kl: reward - controller() * kl, fullgraph=True, backend=count)
    reward, kl = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 4.0])
    assert adjust(reward, kl).tolist() == [0.0, 0.0]
    controller.update(7.0)  # 0.5 + 0.1 * 5
    assert adjust(reward, kl).tolist() == [-1.0, -2.0]
    cloudpickle.loads(cloudpickle.dumps(controller)).update(12.0)  # 1 + 0.1 * 10
    assert adjust(reward, kl).tolist() == [-3.0, -6.0]
    assert len(compilations) == 1


def warnings_of(controller):
    """Messages about another process in three uses."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            controller()
            controller.update(5.0)
    return [(w.category.__name__, str(w.message)) for w in caught if "not shared" in str(w.message)]


def assert_warned_once(messages):
    assert [category for category, _ in messages] == ["RuntimeWarning"]
    assert "share_memory()" in messages[0][1]


def test_an_unshared_copy_in_a_spawned_process_warns_once(worker):
    assert_warned_once(worker[2])
