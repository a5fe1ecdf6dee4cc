"""Wrong arguments of modules fail in the constructor, and the message names what came."""

from __future__ import annotations

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn

from tests.modules.test_decoding import K, policy
from tests.modules.toys import CONTROL, TOKENIZER, WIDTH, heads, tiny_lm
from torchrl_lang.modules import (
    FeatureEmbedding,
    QValueHead,
    RowTokenActor,
    TiedQValueHead,
    Trunk,
    UtteranceActor,
    ValueGuidance,
    causal_lm,
    language_actor,
    qvalue_module,
    value_module,
    with_features,
)
from torchrl_lang.modules.frozen.lower_layers import train_top_layers
from torchrl_lang.modules.language_model import fit_vocabulary

V = TOKENIZER.vocab_size
SMALL = {"vocab_size": 9, "layers": 1, "width": 8, "heads": 2, "max_length": 16}
Q, STATE = heads()
UNPLACED = FeatureEmbedding(5, 8, positions=False)


def module(head, key, reads="hidden"):
    return TensorDictModule(head, in_keys=[reads], out_keys=[key])


def guided(qvalue, value=None, **options):
    return lambda: policy(guidance=ValueGuidance(qvalue, value, **({"beta": 1.0} | options)))


WRONG = [
    (guided(QValueHead(WIDTH, 5)), ValueError, "5 tokens, but the model .* for 12"),
    (guided(nn.Linear(8, V)), ValueError, r"qvalue fails on states .* hidden \[3, 16\]"),
    (guided(Q, nn.Linear(WIDTH, V), clip=0.0), ValueError, r"value must write .* got \[3, 12\]"),
    (lambda: policy(value=nn.Linear(WIDTH, 2)), ValueError, r"value must write .* got \[3, 2\]"),
    (guided(module(Q, "q")), ValueError, "qvalue must write 'action_value'"),
    (guided(Q, Q), ValueError, "a QValueHead does not"),
    (lambda: policy(value=module(STATE, "state_value", "h")), KeyError, "ValueHead reads 'h' but .* writes"),
    (lambda: policy(forbidden=[3, V]), ValueError, r"got \[12\]"),
    (lambda: policy(forbidden=range(V)), ValueError, "leave a token to write"),
    (lambda: UtteranceActor(language_actor(tiny_lm(vocab_size=9)), CONTROL, K), ValueError, "12 ids, the model only 9"),
    (lambda: UtteranceActor(tiny_lm(), CONTROL, K), TypeError, "language_actor"),
    (lambda: policy(method="beam", value=STATE), ValueError, "got method='beam'"),
    (lambda: policy(method="best_of", advantage_weight=1.0), ValueError, "rank by values: pass guidance="),
    (lambda: qvalue_module(nn.Linear(8, V)), TypeError, "A Linear is no head of this library: give .* to the loss"),
    (lambda: RowTokenActor(tiny_lm()), TypeError, "got GPT2"),
    (lambda: language_actor("gpt2"), TypeError, r"got str: use load_causal_lm\(\)"),
    (lambda: language_actor(Trunk(tiny_lm())), ValueError, "Pass head="),
    (lambda: Trunk(tiny_lm())(torch.zeros(1, 41).long()), ValueError, "exceed the model's 40 positions.*row_length=40"),
    (lambda: with_features(language_actor(causal_lm("bloom", **SMALL)), UNPLACED), ValueError, "learned or rotary"),
    (lambda: train_top_layers(tiny_lm(), 4), ValueError, "Cannot train 4 of the model's 2 layers"),
    (lambda: train_top_layers(nn.Linear(2, 2), 1), ValueError, "neither a Trunk nor"),
]


@pytest.mark.parametrize(("build", "error", "message"), WRONG)
def test_the_constructor_refuses(build, error, message):
    with pytest.raises(error, match=message):
        build()


def test_what_fits_is_taken():
    for qvalue in (Q, qvalue_module(Q), nn.Linear(WIDTH, V)):
        guided(qvalue, value_module(STATE))()
    lm = fit_vocabulary(tiny_lm(vocab_size=9), V)
    guidance = ValueGuidance(TiedQValueHead(WIDTH, lm.get_output_embeddings()), beta=1.0)
    assert UtteranceActor(language_actor(lm), CONTROL, K, guidance=guidance).decoder.rule.vocab_size == V
