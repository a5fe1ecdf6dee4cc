"""The policy of CHAI: of some utterances that a language model samples, play the one with the highest value."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase, dispatch
from torch import Tensor, nn

from torchrl_lang._checks import at_least_one
from torchrl_lang.functional.decisions import row_length
from torchrl_lang.modules.actor import UTTERANCE_VALUE
from torchrl_lang.modules.decoding.model_runner import apply_head, check_writes
from torchrl_lang.modules.decoding.utterance_actor import UtteranceActor
from torchrl_lang.modules.eval_mode import eval_mode, is_stochastic
from torchrl_lang.modules.features import RowFeatures
from torchrl_lang.modules.trunk import HIDDEN
from torchrl_lang.modules.utterance_features import candidate_features, check_sampling_policy
from torchrl_lang.schema import (
    ACTION,
    ACTION_LOG_PROB,
    ATTENTION_MASK,
    DONE,
    TOKEN_LOG_PROB,
    TOKENS,
    entry,
)

__all__ = ["CHAIActor"]


class CHAIActor(TensorDictModuleBase):
    """Plays, of ``candidates`` sampled utterances, the one with the highest ``min_k Q_k`` (CHAI, arXiv 2204.08426).

    It reads and writes what the ``policy`` does: ``tokens``, ``attention_mask`` and, if it is there, ``done``;
    ``action``, ``action_log_prob`` and ``token_log_prob``. The log-probabilities are those of sampling, without the
    choice. Values read :func:`~torchrl_lang.modules.utterance_features.candidate_features`, the features that
    :class:`CandidateSampler` computes for training. With ``set_exploration_type(ExplorationType.DETERMINISTIC)`` the
    language model decodes greedily.

    Args:
        policy: samples the candidates; an :class:`UtteranceActor` with ``method="sample"``, which has the seed.
        qvalue: usually with the target parameters: a :class:`UtteranceQValueHead`, or a TensorDictModule with one input
            that writes ``utterance_value`` ``[N, n_q]``.
        candidates: number of samples.

    Raises:
        TypeError, ValueError: the policy or the head is of another kind.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_lang.text import CharTokenizer
        >>> from torchrl_lang.modules import CHAIActor, UtteranceActor, UtteranceQValueHead, causal_lm, language_actor
        >>> tokenizer = CharTokenizer.from_alphabet("abc")
        >>> lm = causal_lm(vocab_size=tokenizer.vocab_size, layers=1, width=8, heads=2, max_length=16)
        >>> policy = UtteranceActor(language_actor(lm), tokenizer.control, 4, seed=0)
        >>> best = CHAIActor(policy, UtteranceQValueHead(8), candidates=5)
        >>> rows = TensorDict(tokens=torch.full((2, 6), tokenizer.control.begin_action),
        ...                   attention_mask=torch.arange(6).expand(2, 6) < 1, batch_size=[2])
        >>> best(rows)["action"].shape
        torch.Size([2, 4])
    """

    def __init__(self, policy: UtteranceActor, qvalue: nn.Module, *, candidates: int = 8) -> None:
        super().__init__()
        check_sampling_policy("CHAIActor", policy)
        check_writes("qvalue", qvalue, UTTERANCE_VALUE)
        at_least_one("candidates", candidates)
        self.policy, self.qvalue, self.candidates = policy, qvalue, candidates
        self.in_keys, self.out_keys = list(policy.in_keys), [ACTION, ACTION_LOG_PROB, TOKEN_LOG_PROB]

    @dispatch(auto_batch_size=False)
    @torch.no_grad()
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write an utterance for every row into ``tensordict``."""
        if not is_stochastic():
            return self.policy(tensordict)
        tokens, attention = entry(tensordict, TOKENS), entry(tensordict, ATTENTION_MASK)
        done, batch = tensordict.get(DONE, None), tokens.shape[:-1]
        features = self.policy.decoder.features(type(self).__name__, tensordict, batch)
        drawn = self.policy.decoder.generate(
            tokens, attention, done=done, candidates=self.candidates, features=features
        )
        rows, length = tokens.reshape(batch.numel(), -1).long(), row_length(attention).flatten()
        active = torch.ones_like(length, dtype=torch.bool) if done is None else ~done.flatten()
        choice = torch.zeros_like(length)
        if bool(active.any()):  # an utterance may not fit after rows that are done
            action = drawn.action.unflatten(0, (-1, self.candidates))[active].flatten(0, 1)
            longest = int(length[active].max())
            own = None if features is None else features.select(active)
            values = self._values(rows[active][:, :longest], length[active], action, own)
            choice[active] = values.argmax(-1)
        found = drawn.select(torch.arange(len(choice), device=choice.device) * self.candidates + choice)
        tensordict.set(ACTION, found.action.reshape(*batch, -1))
        tensordict.set(TOKEN_LOG_PROB, found.token_log_prob.reshape(*batch, -1))
        return tensordict.set(ACTION_LOG_PROB, found.token_log_prob.sum(-1).reshape(batch))

    def _values(self, tokens: Tensor, length: Tensor, action: Tensor, row_features: RowFeatures | None) -> Tensor:
        """``min_k Q_k`` of candidates, ``[N, C]``."""
        features = candidate_features(self.policy, tokens, length, action, row_features)
        # A module reads features by its one key, a head by that of the states it is made for.
        keys = self.qvalue.in_keys if isinstance(self.qvalue, TensorDictModuleBase) else []
        key = keys[0] if keys else str(getattr(self.qvalue, "in_key", HIDDEN))
        with eval_mode(self.qvalue):
            values = apply_head(self.qvalue, {key: features.flatten(0, 1)}, UTTERANCE_VALUE)
        return values.amin(-1).unflatten(0, features.shape[:2])
