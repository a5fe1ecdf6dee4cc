"""How well a model predicts the agent's tokens in episodes that it was not trained on."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase

from torchrl_lang.modules import row_log_prob
from torchrl_lang.modules.eval_mode import eval_mode
from torchrl_lang.schema import AGENT_MASK, entry

__all__ = ["imitation_loss"]


@torch.no_grad()
def imitation_loss(actor: TensorDictModuleBase, rows: TensorDictBase, *, batch_size: int = 256) -> float:
    """Mean negative log-probability of the agent's tokens, in nats per token.

    It is at least the entropy per token of the policy that made the data, and equals it where the imitation is perfect.

    Args:
        actor: a language actor or an :class:`~torchrl_lang.modules.UtteranceActor`.
        rows: entries of a row, ``[N, T]``.
        batch_size: rows at a time.

    Raises:
        ValueError: the rows have no token of the agent.

    Examples:
        >>> import torch
        >>> from torchrl_lang.text import CharTokenizer, Episode, Turn, to_rows
        >>> from torchrl_lang.evaluation import imitation_loss
        >>> from torchrl_lang.modules import causal_lm, language_actor
        >>> tokenizer = CharTokenizer.from_alphabet("abc")
        >>> rows = to_rows([Episode([Turn(word, reward=0.0)], True) for word in ("ab", "c")], tokenizer, 6)
        >>> lm = causal_lm(vocab_size=tokenizer.vocab_size, layers=1, width=8, heads=2, max_length=6)
        >>> imitation_loss(language_actor(lm), rows) > 0
        True
    """
    tokens = int(entry(rows, AGENT_MASK).sum())
    if not tokens:
        raise ValueError(f"The {len(rows)} rows have no token of the agent to predict.")
    with eval_mode(actor):
        total = sum(float(row_log_prob(actor, part).double().sum()) for part in rows.split(batch_size))
    return -total / tokens
