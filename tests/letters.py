"""A task of one letter whose best policy under a penalty is known: ``pi(a) ~ ref(a) exp(R(a) / coef)``."""

import torch

from torchrl_lang.envs.language_env import LanguageEnv, Reply
from torchrl_lang.text import CharTokenizer

REWARD = torch.tensor([0.0, 0.3, 0.6, 1.0])


class Letters(LanguageEnv):
    """One utterance of one letter, paid by the letter; saying nothing pays nothing."""

    def __init__(self, n):
        super().__init__(CharTokenizer.from_alphabet("abcd"), row_length=6, action_length=2, batch_size=[n], seed=0)

    def _open(self, episode, fresh, options):
        return torch.zeros(*episode.shape, 0, dtype=torch.int64), torch.zeros_like(episode), {}

    def _reply(self, utterance, task, live):
        pay = torch.where(utterance.length > 0, REWARD[utterance.tokens[:, 0].clamp_max(3)], 0.0)
        nothing = torch.zeros_like(utterance.length)
        return Reply(nothing.unsqueeze(-1), nothing, pay, torch.ones_like(live)), task


def first_token(env, policy):
    """Log-probabilities of the four letters and of saying nothing, float ``[5]``."""
    start = env.reset()[:1]
    logits = policy.decoder.actor.get_dist(start).logits[:, int(start["attention_mask"].sum()) - 1]
    return policy.decoder.rule({"logits": logits})[0, [*range(4), env.tokenizer.control.end_of_action]].detach()
