"""Controllers of the KL coefficient: their rules in numbers, their sign, where they lead, what they refuse."""

from __future__ import annotations

import copy
import gc
import math
import multiprocessing
import warnings

import cloudpickle
import pytest
import torch
import torchrl.data
from torch import nn

from tests.processes import METHOD
from torchrl_lang.modules import controllers

MAKERS = {
    "constant": lambda: controllers.ConstantKLController(0.3),
    "scheduled": lambda: controllers.ScheduledKLController([(2, 1.0), (10, 0.2)]),
    "adaptive": lambda: controllers.AdaptiveKLController(0.3, target=2.0, horizon=20),
    "lagrange": lambda: controllers.LagrangeKLController(0.3, target=2.0, proportional=0.05),
}


@pytest.fixture(params=MAKERS)
def make(request):
    return MAKERS[request.param]


def coef_of(controller):
    value = controller()
    assert value.dtype == torch.float32
    assert value.shape == ()
    assert value.device.type == "cpu"
    return float(value)


# Knots (10, 1.0), (20, 0.0), (40, 0.5): on them, before, between and after.
@pytest.mark.parametrize(
    ("seen", "expected"), [(1, 1.0), (10, 1.0), (12, 0.8), (20, 0.0), (25, 0.125), (40, 0.5), (41, 0.5), (10**12, 0.5)]
)
@pytest.mark.parametrize("kl", [0.0, 50.0])
def test_schedule_is_linear_between_knots(seen, expected, kl):
    controller = controllers.ScheduledKLController([(10, 1.0), (20, 0.0), (40, 0.5)])
    assert coef_of(controller) == 1.0
    controller.update(kl, n=seen)
    assert int(controller.step) == seen
    assert coef_of(controller) == pytest.approx(expected)


# coef 0.5, target 2, horizon 100, clip 0.2.
@pytest.mark.parametrize(
    ("kl", "n", "expected"),
    [(2.0, 50, 0.5), (2.2, 50, 0.525), (9.0, 50, 0.55), (1.8, 50, 0.475), (0.0, 50, 0.45), (-1.0, 50, 0.45)]
    + [(9.0, 1, 0.501), (9.0, 100, 0.6), (9.0, 10**9, 0.6), (0.0, 10**9, 0.4)],  # one horizon at most
)
def test_adaptive_rule(kl, n, expected):
    controller = controllers.AdaptiveKLController(0.5, target=2.0, horizon=100)
    controller.update(kl, n)
    assert coef_of(controller) == pytest.approx(expected)


def test_the_arguments_of_torchrl_s_controllers():
    """Its list holds rewards ``-coef * KL``, ours takes their mean divergence and their number."""
    options = {"init_kl_coef": 0.5, "target": 2.0, "horizon": 100}
    ours, theirs = controllers.AdaptiveKLController(**options), torchrl.data.AdaptiveKLController(**options)
    for kl in ([1.0, 3.0, 2.3], [9.0], [0.0] * 50, [2.5, 1.7]):
        with pytest.raises(TypeError, match=r"one number.* update\(-mean / coef"):
            ours.update(kl)
        theirs.update([-theirs.coef * value for value in kl])
        ours.update(sum(kl) / len(kl), n=len(kl))
        assert coef_of(ours) == pytest.approx(float(theirs.coef), rel=1e-5)
    assert coef_of(controllers.ConstantKLController(kl_coef=0.25)) == 0.25
    controllers.ConstantKLController(0.25).update()  # as TorchRL's
    for make, match in (
        (lambda: controllers.ConstantKLController(kl_coef=0.1, model=nn.Linear(1, 1)), "has no argument 'model'"),
        (lambda: controllers.ConstantKLController(0.1).update(kl_values=[0.1, 0.2]), r"give update\(-mean / coef, n="),
        (lambda: controllers.ConstantKLController(kl_coef=0.1, coef=0.1), "kl_coef is TorchRL's name of coef"),
        (lambda: controllers.AdaptiveKLController(target=1.0), "missing .* 'coef'"),
        (lambda: controllers.ConstantKLController(theirs), "one number .*torchrl_lang.transforms.Adaptive"),
    ):
        with pytest.raises(TypeError, match=match):
            make()


def test_adaptive_stays_within_its_bounds_and_comes_back():
    controller = controllers.AdaptiveKLController(0.5, target=1.0, horizon=1, min_coef=0.25, max_coef=0.75)
    for kl, bound, back in ((9.0, 0.75, 0.6), (0.0, 0.25, 0.3)):
        for _ in range(20):
            controller.update(kl)
        assert coef_of(controller) == bound
        controller.update(0.0 if kl > 1 else 9.0)
        assert coef_of(controller) == pytest.approx(back)


# target 2, lr 0.1, proportional 0.5: lambda and the coefficient after each update.
def test_lagrange_rule():
    controller = controllers.LagrangeKLController(0.2, target=2.0, lr=0.1, proportional=0.5, max_coef=1.5)
    table = [
        (4.0, 0.4, 1.4),  # 0.2 + 0.1 * 2; 0.4 + 0.5 * 2
        (2.0, 0.4, 0.4),
        (1.0, 0.3, 0.0),  # 0.3 - 0.5 is below 0
        (-2.0, 0.0, 0.0),  # 0.3 - 0.4 is below 0: lambda stays where it can rise from
        (3.0, 0.1, 0.6),
        (100.0, 1.5, 1.5),  # both at the bound
        (1.0, 1.4, 0.9),
    ]
    for kl, multiplier, coef in table:
        controller.update(kl, n=64)
        assert float(controller.multiplier) == pytest.approx(multiplier)
        assert coef_of(controller) == pytest.approx(coef, abs=1e-6)


MOVES = {
    "meta": lambda module: module.to("meta"),
    "half": lambda module: module.half(),
    "to_empty": lambda module: module.to_empty(device="meta"),
}


@pytest.mark.parametrize("move", MOVES)
def test_buffers_stay_on_the_host_in_their_dtype(make, move):
    def buffers(module):
        return {name: (id(buffer), buffer.dtype, buffer.device) for name, buffer in module.named_buffers()}

    controller = make()
    before = buffers(controller)
    around = MOVES[move](nn.Sequential(controller, nn.Linear(1, 1)))
    assert buffers(around[0]) == before
    controller.update(3.0)
    assert not controller.shared


@pytest.mark.parametrize("kl", [-math.inf, 1e39, torch.tensor(math.nan)], ids=str)
def test_a_bad_kl_is_refused_and_changes_nothing(make, kl):
    controller = make()
    before = {name: value.clone() for name, value in controller.state_dict().items()}
    with pytest.raises(ValueError, match=r"kl must .*got"):
        controller.update(kl)
    torch.testing.assert_close(controller.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("value", [[-4.5], (1.0,), torch.zeros(2), "1", None], ids=str)
def test_what_is_not_one_number_is_refused_in_words(make, value):
    with pytest.raises(TypeError, match=r"kl must be one number in nats .*, got"):
        make().update(value)
    with pytest.raises(TypeError, match=r"coef must be one number .*, got"):
        controllers.ConstantKLController(value)


def test_a_rule_of_ones_own():
    class Halving(controllers.KLController):
        def _update(self, kl, n):
            self.coef.fill_(float(self.coef) / 2**n)

    controller = Halving(1.0)
    controller.update(0.0, 3)
    assert coef_of(controller) == 0.125


def test_a_controller_stays_itself_and_anything_else_is_refused(make):
    controller = make()
    assert controllers.as_controller(controller) is controller
    with pytest.raises(TypeError, match=r"got '0\.1'"):
        controllers.as_controller("0.1")


BAD = [
    lambda: controllers.ConstantKLController(-0.1),
    lambda: controllers.ConstantKLController(1e39),
    lambda: controllers.ScheduledKLController([]),
    lambda: controllers.ScheduledKLController([(3, 0.0), (2, 1.0)]),
    lambda: controllers.AdaptiveKLController(0.1, target=0.0),
    lambda: controllers.AdaptiveKLController(0.1, target=1.0, min_coef=0.2),
    lambda: controllers.LagrangeKLController(0.1, target=1.0, lr=0.0),
]


@pytest.mark.parametrize("make", BAD)
def test_bad_options_are_refused(make):
    with pytest.raises(ValueError, match=r"(coef|target|lr|knots) must .*got"):
        make()


SHARED = ("scheduled", "adaptive", "lagrange")


def state_of(controller):
    return {name: value.tolist() for name, value in controller.state_dict().items()}


def serve(connection, shared, pickled, unshared):
    """A worker: holds the controllers that came by pickle and those in the bytes, updates them, sends state."""
    held = {"pickle": shared, "cloudpickle": cloudpickle.loads(pickled)}
    connection.send(warnings_of(cloudpickle.loads(unshared)))
    while (message := connection.recv()) is not None:
        way, name, kl = message
        if kl is not None:
            held[way][name].update(kl)
        connection.send(state_of(held[way][name]))


@pytest.fixture(scope="module")
def worker():
    """Shared controllers, a function that asks a spawned process about its own, and the warnings of an unshared one."""
    shared = {name: MAKERS[name]().share_memory() for name in SHARED}
    context = multiprocessing.get_context(METHOD)
    ours, theirs = context.Pipe()
    unshared = cloudpickle.dumps(MAKERS["lagrange"]())
    arguments = (theirs, shared, cloudpickle.dumps(shared), unshared)
    process = context.Process(target=serve, args=arguments, daemon=True)
    process.start()
    theirs.close()

    def ask(*message):
        ours.send(message)
        assert ours.poll(60)
        return ours.recv()

    assert ours.poll(120)
    warned = ours.recv()
    yield shared, ask, warned
    ours.send(None)
    process.join(60)
    assert process.exitcode == 0
    for controller in shared.values():  # a worker that leaves takes nothing with it
        assert state_of(cloudpickle.loads(cloudpickle.dumps(controller))) == state_of(controller)


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("way", ["pickle", "cloudpickle"])
def test_updates_cross_between_processes_both_ways(worker, way, name):
    """And a checkpoint that is loaded here."""
    shared, ask, _ = worker
    mine = shared[name]
    start, before = copy.deepcopy(mine.state_dict()), state_of(mine)
    assert ask(way, name, None) == before
    mine.update(5.0)
    after_mine = state_of(mine)
    assert after_mine != before
    assert ask(way, name, None) == after_mine
    after_theirs = ask(way, name, 5.0)
    assert after_theirs != after_mine
    assert state_of(mine) == after_theirs
    mine.load_state_dict(start)
    assert ask(way, name, None) == before


def test_the_memory_goes_with_its_last_user():
    mine = controllers.LagrangeKLController(0.5, target=2.0).share_memory()
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
    controller, compilations = controllers.LagrangeKLController(0.5, target=2.0).share_memory(), []

    def adjust(reward, kl):
        return reward - controller() * kl

    torch.compiler.reset()
    adjust = torch.compile(adjust, fullgraph=True, backend=lambda graph, _: compilations.append(graph) or graph)
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


def test_an_unshared_copy_in_a_spawned_process_warns_once(worker):
    ((category, message),) = worker[2]
    assert category == "RuntimeWarning"
    assert "share_memory()" in message
