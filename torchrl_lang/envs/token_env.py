"""Token-level environments: each step of a language environment is one token of the agent's utterance."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.envs import EnvBase

from torchrl_lang.envs.language_env import LanguageEnv
from torchrl_lang.envs.reset_inputs import merge_keywords, refuse_rows
from torchrl_lang.envs.row_state import read_action, read_mask, where_rows
from torchrl_lang.envs.seeded_env import token_ids
from torchrl_lang.schema import ACTION, AGENT_MASK, ATTENTION_MASK, DONE, ROW_KEYS, TOKEN_REWARD, TOKENS, check_row


class TokenEnv(EnvBase):
    """A language environment whose ``action`` is one token, int64 ``[*B]``.

    Each action is appended to the row, with reward zero. When the agent writes the end-of-action token, or its
    utterance reaches the ``action_length`` of ``env``, the turn is played: the reply is appended to the row, and the
    turn's reward is the reward of this last token. The final row, ``terminated`` and ``truncated`` are those of ``env``
    for the same utterances.

    The padding token and ids outside the vocabulary are treated as the end-of-action token. Other control tokens are
    appended like any token, as in ``env``; an actor must mask them if it should not write them. An actor over a model
    with more embeddings than ``tokenizer.vocab_size`` must mask the rest: the row would hold another token than the one
    whose log-probability the actor wrote.

    ``reset(tensordict, set_state=True)`` continues rows that end anywhere, also inside an utterance. ``reset`` accepts
    the names that ``env.reset`` accepts.

    Args:
        env: a :class:`~torchrl_lang.envs.LanguageEnv`, which must not be stepped otherwise. Put transforms around the
            token environment: ``TransformedEnv(TokenEnv(env), ...)``.

    Raises:
        TypeError: ``env`` is not a ``LanguageEnv``.
        KeyError: on a step, there is no ``action``.
        ValueError: on a step, ``action`` is not int64 or does not have the shape of the batch.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_lang.envs import TokenEnv
        >>> from torchrl_lang.envs.games import CorridorEnv
        >>> env = TokenEnv(CorridorEnv(length=3, start=0, batch_size=[1]))
        >>> transcript = env.reset()
        >>> for token in env.tokenizer.encode("r") + [env.tokenizer.control.end_of_action]:
        ...     transcript = env.step(transcript.set("action", torch.tensor([token])))["next"]
        ...     print(env.tokenizer.decode(transcript["tokens"][0, : transcript["attention_mask"][0].sum()]))
        <s>0</s>r
        <s>0</s>r</a>1</s>
    """

    _supports_set_state = True

    def __init__(self, env: LanguageEnv) -> None:
        if not isinstance(env, LanguageEnv):
            raise TypeError(f"TokenEnv needs a LanguageEnv, got {type(env).__name__}: TransformedEnv(TokenEnv(env)).")
        super().__init__(device=env.device, batch_size=env.batch_size)
        self.env, self.tokenizer, self.row_length = env, env.tokenizer, env.row_length
        self._n = env.batch_size.numel()
        self._pending: Tensor
        self._written: Tensor
        self.observation_spec = env.observation_spec.clone()
        self.action_spec = token_ids(env.tokenizer.vocab_size, env.batch_size, device=env.device)
        self.reward_spec = env.reward_spec.clone()
        self.full_done_spec = env.full_done_spec.clone()

    def _set_seed(self, seed: int | None) -> None:
        self.env.set_seed(seed)

    def to(self, device: torch.device | str | int) -> TokenEnv:
        """Move to a device. Moving to another device drops the current rows: call ``reset`` next."""
        self.env.to(device)
        return super().to(device)

    def _input_td_has_state(self, tensordict: TensorDictBase | None) -> bool:
        """Rows in a reset tensordict are a state only with ``set_state=True``."""
        return False

    def _reset(self, tensordict: TensorDictBase | None = None, set_state: bool = False, **given: Any) -> TensorDictBase:
        tensordict = merge_keywords(self.env, self.env._reset_entries, tensordict, given, set_state=set_state)
        fresh, begun = read_mask("_reset", tensordict, self._n), self.env._rows is not None
        shape, pad = (self._n, self.env.action_length), self.tokenizer.control.pad
        pending = torch.full(shape, pad, dtype=torch.int64, device=self.device)
        written = torch.zeros_like(pending[:, 0])
        if set_state and tensordict is not None:
            tensordict, pending, written = self._split(tensordict, pending)
        out = self.env._reset(tensordict, set_state=set_state)
        if begun and fresh is not None:
            pending = where_rows(fresh, pending, self._pending)
            written = where_rows(fresh, written, self._written)
        self._pending, self._written = pending, written
        return self._observe(out)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.env._begun()
        control = self.tokenizer.control
        token = read_action("TokenEnv.step()", tensordict, tuple(self.batch_size)).reshape(self._n)
        is_end = (token < 0) | (token >= self.tokenizer.vocab_size) | (token == control.pad)
        token = torch.where(is_end, control.end_of_action, token)
        live, mask = ~self._done, read_mask("_step", tensordict, self._n)
        live = live if mask is None else live & mask
        place = torch.arange(self.env.action_length, device=token.device) == self._written[:, None]
        pending = torch.where(place & live[:, None], token[:, None], self._pending)
        written = self._written + live
        played = live & ((token == control.end_of_action) | (written == self.env.action_length))
        batch = self.batch_size
        turn = {ACTION: pending.reshape(*batch, self.env.action_length), "_step": played.reshape(*batch, 1)}
        out = self.env._step(TensorDict(turn, batch_size=self.batch_size, device=self.device))
        self._pending = torch.where(played[:, None], control.pad, pending)
        self._written = torch.where(played, 0, written)
        return self._observe(out)

    def _split(self, tensordict: TensorDictBase, pending: Tensor) -> tuple[TensorDictBase, Tensor, Tensor]:
        """Move unfinished utterances from the ends of the rows to ``pending``, int64 ``[N, K]``."""
        check_row(tensordict, vocab_size=self.tokenizer.vocab_size)
        tokens, real, agent, reward = (tensordict.get(key).reshape(self._n, -1) for key in ROW_KEYS)
        position = torch.arange(tokens.shape[-1], device=tokens.device)
        boundary = real & (~agent | (tokens == self.tokenizer.control.end_of_action))
        begin = torch.where(boundary, position + 1, 0).amax(-1, keepdim=True)
        tail = real & (position >= begin)
        written = tail.sum(-1)
        full = written >= self.env.action_length
        refuse_rows(tokens, written > 0, [(full, "an utterance without room for another token: finish it")])
        slot = torch.arange(self.env.action_length, device=tokens.device)
        is_pending = slot < written[:, None]
        source = (begin + slot).clamp_max(tokens.shape[-1] - 1)
        pending = torch.where(is_pending, tokens.gather(-1, source).to(torch.int64), pending)
        entries = {ATTENTION_MASK: real & ~tail, AGENT_MASK: agent & ~tail, TOKEN_REWARD: reward}
        shape = tensordict.get(TOKENS).shape
        begun = {key: value.reshape(shape) for key, value in entries.items()}
        return tensordict.copy().update(begun), pending, written

    def _observe(self, out: TensorDictBase) -> TensorDictBase:
        """The observation of ``env`` with the unfinished utterances appended."""
        self._done = out.get(DONE).reshape(self._n).clone()
        rows = {key: out.get(key).reshape(self._n, self.row_length) for key in ROW_KEYS}
        slot = torch.arange(self.env.action_length, device=self._written.device)
        is_pending = slot < self._written[:, None]
        # A spare column, which is dropped, takes what is not pending.
        place = torch.where(is_pending, rows[ATTENTION_MASK].sum(-1, keepdim=True) + slot, self.row_length)
        for key, new in {TOKENS: self._pending, ATTENTION_MASK: is_pending, AGENT_MASK: is_pending}.items():
            grown = torch.nn.functional.pad(rows[key], (0, 1)).scatter_(-1, place, new)[:, :-1]
            out.set(key, grown.reshape(*self.batch_size, self.row_length))
        return out
