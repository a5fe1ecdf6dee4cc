"""Models that functions reach without having them as submodules are found, and refused where they follow a policy."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

from torchrl_lang.transforms import KLRewardTransform, frozen_copy
from torchrl_lang.transforms.functions import model_behind, refuse_unregistered

GLOBAL = nn.Linear(2, 1)


def by_global(x):
    return GLOBAL(x)


def by_helper(x):
    return [by_global(part) for part in x]


def by_inner(x):
    return [(lambda y: GLOBAL(y))(part) for part in x]


def by_attribute_name(x):
    """``GLOBAL`` here is the name of an attribute, not the global."""
    return x.GLOBAL


def by_default(x, net=GLOBAL):
    return net(x)


def by_keyword(x, *, nets=(GLOBAL,)):
    return nets[0](x)


def in_closure(net):
    return lambda x: net(x)


REACHING = {
    "global": by_global,
    "helper": by_helper,
    "inner": by_inner,
    "default": by_default,
    "keyword": by_keyword,
    "closure": in_closure(GLOBAL),
    "method": GLOBAL.forward,
    "partial": partial(torch.func.functional_call, GLOBAL, {}),
    "partial of a method": partial(GLOBAL.forward),
    "closure of a closure": in_closure(in_closure(GLOBAL)),
    "dict": in_closure({"net": GLOBAL}),
}


def actor_of(function):
    return TensorDictModule(function, in_keys=["x"], out_keys=["y"])


@pytest.fixture
def frozen_net():
    GLOBAL.requires_grad_(False)
    yield
    GLOBAL.requires_grad_(True)


@pytest.mark.parametrize("way", REACHING)
def test_a_model_is_found(way):
    assert model_behind(REACHING[way]) is GLOBAL


@pytest.mark.parametrize("way", REACHING)
def test_a_frozen_one_is_none(way, frozen_net):
    assert model_behind(REACHING[way]) is None


@pytest.mark.parametrize("function", [by_attribute_name, torch.exp, torch.nn.functional.gelu, lambda x: x + 1, len])
def test_nothing_is_found_where_there_is_nothing(function):
    assert model_behind(function) is None


def test_a_variable_without_a_value_yet():
    def function(x):
        return later(x)

    assert model_behind(function) is None
    later = GLOBAL
    assert model_behind(function) is later


def test_functions_that_call_each_other():
    def even(n):
        return n == 0 or odd(n - 1)

    def odd(n):
        return n != 0 and even(n - 1)

    assert model_behind(even) is None


@pytest.mark.parametrize("way", REACHING)
def test_an_actor_made_of_it_is_refused(way):
    with pytest.raises(ValueError, match="refers to a Linear that trains"):
        frozen_copy(actor_of(REACHING[way]))
    with pytest.raises(ValueError, match="refers to a Linear that trains"):
        refuse_unregistered(actor_of(REACHING[way]), copied=False)


def test_a_frozen_model_is_no_hindrance(frozen_net):
    for function in REACHING.values():
        assert model_behind(function) is None
        frozen_copy(actor_of(function))


class Holder(nn.Module):
    """Has the model as a submodule, and refers to it in yet another way."""

    def __init__(self, make_call):
        super().__init__()
        self.net = nn.Linear(2, 1)
        self.call = make_call(self.net)

    def forward(self, x):
        return self.call(x)


@pytest.mark.parametrize("make_call", [lambda net: net.forward, lambda net: partial(net.forward)])
def test_methods_of_registered_models_are_copied(make_call):
    actor, x = actor_of(Holder(make_call)), torch.ones(3, 2)
    frozen = frozen_copy(actor)
    before = actor(TensorDict(x=x, batch_size=[3]))["y"]
    with torch.no_grad():
        actor.module.net.weight.add_(1.0)
    with frozen.evaluating():
        assert torch.equal(frozen.actor(TensorDict(x=x, batch_size=[3]))["y"], before)


def test_functions_go_on_referring_even_to_registered_ones():
    actor = actor_of(Holder(in_closure))
    with pytest.raises(ValueError, match="refers to a Linear that trains"):
        frozen_copy(actor)
    refuse_unregistered(actor, copied=False)  # the same model, not a copy


@pytest.mark.parametrize("inplace", [True, False])
def test_compiled_modules_are_copied(inplace):
    net, x = nn.Linear(2, 1), TensorDict(x=torch.ones(3, 2), batch_size=[3])
    if inplace:
        net.compile(backend="eager")
    actor = actor_of(net if inplace else torch.compile(net, backend="eager"))
    before = actor(x.copy())["y"]
    frozen = frozen_copy(actor)
    with torch.no_grad():
        net.weight.add_(1.0)
    with frozen.evaluating():
        assert torch.equal(frozen.actor(x.copy())["y"], before)


def test_the_transform_refuses_such_a_policy():
    actor = actor_of(by_global)
    actor.get_dist = lambda tensordict: None
    with pytest.raises(ValueError, match="refers to a Linear that trains"):
        KLRewardTransform(actor)
