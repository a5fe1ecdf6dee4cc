"""Wrong arguments of modules fail in the constructor, and the message says what came and what to do."""

from __future__ import annotations

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn

from tests.modules.test_decoding import K, policy
from tests.modules.toys import CONTROL, TOKENIZER, WIDTH, heads, tiny_lm
from torchrl_lang.modules import (
    MixedPolicy,
    QValueHead,
    RowTokenActor,
    TiedQValueHead,
    Trunk,
    UtteranceActor,
    ValueGuidance,
    ValueHead,
    fit_vocabulary,
    language_actor,
    qvalue_module,
    value_module,
)

V = TOKENIZER.vocab_size
Q, STATE = heads()


def head_of(module, key):
    return TensorDictModule(module, in_keys=["hidden"], out_keys=[key])


def guided(qvalue, value=None, **options):
    return lambda: policy(guidance=ValueGuidance(qvalue, value, **({"beta": 1.0} | options)))


WRONG = {
    "a Q head with too few tokens": (guided(QValueHead(WIDTH, 5)), ValueError, "for 5 tokens, but the model .* for 12"),
    "a plain layer of another width for Q": (
        guided(nn.Linear(8, V)),
        ValueError,
        r"qvalue fails on states of this model, hidden \[3, 16\]",
    ),
    "values of all tokens for V": (
        guided(Q, nn.Linear(WIDTH, V), clip=0.0),
        ValueError,
        r"value must write \[N, 1\] or \[N\], got \[3, 12\] for N = 3",
    ),
    "two values of a state as the actor's value": (
        lambda: policy(value=nn.Linear(WIDTH, 2)),
        ValueError,
        r"value must write \[N, 1\] or \[N\], got \[3, 2\]",
    ),
    "other out_keys of Q": (
        guided(head_of(Q, "q")),
        ValueError,
        r"qvalue must write 'action_value', .* \['q'\]",
    ),
    "a Q head for V": (guided(Q, Q), ValueError, "value must give 'state_value', a QValueHead does not"),
    "a strength that is not finite": (
        guided(Q, beta=float("nan")),
        ValueError,
        "beta must lie",
    ),
    "V over states that nobody writes": (
        lambda: policy(value=ValueHead(WIDTH, kind="residual")),
        KeyError,
        "ValueHead reads 'hidden_pre_norm'",
    ),
    "a forbidden id beyond the model": (
        lambda: policy(forbidden=[3, V]),
        ValueError,
        r"contains the ids \[12\]",
    ),
    "everything forbidden": (lambda: policy(forbidden=range(V)), ValueError, "contains all 12 ids"),
    "more ids than the model": (
        lambda: policy(vocab_size=99),
        ValueError,
        "has 99 ids, but the model's .* only 12",
    ),
    "an end beyond vocab_size": (
        lambda: policy(vocab_size=CONTROL.end_of_action),
        ValueError,
        "excludes the end-of-action token",
    ),
    "a model smaller than its tokenizer": (
        lambda: UtteranceActor(language_actor(tiny_lm(vocab_size=9)), CONTROL, K),
        ValueError,
        "tokenizer has 12 ids, but the model's vocabulary only 9",
    ),
    "no actor": (lambda: UtteranceActor(tiny_lm(), CONTROL, K), TypeError, "language_actor"),
    "no token": (lambda: policy(action_length=0), ValueError, "action_length must be .* at least 1, got 0"),
    "no temperature": (lambda: policy(temperature=float("nan")), ValueError, "temperature must be positive, got nan"),
    "no rows' actor": (lambda: RowTokenActor(tiny_lm()), TypeError, "got GPT2"),
    "a head without width": (lambda: ValueHead(0), ValueError, "width must be .* at least 1, got 0"),
    "no model": (lambda: Trunk(nn.Linear(2, 2)), TypeError, "A trunk needs a Hugging Face model, got Linear"),
    "a model's name": (lambda: language_actor("gpt2"), TypeError, r"got str: load one with load_causal_lm\(\)"),
    "an example that does not act": (
        lambda: MixedPolicy(policy(), TensorDictModule(nn.Identity(), ["tokens"], ["words"]), 0.5),
        ValueError,
        r"example must write 'action', got a TensorDictModule",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_constructor_refuses(name):
    build, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        build()


def test_what_fits_is_taken():
    for qvalue in (Q, qvalue_module(Q), nn.Linear(WIDTH, V)):
        guided(qvalue, value_module(STATE))()
    lm = fit_vocabulary(tiny_lm(vocab_size=9), V)
    policy(value=STATE, vocab_size=V, forbidden=[0, V - 1])
    guidance = ValueGuidance(TiedQValueHead(WIDTH, lm.get_output_embeddings()), beta=1.0)
    actor = UtteranceActor(language_actor(lm), CONTROL, K, guidance=guidance)
    assert actor.decoder.rule.vocab_size == V
    assert torch.equal(actor.decoder.rule.forbidden, torch.tensor(CONTROL.forbidden_in_action()))
