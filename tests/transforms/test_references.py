"""Data without what is needed: a clear error, or zero where that was asked for."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import nn
from torch.distributions import Categorical
from torchrl.envs import Compose, TransformedEnv
from torchrl.modules import Actor, TanhDelta

from tests.transforms.world import drift, make_actor, make_env, steps_of
from torchrl_lang import transforms
from torchrl_lang.modules import LanguageActor
from torchrl_lang.transforms import (
    KLConstrainedTransform,
    KLDivergenceTransform,
    ReferenceModelLogProbTransform,
    references,
)
from torchrl_lang.transforms.language_references import as_policy, as_reference


def test_the_policy_is_asked_where_the_data_is_silent():
    actor = make_actor("tanh-normal")
    transform = KLConstrainedTransform(actor, policy=actor)
    drift(actor)
    steps = steps_of(actor)
    expected = transform(steps)["next", "kl"]
    assert (expected != 0).all()
    asked = transform(steps.exclude("action_log_prob"))["next", "kl"]
    torch.testing.assert_close(asked, expected, rtol=1e-4, atol=1e-4)


STEP = {"ref_log_prob": torch.zeros(2), "action_log_prob": torch.zeros(2), "reward": torch.zeros(2, 1)}


@pytest.mark.parametrize(
    ("transform", "lacks", "message"),
    [
        (ReferenceModelLogProbTransform(make_actor("tanh-normal")), "observation", "reference needs 'observation'"),
        (ReferenceModelLogProbTransform(transforms.ColumnReference("stored")), "stored", "needs 'stored'"),
        (KLDivergenceTransform(), "ref_log_prob", "Put ReferenceModelLogProbTransform before"),
        (KLDivergenceTransform(mask_key="mask"), "mask", "tokens that count"),
        (KLDivergenceTransform(log_prob_key="mine"), "mine", "log_prob_key="),
        (transforms.RewardAdjustmentTransform(), "kl", "Put KLDivergenceTransform before"),
        (transforms.RewardAdjustmentTransform(kl_key="ref_log_prob", reward_key="score"), "score", "reward_key="),
    ],
)
def test_a_missing_entry_is_named(transform, lacks, message):
    data = TensorDict({key: value for key, value in STEP.items() if key != lacks}, batch_size=[2])
    with pytest.raises(KeyError, match=message):
        transform(data)


def test_the_last_distribution_of_an_actor_is_that_of_its_action():
    latent, action = (
        ProbabilisticTensorDictModule([key], [out], distribution_class=Categorical, return_log_prob=True)
        for key, out in (("logits", "latent"), ("others", "action"))
    )
    scores = TensorDictModule(lambda x: (x, x), ["observation"], ["logits", "others"])
    actor = ProbabilisticTensorDictSequential(scores, latent, action, return_composite=False)
    assert ReferenceModelLogProbTransform(actor).reference.action_keys.action == ("action",)


def test_keys_of_an_actor_without_a_distribution_of_its_own():
    assert references._keys_of_actor([], None).action == ("action",)
    assert references._keys_of_actor([], ["move", "speech"]).action == ("move", "speech")


def test_a_wrong_order_is_found_when_the_environment_is_built():
    env = TransformedEnv(make_env("tanh-normal"), KLDivergenceTransform())
    with pytest.raises(KeyError, match="Put ReferenceModelLogProbTransform before"):
        env.reset()
    env = TransformedEnv(make_env("tanh-normal"), KLConstrainedTransform(make_actor("tanh-normal"), in_keys="score"))
    with pytest.raises(KeyError, match="needs 'score', found only"):
        env.reset()


def steps(actor, n=16):
    torch.manual_seed(0)
    return actor(TensorDict(observation=torch.randn(n, 3), batch_size=[n]))


def test_a_column_of_the_data():
    actor = make_actor("categorical")
    data = steps(actor)
    data["stored"] = transforms.ActorReference(transforms.frozen_copy(actor)).log_prob(data, data.copy())
    data = drift(actor)(data)
    data["reward"] = torch.zeros(16, 1)
    out = KLConstrainedTransform("stored")(data.copy())
    torch.testing.assert_close(out["reward"], -(data["action_log_prob"] - data["stored"]).unsqueeze(-1))
    assert "ref_log_prob" in out.keys()
    for make, error, match in (
        (lambda: KLConstrainedTransform(transforms.ColumnReference("elsewhere"))(data.copy()), KeyError, "'elsewhere'"),
        (lambda: KLConstrainedTransform("stored", action_key="move"), ValueError, "for actors: a ColumnReference"),
        (lambda: KLConstrainedTransform(nn.Linear(3, 4)), TypeError, "is an actor with get_dist, .*, got Linear"),
    ):
        with pytest.raises(error, match=match):
            make()


def test_a_function_and_a_module():
    data = TensorDict(action=torch.arange(3), x=torch.ones(3), reward=torch.zeros(3, 1), batch_size=[3])
    out = ReferenceModelLogProbTransform(lambda td: -td["action"].float())(data.copy())
    assert out["ref_log_prob"].tolist() == [0.0, -1.0, -2.0]
    with pytest.raises(KeyError, match='key "x" not found'):
        ReferenceModelLogProbTransform(lambda td: td["x"], in_keys=["action"])(data.copy())

    class Score(nn.Linear):
        def forward(self, td):
            return super().forward(td["x"][:, None]).squeeze(-1)

    module = Score(1, 1)
    expected = module(data).detach()
    transform = ReferenceModelLogProbTransform(transforms.FunctionReference(module))
    with torch.no_grad():
        module.weight.fill_(5.0)
    found = transform(data.copy())["ref_log_prob"]
    assert torch.equal(found, expected)
    assert not found.requires_grad
    assert list(transform.state_dict()) == ["reference_fingerprint"]
    assert not list(transform.parameters())


def test_a_column_on_steps_is_the_action_s_own():
    """At the root an environment has what belongs to the step before."""
    own = {"ref_log_prob": torch.tensor([-1.0, -2.0, -3.0]), "reward": torch.zeros(3, 1)}
    data = {"ref_log_prob": torch.zeros(3), "action_log_prob": -torch.ones(3), "next": own}
    out = KLConstrainedTransform("ref_log_prob")(TensorDict(data, batch_size=[3]))
    assert out["next", "kl"].tolist() == [0.0, 1.0, 2.0]


def reads_tokens(kind, **options):
    """An actor of one move a step that sees a row of tokens, or the same parts as a language model's."""
    net = TensorDictModule(nn.Embedding(7, 4), in_keys=["tokens"], out_keys=["embedded"])
    head = TensorDictModule(lambda embedded: embedded.mean(-2), in_keys=["embedded"], out_keys=["logits"])
    options = {"distribution_class": Categorical, "return_log_prob": True} | options
    return kind(net, head, ProbabilisticTensorDictModule(in_keys=["logits"], out_keys=["move"], **options))


def test_the_class_of_an_actor_decides_what_is_scored():
    """Not the names of its entries: this one reads tokens and writes no "action", but one move a step."""
    actor = reads_tokens(ProbabilisticTensorDictSequential)
    reference = as_reference(actor)
    assert type(reference) is transforms.ActorReference
    assert reference.action_keys.action == ("move",)
    data = actor(TensorDict(tokens=torch.randint(7, (5, 3)), batch_size=[5]))
    torch.testing.assert_close(reference.log_prob(data, data), data["move_log_prob"].detach())
    assert type(as_reference(reads_tokens(LanguageActor))) is transforms.RowReference
    assert type(as_policy(reads_tokens(LanguageActor))) is transforms.RowReference
    with pytest.raises(TypeError, match=r"with get_dist\(tensordict\); got TensorDictModule"):
        as_policy(TensorDictModule(nn.Linear(3, 2), in_keys=["observation"], out_keys=["action"]))
    with pytest.raises(KeyError, match=r"'move'.*RowReference\(frozen_copy\(actor\)\)"):
        reference.log_prob(data.exclude("move"), data)
    with pytest.raises(ValueError, match="for actors: a RowReference has its own"):
        as_reference(reads_tokens(LanguageActor), action_key="move")


@pytest.mark.parametrize(
    "make",
    [
        lambda: Actor(nn.Linear(3, 2)),
        lambda: transforms.frozen_copy(Actor(nn.Linear(3, 2))),
        lambda: transforms.frozen_copy(TensorDictModule(nn.Linear(3, 2), in_keys=["observation"], out_keys=["action"])),
        lambda: reads_tokens(ProbabilisticTensorDictSequential, distribution_class=TanhDelta),
    ],
)
def test_a_deterministic_actor_is_refused_at_once(make):
    with pytest.raises(TypeError, match=r"no distribution of actions.* use TorchRL's ProbabilisticActor"):
        transforms.KLRewardTransform(make())


def test_two_references_in_one_place():
    actor, other = make_actor("categorical"), make_actor("categorical", 1)
    data = steps(actor)
    data["reward"] = torch.ones(16, 1)
    once = KLConstrainedTransform(actor, 0.5)(data)
    logs = {"log_prob_key": actor.log_prob_keys, "ref_log_prob_key": "style_ref"}
    second = Compose(
        ReferenceModelLogProbTransform(other, out_key="style_ref"),
        KLDivergenceTransform(out_key="style_kl", **logs),
        transforms.RewardAdjustmentTransform(0.25, kl_key="style_kl", raw_key="once"),
    )
    out = second(once)
    torch.testing.assert_close(out["once"], once["reward"])
    torch.testing.assert_close(out["reward"].squeeze(-1), 1 - 0.5 * out["kl"] - 0.25 * out["style_kl"])
    for options in ({}, {"out_keys": "elsewhere"}):
        with pytest.raises(ValueError, match=r"adjusted before.* raw_key= of its own"):
            KLConstrainedTransform(other, **options)(once)
