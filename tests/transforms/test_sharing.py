"""References that cost less than a copy: what they hold, what they run, and that they say the same."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.modules import ProbabilisticActor

from tests.modules.toys import tiny_lm
from tests.transforms.test_rows import drift, make_rows, score
from torchrl_lang.modules import language_actor, train_top_layers
from torchrl_lang.transforms import (
    ActorReference,
    ColumnReference,
    FunctionReference,
    KLConstrainedTransform,
    ReferenceModelLogProbTransform,
    adapters_off,
    frozen_copy,
)


def own_bytes(reference, policy):
    """Memory of a reference that is not the policy's."""
    theirs = {p.untyped_storage().data_ptr() for p in policy.parameters()}
    mine = {p.untyped_storage().data_ptr(): p.nbytes for p in reference.frozen.actor.parameters()}
    return sum(size for place, size in mine.items() if place not in theirs)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_adapters_off_is_the_base_model_without_a_copy(kind):
    lm, rows = tiny_lm(kind), make_rows()
    before = score(language_actor(lm), rows)
    targets = ["c_attn"] if kind == "gpt2" else ["q_proj", "v_proj"]
    actor = language_actor(get_peft_model(lm, LoraConfig(r=2, target_modules=targets, init_lora_weights=False)))
    transform = ReferenceModelLogProbTransform(adapters_off(actor))
    assert own_bytes(transform.reference, actor) == 0
    torch.testing.assert_close(transform(rows.copy())["ref_log_prob"], before, atol=1e-5, rtol=1e-5)
    live = score(actor, rows)
    assert (live - before).abs().max() > 1e-3  # the adapters are on again
    drift(actor, 0.1)
    torch.testing.assert_close(transform(rows.copy())["ref_log_prob"], before, atol=1e-5, rtol=1e-5)
    assert any(p.requires_grad for p in actor.parameters())


def test_shared_weights_that_change_are_noticed():
    actor, rows = language_actor(tiny_lm()), make_rows()
    train_top_layers(actor, 1)
    transform = ReferenceModelLogProbTransform(actor)
    transform(rows.copy())
    embedding = actor[0].module.model.get_input_embeddings().weight
    with torch.no_grad():
        embedding.add_(1.0)
    with pytest.raises(RuntimeError, match="share=False"):
        transform(rows.copy())


def two_headed():
    """A frozen trunk and a head that trains, as one actor of discrete actions."""
    trunk = TensorDictModule(nn.Sequential(nn.Linear(3, 8), nn.Tanh()), in_keys=["observation"], out_keys=["hidden"])
    head = TensorDictModule(nn.Linear(8, 4), in_keys=["hidden"], out_keys=["logits"])
    trunk.requires_grad_(False)
    return ProbabilisticActor(
        TensorDictSequential(trunk, head),
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )


def steps(actor, n=16):
    return actor(TensorDict(observation=torch.randn(n, 3), batch_size=[n]))


def test_a_column_of_the_data():
    torch.manual_seed(0)
    actor = two_headed()
    data = steps(actor)
    data["stored"] = ActorReference(frozen_copy(actor)).log_prob(data, data.copy())
    drift(actor, 0.5)
    data = actor(data)
    data["reward"] = torch.zeros(16, 1)
    out = KLConstrainedTransform("stored")(data.copy())
    torch.testing.assert_close(out["reward"], -(data["action_log_prob"] - data["stored"]).unsqueeze(-1))
    assert "ref_log_prob" in out.keys()
    with pytest.raises(KeyError, match="'elsewhere'"):
        KLConstrainedTransform(ColumnReference("elsewhere"))(data.copy())


def test_a_function_and_a_module():
    data = TensorDict(action=torch.arange(3), x=torch.ones(3), reward=torch.zeros(3, 1), batch_size=[3])
    out = ReferenceModelLogProbTransform(lambda td: -td["action"].float())(data.copy())
    assert out["ref_log_prob"].tolist() == [0.0, -1.0, -2.0]
    with pytest.raises(KeyError):
        ReferenceModelLogProbTransform(lambda td: td["x"], in_keys=["action"])(data.copy())

    class Score(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.tensor(2.0))

        def forward(self, td):
            return -self.weight * td["x"]

    module = Score()
    transform = ReferenceModelLogProbTransform(FunctionReference(module))
    with torch.no_grad():
        module.weight.fill_(5.0)
    found = transform(data.copy())["ref_log_prob"]
    assert found.tolist() == [-2.0, -2.0, -2.0]
    assert not found.requires_grad
    assert list(transform.state_dict()) == ["reference_fingerprint"]
    assert not list(transform.parameters())


def test_what_is_no_reference_is_refused():
    with pytest.raises(TypeError, match="actor with get_dist"):
        ReferenceModelLogProbTransform(3.0)
    with pytest.raises(ValueError, match="to ColumnReference itself"):
        ReferenceModelLogProbTransform(ColumnReference("x"), in_keys=["y"])


def test_a_column_on_steps_is_the_action_s_own():
    """At the root an environment has what belongs to the step before."""
    data = TensorDict(
        {
            "ref_log_prob": torch.zeros(3),
            "action_log_prob": torch.tensor([-1.0, -1.0, -1.0]),
            "next": {"ref_log_prob": torch.tensor([-1.0, -2.0, -3.0]), "reward": torch.zeros(3, 1)},
        },
        batch_size=[3],
    )
    assert KLConstrainedTransform("ref_log_prob")(data)["next", "kl"].tolist() == [0.0, 1.0, 2.0]


def test_two_references_in_one_place():
    torch.manual_seed(0)
    actor, other = two_headed(), two_headed()
    data = steps(actor)
    data["reward"] = torch.ones(16, 1)
    first, second = KLConstrainedTransform(actor, 0.5), KLConstrainedTransform(other, 0.25, name="style")
    out = second(first(data))
    assert {"kl", "raw_reward", "style_kl", "style_ref_log_prob", "style_raw_reward"} <= set(out.keys())
    torch.testing.assert_close(out["style_raw_reward"], first(data)["reward"])
    expected = 1 - 0.5 * out["kl"] - 0.25 * out["style_kl"]
    torch.testing.assert_close(out["reward"].squeeze(-1), expected)
    with pytest.raises(ValueError, match="name= in KLConstrainedTransform"):
        KLConstrainedTransform(other)(first(data))
    with pytest.raises(ValueError, match="adjusted before"):
        KLConstrainedTransform(other, out_keys="elsewhere")(first(data))
