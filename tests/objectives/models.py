"""Small rows and networks on which every loss is tried; the utterances of rows by plain loops."""

from __future__ import annotations

import copy
import functools
from functools import partial

import torch
from tensordict import TensorDict

from torchrl_lang import modules, objectives
from torchrl_lang.schema import ControlTokens
from torchrl_lang.transforms import frozen_copy

VOCAB, WIDTH, T = 12, 16, 14
CONTROL = ControlTokens(pad=0, end_of_action=1, end_of_state=2, begin_state=3, begin_action=4, end_of_dialogue=5)
CANDIDATES = 3
PLAIN = {"normalize_advantage": False}  # advantages standardised over a batch are no sum over its rows


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
    masks = {"attention_mask": attention, "agent_mask": agent, "terminated": terminated}
    return TensorDict(tokens=tokens, token_reward=reward, **masks, batch_size=[n])


def by_hand(tokens, agent, reward=None, *, terminated=True, **entries):
    """Rows without padding, of lists."""
    tokens, agent = torch.as_tensor(tokens), torch.as_tensor(agent).bool()
    reward = torch.zeros(tokens.shape) if reward is None else torch.as_tensor(reward)
    masks = {"attention_mask": torch.ones_like(agent), "agent_mask": agent}
    masks["terminated"] = torch.as_tensor(terminated).expand(len(tokens)).clone().unsqueeze(-1)
    return TensorDict(tokens=tokens, token_reward=reward, **masks, **entries, batch_size=[len(tokens)])


def with_a_hole(rows):
    """Row 1 (of pairs: of the first one) has padding at position 2, between real tokens."""
    rows = rows.clone()
    for key in ("attention_mask", "agent_mask", "token_reward"):
        rows[key].view(-1, rows[key].shape[-1])[1, 2] = 0
    return rows


@functools.cache
def language_model(seed):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return modules.causal_lm("gpt2", vocab_size=VOCAB, layers=1, width=WIDTH, heads=2, max_length=32)


@functools.cache
def first_actor(seed):
    return modules.language_actor(copy.deepcopy(language_model(seed)))


def make_actor(seed=0):
    """A copy: that the model is causal is found out once."""
    return copy.deepcopy(first_actor(seed))


def make_heads(seed=1, kind="mlp"):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        q, v = modules.QValueHead(WIDTH, VOCAB, kind=kind), modules.ValueHead(WIDTH, kind=kind)
        for parameter in (*q.parameters(), *v.parameters()):
            parameter.data.add_(torch.randn_like(parameter) * 0.2)  # away from zero: equal numbers then mean something
        return modules.qvalue_module(q), modules.value_module(v)


def make_ilql(kind="mlp", **options):
    return objectives.ILQLLoss(make_actor(), *make_heads(kind=kind), **options)


def make_tied(**options):
    """Action values that read the actor's own embedding, and train it."""
    actor, (_, value) = make_actor(), make_heads()
    with torch.random.fork_rng():
        torch.manual_seed(2)
        q = modules.TiedQValueHead(WIDTH, actor[1].module, detach_embedding=False)
        q.out_weight.data.mul_(30)
    return objectives.ILQLLoss(actor, modules.qvalue_module(q), value, **options)


def make_bc(**options):
    return objectives.BCLoss(make_actor(), **options)


def make_dt(mode="decremented", actor=None, **options):
    """A decision transformer whose embedding of returns is far from zero."""
    returns = modules.ReturnEmbedding(WIDTH, -20.0, 20.0, mode=mode)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(4)
        returns.weight.normal_()
        returns.bias.normal_(std=0.3)
    return objectives.DecisionTransformerLoss(modules.condition_on_returns(actor or make_actor(), returns), **options)


def make_qbackup(kind, **options):
    return kind(make_actor(), make_heads()[0], **options)


make_cql = partial(make_qbackup, objectives.CQLLoss)
make_bcq = partial(make_qbackup, objectives.BCQLoss)
make_psi = partial(make_qbackup, objectives.PsiLoss)


def own_trunk(make, **options):
    """A loss whose values have a trunk of their own."""
    return make(value_trunk=make_actor(seed=3)[0], **options)


def make_qsft(**options):
    """Q-SFT with a reference of other weights, and returns far inside their interval."""
    options = {"value_min": -20.0, "value_max": 20.0} | options
    return objectives.QSFTLoss(make_actor(), frozen_copy(make_actor(seed=5)), **options)


def make_oreo(**options):
    """OREO with a reference of other weights."""
    return objectives.OREOLoss(make_actor(), make_heads()[1], frozen_copy(make_actor(seed=5)), beta=0.5, **options)


def make_preference(kind, **options):
    """A loss of preferences with a reference of other weights."""
    return kind(make_actor(), frozen_copy(make_actor(seed=5)), **options)


def moved(head, seed):
    """The head with weights away from zero, so that equal numbers mean something."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in head.parameters():
        parameter.data.normal_(generator=generator).mul_(0.2)
    return head


def utterance_heads():
    q, v = moved(modules.UtteranceQValueHead(WIDTH), 1), moved(modules.ValueHead(WIDTH), 2)
    return modules.qvalue_module(q), modules.value_module(v)


def make_utterance_ilql(actor=None, **options):
    return objectives.UtteranceILQLLoss(actor or make_actor(), *utterance_heads(), **options)


def make_archer(actor=None, **options):
    """Target values away from the online ones."""
    loss = objectives.ArCHerLoss(actor or make_actor(), *utterance_heads(), **options)
    generator = torch.Generator().manual_seed(6)
    for name, target in loss.named_children():
        for value in target.values(True, True) if name.startswith("target_") else ():
            value.data.add_(torch.randn(value.shape, generator=generator, dtype=value.dtype) * 0.05)
    return loss


def vary(rows, variant):
    """Rows that are all over, or of whose tokens only some are trained on."""
    if variant == "all-terminated":
        rows["terminated"][:] = True
    if variant == "train-mask":
        rows["train_mask"] = torch.rand(rows["tokens"].shape, generator=torch.Generator().manual_seed(1)) < 0.6
    return rows


def utterances_of(rows, row, end_of_action=None):
    """One row's finished utterances as lists of the positions of their tokens, and the position that bootstraps."""
    tokens, agent, length = rows["tokens"][row], rows["agent_mask"][row], int(rows["attention_mask"][row].sum())
    found, current = [], []
    for p in range(1, length):
        if not agent[p]:
            continue
        current.append(p)
        replied = p + 1 < length and not agent[p + 1]
        ended = bool(rows["terminated"][row]) and not agent[p + 1 :].any()
        if replied or ended or (end_of_action is not None and tokens[p] == end_of_action):
            found.append(current)
            current = []
    return found, (current[0] - 1 if current else length - 1)


def whole_rows(mask, rows):
    """A mask of the first dimension, ``[N]``, as one of whole rows."""
    shape = rows["tokens"].shape[:-1]
    return mask.reshape(-1, *[1] * (len(shape) - 1)).expand(shape)


def number_of_utterances(rows, end_of_action=None):
    return sum(len(utterances_of(rows, row, end_of_action)[0]) for row in range(len(rows)))


# -- preferences: labelled rows, and pairs -----------------------------------------------------------------------------


def labelled(rows):
    """The rows, of which some are desirable."""
    return rows.set("desirable", torch.arange(len(rows))[:, None] % 3 == 1)


def paired(n=6, seed=0):
    """Pairs ``[n, 2]`` of ragged rows, whose entries belong to ``n`` pairs; the first one has no action."""
    rows = make_rows(2 * n, seed=seed)
    rows["agent_mask"][1] = False
    rows["token_reward"][1] = 0.0
    return TensorDict(dict(rows.reshape(n, 2).items()), batch_size=[n])


# -- CHAI: rows with candidates of a language model with random weights ------------------------------------------------


def make_policy(seed=0, **options):
    return modules.UtteranceActor(make_actor(), CONTROL, 4, **{"forbidden": (0,), "seed": seed, **options})


def chai_rows(n=6, seed=0):
    """Ragged rows; a row with an utterance that is cut off is among the truncated ones."""
    return modules.CandidateSampler(make_policy(seed), CANDIDATES, rows_at_a_time=4)(make_rows(n, seed=seed))


def make_chai(**options):
    loss = objectives.CHAILoss(modules.qvalue_module(moved(modules.UtteranceQValueHead(WIDTH), 1)), **options)
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(5)
        for value in loss.target_qvalue_network_params.values(True, True):
            value.data.add_(torch.randn_like(value) * 0.1)  # so that the two networks differ
    return loss


# -- PPO: rows that were acted and estimated ---------------------------------------------------------------------------


def acted(rows, seed=4):
    """The rows with all that PPO reads, so that some ratios are clipped and some are not."""
    g = torch.Generator().manual_seed(seed)
    agent = rows["agent_mask"]
    with torch.no_grad():
        log_prob = modules.row_log_prob(make_actor(), rows)
    noise = {"token_log_prob": 0.3, "ref_log_prob": 0.5}
    entries = {key: log_prob + scale * torch.randn(agent.shape, generator=g) for key, scale in noise.items()}
    entries |= {key: torch.randn(agent.shape, generator=g) for key in ("advantage", "value_target", "state_value")}
    return rows.clone().update({key: torch.where(agent, value, 0.0) for key, value in entries.items()})


def make_ppo(actor=None, **options):
    return objectives.PPOLoss(actor or make_actor(), make_heads()[1], **options)


def make_all_terms(**options):
    return make_ppo(**(PLAIN | {"entropy_weight": 0.1, "kl_weight": 0.3, "value_clip": 0.2} | options))


def make_exact(seed=7, **options):
    reference = frozen_copy(make_actor(seed))
    options = {"kl_weight": 0.3, "kl_estimator": "exact", "reference": reference, "entropy_weight": 0.1} | options
    return make_ppo(**(PLAIN | options))


# Every loss of the library stands here and goes through the contract suite.
LOSSES = {
    "bc-in-pieces": partial(make_bc, logits_chunk=5),
    "dt": make_dt,
    "ilql-tied": make_tied,
    "utterance-ilql-weighted": partial(make_utterance_ilql, advantage_temperature=0.7, transition_weight=0.1),
    "ilql-all-terms-in-pieces": partial(
        make_ilql, "deep", margin_weight=0.3, advantage_temperature=0.7, transition_weight=0.1, target="lambda",
        cql_temperature=0.8, logits_chunk=3,
    ),
    "ilql-own-trunks": partial(own_trunk, make_ilql, target_trunk=True, cql_weight=0.0),
    "cql": make_cql,
    "bcq": partial(make_bcq, turn_gamma=0.5, logits_chunk=3),
    "psi-prior": lambda **options: make_psi(
        prior=frozen_copy(make_actor(seed=5)), threshold=0.2, reward_scale=0.5, **options
    ),
    "qsft-rest": partial(make_qsft, rest=0, threshold=0.2, turn_gamma=0.5, transition_weight=0.1, logits_chunk=3),
    "oreo-own-trunk": partial(own_trunk, make_oreo, transition_weight=0.1, logits_chunk=3),
    "ppo": make_all_terms,
    "ppo-exact-in-pieces": partial(make_exact, logits_chunk=5),
    "ppo-utterance-own-trunk": lambda **options: own_trunk(
        make_all_terms,
        actor=modules.UtteranceActor(make_actor(), CONTROL, 4, forbidden=(), temperature=0.7),
        **({"kl_estimator": "k3", "loss_critic_type": "smooth_l1"} | options),
    ),
    "chai": make_chai,
    "dpo-in-pieces": partial(make_preference, objectives.DPOLoss, label_smoothing=0.1, logits_chunk=5),
    "ipo": partial(make_preference, objectives.IPOLoss, per_token=True),
    # A baseline of the batch would be no sum over its rows.
    "kto-in-pieces": partial(make_preference, objectives.KTOLoss, undesirable_weight=1.5, baseline=0.1, logits_chunk=5),
    "archer": partial(make_archer, target_trunk=True),
    "archer-own-trunks": partial(own_trunk, make_archer, target_trunk=True),
}  # fmt: skip


@functools.cache
def first_rows(kind, n):
    kinds = {"chai": chai_rows, "ppo": lambda n: acted(make_rows(n)), "kto": lambda n: labelled(make_rows(n))}
    return {**kinds, "dpo": paired, "ipo": paired}.get(kind, make_rows)(n)


def rows_for(name, n=6):
    """Rows that the loss of this name reads."""
    return first_rows(name.partition("-")[0], n).clone()


def unread(loss):
    """The policy's parameters, of a critic that has a trunk of its own."""
    own = isinstance(loss, objectives.ArCHerLoss) and loss.value_trunk is not None
    return {*loss.actor_network.parameters()} if own else set()


def losses_of(out):
    return {key: value for key, value in out.items() if key.startswith("loss_")}


def total(out):
    return sum(value.sum() for value in losses_of(out).values())
