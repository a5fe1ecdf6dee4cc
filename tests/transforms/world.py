"""A small world and one actor of each kind, on which every transform is tried."""

from __future__ import annotations

import copy
import io
import math

import torch
from tensordict import TensorDict, assert_allclose_td
from tensordict import nn as tdnn
from tensordict.nn import NormalParamExtractor, TensorDictModule, TensorDictSequential
from torch import distributions as D
from torch import nn
from torchrl.data import Binary, Bounded, Categorical, Composite, OneHot, Unbounded
from torchrl.envs import Compose as Chain
from torchrl.envs import EnvBase, InitTracker, TransformedEnv
from torchrl.modules import GRUModule, IndependentNormal, LSTMModule, OneHotCategorical, ProbabilisticActor, TanhNormal

from torchrl_lang.transforms import KLConstrainedTransform

HORIZON = 5
AGENTS = 2


class LinearEnv(EnvBase):
    """``observation <- 0.9 observation + 0.3 push``, for at most five steps; what it knows is in the tensordict.

    Episodes begin at different counts, so that the rows of a batch end at different steps. ``actions`` is the kind of
    action: ``box``, ``categorical``, ``one-hot``, ``composite`` or ``agents``.
    """

    def __init__(self, actions="box", batch_size=(), *, locked=True, truncated=False, seed=0, dtype=torch.float32):
        super().__init__(batch_size=torch.Size(batch_size))
        self._batch_locked = locked
        self.actions = actions
        self.group = ("agents",) if actions == "agents" else ()
        self.dtype = dtype
        self.wide = (*self.batch_size, AGENTS) if self.group else tuple(self.batch_size)
        self.observation_spec = self._state_spec()
        self.state_spec = self._state_spec()
        self.action_spec = self._action_spec()
        self.reward_spec = self._grouped("reward", Bounded(-100.0, 100.0, (*self.wide, 1), dtype=dtype))
        names = ("done", "terminated", "truncated") if truncated else ("done", "terminated")
        done = Binary(shape=(*self.batch_size, 1), dtype=torch.bool)
        self.full_done_spec = Composite({name: done.clone() for name in names}, shape=self.batch_size)
        self.rng = torch.Generator().manual_seed(seed)

    def _grouped(self, name, spec):
        if not self.group:
            return Composite({name: spec}, shape=self.batch_size)
        return Composite(agents=Composite({name: spec}, shape=self.wide), shape=self.batch_size)

    def _state_spec(self):
        spec = self._grouped("observation", Unbounded((*self.wide, 3), dtype=self.dtype))
        spec["count"] = Unbounded((*self.batch_size, 1), dtype=torch.int64)
        return spec

    def _action_spec(self):
        box = Bounded(-1.0, 1.0, (*self.wide, 2), dtype=self.dtype)
        if self.actions == "composite":
            move = Categorical(3, shape=self.batch_size)
            return Composite(action=Composite(move=move, push=box, shape=self.batch_size), shape=self.batch_size)
        spec = {"categorical": Categorical(4, shape=self.wide), "one-hot": OneHot(4, shape=(*self.wide, 4))}
        return self._grouped("action", spec.get(self.actions, box))

    def _reset(self, tensordict=None):
        batch = self.batch_size if tensordict is None or self.batch_locked else tensordict.batch_size
        wide = (*batch, AGENTS) if self.group else tuple(batch)
        count = torch.randint(0, HORIZON - 1, (*batch, 1), generator=self.rng)
        out = self._with_group(TensorDict(count=count, batch_size=batch), wide)
        out[(*self.group, "observation")] = torch.randn(*wide, 3, generator=self.rng, dtype=self.dtype)
        return out

    def _step(self, tensordict):
        observation = 0.9 * tensordict[(*self.group, "observation")]
        observation = torch.cat([observation[..., :2] + 0.3 * self._push(tensordict), observation[..., 2:]], -1)
        count = tensordict["count"] + 1
        done = count >= HORIZON
        out = TensorDict(count=count, done=done, terminated=done.clone(), batch_size=tensordict.batch_size)
        out = self._with_group(out, observation.shape[:-1])
        out[(*self.group, "observation")] = observation
        out[(*self.group, "reward")] = observation.sum(-1, keepdim=True)
        if "truncated" in self.full_done_spec.keys():
            out["truncated"] = torch.zeros_like(done)
        return out

    def _with_group(self, out, wide):
        return out.set("agents", TensorDict(batch_size=wide)) if self.group else out

    def _push(self, tensordict):
        action = tensordict[(*self.group, "action")]
        if self.actions == "composite":
            return action["push"] + action["move"].unsqueeze(-1)
        if self.actions == "one-hot":
            action = action.to(torch.int64).argmax(-1)
        if self.actions in ("categorical", "one-hot"):
            return torch.stack([action % 2, action // 2], -1).to(self.dtype)
        return action

    def _set_seed(self, seed):
        self.rng.manual_seed(seed)


def linear(outputs, seed):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Linear(3, outputs)


RANDOM = {"default_interaction_type": tdnn.InteractionType.RANDOM, "return_log_prob": True}


class CompositeParams(nn.Module):
    """Parameters of a move and of a push, as a composite distribution reads them."""

    def __init__(self, seed):
        super().__init__()
        self.linear = linear(3 + 4, seed)
        self.extract = NormalParamExtractor()

    def forward(self, observation):
        logits, rest = self.linear(observation).split((3, 4), -1)
        loc, scale = self.extract(rest)
        return logits, loc, scale


def _gaussian(distribution, seed, group=()):
    read, write, *keys = ((*group, name) if group else name for name in ("observation", "action", "loc", "scale"))
    net = nn.Sequential(linear(4, seed), NormalParamExtractor())
    module = TensorDictModule(net, in_keys=[read], out_keys=keys)
    names = dict(zip(("loc", "scale"), keys, strict=True))
    return ProbabilisticActor(module, in_keys=names, out_keys=[write], distribution_class=distribution, **RANDOM)


def _discrete(distribution, seed):
    module = TensorDictModule(linear(4, seed), in_keys=["observation"], out_keys=["logits"])
    return ProbabilisticActor(module, in_keys=["logits"], distribution_class=distribution, **RANDOM)


def _composite(seed):
    keys = [("params", "move", "logits"), ("params", "push", "loc"), ("params", "push", "scale")]
    actions = {"move": ("action", "move"), "push": ("action", "push")}
    parts = {"move": D.Categorical, "push": IndependentNormal}
    sample = tdnn.ProbabilisticTensorDictModule(
        in_keys=["params"],
        out_keys=[*actions.values()],
        distribution_class=tdnn.CompositeDistribution,
        distribution_kwargs={"distribution_map": parts, "name_map": actions},
        **RANDOM,
    )
    module = TensorDictModule(CompositeParams(seed), in_keys=["observation"], out_keys=keys)
    return tdnn.ProbabilisticTensorDictSequential(module, sample)


ACTORS = {
    "tanh-normal": lambda seed=0: _gaussian(TanhNormal, seed),
    "independent-normal": lambda seed=0: _gaussian(IndependentNormal, seed),
    "normal": lambda seed=0: _gaussian(D.Normal, seed),
    "categorical": lambda seed=0: _discrete(D.Categorical, seed),
    "one-hot": lambda seed=0: _discrete(OneHotCategorical, seed),
    "composite": _composite,
    "agents": lambda seed=0: _gaussian(IndependentNormal, seed, group=("agents",)),
}
ACTIONS = dict.fromkeys(ACTORS, "box") | {name: name for name in ("categorical", "one-hot", "composite", "agents")}


def make_actor(kind, seed=0):
    actor = ACTORS[kind](seed)
    return actor.select_out_keys(*actor.out_keys)


def make_env(kind, batch_size=(), **options):
    return LinearEnv(ACTIONS.get(kind, "box"), batch_size, **options)


def drift(actor, by=0.5):
    """Move the policy, as training would."""
    with torch.no_grad():
        for index, parameter in enumerate(actor.parameters()):
            parameter.add_(by * torch.linspace(-1.0, 1.0, parameter.numel()).sin().view_as(parameter) * (1 + index))
    return actor


def normal_log_prob(x, loc, scale):
    return -0.5 * ((x - loc) / scale).square() - scale.log() - 0.5 * math.log(2 * math.pi)


def log_prob_by_hand(kind, actor, steps):
    """The formulas, without a distribution class; ``actor`` is asked for its parameters only."""
    group = ("agents",) if kind == "agents" else ()
    with torch.no_grad():
        read = steps.select((*group, "observation") if group else "observation")
        out = TensorDictSequential(*list(actor.module)[:-1])(read)
    action = steps[(*group, "action") if group else "action"]
    if kind in ("categorical", "one-hot"):
        index = action.to(torch.int64).argmax(-1) if kind == "one-hot" else action
        return out["logits"].log_softmax(-1).gather(-1, index.unsqueeze(-1)).squeeze(-1)
    if kind == "composite":
        params = out["params"]
        move = params["move", "logits"].log_softmax(-1).gather(-1, action["move"].unsqueeze(-1)).squeeze(-1)
        return move + normal_log_prob(action["push"], params["push", "loc"], params["push", "scale"]).sum(-1)
    loc, scale = (out[(*group, name) if group else name] for name in ("loc", "scale"))
    if kind == "tanh-normal":
        return (normal_log_prob(action.atanh(), loc, scale) - (1 - action.square()).log()).sum(-1)
    log_prob = normal_log_prob(action, loc, scale)
    return log_prob if kind == "normal" else log_prob.sum(-1)


def play(env, actor, steps=8, seed=0, **options):
    """A rollout over several episodes, the same for the same seed."""
    torch.manual_seed(seed)
    env.set_seed(seed)
    with torch.no_grad():
        return env.rollout(steps, actor, break_when_any_done=False, **options)


def steps_of(actor, batch=(3,), kind="tanh-normal"):
    """Steps of the plain environment."""
    return play(make_env(kind, batch), actor)


def key_of(kind, name):
    return ("agents", name) if kind == "agents" else name


COEF = 0.3


def drifted(kind="tanh-normal", coef=COEF, **options):
    """A transform around a policy as it was, that policy as it is, and a twin as it was."""
    actor = make_actor(kind)
    transform = KLConstrainedTransform(actor, coef, **options)
    before = frozen_twin(actor)
    return transform, drift(actor), before


def assert_adjusted(steps, actor, before, kind="tanh-normal", coef=COEF):
    """The numbers worked out from the steps themselves."""
    ref, out = log_prob_by_hand(kind, before, steps), steps["next"]
    kl = log_prob_by_hand(kind, actor, steps) - ref
    torch.testing.assert_close(out[key_of(kind, "ref_log_prob")], ref, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(out[key_of(kind, "kl")], kl, rtol=1e-3, atol=1e-3)
    raw = out[key_of(kind, "observation")].sum(-1, keepdim=True)
    torch.testing.assert_close(out[key_of(kind, "raw_reward")], raw)
    penalty = kl.sum(-1, keepdim=True) if kind == "normal" else kl.unsqueeze(-1)
    torch.testing.assert_close(out[key_of(kind, "reward")], raw - coef * penalty, rtol=1e-3, atol=1e-3)


def parts_of(key):
    return key if isinstance(key, tuple) else (key,)


def stored(state):
    """Through a file, without pickle."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


CELLS = {"lstm": LSTMModule, "gru": GRUModule}
STATES = {"lstm": ("h", "c"), "gru": ("h",)}


def make_recurrent(cell="lstm", seed=0, hidden=4, layers=1, group=None, **options):
    """With TorchRL's names of the hidden state, or with names in a group."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        keys = {"in_key": "observation", "out_key": "features"}
        if group is not None:
            states = [(group, name) for name in STATES[cell]]
            keys = {"in_keys": ["observation", *states], "out_keys": ["features", *(("next", *key) for key in states)]}
        memory = CELLS[cell](input_size=3, hidden_size=hidden, num_layers=layers, **keys, **options)
        net = nn.Sequential(nn.Linear(hidden, 4), NormalParamExtractor())
    head = TensorDictModule(net, in_keys=["features"], out_keys=["loc", "scale"])
    module = TensorDictSequential(memory, head)
    # A distribution whose samples, scored again, are the same to the last digit.
    return ProbabilisticActor(module, in_keys=["loc", "scale"], distribution_class=IndependentNormal, **RANDOM)


def recurrent_env(actor, batch_size=(), transforms=(), **options):
    memory = actor.module[0][0] if isinstance(actor.module[0], TensorDictSequential) else actor.module[0]
    env = LinearEnv("box", batch_size, **options)
    return TransformedEnv(env, Chain(InitTracker(), memory.make_tensordict_primer(), *transforms))


def frozen_twin(actor):
    return copy.deepcopy(actor).requires_grad_(False)


def compiled_step(env, actor):
    """A compiled step, without a break in its graph, which is the same as an eager one, and what it steps."""
    torch.manual_seed(0)
    with torch.no_grad():
        td = actor(env.reset())
        torch.compiler.reset()
        step = torch.compile(env.step, backend="eager", fullgraph=True)
        assert_allclose_td(step(td.clone()), env.step(td.clone()), rtol=1e-5, atol=1e-6)
    return step, td
