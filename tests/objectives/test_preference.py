"""DPO, IPO and KTO: plain loops, numbers by hand, the start of training, mismatched rows, the optimum of a bandit."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tests.objectives.models import CONTROL, by_hand, labelled, make_actor, make_rows, paired, vary, whole_rows
from tests.objectives.oracle import assert_matches, log_softmax
from tests.objectives.test_contract import assert_same
from tests.objectives.test_qsft import logits_of, uneven
from torchrl_lang.modules import UtteranceActor, causal_lm, language_actor, row_log_prob
from torchrl_lang.objectives import DPOLoss, IPOLoss, KTOLoss
from torchrl_lang.objectives.preference import mismatched
from torchrl_lang.text import CharTokenizer, Episode, Turn, to_rows
from torchrl_lang.training import adamw, train_steps
from torchrl_lang.transforms import ReferenceModelLogProbTransform, frozen_copy


def log_ratios(rows, policy, reference, counted=None):
    """Of each row of ``[N]`` the sum of its tokens' log-ratios and their number, by loops over the logits."""
    tables = [logits_of(actor, rows) for actor in (policy, reference)]
    tokens, agent = rows["tokens"].numpy(), rows["agent_mask"].numpy()
    found = []
    for row in range(len(tokens)):
        at = [p for p in range(1, tokens.shape[1]) if agent[row, p] and (counted is None or counted[row, p])]
        mine, its = ([log_softmax(table[row, p - 1])[tokens[row, p]] for p in at] for table in tables)
        found.append((sum(mine) - sum(its), len(at)))
    return np.array(found).T


def sigma(x):
    return 1 / (1 + np.exp(-x))


def of_pairs(kind, l, number, beta=0.1, per_token=False, label_smoothing=0.0):  # noqa: E741
    """The outputs for rows in pairs, of those in which both rows count."""
    l = l / np.maximum(number, 1) if per_token else l  # noqa: E741
    both = number.reshape(-1, 2).all(1)
    l_w, l_l = l.reshape(-1, 2)[both].T
    h = l_w - l_l
    if kind is DPOLoss:
        loss = -(1 - label_smoothing) * np.log(sigma(beta * h)) - label_smoothing * np.log(sigma(-beta * h))
    else:
        loss = (h - 1 / (2 * beta)) ** 2
    rewards = {"chosen_reward": beta * l_w, "rejected_reward": beta * l_l, "margin": beta * h, "accuracy": h > 0}
    return {"loss_actor": loss.mean(), **{key: each.mean() for key, each in rewards.items()}}


def flat(pairs):
    return TensorDict({key: value.flatten(0, 1) for key, value in pairs.items()}, batch_size=[2 * len(pairs)])


OF_PAIRS = [
    (DPOLoss, {}),
    (DPOLoss, {"beta": 0.7, "label_smoothing": 0.2}),
    (DPOLoss, {"beta": 2.0, "per_token": True}),
    (IPOLoss, {}),
    (IPOLoss, {"beta": 0.6, "per_token": True}),
]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("kind", "options"), OF_PAIRS)
def test_losses_of_pairs_match_plain_loops(kind, options, masked):
    pairs, policy, reference = paired(8), uneven(0), uneven(2)
    counted = vary(pairs, "train-mask")["train_mask"].flatten(0, 1).numpy() if masked else None
    out = kind(policy, frozen_copy(reference), **options)(pairs)
    expected = of_pairs(kind, *log_ratios(flat(pairs), policy, reference, counted), **options)
    assert expected.keys() == set(out.keys())
    assert_matches(out, expected, rtol=2e-4, atol=1e-5)


def swapped(rows):
    """Each row's beginning with the rest of the next one."""
    begins, rests = [], []
    for row in rows:
        real = row["attention_mask"]
        both = torch.stack([row["tokens"], row["agent_mask"], real], -1)[real]
        first = int(row["agent_mask"].int().argmax())
        begins.append(both[:first])
        rests.append(both[first:])
    every = [torch.cat(parts) for parts in zip(begins, rests[1:] + rests[:1], strict=True)]
    tokens, agent, real = torch.nn.utils.rnn.pad_sequence(every, batch_first=True).unbind(-1)
    return TensorDict(tokens=tokens, agent_mask=agent.bool(), attention_mask=real.bool(), batch_size=[len(every)])


@pytest.mark.parametrize("baseline", ["mismatched", "rows", 0.4])
@pytest.mark.parametrize("sign", [1, -1], ids=["policy", "swapped"])  # of either, one has a mean above zero
def test_kto_matches_plain_loops(baseline, sign):
    rows, policies = labelled(make_rows(8, seed=2)), [uneven(0), uneven(2)][::sign]
    beta, weights = 0.3, (1.2, 0.8)
    kept = rows["agent_mask"].any(-1)  # the first row has no action
    (l, _), good = log_ratios(rows[kept], *policies), rows["desirable"][kept, 0].numpy()  # noqa: E741
    z_0 = baseline
    if baseline == "mismatched":
        z_0 = max(0.0, log_ratios(swapped(rows[kept]), *policies)[0].mean())
    if baseline == "rows":
        z_0 = max(0.0, l.mean())
    v = np.where(good, sigma(beta * (l - z_0)), sigma(beta * (z_0 - l)))
    expected = {"loss_actor": (np.where(good, *weights) * (1 - v)).mean(), "baseline": z_0}
    expected |= {"desirable_reward": beta * l[good].mean(), "undesirable_reward": beta * l[~good].mean()}
    expected["margin"] = expected["desirable_reward"] - expected["undesirable_reward"]
    options = {"beta": beta, "baseline": baseline, "desirable_weight": weights[0], "undesirable_weight": weights[1]}
    out = KTOLoss(policies[0], frozen_copy(policies[1]), **options)(rows)
    assert expected.keys() == set(out.keys())
    assert_matches(out, expected, rtol=2e-4, atol=1e-5)


def test_mismatched_rows_by_hand():
    """The second row's first turn is not trained on; rows are cut after five tokens."""
    tokens = [[7, 1, 2, 8, 3], [6, 5, 9, 4, 8], [7, 7, 1, 0, 0]]
    rows = by_hand(tokens, [[0, 1, 1, 0, 1], [0, 0, 1, 0, 1], [0, 0, 1, 0, 0]])
    rows["attention_mask"][2, 3:] = False
    rows["train_mask"] = torch.tensor([[True] * 5, [True] * 4 + [True], [True] * 5])
    rows["train_mask"][1, 2] = False
    loss = KTOLoss(make_actor(), frozen_copy(make_actor()))
    out = mismatched(loss._find(rows), torch.tensor([0, 1, 2]), torch.tensor([1, 2, 0]), limit=5)
    real = [row[mask].tolist() for row, mask in zip(out.tokens, out.attention_mask, strict=True)]
    assert real == [[7, 9, 4, 8], [6, 5, 1], [7, 7, 1, 2, 8]]
    assert out.agent_mask.int().tolist() == [[0, 1, 0, 1, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0]]
    assert out.place.tolist() == [2, 6, 11, 12]
    assert out.action.tolist() == [8, 1, 1, 2]


def test_numbers_by_hand():
    """Log-ratios of 0.5 + 0.5 and -0.25 - 0.25, with anything beside the environment's tokens."""
    actor = make_actor()
    rows = by_hand([[7, 1, 8, 2], [7, 3, 8, 3]], [[0, 1, 0, 1], [0, 1, 0, 1]])
    ratio = torch.tensor([[0.5], [-0.25]]) * rows["agent_mask"]
    ref = torch.where(rows["agent_mask"], row_log_prob(actor, rows).detach() - ratio, torch.nan)
    rows["ref_log_prob"], rows["desirable"] = ref, torch.tensor([[True], [False]])
    pairs = rows[None]
    out = DPOLoss(actor, beta=2.0)(pairs)
    assert float(out["loss_actor"].detach()) == pytest.approx(0.0485874)  # log(1 + exp(-3))
    assert [round(float(out[key]), 4) for key in DPOLoss.out_keys.fget(DPOLoss(actor))[1:]] == [2.0, -1.0, 3.0, 1.0]
    smooth = DPOLoss(actor, beta=2.0, label_smoothing=0.25)(pairs)["loss_actor"]
    assert float(smooth.detach()) == pytest.approx(0.0485874 + 0.75)  # eps * beta h more
    assert float(IPOLoss(actor, beta=0.25)(pairs)["loss_actor"].detach()) == pytest.approx(0.25)  # (1.5 - 2)^2
    per_token = IPOLoss(actor, beta=0.25, per_token=True)(pairs)["loss_actor"]
    assert float(per_token.detach()) == pytest.approx(1.25**2)
    kto = KTOLoss(actor, beta=2.0, baseline="rows")(rows)
    assert float(kto["baseline"]) == pytest.approx(0.25)
    # 1 - sigma(2 * 0.75) and 1 - sigma(2 * 0.75)
    assert float(kto["loss_actor"].detach()) == pytest.approx(0.1824255)


@pytest.mark.parametrize("spoken", [False, True])
def test_the_beginning_of_training(spoken):
    """The loss is log 2, and its gradient that of ``beta / 2 (log pi(w) - log pi(l))``, upwards."""
    actor, pairs = make_actor(), paired()
    if spoken:
        actor = UtteranceActor(actor, CONTROL, 20, forbidden=(), temperature=0.7)
    loss = DPOLoss(actor, frozen_copy(actor), beta=0.6)
    out = loss(pairs)
    assert out["loss_actor"].item() == pytest.approx(math.log(2), abs=1e-6)
    assert out["margin"] == out["chosen_reward"] == out["accuracy"] == 0
    out["loss_actor"].backward()
    found = {name: p.grad.clone() for name, p in actor.named_parameters()}
    loss.zero_grad()
    kept = pairs[1:]  # the first one has no action
    log_prob = row_log_prob(actor, TensorDict(dict(kept.items()), batch_size=[5, 2])).sum(-1)
    (-0.3 * (log_prob[:, 0] - log_prob[:, 1]).mean()).backward()
    assert_same(found, {name: p.grad for name, p in actor.named_parameters()}, rtol=1e-4, atol=1e-6)


def test_a_reference_may_stand_in_the_rows():
    """As the transform writes it, once, for DPO and KTO; the model is then not read."""
    pairs, actor, frozen = paired(), uneven(0), frozen_copy(uneven(2))
    wrote = ReferenceModelLogProbTransform(frozen)(TensorDict(dict(pairs.items()), batch_size=[6, 2]))
    assert wrote["ref_log_prob"].shape == pairs["tokens"].shape
    torch.testing.assert_close(DPOLoss(actor)(wrote)["loss_actor"], DPOLoss(actor, frozen)(pairs)["loss_actor"])
    rows = labelled(flat(wrote))
    found, expected = (KTOLoss(actor, own, baseline="rows")(rows) for own in (None, frozen))
    torch.testing.assert_close(found["loss_actor"], expected["loss_actor"])
    wrote["ref_log_prob"][1, 0, wrote["agent_mask"][1, 0]] = -torch.inf
    with pytest.raises(ValueError, match="Row 2 has ref_log_prob that is not finite at position"):
        DPOLoss(actor)(wrote)


def test_a_pair_counts_if_both_rows_do():
    pairs, actor, frozen = paired(), uneven(0), frozen_copy(uneven(2))
    expected = DPOLoss(actor, frozen)(pairs[torch.tensor([1, 2, 4, 5])])
    mask = whole_rows(torch.ones(6, dtype=torch.bool), pairs).clone()
    mask[3, 1] = False
    found = DPOLoss(actor, frozen)(pairs.set(("collector", "mask"), mask))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)


def test_kto_of_rows_without_an_action_has_no_mismatched_rows():
    actor, rows = uneven(0), labelled(make_rows())[:1]
    out = KTOLoss(actor, frozen_copy(actor))(rows)
    assert out["loss_actor"] == out["baseline"] == 0


def test_passes_of_the_trunk(passes):
    pairs, rows = paired(), labelled(make_rows())
    actor = make_actor()
    assert passes(DPOLoss(actor, frozen_copy(actor)), pairs) == [False, True]
    assert passes(KTOLoss(actor, frozen_copy(actor)), rows) == [False, False, False, True]
    assert passes(KTOLoss(actor, frozen_copy(actor), baseline="rows"), rows) == [False, True]
    given = rows.set("ref_log_prob", torch.zeros(rows["tokens"].shape))
    assert passes(KTOLoss(actor, baseline=0.0), given) == [True]


def test_what_does_not_fit_is_refused():
    actor, rows = make_actor(), labelled(make_rows())
    frozen = frozen_copy(actor)
    kto, filtered = KTOLoss(actor, frozen), UtteranceActor(make_actor(), CONTROL, 4, top_k=3)
    for call, message in (
        (lambda: DPOLoss(actor, frozen)(rows), "reads pairs of rows"),
        (lambda: IPOLoss(actor)(paired()), "ref_log_prob: give the loss its reference"),
        (lambda: kto(rows.exclude("desirable")), "desirable: label each row"),
        (lambda: kto(rows.clone().set("desirable", torch.ones(6, 1))), "desirable must be bool"),
        (lambda: kto(rows.clone().set("desirable", rows["agent_mask"])), "desirable must have shape"),
        (lambda: KTOLoss(actor), "Mismatched rows need a reference model"),
        (lambda: KTOLoss(actor, frozen, baseline="batch"), "baseline must be one of"),
        (lambda: DPOLoss(actor, frozen, label_smoothing=0.5), "label_smoothing must lie in"),
        (lambda: DPOLoss(filtered), "DPOLoss needs actors without top_k"),
    ):
        with pytest.raises((KeyError, TypeError, ValueError), match=message):
            call()


# -- a problem with a known answer -------------------------------------------------------------------------------------

WORDS = CharTokenizer.from_alphabet("abc")


def answers(*texts):
    """Rows with two turns of the agent, the first always the same."""
    turns = [[Turn("c"), Turn("a", 0.0), Turn("b"), Turn(text, 0.0)] for text in texts]
    return to_rows([Episode(each, terminated=True) for each in turns], WORDS, 16)


def trained(make_loss, rows, steps=80):
    """The difference of the log-ratios of the answers a and b to the reference after training."""
    torch.manual_seed(0)
    lm = causal_lm(vocab_size=WORDS.vocab_size, layers=1, width=16, heads=2, max_length=16)
    actor = language_actor(lm)
    loss = make_loss(actor, frozen_copy(actor))
    for _ in train_steps(loss, lambda: rows, adamw(loss, 1e-2), steps=steps):
        pass
    every = answers("a", "b")
    with torch.no_grad():
        mine, its = (row_log_prob(one, every).sum(-1) for one in (actor, loss.reference.actor))
    return float((mine - its)[0] - (mine - its)[1])


def votes(for_a, for_b):
    """Pairs of the answers a and b, by who won."""
    a, b = answers("a", "b")
    return torch.stack([*[torch.stack([a, b])] * for_a, *[torch.stack([b, a])] * for_b])


def test_dpo_and_ipo_find_the_policy_that_votes_of_three_to_one_ask_for():
    """DPO: ``beta h`` is the log-odds of winning, log 3. IPO: ``h = (3/4 - 1/4) / (2 beta)``."""
    found = trained(lambda *parts: DPOLoss(*parts, beta=0.5), votes(3, 1))
    assert found == pytest.approx(math.log(3) / 0.5, abs=0.05)
    found = trained(lambda *parts: IPOLoss(*parts, beta=0.25), votes(3, 1))
    assert found == pytest.approx(1.0, abs=0.05)
    smooth = trained(lambda *parts: DPOLoss(*parts, beta=0.5, label_smoothing=0.25), votes(1, 0))
    assert smooth == pytest.approx(math.log(3) / 0.5, abs=0.05)


def test_kto_prefers_what_is_desirable():
    rows = answers("a", "b", "a", "b").set("desirable", torch.tensor([[True], [False]] * 2))
    assert trained(lambda *parts: KTOLoss(*parts, beta=0.5), rows) > 2
