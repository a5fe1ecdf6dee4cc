from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import nn
from torch.distributions import Categorical

from tests.modules.toys import CONTROL, KINDS, TOKENIZER, heads, rows, tiny_lm
from torchrl_lang.modules import (
    QValueHead,
    UtteranceActor,
    ValueGuidance,
    ValueHead,
    causal_lm,
    language_actor,
    load_language_model,
    qvalue_module,
    save_language_model,
    value_module,
)
from torchrl_lang.modules.save import language_model_of
from torchrl_lang.objectives import ILQLLoss
from torchrl_lang.text import CharTokenizer


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head_kind", ["mlp", "residual"])
def test_round_trip(tmp_path, kind, head_kind):
    lm, (q, v) = tiny_lm(kind), heads(kind=head_kind)
    actor = language_actor(lm, expose_pre_norm=True)
    save_language_model(tmp_path / "new", actor, {"qvalue": q, "value": v}, tokenizer=TOKENIZER.config())
    saved = load_language_model(tmp_path / "new")
    assert CharTokenizer(saved.tokenizer["symbols"], saved.tokenizer["control"]).control == CONTROL

    def said(lm, q, v):
        actor = language_actor(lm, expose_pre_norm=True)
        return UtteranceActor(actor, CONTROL, 5, guidance=ValueGuidance(q, v, beta=2.0, clip=0.0), seed=0)(rows())

    first, second = said(lm, q, v), said(saved.lm, saved.heads["qvalue"], saved.heads["value"])
    assert torch.equal(first["action"], second["action"])
    torch.testing.assert_close(first["token_log_prob"], second["token_log_prob"])
    tied = saved.lm.get_output_embeddings().weight is saved.lm.get_input_embeddings().weight
    assert tied == (kind == "gpt2")


def test_a_folder_of_someone_else_is_read(tmp_path):
    tiny_lm().save_pretrained(tmp_path)
    saved = load_language_model(tmp_path)
    assert saved.heads == {}
    assert saved.tokenizer is None


def test_the_language_model_of_an_actor_shares_its_weights():
    lm = tiny_lm("llama")
    again = language_model_of(language_actor(lm))
    assert {id(p) for p in again.parameters()} == {id(p) for p in lm.parameters()}
    tokens = rows()["tokens"]
    torch.testing.assert_close(again(tokens).logits, lm(tokens).logits)


def test_an_actor_that_is_no_hugging_face_model_is_refused(tmp_path):
    trunk = TensorDictModule(nn.Embedding(5, 5), in_keys=["tokens"], out_keys=["logits"])
    prob = ProbabilisticTensorDictModule(in_keys=["logits"], out_keys=["action"], distribution_class=Categorical)
    with pytest.raises(ValueError, match="Only an actor of a Trunk"):
        save_language_model(tmp_path, ProbabilisticTensorDictSequential(trunk, prob))


def test_heads_without_weights_are_refused(tmp_path):
    lm = causal_lm(vocab_size=11, layers=1, width=8, heads=2, max_length=16)
    head = ValueHead(8)
    TensorDict.from_module(head).data.to_module(head, preserve_module_state=False)  # plain tensors, no parameters
    with pytest.raises(ValueError, match="'target'] have no weights"):
        save_language_model(tmp_path / "model", lm, {"target": head})
    assert not (tmp_path / "model").exists()


def test_a_losss_target_network_is_saved_with_the_weights_of_now(tmp_path):
    lm = causal_lm(vocab_size=11, layers=1, width=8, heads=2, max_length=16)
    loss = ILQLLoss(language_actor(lm), qvalue_module(QValueHead(8, 11)), value_module(ValueHead(8)))
    target = loss.target_qvalue_network().module
    loss.target_qvalue_network_params.data.apply_(lambda weight: weight.add_(1.0))
    assert not any(parameter.requires_grad for parameter in target.parameters())
    saved = load_language_model(save_language_model(tmp_path, lm, {"target": target})).heads["target"]
    expected = loss.target_qvalue_network_params.get("module")
    assert all(torch.equal(value, expected[name]) for name, value in saved.state_dict().items())
