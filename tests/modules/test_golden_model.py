"""Numbers of the ILQL paper's code: the model's outputs, guided scores and beam search."""

from __future__ import annotations

import pytest
import torch

from tests.modules.toys import GOLDEN_CONTROL, Golden
from torchrl_lang.functional import filter_logits
from torchrl_lang.modules import ValueGuidance, language_actor
from torchrl_lang.modules.actor import split_actor
from torchrl_lang.modules.decoding.model_runner import LanguageModelRunner
from torchrl_lang.modules.decoding.next_token import NextTokenDistribution
from torchrl_lang.modules.decoding.sampling import Prompt, beam_search

CLOSE = {"atol": 2e-5, "rtol": 1e-5}
ROWS = [0, 5]  # the rows whose logits, Q values and scores are kept


@pytest.fixture(scope="module")
def golden():
    return Golden()


@pytest.fixture(scope="module")
def hidden(golden):
    with torch.no_grad():
        return split_actor(language_actor(golden.lm)).trunk.module(golden["in_tokens"])


@torch.no_grad()
def test_values_and_logits(golden, hidden):
    real = golden["in_attn_mask"].bool()
    logits = golden.lm.get_output_embeddings()(hidden)
    torch.testing.assert_close(logits[ROWS][real[ROWS]], golden["fwd_logits"][real[ROWS]], **CLOSE)
    row = torch.arange(7)[:, None]
    torch.testing.assert_close(golden.value(hidden[row, golden["in_state_idxs"]])[..., 0], golden["fwd_vs"], **CLOSE)
    at_actions = hidden[row, golden["in_action_idxs"]]
    torch.testing.assert_close(golden.target_qvalue(at_actions).amin(-2), golden["fwd_target_qs"], **CLOSE)
    q = golden.qvalue(at_actions[ROWS])
    torch.testing.assert_close(q[..., 0, :], golden["fwd_q1"], **CLOSE)
    torch.testing.assert_close(q[..., 1, :], golden["fwd_q2"], **CLOSE)


@pytest.mark.parametrize(
    ("name", "guide", "filters"),
    [
        ("adv16", {"beta": 16.0, "clip": 0.0}, {}),
        ("adv1_nologits", {"beta": 1.0}, None),
        ("sign08", {"beta": 0.8, "weighting": "sign"}, {}),
        ("logits_topk5_t07", None, {"temperature": 0.7, "top_k": 5}),
        ("adv4_topp", {"beta": 4.0}, {"top_p": 0.9}),
    ],
)
@torch.no_grad()
def test_guided_scores(golden, hidden, name, guide, filters):
    real, states = golden["in_attn_mask"].bool()[ROWS], hidden[ROWS]
    score = torch.zeros(2, states.shape[1], 35)
    if guide is not None:
        guidance = ValueGuidance(golden.target_qvalue, golden.value, **guide)
        flat = {"hidden": states.flatten(0, 1)}
        # There V is subtracted even where it cancels.
        term = guidance.term(flat) if guidance.needs_value else guide["beta"] * guidance.advantage(flat)
        at_actions = torch.zeros(real.shape, dtype=torch.bool).scatter(1, golden["in_action_idxs"][ROWS], True)
        score = torch.where(at_actions[..., None], term.unflatten(0, real.shape), 0.0)
    if filters is not None:
        score = score + filter_logits(golden.lm.get_output_embeddings()(states), **filters).log_softmax(-1)
    expected = golden[f"score/{name}"]
    assert torch.equal(score[real].isneginf(), expected[real].isneginf())
    finite = expected[real].isfinite()
    torch.testing.assert_close(score[real][finite], expected[real][finite], atol=5e-5, rtol=1e-5)


@pytest.mark.parametrize("row", [5, 6])
@pytest.mark.parametrize("width", [1, 3])
@torch.no_grad()
def test_beams(golden, row, width):
    # Six free tokens there, of which only padding is forbidden; here the seventh slot holds the certain end.
    length = golden["in_attn_mask"][row].long().sum()
    runner = LanguageModelRunner(split_actor(language_actor(golden.lm)), None, size=80, cached=True)
    rule = NextTokenDistribution([GOLDEN_CONTROL.pad], guidance=ValueGuidance(golden.target_qvalue, beta=2.0))
    prompt = Prompt(golden["in_tokens"][row, None, :length], length[None])
    found, score = beam_search(runner, rule, prompt, GOLDEN_CONTROL, 7, beams=width, diagnostics=True)
    symbols = [*"abcdefghijklmnopqrstuvwxyz", "<g>", "<b>", "<y>", "<|pad|>", "</a>", "</s>", "<s>", "<a>", "</eod>"]
    texts = ["".join(symbols[token] for token in action).split("</a>")[0] for action in found.action.tolist()]
    assert texts == golden.arrays[f"beam/row{row}_width{width}_text"].tolist()
    torch.testing.assert_close(score, golden[f"beam/row{row}_width{width}_score"], **CLOSE)
    # Only the best beam's: the paper's code leaves the others' raw log-probabilities where a beam stood before.
    raw = golden[f"beam/row{row}_width{width}_neg_lm_logprob"][0, 0]
    torch.testing.assert_close(-found.behavior_log_prob[0].sum(), raw, **CLOSE)
