"""Beam search for the most likely utterances."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_lang.functional import categorical_entropy
from torchrl_lang.modules.decoding.model_runner import ModelRunner
from torchrl_lang.modules.decoding.next_token import NextTokenDistribution
from torchrl_lang.modules.decoding.sampling import Prompt, Utterances, gather_token
from torchrl_lang.schema import ControlTokens

__all__ = ["beam_search"]


def beam_search(
    runner: ModelRunner,
    rule: NextTokenDistribution,
    prompt: Prompt,
    control: ControlTokens,
    action_length: int,
    *,
    beams: int,
    diagnostics: bool = False,
) -> tuple[Utterances, Tensor]:
    """The most likely utterances that beam search finds, without length normalisation.

    A finished beam keeps its score and competes with the others. At the first token there is one beam per prompt; with
    width 1 this is greedy decoding.

    The arguments are those of :func:`sample_utterances`, and ``beams``, ``W``.

    Returns:
        ``N * W`` utterances, adjacent for each prompt with the best first, and their summed log-probabilities, float
        ``[N, W]``; ``-inf`` if there are fewer than ``W`` possible utterances.
    """
    n, device = prompt.length.shape[0], prompt.length.device
    out = Utterances.empty(n * beams, action_length, control, device)
    prompt_of = torch.arange(n, device=device).repeat_interleave(beams)  # the prompt of each beam
    first = torch.arange(n, device=device).unsqueeze(-1) * beams  # the first beam of each prompt
    states = {key: value[prompt_of] for key, value in runner.prefill(prompt.tokens, prompt.length).items()}
    runner.reorder(prompt_of)
    position = prompt.length[prompt_of]
    score = torch.full((n, beams), -torch.inf, device=device)
    score[:, 0] = 0.0
    finished = torch.zeros(n * beams, dtype=torch.bool, device=device)
    for slot in range(action_length - 1):
        log_prob = rule(states)
        # A finished beam continues with padding only, which has probability one.
        only_pad = torch.full_like(log_prob[0], -torch.inf)
        only_pad[control.pad] = 0.0
        log_prob = torch.where(finished[:, None], only_pad, log_prob)
        total = score[:, :, None] + log_prob.unflatten(0, (n, beams))
        score, best = total.flatten(1).topk(beams, -1)
        parent = (first + best // log_prob.shape[-1]).flatten()
        token = (best % log_prob.shape[-1]).flatten()
        out = out.select(parent)
        log_prob, finished = log_prob[parent], finished[parent]
        out.action[:, slot] = token
        out.token_log_prob[:, slot] = gather_token(log_prob, token)
        if diagnostics:
            out.behavior_log_prob[:, slot] = gather_token(rule.behavior(states)[parent], token).masked_fill(
                finished, 0.0
            )
            out.token_entropy[:, slot] = categorical_entropy(log_prob)
        finished = finished | (token == control.end_of_action)
        if slot == action_length - 2 or bool(finished.all()):  # the only synchronization with the device
            break
        runner.reorder(parent)
        states = runner.decode(token, position, prompt.tokens.shape[-1] + slot + 1)
        position = position + 1
    out.action[:, -1] = torch.where(finished, control.pad, control.end_of_action)  # the forced end, as in sampling
    return out, score
