"""Features of a state and an utterance from a frozen language model, as CHAI's values read them (arXiv 2204.08426)."""

from __future__ import annotations

from typing import Any

import torch
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from torchrl_lang.functional.decisions import running_mean
from torchrl_lang.modules.actor import split_actor
from torchrl_lang.modules.decoding.model_runner import read_rows
from torchrl_lang.modules.decoding.utterance_actor import UtteranceActor
from torchrl_lang.modules.eval_mode import eval_mode
from torchrl_lang.modules.features import RowFeatures
from torchrl_lang.modules.trunk import HIDDEN

__all__ = ["candidate_features", "check_sampling_policy", "utterance_features"]

# Tokens that the model reads at a time: with 768 numbers each, 400 MB of states and their running means.
_TOKENS_AT_ONCE = 2**16


@torch.no_grad()
def utterance_features(
    trunk: TensorDictModuleBase,
    tokens: Tensor,
    length: Tensor,
    position: Tensor,
    row_features: RowFeatures | None = None,
) -> Tensor:
    """The feature ``f(s, u)`` of utterances: the mean of the hidden states up to their last decisions.

    The mean is over all positions from the row's first token to the utterance's last decision, the position in which
    its end is written and which has read all its words. This is the only definition of the feature: the utterances of a
    dataset, candidates in it and candidates in play all have theirs from here.

    Args:
        trunk: writes ``hidden`` ``[B, T, H]``.
        tokens: int64 ``[N, T]``, right-padded.
        length: int64 ``[N]``, the number of tokens to read of each row.
        position: int64 ``[N, U]``, last decisions, each below its row's ``length``.
        row_features: features of the rows, which a trunk may read before the tokens; the mean is over tokens only.

    Returns:
        float ``[N, U, H]``, at least float32.
    """
    parts, size = [], max(_TOKENS_AT_ONCE // max(tokens.shape[-1], 1), 1)
    with eval_mode(trunk):
        for part in torch.arange(tokens.shape[0], device=tokens.device).split(size):
            rows, read, place = tokens[part], length[part], position[part]
            own = None if row_features is None else row_features.select(part)
            width = max(int(read.max()), 1) if read.numel() else 1
            attention = torch.arange(width, device=rows.device) < read[:, None]
            mean = running_mean(read_rows(trunk, rows[:, :width], attention, own)[HIDDEN])
            parts.append(mean.gather(1, place.unsqueeze(-1).expand(-1, -1, mean.shape[-1])))
    return torch.cat(parts)


def candidate_features(
    policy: UtteranceActor, tokens: Tensor, length: Tensor, action: Tensor, row_features: RowFeatures | None = None
) -> Tensor:
    """Features of utterances that were sampled to continue rows.

    Args:
        policy: of whose language model the features are.
        tokens: int64 ``[N, T]``.
        length: int64 ``[N]``, the number of tokens of each row.
        action: int64 ``[N * C, K]``, the candidates of each row one after the other, each with its end.
        row_features: features of the rows, for language models that read some.

    Returns:
        float ``[N, C, H]``.
    """
    copies = action.shape[0] // tokens.shape[0]
    of = torch.arange(tokens.shape[0], device=tokens.device).repeat_interleave(copies)
    tokens, length, row_features = tokens[of], length[of], None if row_features is None else row_features.select(of)
    rows = torch.cat([tokens, torch.zeros_like(action)], -1)
    slot = torch.arange(action.shape[-1], device=action.device)
    rows = rows.scatter(-1, length[:, None] + slot, action)
    # The first word is written in the last state of the row_features, so the end, word e, in the state length - 1 + e.
    end = (action == policy.decoder.control.end_of_action).int().argmax(-1)
    last_decision = length - 1 + end
    trunk = split_actor(policy.decoder.actor).trunk
    features = utterance_features(trunk, rows, last_decision + 1, last_decision[:, None], row_features)
    return features.squeeze(1).unflatten(0, (-1, copies))


def check_sampling_policy(user: str, policy: Any) -> None:
    """Raise unless ``policy`` samples utterances with ends from a language model that shows its states."""
    if not isinstance(policy, UtteranceActor):
        raise TypeError(
            f"{user} samples candidates from an UtteranceActor over the frozen language model, got "
            f"{type(policy).__name__}: build it with UtteranceActor(language_actor(lm), control, action_length)."
        )
    if policy.method != "sample" or policy.decoder.stop is not None:
        given = f"method={policy.method!r}" + ("" if policy.decoder.stop is None else " and stop=")
        raise ValueError(f"{user} needs utterances that are sampled to their end: method='sample', got {given}.")
    trunk = split_actor(policy.decoder.actor).trunk
    if HIDDEN not in trunk.out_keys:
        raise ValueError(
            f"{user} reads the trunk's 'hidden', this one writes {list(map(str, trunk.out_keys))}: build the actor "
            "with language_actor(lm)."
        )
