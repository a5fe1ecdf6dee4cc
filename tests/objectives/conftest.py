"""Small rows and networks on which every loss is tried."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from tests.objectives.utterances import make_utterance_ilql
from torchrl_lang.modules import (
    QValueHead,
    ReturnEmbedding,
    TiedQValueHead,
    ValueHead,
    causal_lm,
    condition_on_returns,
    language_actor,
    qvalue_module,
    value_module,
)
from torchrl_lang.objectives import (
    BCLoss,
    BCQLoss,
    CQLLoss,
    DecisionTransformerLoss,
    ILQLLoss,
    OREOLoss,
    PsiLoss,
    QSFTLoss,
)
from torchrl_lang.transforms import frozen_copy

VOCAB, WIDTH, T = 12, 16, 14


def make_rows(n=6, seed=0, width=T):
    """Ragged rows: several utterances, one row without any action, terminated, truncated and unfinished ones."""
    g = torch.Generator().manual_seed(seed)
    length = torch.randint(5, width + 1, (n,), generator=g)
    attention = torch.arange(width) < length[:, None]
    agent = (torch.rand(n, width, generator=g) < 0.5) & attention
    agent[:, 0] = False
    agent[0] = False
    reward = torch.where(agent, torch.randn(n, width, generator=g), 0.0)
    tokens = torch.where(attention, torch.randint(1, VOCAB, (n, width), generator=g), 0)
    terminated = torch.arange(n)[:, None] % 2 == 0
    return TensorDict(
        tokens=tokens,
        attention_mask=attention,
        agent_mask=agent,
        token_reward=reward,
        terminated=terminated,
        batch_size=[n],
    )


def make_actor(seed=0, **options):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        lm = causal_lm("gpt2", vocab_size=VOCAB, layers=1, width=WIDTH, heads=2, max_length=32)
        return language_actor(lm, **options)


def make_heads(seed=1, kind="mlp"):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        q, v = QValueHead(WIDTH, VOCAB, kind=kind), ValueHead(WIDTH, kind=kind)
        for parameter in (*q.parameters(), *v.parameters()):
            parameter.data.add_(torch.randn_like(parameter) * 0.2)  # away from zero: equal numbers then mean something
        return qvalue_module(q), value_module(v)


def make_ilql(kind="mlp", **options):
    return ILQLLoss(make_actor(expose_pre_norm=kind == "residual"), *make_heads(kind=kind), **options)


def make_tied(**options):
    """Action values that read the actor's own embedding, and train it."""
    actor, (_, value) = make_actor(), make_heads()
    with torch.random.fork_rng():
        torch.manual_seed(2)
        q = TiedQValueHead(WIDTH, actor[1].module, detach_embedding=False)
        q.out_weight.data.mul_(30)
    return ILQLLoss(actor, qvalue_module(q), value, **options)


def make_bc(**options):
    return BCLoss(make_actor(), **options)


def make_dt(mode="decremented", actor=None, **options):
    """A decision transformer whose embedding of returns is far from zero."""
    returns = ReturnEmbedding(WIDTH, -20.0, 20.0, mode=mode)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(4)
        returns.weight.normal_()
        returns.bias.normal_(std=0.3)
    return DecisionTransformerLoss(condition_on_returns(actor or make_actor(), returns), **options)


def make_qbackup(kind, **options):
    """CQL, BCQ or psi-learning."""
    return kind(make_actor(), make_heads()[0], **options)


def make_qsft(**options):
    """Q-SFT with a reference of other weights, and returns far inside their interval."""
    return QSFTLoss(make_actor(), frozen_copy(make_actor(seed=5)), value_min=-20.0, value_max=20.0, **options)


def make_oreo(**options):
    """OREO with a reference of other weights."""
    return OREOLoss(make_actor(), make_heads()[1], frozen_copy(make_actor(seed=5)), beta=0.5, **options)


# Every loss of the library stands here and goes through the contract suite.
LOSSES = {
    "bc": make_bc,
    "dt": make_dt,
    "dt-constant": lambda **options: make_dt("constant", transition_weight=0.3, logits_chunk=5, **options),
    "ilql": make_ilql,
    "ilql-tied": make_tied,
    "utterance-ilql-weighted": lambda **options: make_utterance_ilql(
        make_actor(), advantage_temperature=0.7, transition_weight=0.1, **options
    ),
    "bc-in-pieces": lambda **options: make_bc(logits_chunk=5, **options),
    "ilql-all-terms-in-pieces": lambda **options: make_ilql(
        kind="residual",
        margin_weight=0.3,
        advantage_temperature=0.7,
        transition_weight=0.1,
        target="lambda",
        cql_temperature=0.8,
        logits_chunk=3,
        **options,
    ),
    "ilql-own-trunks": lambda **options: make_ilql(
        value_trunk=make_actor(seed=3)[0], target_trunk=True, cql_weight=0.0, **options
    ),
    "cql": lambda **options: make_qbackup(CQLLoss, **options),
    "bcq": lambda **options: make_qbackup(BCQLoss, turn_gamma=0.5, logits_chunk=3, **options),
    "psi": lambda **options: make_qbackup(PsiLoss, reward_scale=0.5, transition_weight=0.1, **options),
    "psi-prior": lambda **options: make_qbackup(
        PsiLoss, prior=frozen_copy(make_actor(seed=5)), threshold=0.2, **options
    ),
    "bcq-own-trunks": lambda **options: make_qbackup(
        BCQLoss, value_trunk=make_actor(seed=3)[0], target_trunk=True, **options
    ),
    "qsft-rest": lambda **options: make_qsft(
        rest=0, threshold=0.2, turn_gamma=0.5, transition_weight=0.1, logits_chunk=3, **options
    ),
    "oreo": make_oreo,
    "oreo-own-trunk": lambda **options: make_oreo(
        value_trunk=make_actor(seed=3)[0], transition_weight=0.1, logits_chunk=3, **options
    ),
}


@pytest.fixture(params=sorted(LOSSES))
def make_loss(request):
    return LOSSES[request.param]


@pytest.fixture
def rows():
    return make_rows()


def losses_of(out):
    return {key: value for key, value in out.items() if key.startswith("loss_")}


def total(out):
    return sum(value.sum() for value in losses_of(out).values())
