"""The contract of decoding: every method, every kind of model, with and without values and cache."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import nn
from torch.distributions import Categorical

from tests.modules.toys import CONTROL, SLIDING, TOKENIZER, WIDTH, heads, rows, sliding_lm, tiny_lm
from torchrl_lang.modules import Trunk, UtteranceActor, ValueGuidance, causal_lm, language_actor
from torchrl_lang.modules.decoding.model_runner import _warn_once
from torchrl_lang.text import CharTokenizer

METHODS = ("sample", "greedy", "beam", "best_of")
K = 5
CLOSE = {"atol": 1e-4, "rtol": 1e-4}


def guidance(**options):
    return ValueGuidance(*heads(), **({"beta": 2.0} | options))


GUIDES = {
    "plain": lambda: None,
    "exp": guidance,
    "clipped": lambda: guidance(clip=0.0),
    "sign": lambda: guidance(beta=0.7, weighting="sign"),
    "values only": lambda: guidance(include_logits=False),
    "own trunk": lambda: guidance(clip=0.5, value_trunk=Trunk(tiny_lm(seed=5))),
}


def policy(kind="gpt2", action_length=K, **options):
    options = {"seed": 3} | options
    return UtteranceActor(language_actor(tiny_lm(kind)), CONTROL, action_length, **options)


def spoken(action):
    """True on the tokens of each utterance, its end included."""
    end = action == CONTROL.end_of_action
    return (end.cumsum(-1) - end.long()) == 0


WAYS = [("gpt2", guide, method) for guide in GUIDES for method in METHODS[:2]]
WAYS += [("gpt2", "plain", "beam"), ("qwen2", "exp", "beam")]
WAYS += [("gpt2", "sign", "best_of"), ("llama", "own trunk", "best_of")]


@pytest.mark.parametrize(("kind", "guide", "method"), WAYS)
def test_cached_equals_uncached_and_the_distribution_agrees(kind, guide, method):
    options = {"method": method, "guidance": GUIDES[guide](), "temperature": 1.3, "top_k": 6, "diagnostics": True}
    if method == "best_of" and options["guidance"] is not None:
        options["advantage_weight"] = 0.5
    batch = rows()
    cached, uncached = (policy(kind, cached=flag, **options)(batch.clone()) for flag in (True, False))
    assert torch.equal(cached["action"], uncached["action"])
    for key in ("action_log_prob", "token_log_prob", "behavior_log_prob", "token_entropy"):
        torch.testing.assert_close(cached[key], uncached[key], **CLOSE)
    dist = policy(kind, **options).get_dist(batch)
    torch.testing.assert_close(dist.token_log_prob(cached["action"]), cached["token_log_prob"], **CLOSE)
    torch.testing.assert_close(dist.log_prob(cached["action"]), cached["action_log_prob"], **CLOSE)


@pytest.mark.parametrize("method", METHODS)
def test_utterances_are_well_formed(method):
    said = policy(method=method, temperature=2.0)(rows(n=64))["action"]
    active = spoken(said)
    assert (said == CONTROL.end_of_action).sum(-1).eq(1).all()
    assert (said[~active] == CONTROL.pad).all()
    assert not torch.isin(said[active], torch.tensor(CONTROL.forbidden_in_action())).any()
    if method == "sample":
        assert active.sum(-1).unique().numel() > 2
    one = policy(method=method, action_length=1)(rows())  # one slot leaves no choice
    assert (one["action"] == CONTROL.end_of_action).all()
    assert (one["action_log_prob"] == 0).all()


@pytest.mark.parametrize("method", METHODS)
def test_batch_order_and_padding_width_change_nothing(method):
    # Sampling draws a row's numbers by its place in the batch, so there only the padding is varied.
    batch, actor = rows(width=20, longest=12), policy(method=method, guidance=guidance())
    expected = actor(batch.clone())
    narrow = batch.apply(lambda x: x[:, :12])
    again = policy(method=method, guidance=guidance())(narrow)
    assert torch.equal(again["action"], expected["action"])
    torch.testing.assert_close(again["token_log_prob"], expected["token_log_prob"], **CLOSE)
    if method in ("greedy", "beam"):
        order = torch.randperm(7)
        shuffled = actor(batch[order].clone())
        assert torch.equal(shuffled["action"], expected["action"][order])
        single = torch.cat([actor(batch[i : i + 1].clone())["action"] for i in range(7)])
        assert torch.equal(single, expected["action"])


def test_probabilities_of_all_utterances_sum_to_one():
    tokenizer = CharTokenizer.from_alphabet("ab")
    control = tokenizer.control
    lm = tiny_lm(vocab_size=tokenizer.vocab_size)
    q, v = heads(vocab_size=tokenizer.vocab_size)
    actor = UtteranceActor(language_actor(lm), control, 3, guidance=ValueGuidance(q, v, beta=3.0), seed=0)
    end, pad = control.end_of_action, control.pad
    two = itertools.product((0, 1), repeat=2)
    every = torch.tensor([[end, pad, pad], [0, end, pad], [1, end, pad], *([a, b, end] for a, b in two)])
    tokens = torch.tensor([[0, 1, 1]])
    row = TensorDict(tokens=tokens, attention_mask=tokens >= 0, batch_size=[1])
    probability = actor.get_dist(row.expand(7).clone()).log_prob(every).exp()
    torch.testing.assert_close(probability.sum(), torch.tensor(1.0))
    drawn = actor.get_dist(row).sample((20_000,))[:, 0]
    share = torch.stack([(drawn == one).all(-1).float().mean() for one in every])
    assert (share - probability).abs().max() < 4 * (0.25 / 20_000) ** 0.5


def test_impossible_utterances_have_no_probability():
    dist = policy(action_length=3).get_dist(rows(n=4))
    end, pad = CONTROL.end_of_action, CONTROL.pad
    action = torch.tensor([[1, 2, 3], [1, pad, end], [CONTROL.end_of_state, end, pad], [end, 5, 5]])
    log_prob = dist.log_prob(action)
    assert log_prob.isneginf().tolist() == [True, True, True, False]
    torch.testing.assert_close(
        log_prob[3], dist.log_prob(action[[3, 3, 3, 3]].index_fill(1, torch.tensor([1]), pad))[3]
    )
    with pytest.raises(ValueError, match=r"must have shape \[4, 3\]"):
        dist.log_prob(action[:, :2])


def test_gradients_flow_through_the_distribution_but_not_through_acting():
    actor, batch = policy(guidance=guidance()).train(), rows()
    said = actor(batch.clone())
    assert not said["action_log_prob"].requires_grad
    assert all(module.training for module in actor.modules())
    actor.get_dist(batch).log_prob(said["action"]).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in actor.decoder.actor.parameters())


def test_beam_of_width_one_is_greedy_and_a_wide_beam_finds_the_best():
    batch = rows(n=3)
    greedy, narrow = (policy(method=method, beams=1)(batch.clone()) for method in ("greedy", "beam"))
    assert torch.equal(greedy["action"], narrow["action"])
    torch.testing.assert_close(greedy["token_log_prob"], narrow["token_log_prob"], **CLOSE)
    letters, end, pad = range(6), CONTROL.end_of_action, CONTROL.pad
    every = [[end, pad, pad], *([a, end, pad] for a in letters), *([a, b, end] for a in letters for b in letters)]
    wide = policy(action_length=3, method="beam", beams=len(every))(batch.clone())
    scores = torch.stack(
        [policy(action_length=3).get_dist(batch).log_prob(torch.tensor(one).expand(3, 3)) for one in every], -1
    )
    torch.testing.assert_close(wide["action_log_prob"], scores.amax(-1), **CLOSE)


RANKS = [("advantage", False, True), ("end", False, True), ("end", True, True), ("end", True, False)]


@pytest.mark.parametrize(("by", "own", "cached"), RANKS)
@torch.no_grad()
def test_best_of_ranks_by_the_values_of_what_was_said(by, own, cached):
    """Advantages of the tokens; or Q of the end in the state that has read the utterance, also where it is forced."""
    batch, guide = rows(n=24), guidance(clip=0.0, value_trunk=Trunk(tiny_lm(seed=5)) if own else None)
    weights = {"advantage_weight": 1.0} if by == "advantage" else {"end_value_weight": 1.0}
    share = 0.5 if by == "advantage" else 0.0
    options = {"method": "best_of", "candidates": 6, "log_prob_weight": share, "cached": cached, **weights}
    actor = policy(guidance=guide, **options)
    chosen = actor(batch.clone())["action"]
    dist = policy(guidance=guide).get_dist(batch)
    drawn = dist.sample((6,))  # the same stream, the same samples
    reads = (guide.value_trunk if own else actor.decoder.actor[0]).module

    def score(row, action):
        length, said = int(batch["attention_mask"][row].sum()), action[: int(spoken(action[None]).sum())]
        states = reads(torch.cat([batch["tokens"][row, :length], said])[None])[0]
        if by == "end":
            return guide.qvalue(states[-2:-1]).amin(-2)[0, CONTROL.end_of_action]
        advantage = guide.advantage({"hidden": states[length - 1 : -1]}).gather(-1, said[:, None])[:, 0]
        return advantage[: K - 1].sum()  # the last slot's end is not a choice

    lengths = spoken(drawn).sum(-1)
    assert lengths.min() < K == lengths.max()
    scores = torch.stack([torch.stack([score(*each) for each in enumerate(sample)]) for sample in drawn])
    best = (scores + share * torch.stack([dist.log_prob(sample) for sample in drawn])).argmax(0)
    assert torch.equal(chosen, drawn[best, torch.arange(24)])


def assert_scores_what_it_says(actor):
    actor, batch = UtteranceActor(actor, CONTROL, K, seed=0), rows(n=32)
    said = actor(batch.clone())
    torch.testing.assert_close(actor.get_dist(batch).log_prob(said["action"]), said["action_log_prob"], **CLOSE)
    assert spoken(said["action"]).sum(-1).unique().numel() > 1


def test_foreign_actors_decode_without_a_cache():
    torch.manual_seed(0)

    class Whole(nn.Module):
        """Writes logits itself: the next token depends on the last two."""

        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.randn(2, TOKENIZER.vocab_size, TOKENIZER.vocab_size))

        def forward(self, tokens, attention_mask):
            before = torch.cat([tokens[:, :1], tokens[:, :-1]], 1)
            return self.table[0][tokens] + self.table[1][before]

    trunk = TensorDictModule(Whole(), in_keys=["tokens", "attention_mask"], out_keys=["logits"])
    prob = ProbabilisticTensorDictModule(in_keys=["logits"], out_keys=["action"], distribution_class=Categorical)
    assert_scores_what_it_says(ProbabilisticTensorDictSequential(trunk, prob))


def test_no_rows_at_all():
    actor, nothing = policy(), rows()[:0]
    said = actor(nothing.clone())
    assert said["action"].shape == said["token_log_prob"].shape == (0, K)
    dist = actor.get_dist(nothing)
    assert dist.log_prob(said["action"]).shape == (0,)
    assert dist.mode.shape == (0, K)
    assert dist.sample((3,)).shape == (3, 0, K)


@pytest.mark.parametrize(("kind", "method"), [*zip(SLIDING, METHODS, strict=True)])
def test_sliding_windows_decode_with_a_cache_as_without(kind, method):
    actor = language_actor(sliding_lm(kind))
    assert actor[0].module.cache_obstacle is None
    cached, uncached = (
        UtteranceActor(actor, CONTROL, K, seed=0, method=method, cached=flag)(rows(n=12)) for flag in (True, False)
    )
    assert torch.equal(cached["action"], uncached["action"])
    torch.testing.assert_close(cached["token_log_prob"], uncached["token_log_prob"], atol=1e-6, rtol=1e-6)
    full = sliding_lm(kind, sliding_window=40)
    whole = UtteranceActor(language_actor(full), CONTROL, K, seed=0, method=method)(rows(n=12))
    assert not torch.equal(whole["token_log_prob"], cached["token_log_prob"])  # the window matters


def test_a_model_that_cannot_be_read_piece_by_piece_still_decodes_and_says_so_once():
    lm = causal_lm("bloom", vocab_size=TOKENIZER.vocab_size, layers=2, width=WIDTH, heads=2, max_length=40).eval()
    _warn_once.cache_clear()
    with pytest.warns(UserWarning, match="BloomModel decodes without a key-value cache.*: it takes no position_ids"):
        UtteranceActor(language_actor(lm), CONTROL, K, seed=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_scores_what_it_says(language_actor(lm))


@pytest.mark.parametrize(("method", "options"), [*((method, {}) for method in METHODS), ("sample", {"vocab_size": 8})])
def test_ids_beyond_the_tokenizer_are_never_generated(method, options):
    """By default: a model often has more embeddings than its tokenizer has ids."""
    actor = UtteranceActor(language_actor(tiny_lm(vocab_size=60)), CONTROL, K, seed=0, method=method, **options)
    first = options.get("vocab_size", TOKENIZER.vocab_size)
    assert actor(rows(n=64))["action"].max() < first
    assert actor.get_dist(rows(n=64)).log_prob(torch.full((64, K), first)).isneginf().all()
