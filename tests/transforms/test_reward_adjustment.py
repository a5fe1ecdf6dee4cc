"""The reward itself: options, gradients, controllers, and the transform that TorchRL once had."""

from __future__ import annotations

import pickle

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import distributions as D
from torchrl.data import Binary, Composite
from torchrl.envs import TransformedEnv
from torchrl.envs.utils import check_env_specs

from tests.transforms import world
from torchrl_lang import transforms
from torchrl_lang.transforms import KLDivergenceTransform, KLLimitTransform, RewardAdjustmentTransform


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "exact"])
def test_a_reward_carries_no_gradient(estimator):
    """Whatever the data carry, and with a policy that is run or whose parameters are in the data."""
    actor = world.make_actor("tanh-normal")
    transform = transforms.KLConstrainedTransform(actor, estimator=estimator, policy=actor)
    world.drift(actor)
    steps = actor(world.steps_of(actor).exclude("action", "action_log_prob"))
    assert steps["action_log_prob"].requires_grad
    out = transform(steps)["next"]
    assert not any(out[key].requires_grad for key in ("reward", "kl", "ref_log_prob") if key in out.keys())


LOG_PROB = torch.tensor([[-1.0, -2.0, -3.0], [-1.0, -1.0, -1.0]])
REF = torch.tensor([[-1.5, -1.0, -3.0], [-2.0, torch.nan, -1.0]])
MASK = torch.tensor([[True, True, True], [True, False, True]])


def tokens(**entries):
    data = {"log_prob": LOG_PROB, "ref_log_prob": REF, "mask": MASK} | entries
    return TensorDict(data, batch_size=[2])


@pytest.mark.parametrize(
    ("estimator", "direction", "first"),
    [
        ("k1", "reverse", [0.5, -1.0, 0.0]),
        ("k2", "reverse", [0.125, 0.5, 0.0]),
        ("k3", "reverse", [0.60653 - 1 + 0.5, 2.71828 - 1 - 1, 0.0]),
        ("k1", "forward", [-0.5 * 0.60653, 2.71828, 0.0]),
    ],
)
def test_numbers_by_hand(estimator, direction, first):
    transform = KLDivergenceTransform(estimator, direction=direction, log_prob_key="log_prob", mask_key="mask")
    kl = transform(tokens())["kl"]
    torch.testing.assert_close(kl[0], torch.tensor(first), rtol=1e-4, atol=1e-4)
    assert kl[1, 1] == 0  # masked, though it is NaN
    assert not kl.isnan().any()


def test_per_sequence_sums_what_counts():
    transform = KLDivergenceTransform(log_prob_key="log_prob", mask_key="mask", per="sequence")
    torch.testing.assert_close(transform(tokens())["kl"], torch.tensor([[-0.5], [1.0]]))
    # One value an action has nothing beyond the batch, and stays.
    flat = TensorDict(log_prob=LOG_PROB[0], ref_log_prob=REF[0], batch_size=[3])
    assert KLDivergenceTransform(log_prob_key="log_prob", per="sequence")(flat)["kl"].shape == (3,)


def test_heads_in_modules_of_their_own():
    """Two probabilistic modules in a row: both actions are scored, and both log-probabilities are the policy's."""
    nets = [TensorDictModule(world.linear(n, n), in_keys=["observation"], out_keys=[f"logits_{n}"]) for n in (2, 4)]
    options = {"distribution_class": D.Categorical, **world.RANDOM}
    heads = [
        ProbabilisticTensorDictModule(in_keys={"logits": f"logits_{n}"}, out_keys=[f"action_{n}"], **options)
        for n in (2, 4)
    ]
    actor = ProbabilisticTensorDictSequential(*nets, *heads)
    transform = transforms.KLConstrainedTransform(actor)
    steps = actor(TensorDict(observation=torch.randn(5, 3), reward=torch.zeros(5, 1), batch_size=[5]))
    torch.testing.assert_close(transform(steps)["kl"], torch.zeros(5))
    out = transform(world.drift(actor)(steps))
    log_prob = out["action_2_log_prob"] + out["action_4_log_prob"]
    torch.testing.assert_close(out["kl"], log_prob - out["ref_log_prob"])
    assert (out["kl"] != 0).all()


def test_a_copied_policy_does_not_run_stale():
    actor = world.make_actor("tanh-normal")
    transform = transforms.KLConstrainedTransform(actor, estimator="exact", policy=actor)
    steps = world.steps_of(actor)
    copied = pickle.loads(pickle.dumps(transform))  # noqa: S301
    torch.testing.assert_close(copied(steps)["next", "kl"], torch.zeros(3, 8))  # from parameters in the data
    with pytest.raises(RuntimeError, match="copy of the policy"):
        copied(steps.exclude("loc", "scale"))
    transform(steps.exclude("loc", "scale"))


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64])
def test_rewards_of_any_type_lose_nothing_of_the_penalty(dtype):
    kl = torch.tensor([0.5, 3.0], dtype=torch.promote_types(dtype, torch.float32))
    data = TensorDict(reward=torch.ones(2, 1, dtype=dtype), kl=kl, batch_size=[2])
    reward = RewardAdjustmentTransform(0.1)(data)["reward"].flatten()
    torch.testing.assert_close(reward, torch.tensor([0.95, 0.7], dtype=kl.dtype))


def test_a_coefficient_of_zero_forgives_everything():
    data = TensorDict(reward=torch.ones(2, 1), kl=torch.tensor([torch.inf, 1.0]), batch_size=[2])
    out = RewardAdjustmentTransform(transforms.LagrangeKLController(0.0, target=1.0))(data)
    assert out["reward"].flatten().tolist() == [1.0, 1.0]
    assert RewardAdjustmentTransform(0.1)(data)["reward"][0] < -1e30
    with pytest.raises(ValueError, match="1 of 2"):
        RewardAdjustmentTransform(transforms.AdaptiveKLController(0.1, target=1.0)).update(out)


def test_padded_steps_are_not_measured():
    mask = torch.tensor([[True, True], [True, False]])
    kl = torch.tensor([[3.0, 3.0], [3.0, 0.0]])
    next_step = {"reward": torch.zeros(2, 2, 1), "kl": kl}
    data = TensorDict({"collector": {"mask": mask}, "next": next_step}, batch_size=[2, 2])
    by_hand, by_batch = (transforms.AdaptiveKLController(0.1, target=1.0, horizon=100) for _ in range(2))
    by_hand.update(3.0, n=3)
    RewardAdjustmentTransform(by_batch).update(data)
    assert by_batch.coef == by_hand.coef != 0.1


def test_rows_in_which_the_agent_wrote_nothing_are_not_measured():
    mask, kl = torch.tensor([[True, False], [False, False]]), torch.tensor([[3.0, 0.0], [0.0, 0.0]])
    by_hand, by_batch = (transforms.AdaptiveKLController(0.1, target=1.0, horizon=100) for _ in range(2))
    by_hand.update(3.0, n=1)
    rows = TensorDict(agent_mask=mask, kl=kl, batch_size=[2])
    RewardAdjustmentTransform(by_batch, mask_key="agent_mask").update(rows)
    assert by_batch.coef == by_hand.coef != 0.1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: KLDivergenceTransform("k4"), "estimator must be one of"),
        (lambda: KLDivergenceTransform("exact"), "needs both distributions"),
        (lambda: RewardAdjustmentTransform(placement="last"), "it needs their mask, mask_key="),
        (lambda: RewardAdjustmentTransform(-1.0), r"coef must lie in \[0, inf\), got -1"),
        (lambda: KLLimitTransform(float("nan")), r"limit must .*got"),
    ],
)
def test_options_are_checked(make, message):
    with pytest.raises(ValueError, match=message):
        make()


LIMIT = 1.0
ENDS = ("done", "terminated")


@pytest.mark.parametrize("truncated", [True, False])
def test_truncates_at_the_step_at_which_the_sum_passes(truncated):
    """Replayed by hand: sums start anew after each reset, partial ones included; the end of a task is no truncation."""
    transform, actor, _ = world.drifted(limit=LIMIT, estimator="k3", missing="zero")
    env = TransformedEnv(world.make_env("tanh-normal", (16,), truncated=truncated), transform)
    check_env_specs(env)
    steps = world.play(env, actor, 12)
    out = steps["next"]
    total = torch.zeros(16, 1)
    for t in range(12):
        assert torch.equal(steps["episode_kl"][:, t], total)
        total = total + out["kl"][:, t, None]
        torch.testing.assert_close(out["episode_kl"][:, t], total)
        passed, ended = total > LIMIT, steps["count"][:, t] + 1 >= world.HORIZON
        for key, expected in (("truncated", passed), ("terminated", ended), ("done", passed | ended)):
            assert torch.equal(out[key][:, t], expected)
        total = torch.where(out["done"][:, t], 0.0, total)
    assert not steps["truncated"].any()
    assert (out["truncated"] & ~out["terminated"]).any()
    assert (~out["truncated"] & out["terminated"]).any()


def test_a_row_that_passed_stays_out():
    """Though a later log-ratio brings the sum below the limit again; a sum that is NaN has passed."""
    kl = torch.tensor([[0.5, 1.0, -1.0, 0.1], [0.5, torch.nan, 0.0, 0.0], [1.0, 0.0, -0.5, 0.5]])
    for rows in (TensorDict(kl=kl, batch_size=[3]), TensorDict(kl=kl[:, None], batch_size=[3, 1])):
        within = KLLimitTransform(LIMIT)(rows)["within_kl_limit"]
        assert within.reshape(3, 4).tolist() == [[True, False, False, False]] * 2 + [[True] * 4]


class AgentsEnv(world.LinearEnv):
    """Two agents, each with a reward and a ``done`` of its own; the second has one step more."""

    def __init__(self, batch_size=(), *, root=False, **options):
        super().__init__("agents", batch_size, **options)
        done = Binary(shape=(*self.wide, 1), dtype=torch.bool)
        agents = Composite(done=done, terminated=done.clone(), shape=self.wide)
        specs = Composite(agents=agents, shape=self.batch_size)
        if root:
            specs.update({name: Binary(shape=(*self.batch_size, 1), dtype=torch.bool) for name in ENDS})
        self.full_done_spec = specs
        self.root = root

    def _step(self, tensordict):
        out = super()._step(tensordict)
        last = torch.tensor([[world.HORIZON], [world.HORIZON + 1]])
        done = out["count"].unsqueeze(-2) >= last
        for name in ENDS:
            out["agents", name] = done.clone()
            out[name] = done.all(-2)
            if not self.root:
                del out[name]
        return out


@pytest.mark.parametrize("root", [False, True])
def test_each_agent_has_its_own_limit_and_reward(root):
    """Where ``done`` stands in the agents' group; numbers worked out from the steps."""
    transform, actor, before = world.drifted("agents", estimator="k3", limit=LIMIT, missing="zero")
    env = TransformedEnv(AgentsEnv((16,), root=root), transform)
    check_env_specs(env)
    steps = world.play(env, actor, 6)
    out = steps["next", "agents"]
    rho = world.log_prob_by_hand("agents", before, steps) - world.log_prob_by_hand("agents", actor, steps)
    kl = (rho.exp() - 1 - rho).unsqueeze(-1)
    torch.testing.assert_close(out["kl"].unsqueeze(-1), kl, rtol=1e-3, atol=1e-3)
    raw = out["observation"].sum(-1, keepdim=True)
    torch.testing.assert_close(out["raw_reward"], raw)
    torch.testing.assert_close(out["reward"], raw - world.COEF * kl, rtol=1e-3, atol=1e-3)
    total = steps["agents", "episode_kl"] + out["kl"].unsqueeze(-1)
    torch.testing.assert_close(out["episode_kl"], total)
    assert torch.equal(out["truncated"], total > LIMIT)
    assert torch.equal(out["done"], out["truncated"] | out["terminated"])
    assert (out["truncated"][..., 0, :] != out["truncated"][..., 1, :]).any()
    assert not steps["agents", "episode_kl"][:, 0].any()


@pytest.mark.parametrize(
    ("kl_key", "done_key", "expected"),
    [
        (("b", "kl"), None, ("b", "episode_kl")),
        (("c", "kl"), None, "episode_kl"),
        ("kl", ("b", "done"), ("b", "episode_kl")),
    ],
)
def test_done_is_that_of_the_divergences_group_or_the_environments_or_named(kl_key, done_key, expected):
    env = world.make_env("tanh-normal")
    env.full_done_spec = Composite({key: Binary(shape=(1,), dtype=torch.bool) for key in ("done", ("b", "done"))})
    env = TransformedEnv(env, KLLimitTransform(LIMIT, kl_key=kl_key, done_key=done_key))
    assert expected in env.observation_spec.keys(True, True)
    flags = ["done", "truncated"] if isinstance(expected, str) else [("b", "done"), ("b", "truncated")]
    assert env.transform.out_keys == [expected, *flags]
    with pytest.raises(KeyError, match="done_key="):
        _ = TransformedEnv(world.make_env("tanh-normal"), KLLimitTransform(LIMIT, done_key="other")).observation_spec
