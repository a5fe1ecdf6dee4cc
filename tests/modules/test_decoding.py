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
WAYS += [
    ("gpt2", "plain", "beam"),
    ("qwen2", "exp", "beam"),
    ("gpt2", "sign", "best_of"),
    ("llama", "own trunk", "best_of"),
]


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


def test_what_a_row_says_does_not_depend_on_the_other_rows():
    batch, other = rows(seed=0), rows(seed=1)
    mixed = torch.where(torch.arange(7)[:, None] < 3, batch["tokens"], other["tokens"])
    mask = torch.where(torch.arange(7)[:, None] < 3, batch["attention_mask"], other["attention_mask"])
    mixed = TensorDict(tokens=mixed, attention_mask=mask, batch_size=[7])
    for options in (
        {"method": "sample"},
        {"method": "best_of", "guidance": guidance(clip=0.0), "advantage_weight": 1.0},
    ):
        first, second = policy(**options)(batch.clone()), policy(**options)(mixed)
        assert torch.equal(first["action"][:3], second["action"][:3])


def test_probabilities_of_all_utterances_sum_to_one():
    tokenizer = CharTokenizer.from_alphabet("ab")
    control = tokenizer.control
    lm = tiny_lm(vocab_size=tokenizer.vocab_size)
    q, v = heads(vocab_size=tokenizer.vocab_size)
    actor = UtteranceActor(language_actor(lm), control, 3, guidance=ValueGuidance(q, v, beta=3.0), seed=0)
    end, pad = control.end_of_action, control.pad
    every = [[end, pad, pad], *([a, end, pad] for a in (0, 1))]
    every += [[a, b, end] for a, b in itertools.product((0, 1), repeat=2)]
    every = torch.tensor(every)
    row = TensorDict(
        tokens=torch.tensor([[0, 1, 1]]), attention_mask=torch.ones(1, 3, dtype=torch.bool), batch_size=[1]
    )
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


def test_best_of_ranks_by_the_advantage_of_the_tokens_that_were_said():
    batch, guide = rows(n=32), guidance(clip=0.0)
    actor = policy(method="best_of", guidance=guide, candidates=6, advantage_weight=1.0, log_prob_weight=0.5)
    chosen = actor(batch.clone())["action"]
    dist = policy(guidance=guide).get_dist(batch)
    drawn = dist.sample((6,))
    log_prob = torch.stack([dist.log_prob(sample) for sample in drawn])

    def score(row, action):
        length = batch["attention_mask"][row].sum()
        active = action[: int(spoken(action[None]).sum())]
        tokens = torch.cat([batch["tokens"][row, :length], active])
        hidden = actor.decoder.actor[0].module(tokens[None])[0, length - 1 : -1]
        advantage = guide.advantage({"hidden": hidden}).gather(-1, active[:, None])[:, 0]
        certain = active.shape[0] == K  # the last slot's end is not a choice
        return advantage[: K - 1].sum() if certain else advantage.sum()

    with torch.no_grad():
        for row in range(32):
            scores = torch.stack([score(row, action) for action in drawn[:, row]]) + 0.5 * log_prob[:, row]
            assert torch.equal(chosen[row], drawn[scores.argmax(), row])


@pytest.mark.parametrize(("own", "cached"), [(False, True), (True, True), (True, False)])
def test_best_of_ranks_by_the_value_of_the_whole_utterance(cached, own):
    """Q of the end of the action, in the state that has read the utterance, also where the end is forced."""
    trunk = Trunk(tiny_lm(seed=5)) if own else None
    batch, guide = rows(n=8), guidance(value_trunk=trunk)
    best_of = {"method": "best_of", "candidates": 6, "end_value_weight": 1.0, "log_prob_weight": 0.0}
    actor = policy(guidance=guide, cached=cached, **best_of)
    chosen = actor(batch.clone())["action"]
    drawn = policy(guidance=guide).get_dist(batch).sample((6,))  # the same stream, the same samples
    reads = actor.decoder.actor[0].module if trunk is None else trunk

    def score(row, action):
        utterance = action[: int(spoken(action[None]).sum()) - 1]
        tokens = torch.cat([batch["tokens"][row, : batch["attention_mask"][row].sum()], utterance])
        return guide.qvalue(reads(tokens[None])[:, -1]).amin(-2)[0, CONTROL.end_of_action]

    lengths = spoken(drawn).sum(-1)
    assert (lengths == K).any()
    assert (lengths < K).any()
    with torch.no_grad():
        for row in range(8):
            scores = torch.stack([score(row, action) for action in drawn[:, row]])
            assert torch.equal(chosen[row], drawn[scores.argmax(), row])


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
    actor = UtteranceActor(ProbabilisticTensorDictSequential(trunk, prob), CONTROL, K, seed=0)
    batch = rows(n=32)
    said = actor(batch.clone())
    torch.testing.assert_close(actor.get_dist(batch).log_prob(said["action"]), said["action_log_prob"], **CLOSE)
    assert spoken(said["action"]).sum(-1).unique().numel() > 1


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
        actor = UtteranceActor(language_actor(lm), CONTROL, K, seed=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        actor, batch = UtteranceActor(language_actor(lm), CONTROL, K, seed=0), rows(n=12)
    said = actor(batch.clone())
    torch.testing.assert_close(actor.get_dist(batch).log_prob(said["action"]), said["action_log_prob"], **CLOSE)


def test_one_slot_leaves_no_choice():
    said = policy(action_length=1)(rows())
    assert (said["action"] == CONTROL.end_of_action).all()
    assert (said["action_log_prob"] == 0).all()


@pytest.mark.parametrize("method", METHODS)
def test_ids_beyond_the_tokenizer_are_never_generated(method):
    """By default: a model often has more embeddings than its tokenizer has ids."""
    actor = UtteranceActor(language_actor(tiny_lm(vocab_size=60)), CONTROL, K, seed=0, method=method)
    said = actor(rows(n=64))
    assert said["action"].max() < TOKENIZER.vocab_size
    beyond = torch.full_like(said["action"], TOKENIZER.vocab_size)
    assert actor.get_dist(rows(n=64)).log_prob(beyond).isneginf().all()
    fewer = UtteranceActor(language_actor(tiny_lm(vocab_size=60)), CONTROL, K, seed=0, vocab_size=8)
    assert fewer(rows(n=64))["action"].max() < 8
