"""Utterances that stop after a text: what they contain, what the environment adds, and their log-probabilities."""

from __future__ import annotations

import pytest
import torch

from torchrl_lang.data import rows_from_rollout
from torchrl_lang.envs import TextGameEnv
from torchrl_lang.modules import StopStrings, UtteranceActor, causal_lm, language_actor
from torchrl_lang.modules.row_scoring import row_log_prob
from torchrl_lang.text import CharTokenizer

TOKENIZER = CharTokenizer.from_alphabet(["a", "b", "c", "cb"])  # "cb" may be one token or two
LENGTH = 8


@pytest.fixture(scope="module")
def lm():
    torch.manual_seed(0)
    return causal_lm(vocab_size=TOKENIZER.vocab_size, layers=1, width=16, heads=2, max_length=80, initializer_range=0.4)


class Echo:
    def reset(self, seed):
        return "ab" * (1 + seed % 3)

    def step(self, text):
        return text, 1.0, False


def make_env(n=16):
    return TextGameEnv(Echo, TOKENIZER, row_length=64, action_length=LENGTH, max_turns=3, batch_size=[n], seed=0)


def make_policy(lm, texts=("bb", "cb"), **options):
    stop = None if texts is None else StopStrings(texts, TOKENIZER)
    return UtteranceActor(language_actor(lm), TOKENIZER.control, LENGTH, seed=1, stop=stop, **options)


def until_stop(action):
    """An action of a policy without stop strings, with padding after the first text."""
    for end in range(1, LENGTH):
        text = TOKENIZER.decode(action[:end].tolist())
        if TOKENIZER.control.end_of_action in action[:end]:
            break
        if "bb" in text or "cb" in text:
            return torch.cat([action[:end], torch.full_like(action[end:], TOKENIZER.control.pad)])
    return action


def test_an_utterance_stops_after_the_text_and_is_otherwise_the_same(lm):
    td = make_env(64).reset()
    whole = make_policy(lm, None)(td.clone())
    stopped = make_policy(lm)(td.clone())
    expected = torch.stack([until_stop(action) for action in whole["action"]])
    assert torch.equal(stopped["action"], expected)
    cut = expected != whole["action"]
    assert 0.05 < cut.any(-1).float().mean() < 0.95
    kept = torch.where(expected == TOKENIZER.control.pad, 0.0, whole["token_log_prob"])
    torch.testing.assert_close(stopped["token_log_prob"], kept)


def test_the_environment_ends_the_utterance_and_the_policy_is_not_blamed(lm):
    """Log-probabilities of rows are those of acting, also where the environment wrote the end."""
    policy = make_policy(lm)
    rollout = make_env().rollout(3, policy)
    rows = rows_from_rollout(rollout, unfinished="drop", carry=["token_log_prob"])
    end, agent = TOKENIZER.control.end_of_action, rows["agent_mask"]
    ends = rows["tokens"] == end
    assert (ends & ~agent).any()
    assert (ends & agent).any()
    scored = row_log_prob(policy.decoder, rows)
    torch.testing.assert_close(scored[agent], rows["token_log_prob"][agent], atol=1e-5, rtol=1e-5)
    assert (rows["token_reward"].sum(-1) == 3).all()
    td = rollout[:, 0]
    torch.testing.assert_close(policy.get_dist(td).log_prob(td["action"]), td["action_log_prob"], atol=1e-5, rtol=1e-5)
