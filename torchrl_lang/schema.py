"""The row: the one shape in which an episode of text lives, and the names of its entries.

An episode is one growing row of tokens, what the environment said and what the agent wrote, in order, right-padded to a
fixed width ``T``. The same entries are an environment's observation, a training sample and an actor's input:

==================  ======================  ====================================================================
key                 dtype, shape            meaning
==================  ======================  ====================================================================
``tokens``          int64 ``[*B, T]``       token ids, right-padded (int32 on disk)
``attention_mask``  bool ``[*B, T]``        True on real tokens
``action_mask``     bool ``[*B, T]``        True on tokens the agent wrote, its end-of-action token included
``token_reward``    float32 ``[*B, T]``     reward earned by writing that token
``action``          int64 ``[*B, K]``       the agent's next utterance, right-padded
==================  ======================  ====================================================================

``reward``, ``done``, ``terminated`` and ``truncated`` are TorchRL's own, ``[*B, 1]``, one per turn. ``terminated`` says
that the task ended, ``truncated`` that a limit did.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

__all__ = [
    "ACTION",
    "ACTION_LOG_PROB",
    "ACTION_MASK",
    "ATTENTION_MASK",
    "BEHAVIOR_LOG_PROB",
    "DONE",
    "IS_EXAMPLE",
    "TRAIN_MASK",
    "RAW_REWARD",
    "REWARD",
    "ROW_KEYS",
    "TERMINATED",
    "TOKENS",
    "TOKEN_ENTROPY",
    "TOKEN_LOG_PROB",
    "TOKEN_REWARD",
    "TRUNCATED",
    "ControlTokens",
    "check_row",
    "check_values",
    "entry",
]

TOKENS = "tokens"
ATTENTION_MASK = "attention_mask"
ACTION_MASK = "action_mask"
TOKEN_REWARD = "token_reward"
ACTION = "action"
ACTION_LOG_PROB = "action_log_prob"
TOKEN_LOG_PROB = "token_log_prob"
BEHAVIOR_LOG_PROB = "behavior_log_prob"
"""float ``[*B, K]``: log-probability of each token of an action under the model that made the data."""
TOKEN_ENTROPY = "token_entropy"
"""float ``[*B, K]``: entropy of the distribution that each token of an action was drawn from."""
TRAIN_MASK = "train_mask"
"""bool ``[*B, K]`` beside an action, ``[*B, T]`` in a row: False on tokens of the agent that are not to be learned."""
IS_EXAMPLE = "is_example"
"""bool ``[*B, 1]``: the turn was played by somebody else than the policy."""
REWARD = "reward"
RAW_REWARD = "raw_reward"
"""float: the reward before a penalty for the divergence from a reference was taken off, of the reward's shape."""
DONE = "done"
TERMINATED = "terminated"
TRUNCATED = "truncated"

ROW_KEYS = (TOKENS, ATTENTION_MASK, ACTION_MASK, TOKEN_REWARD)
"""The entries of a row, in the order in which everything here passes them."""

_ROW_DTYPES = {
    TOKENS: (torch.int64, torch.int32),
    ATTENTION_MASK: (torch.bool,),
    ACTION_MASK: (torch.bool,),
    TOKEN_REWARD: (torch.float32,),
    TERMINATED: (torch.bool,),
    TRUNCATED: (torch.bool,),
}


@dataclass(frozen=True)
class ControlTokens:
    """Ids of the tokens that structure a row and that nobody's text may contain.

    A row opens with ``begin_state`` when the environment speaks first and with ``begin_action`` when the agent does.
    ``end_of_state`` closes what the environment said, ``end_of_action`` what the agent wrote (it is itself an action),
    ``end_of_dialogue`` closes a row whose task has ended, and ``pad`` fills the rest. ``tokenizer.control``
    carries the number of the tokenizer's ids as ``vocab_size``, because a model may have more embeddings than that.

    Raises:
        ValueError: two ids are the same, or one is not below ``vocab_size``.

    Examples:
        >>> from torchrl_lang.schema import ControlTokens
        >>> control = ControlTokens(pad=0, end_of_action=1, end_of_state=2, begin_state=3, begin_action=4,
        ...                         end_of_dialogue=5)
        >>> sorted(control.ids())
        [0, 1, 2, 3, 4, 5]
    """

    pad: int
    end_of_action: int
    end_of_state: int
    begin_state: int
    begin_action: int
    end_of_dialogue: int
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        if len(set(self.ids())) != 6:
            raise ValueError(f"The six control tokens need six different ids, got {self}.")
        if min(self.ids()) < 0 or (self.vocab_size is not None and max(self.ids()) >= self.vocab_size):
            raise ValueError(f"The ids of control tokens lie in [0, vocab_size), got {self}.")

    def ids(self) -> tuple[int, ...]:
        """All six ids, in the order of the fields."""
        return (
            self.pad,
            self.end_of_action,
            self.end_of_state,
            self.begin_state,
            self.begin_action,
            self.end_of_dialogue,
        )

    def forbidden_in_action(self) -> tuple[int, ...]:
        """Ids that an utterance of the agent may not contain: all but ``end_of_action``."""
        return tuple(token for token in self.ids() if token != self.end_of_action)


def check_row(tensordict: TensorDictBase, *, vocab_size: int | None = None) -> None:
    """Raise a helpful error unless ``tensordict`` holds well-formed rows.

    Looks at values, so it waits for the device: call it where data enters, not in a training step.

    Args:
        tensordict: anything with the entries of a row, each ``[*B, T]``, on one device. ``terminated`` and
            ``truncated``, where they are there, are checked as well.
        vocab_size: where given, every real token must lie in ``[0, vocab_size)``.

    Raises:
        KeyError: an entry is missing.
        TypeError: an entry has another dtype.
        ValueError: shapes differ, padding is not on the right, an agent's token or a reward lies on padding or on a
            token that the agent did not write, a row opens with an agent's token, a reward is not finite, or a token id
            is out of range.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_lang.schema import check_row
        >>> row = TensorDict(
        ...     tokens=torch.tensor([[7, 3, 9, 0]]),
        ...     attention_mask=torch.tensor([[True, True, True, False]]),
        ...     action_mask=torch.tensor([[False, True, True, False]]),
        ...     token_reward=torch.tensor([[0.0, 0.0, -1.0, 0.0]]),
        ...     batch_size=[1],
        ... )
        >>> check_row(row, vocab_size=10)
        >>> row["action_mask"][0, 3] = True
        >>> check_row(row)
        Traceback (most recent call last):
            ...
        ValueError: Row 0 has an agent's token on padding at position 3: action_mask must lie within attention_mask.
    """
    entries = {key: entry(tensordict, key) for key in ROW_KEYS}
    shape = entries[TOKENS].shape
    ends = {key: tensordict.get(key, None) for key in (TERMINATED, TRUNCATED)}
    for key, value in (entries | {key: end for key, end in ends.items() if end is not None}).items():
        expected_shape = (*shape[:-1], 1) if key in ends else tuple(shape)
        if value.dtype not in _ROW_DTYPES[key]:
            expected = " or ".join(str(dtype) for dtype in _ROW_DTYPES[key])
            raise TypeError(f"'{key}' must be {expected}, got {value.dtype}: convert it with .to(...).")
        if tuple(value.shape) != expected_shape:
            raise ValueError(
                f"'{key}' has shape {tuple(value.shape)} but 'tokens' has {tuple(shape)}: the entries of a row are "
                f"[*B, T], 'terminated' and 'truncated' [*B, 1]."
            )
    check_values(*(entries[key] for key in ROW_KEYS), vocab_size=vocab_size)


def check_values(
    tokens: Tensor,
    attention_mask: Tensor,
    action_mask: Tensor,
    token_reward: Tensor | None = None,
    *,
    vocab_size: int | None = None,
) -> None:
    """Raise ValueError unless the values of a row's entries make sense; dtypes and shapes are taken for granted.

    Waits for the device once. The error names the first row and position that break a rule, rows numbered as in a
    batch flattened to ``[B, T]``.

    Args:
        tokens: int ``[*B, T]``.
        attention_mask: bool ``[*B, T]``.
        action_mask: bool ``[*B, T]``.
        token_reward: float ``[*B, T]``; None where there are no rewards to check.
        vocab_size: ids of real tokens must lie below it; None for no upper limit.
    """
    width = tokens.shape[-1]
    tokens, attention, action = (x.reshape(-1, width) for x in (tokens, attention_mask, action_mask))
    out_of_range = tokens < 0 if vocab_size is None else (tokens < 0) | (tokens >= vocab_size)
    limits = "ids are at least 0" if vocab_size is None else f"ids lie in [0, {vocab_size})"
    right_padded = "rows are padded on the right and have no holes: move real tokens to the left"
    rules = [
        (attention[:, 1:] & ~attention[:, :-1], "a real token right of padding", right_padded, 1),
        (action & ~attention, "an agent's token on padding", "action_mask must lie within attention_mask", 0),
        (action[:, :1], "an agent's token", "no token comes before it to predict it from; begin rows with a token", 0),
        (attention & out_of_range, "a token id out of range", limits, 0),
    ]
    if token_reward is not None:
        reward = token_reward.reshape(-1, width)
        elsewhere = (reward != 0) & ~action
        rules += [
            (elsewhere, "a reward on a token that the agent did not write", "move it to an agent's token", 0),
            (~reward.isfinite(), "a reward that is not finite", "fix the data, one such number spoils every loss", 0),
        ]
    broken = torch.stack([bad.any() for bad, *_ in rules]).tolist()  # one wait for the device
    for is_broken, (bad, what, rule, shift) in zip(broken, rules, strict=True):
        if is_broken:
            row, position = bad.nonzero()[0].tolist()
            raise ValueError(f"Row {row} has {what} at position {position + shift}: {rule}.")


def entry(tensordict: TensorDictBase, key: str) -> Tensor:
    """The entry of that name, or an error that says what there is instead.

    Raises:
        KeyError: it is missing.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_lang.schema import TOKENS, entry
        >>> entry(TensorDict(input_ids=torch.zeros(2, 3)), TOKENS)
        Traceback (most recent call last):
            ...
        KeyError: "A row needs 'tokens'; this tensordict holds ['input_ids']. Rename or add the entry."
    """
    value: Any = tensordict.get(key, None)
    if value is None:
        present = sorted(map(str, tensordict.keys()))
        raise KeyError(f"A row needs '{key}'; this tensordict holds {present}. Rename or add the entry.")
    return value
