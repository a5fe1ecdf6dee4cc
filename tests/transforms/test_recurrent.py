"""Actors with a memory: a policy is run on the state it acted on; a reference carries a state of its own."""

from __future__ import annotations

import functools

import pytest
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import Unbounded
from torchrl.envs import Compose, InitTracker, ParallelEnv, SerialEnv, TensorDictPrimer, TransformedEnv
from torchrl.envs.utils import check_env_specs
from torchrl.modules import LSTMModule, ProbabilisticActor, TanhNormal, set_recurrent_mode

from tests.transforms.world import LinearEnv, drift, frozen_twin, make_recurrent, normal_log_prob, play, recurrent_env
from torchrl_lang import transforms
from torchrl_lang.transforms import KLConstrainedTransform, KLRewardTransform, ReferenceModelLogProbTransform
from torchrl_lang.transforms.language_references import as_policy

cells = pytest.mark.parametrize("cell", ["lstm", "gru"])


def by_hand(reference, steps):
    """Log-probabilities ``[*B, T]``: each episode on its own through torch's cell, from a state of zeros."""
    memory, head = (module for module in reference.module[0].module)
    cell = getattr(memory, "lstm" if isinstance(memory, LSTMModule) else "gru")
    rows = steps.reshape(-1, steps.shape[-1])
    loc, scale = torch.empty(2, *rows["action"].shape)
    for n in range(len(rows)):
        state = None  # torch's word for zeros
        for t in range(rows.shape[1]):
            state = None if rows["is_init"][n, t] else state
            with torch.no_grad():
                features, state = cell(rows["observation"][n : n + 1, t : t + 1], state)
                loc[n, t], scale[n, t] = (value[0, 0] for value in head.module(features))
    return normal_log_prob(rows["action"], loc, scale).sum(-1).reshape(steps.shape)


def assert_its_own(steps, reference):
    out = steps["next"]
    assert steps["is_init"][..., 1:, :].any()
    torch.testing.assert_close(out["ref_log_prob"], by_hand(reference, steps), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(out["kl"], steps["action_log_prob"] - out["ref_log_prob"], rtol=1e-4, atol=1e-4)


@cells
@pytest.mark.parametrize(("layers", "batch", "group"), [(1, (), None), (2, (3,), "memory")])
def test_a_reference_that_is_the_policy_has_no_divergence(cell, layers, batch, group):
    """Over several episodes whose rows end at different steps."""
    actor = make_recurrent(cell, layers=layers, group=group)
    env = recurrent_env(actor, batch, [KLRewardTransform(actor, 0.5)])
    check_env_specs(env)
    steps = play(env, actor, 20)
    assert steps["is_init"].sum() > 3 * max((1, *batch))
    assert steps["next", "kl"].abs().max() < 1e-6
    before = frozen_twin(actor)
    drift(actor, 0.3)
    steps = play(env, actor, 20)
    assert_its_own(steps, before)
    assert steps["next", "kl"].abs().mean() > 0.01
    expected = steps["next", "raw_reward"] - 0.5 * steps["next", "kl"].unsqueeze(-1)
    torch.testing.assert_close(steps["next", "reward"], expected)


@cells
def test_another_width_than_the_policys_and_a_second_reference(cell):
    """All three call their states by the same names."""
    actor, wide, twin = make_recurrent(cell), make_recurrent(cell, seed=1, hidden=7), make_recurrent(cell)
    keys = ["observation", "is_init"]
    first = ReferenceModelLogProbTransform(transforms.ActorReference(transforms.frozen_copy(wide), in_keys=keys))
    second = ReferenceModelLogProbTransform(twin, out_key=("second", "lp"))
    env = recurrent_env(actor, (3,), [first, second])
    check_env_specs(env)
    steps = play(env, actor, 12)
    torch.testing.assert_close(steps["next", "ref_log_prob"], by_hand(wide, steps), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(steps["next", "second", "lp"], steps["action_log_prob"], rtol=1e-5, atol=1e-6)
    name = "recurrent_state_h" if cell == "lstm" else "recurrent_state"
    own = steps["ref_log_prob_state", name]
    assert own.shape == (3, 12, 1, 7)
    torch.testing.assert_close(steps["second_lp_state", name], steps[name])
    begins = steps["is_init"].squeeze(-1)
    assert (own[begins] == 0).all()
    assert (own[~begins] != 0).any()


def test_the_exact_divergence():
    actor = make_recurrent("gru")
    env = recurrent_env(actor, (3,), [KLConstrainedTransform(actor, estimator="exact", policy=actor)])
    assert play(env, actor, 12)["next", "kl"].abs().max() < 1e-6


PARALLEL = pytest.param("gru", functools.partial(ParallelEnv, mp_start_method="fork"), marks=pytest.mark.slow)


@pytest.mark.parametrize(("cell", "batched"), [("lstm", SerialEnv), PARALLEL])
def test_over_workers(cell, batched):
    actor = make_recurrent(cell, layers=2)
    before = frozen_twin(actor)
    inside = batched(2, functools.partial(LinearEnv, "box", (2,)))
    primer = actor.module[0][0].make_tensordict_primer()
    env = TransformedEnv(inside, Compose(InitTracker(), primer, KLRewardTransform(actor)))
    try:
        check_env_specs(env)
        assert play(env, actor, 12)["next", "kl"].abs().max() < 1e-6
        assert_its_own(play(env, drift(actor, 0.3), 12), before)
    finally:
        env.close()


def test_in_a_collector():
    """From one batch to the next an episode goes on."""
    before, actor = make_recurrent("lstm"), drift(make_recurrent("lstm"), 0.3)
    env = recurrent_env(actor, (3,), [KLConstrainedTransform(before, missing="zero")])
    collector = Collector(env, actor, frames_per_batch=9, total_frames=36)
    steps = torch.cat([batch.clone() for batch in collector], dim=-1)
    collector.shutdown()
    assert not steps["is_init"][:, 3].all()
    assert_its_own(steps, before)


@cells
def test_a_batch_of_sequences_in_one_pass(cell):
    """As the environment gave it; step by step only with the reference's state."""
    actor, before = make_recurrent(cell), make_recurrent(cell)
    drift(actor, 0.3)
    steps = play(recurrent_env(actor, (3,), [KLConstrainedTransform(before)]), actor, 12)
    transform = ReferenceModelLogProbTransform(before)
    plain = steps.exclude("ref_log_prob_state", ("next", "ref_log_prob_state"), ("next", "ref_log_prob"))
    with set_recurrent_mode(True):
        assert_its_own(steps.clone().set(("next", "ref_log_prob"), transform(plain)["next", "ref_log_prob"]), before)
    with pytest.raises(KeyError, match=r"ref_log_prob_state.*environment.*set_recurrent_mode\(True\)"):
        transform(plain)
    moments = steps.reshape(-1)[torch.randperm(36)]
    expected = moments["next", "ref_log_prob"]
    moments["next", "ref_log_prob"] = torch.zeros(36)
    torch.testing.assert_close(transform(moments)["next", "ref_log_prob"], expected, rtol=1e-4, atol=1e-5)


def test_a_policy_is_run_on_the_state_that_it_acted_on():
    actor = make_recurrent("lstm")
    steps = play(recurrent_env(actor, (3,)), actor, 9)
    assert (steps["recurrent_state_h"] != 0).any()
    found = as_policy(actor).log_prob(steps, steps)
    torch.testing.assert_close(found, steps["action_log_prob"], rtol=1e-4, atol=1e-4)


class Averages(nn.Module):
    """A cell that TorchRL does not know."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, 2)

    def forward(self, observation, mean, is_init):
        mean = torch.where(is_init, observation, 0.5 * (mean + observation))
        return self.net(mean), torch.ones_like(mean[..., :2]), mean


def own_cell():
    names = ["loc", "scale", ("next", "mean")]
    memory = TensorDictModule(Averages(), in_keys=["observation", "mean", "is_init"], out_keys=names)
    options = {"distribution_class": TanhNormal, "return_log_prob": True}
    return ProbabilisticActor(TensorDictSequential(memory), in_keys=names[:2], **options)


class Secretive(nn.Module):
    """A memory that no tensordict shows."""

    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(3, 2)
        self.state = None

    def forward(self, observation):
        self.state = self.cell(observation, self.state)
        return self.state, torch.ones_like(self.state)


def begin(transform):
    """An environment that declares the states of cells that TorchRL does not know."""
    states = TensorDictPrimer({key: Unbounded((3,)) for key in ("mean", ("ref", "mean"))}, expand_specs=True)
    TransformedEnv(LinearEnv("box", (3,)), Compose(InitTracker(), states, transform)).reset()


def secretive():
    module = TensorDictModule(Secretive(), in_keys=["observation"], out_keys=["loc", "scale"])
    return ProbabilisticActor(module, in_keys=["loc", "scale"], distribution_class=TanhNormal)


def reading(cell, *in_keys):
    return transforms.ActorReference(transforms.frozen_copy(make_recurrent(cell)), in_keys=[*in_keys])


SEQUENCES = functools.partial(make_recurrent, default_recurrent_mode=True)
OUTSIDE = r"keeps a state outside the tensordict.*GRUModule.*ColumnReference"
SEEN = ["observation", "is_init"]
REFUSED = [
    (lambda: reading("gru", "observation"), r"'is_init' and all of .*or none of it.*got in_keys=\['observation'\]"),
    (lambda: reading("lstm", *SEEN, "recurrent_state_h"), r"all of its state \['recurrent_state_h', 'recurrent"),
    (lambda: recurrent_env(make_recurrent(), (), [KLRewardTransform(SEQUENCES())]).rollout(2), "recurrent_mode=False"),
    (lambda: ReferenceModelLogProbTransform(own_cell()), r"'mean'.*not carried.*in_keys="),
    (lambda: ReferenceModelLogProbTransform(own_cell(), in_keys=SEEN), r"'mean'.*not carried.*in_keys="),
    (lambda: begin(ReferenceModelLogProbTransform(secretive())), OUTSIDE),
    (lambda: begin(KLConstrainedTransform(secretive(), estimator="exact", policy=own_cell())), OUTSIDE),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_what_cannot_be_carried_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_without_the_mark_of_the_first_step():
    """The remedy is in every test above."""
    env = TransformedEnv(LinearEnv("box", (3,)), KLRewardTransform(make_recurrent("gru")))
    with pytest.raises(KeyError, match=r"needs 'is_init'.*put InitTracker\(\) before"):
        env.reset()
