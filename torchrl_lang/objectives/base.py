"""The base of the losses over rows: it reads a batch's decisions, rewards and ends, and reduces terms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDict, TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential
from torch import Tensor
from torchrl.objectives import LossModule

from torchrl_lang._checks import finite, one_of
from torchrl_lang.functional import decision_mask, find_decisions, shift_left, turn_end_mask
from torchrl_lang.functional.advantages import clock
from torchrl_lang.functional.decisions import trained_states
from torchrl_lang.modules.controllers import KLController, as_controller
from torchrl_lang.modules.decoding.utterance_actor import UtteranceActor
from torchrl_lang.modules.features import reads_features
from torchrl_lang.modules.frozen.frozen_copy import FrozenActor
from torchrl_lang.modules.frozen.reference_holder import ReferenceHolder
from torchrl_lang.modules.row_scoring import DecisionBatch, RowScorer, refuse_steps
from torchrl_lang.objectives.checks import token_limit, vocabulary
from torchrl_lang.schema import (
    AGENT_MASK,
    ATTENTION_MASK,
    FEATURES,
    FEATURES_MASK,
    TERMINATED,
    TOKEN_REWARD,
    TOKENS,
    TRAIN_MASK,
    check_values,
    missing_entry,
    refuse,
)

__all__ = [
    "ActorNormalizer",
    "LogitsChunk",
    "RowLoss",
    "TransitionBatch",
    "gather_inputs",
    "in_chunks",
    "kl_controller",
]

ActorNormalizer = Literal["all", "action"]
"""What the policy's term is divided by: the number of real tokens, or of those that the agent wrote."""
LogitsChunk = int | Literal["auto"] | None
"""Positions whose values over the vocabulary exist at a time; None for all, ``"auto"`` decides by the vocabulary."""

# From this vocabulary size on, chunks cost less time than the whole table, and far less memory.
_LARGE_VOCABULARY = 512

# What the entries of a row may be; all others are floats.
_MASKS = ("attention_mask", "agent_mask", "terminated", "train_mask")


@dataclass
class TransitionBatch(DecisionBatch):
    """The ``N`` decisions of ``B`` rows of width ``T`` with their rewards, successors and ends.

    There are ``S`` states: the decisions and what follows them. The successor of the decision at ``state[i]`` is the
    state at ``state[i] + 1`` (see :class:`~torchrl_lang.functional.decisions.Decisions`).
    """

    rows: TensorDictBase
    """The rows, flattened to batch size ``[B]``, for the trunk: their attention mask ends where no term reads on."""
    decision: Tensor
    """bool ``[B, T]``: True where the next token is the agent's."""
    next_reward: Tensor
    """float32 ``[B, T]``: the reward of that token."""
    state_place: Tensor
    """int64 ``[S]``: places of the states in a batch flattened to ``[B * T]``."""
    state: Tensor
    """int64 ``[N]``: the index of each decision among the states."""
    reward: Tensor
    """float32 ``[N]``."""
    last: Tensor
    """bool ``[N]``: the row's last decision, whose successor is the bootstrap state."""
    terminated: Tensor
    """bool ``[N]``: the task ended after this decision, so nothing is bootstrapped."""
    row_terminated: Tensor
    """bool ``[B]``."""
    mask: Tensor | None
    """bool ``[B, T]``: positions whose losses count, by ``loss_mask_key`` and the train mask; None where all do."""

    @property
    def counted(self) -> Tensor | None:
        """Bool ``[N]``: decisions that count; None where all do."""
        return None if self.mask is None else self.mask.flatten()[self.place]

    @property
    def counts(self) -> Tensor:
        """Bool ``[N]``: decisions that count, also where all do."""
        return torch.ones_like(self.last) if self.counted is None else self.counted

    @property
    def number(self) -> Tensor:
        """int64 ``[]``: how many decisions count, at least 1."""
        return self.counts.sum().clamp_min(1)


class RowLoss(ReferenceHolder, LossModule):
    """Base of the losses over rows. Abstract: a loss fills in ``forward``.

    It reads the entries of a row by configurable keys, finds the decisions once, and evaluates heads only where a loss
    needs them. Dtypes, shapes and values (right padding, masks, token ids, finite rewards) are checked in every call,
    before the trunk runs, also under ``torch.compile``. The trunk reads each row up to the last decision or the state
    that bootstraps, and with a ``transition_weight`` all but a last token that nothing follows: a loss whose terms read
    later states overrides :meth:`_read`.
    """

    @dataclass
    class _AcceptedKeys:
        """Keys that ``set_keys`` can change, with their defaults."""

        tokens: NestedKey = TOKENS
        attention_mask: NestedKey = ATTENTION_MASK
        agent_mask: NestedKey = AGENT_MASK
        token_reward: NestedKey = TOKEN_REWARD
        terminated: NestedKey = TERMINATED
        train_mask: NestedKey = TRAIN_MASK
        features: NestedKey = FEATURES
        features_mask: NestedKey = FEATURES_MASK

    default_keys = _AcceptedKeys
    # The entries without which a loss cannot read a row; a loss that needs no rewards drops some.
    _row_entries: tuple[str, ...] = ("tokens", "attention_mask", "agent_mask", "token_reward", "terminated")

    # Further entries that a loss reads itself, of other shapes than ``[*B, T]``.
    _more_entries: tuple[str, ...] = ()

    # How to get entries that are not part of a row, for the error if one is missing.
    _sources: Mapping[str, str] = {}
    # Weight of the environment's tokens in the policy's loss.
    transition_weight: float = 0.0
    actor_normalizer: ActorNormalizer
    actor_network: UtteranceActor | ProbabilisticTensorDictSequential
    # Discount inside an utterance, and of the step to the next one where that differs, of the losses that have them.
    gamma: float
    turn_gamma: float | None
    # Id of the token that ends an utterance; None for that of an UtteranceActor.
    end_of_action: int | None = None
    # The reference of an exact divergence, or the policy that made the data.
    reference: FrozenActor | None = None

    def __init__(self, reduction: str | None = None, logits_chunk: LogitsChunk = "auto") -> None:
        self._in_keys: list[NestedKey] | None = None
        super().__init__()
        is_number = isinstance(logits_chunk, int) and not isinstance(logits_chunk, bool) and logits_chunk > 0
        if logits_chunk not in ("auto", None) and not is_number:
            raise ValueError(f"logits_chunk must be 'auto', None or a positive number, got {logits_chunk!r}.")
        self.logits_chunk = logits_chunk
        self.reduction = "mean" if reduction is None else reduction
        one_of("reduction", self.reduction, ("mean", "sum", "none"))

    def _forward_value_estimator_keys(self, **kwargs: NestedKey) -> None:
        self._in_keys = None

    @property
    def scorer(self) -> RowScorer:
        """Computes the log-probability of the agent's tokens under the distribution that the actor samples from."""
        return RowScorer(self.actor_network)

    @property
    def language_actor(self) -> ProbabilisticTensorDictSequential:
        """Trunk, head and distribution of the policy."""
        return self.scorer.language_actor

    @property
    def in_keys(self) -> list[NestedKey]:
        """Entries that ``forward`` reads, in the order in which it takes them as arguments."""
        if self._in_keys is None:
            names = (*self._row_entries, *self._more_entries, *(("features",) if self._reads_features else ()))
            self._in_keys = [getattr(self.tensor_keys, name) for name in names]
        return self._in_keys

    @in_keys.setter
    def in_keys(self, values: list[NestedKey]) -> None:
        self._in_keys = values

    @property
    def optional_in_keys(self) -> list[NestedKey]:
        """Entries that ``forward`` reads where they are there: the train mask, and masks by ``loss_mask_key``.

        For a trunk that reads features also their mask.

        As tensors they are given by name, ``loss(..., train_mask=mask)``. Who selects entries for a loss keeps these
        too: ``rows.select(*loss.in_keys, *loss.optional_in_keys, strict=False)``.
        """
        features_mask = [self.tensor_keys.features_mask] if self._reads_features else []
        return [self.tensor_keys.train_mask, *features_mask, *self._loss_mask_keys()]

    @property
    def _reads_features(self) -> bool:
        """Whether a trunk reads the features of rows."""
        return any(reads_features(network) for network in self.children())

    @property
    def _all_in_keys(self) -> list[NestedKey]:
        return [*self.in_keys, *self.optional_in_keys]

    def _find(self, tensordict: TensorDictBase) -> TransitionBatch:
        """Derive all that the terms need from the rows; ``tensordict`` is left as it was."""
        entries = self._entries(tensordict)
        mask = self._mask(tensordict, entries)
        tokens = self._checked(entries, mask)
        attention, agent_mask = entries["attention_mask"], entries["agent_mask"]
        width = tokens.shape[-1]
        found, decision = find_decisions(attention, agent_mask), decision_mask(agent_mask)
        state_place = found.row * width + found.position
        place = state_place[found.state]
        reward = entries.get("token_reward", torch.zeros_like(tokens, dtype=torch.float32))
        next_reward = shift_left(reward)
        ended = entries.get("terminated", torch.ones_like(attention[:, :1])).reshape(-1)
        rows = self._trunk_input(tensordict, tokens, self._read(attention, decision, ended))
        return TransitionBatch(
            rows=rows,
            shape=tensordict.get(self.tensor_keys.tokens).shape,
            tokens=tokens,
            attention_mask=attention,
            agent_mask=agent_mask,
            decision=decision,
            next_reward=next_reward,
            state_place=state_place,
            state=found.state,
            place=place,
            action=shift_left(tokens).flatten()[place],
            reward=next_reward.flatten()[place],
            last=found.last,
            terminated=found.last & ended[found.row[found.state]],
            row_terminated=ended,
            mask=mask,
        )

    def _entries(self, tensordict: TensorDictBase) -> dict[str, Tensor]:
        """The row's entries, flattened to ``[B, ...]``, with clear errors for what cannot be a row."""
        refuse_steps(tensordict, self.tensor_keys.tokens)
        entries = {name: self._needed(tensordict, name) for name in self._row_entries}
        for name, value in entries.items():
            _check_entry(name, value, entries["tokens"].shape)
        return {name: value.reshape(-1, value.shape[-1]) for name, value in entries.items()}

    def _needed(self, tensordict: TensorDictBase, name: str) -> Tensor:
        key = getattr(self.tensor_keys, name)
        value = tensordict.get(key, None)
        if value is None:
            advice = f"{name}: {self._sources.get(name, 'add it')}, or name it with set_keys({name}=...)."
            raise missing_entry(type(self).__name__, [key], tensordict, advice)
        return value

    def _turn_ends(self, batch: TransitionBatch) -> Tensor:
        """True at the last decision of each utterance, bool ``[B, T]``, see :func:`turn_end_mask`."""
        end, decoder = self.end_of_action, self.scorer.decoder
        if end is None and decoder is not None:
            end = decoder.control.end_of_action
        return turn_end_mask(batch.attention_mask, batch.agent_mask, batch.tokens, end)

    def _discount(self, batch: TransitionBatch, like: Tensor) -> Tensor | float:
        """Discount of the step after each decision, ``[N]`` in the dtype of ``like``, or one number for all."""
        if self.turn_gamma is None:
            return self.gamma
        return clock(self._turn_ends(batch), self.turn_gamma, self.gamma, like).flatten()[batch.place]

    def _checked(self, entries: dict[str, Tensor], mask: Tensor | None) -> Tensor:
        """The tokens, int64, after a look at the values of the rows that count."""
        names = ("tokens", "attention_mask", "agent_mask", "token_reward")
        counted, limit = None if mask is None else mask.any(-1), self._token_limit()
        tokens = check_values(*map(entries.get, names), vocab_size=limit, counted=counted)  # type: ignore[arg-type]
        # Padding and rows that do not count may hold any id, and the trunk looks it up.
        return tokens.long().clamp(0, None if limit is None else limit - 1)

    def _refuse(self, batch: TransitionBatch, rules: Sequence[tuple[Tensor, str]]) -> None:
        """Raise ValueError for the first decision that counts and breaks a rule, bool ``[N]``, see :func:`refuse`."""
        at_tokens = [(batch.at_tokens(broken & batch.counts), text) for broken, text in rules]
        batch.place = refuse(batch.place, at_tokens, batch.tokens)

    def _token_limit(self) -> int | None:
        """The smallest id that the actor can neither read nor write; None where it is unknown."""
        actor = getattr(self, "actor_network", None)
        if actor is None:
            return None
        limits = [limit for limit in (vocabulary(actor), token_limit(actor)) if limit]
        return min(limits) if limits else None

    def _read(self, attention: Tensor, decision: Tensor, terminated: Tensor) -> Tensor:
        """Bool ``[B, T]``: the tokens up to the last state of each row that a term reads; no other is computed."""
        position, length = torch.arange(attention.shape[-1], device=attention.device), attention.sum(-1)
        last = length - 1 if self.transition_weight else torch.where(decision, position + 1, 0).amax(-1)
        end = torch.where(terminated, last, length).clamp_min(1)  # where nothing ended, the last state bootstraps
        return attention & (position < end[:, None])

    def _trunk_input(self, tensordict: TensorDictBase, tokens: Tensor, read: Tensor) -> TensorDictBase:
        """A shallow copy of the rows with batch size ``[B]``, so that what modules write stays out of the input."""
        lazy = isinstance(tensordict, LazyStackedTensorDict)
        rows = tensordict.to_tensordict() if lazy else tensordict.copy()
        rows.batch_size = tensordict.get(self.tensor_keys.tokens).shape[:-1]
        rows = rows.reshape(-1)
        # A trunk has in_keys of its own, whatever set_keys called the entries of the rows.
        rows.set(self.tensor_keys.tokens, tokens).set(self.tensor_keys.attention_mask, read)
        if self._reads_features:
            self._needed(rows, "features")
        for key, given in ((FEATURES, self.tensor_keys.features), (FEATURES_MASK, self.tensor_keys.features_mask)):
            value = rows.get(given, None)
            rows = rows if value is None else rows.set(key, value)
        return rows.set(TOKENS, tokens).set(ATTENTION_MASK, read)

    def _mask(self, tensordict: TensorDictBase, entries: dict[str, Tensor]) -> Tensor | None:
        """Bool ``[B, T]`` of the positions that count, by ``loss_mask_key`` and ``train_mask``; None where all do."""
        attention_mask, agent = entries["attention_mask"], entries["agent_mask"]
        train_mask = tensordict.get(self.tensor_keys.train_mask, None)
        counted = None
        if train_mask is not None:  # it is given at tokens; loss masks are given at the states before them
            _check_entry("train_mask", train_mask, tensordict.get(self.tensor_keys.tokens).shape)
            counted = trained_states(train_mask.reshape(agent.shape), agent)
        for key in self._loss_mask_keys():
            mask = tensordict.get(key, None)
            if mask is not None:
                if mask.dtype != torch.bool:
                    raise TypeError(f"The mask {key!r} must be bool, got {mask.dtype}: convert it with .bool().")
                mask = mask.reshape(attention_mask.shape[0], -1).expand_as(attention_mask)
                counted = mask if counted is None else counted & mask
        return counted

    def _reduce_decisions(self, values: Tensor, batch: TransitionBatch) -> Tensor:
        """Reduce one value a decision, ``[N]``: mean or sum over what counts, or all at their places, ``[*B, T]``."""
        return self._reduce(values, batch, batch.place, batch.counts)

    def _reduce(self, values: Tensor, batch: TransitionBatch, place: Tensor, counted: Tensor) -> Tensor:
        """Reduce values that belong to places of the flattened batch, of which some are ``counted``, each ``[M]``."""
        values = torch.where(counted, values, 0)  # not multiplied: a masked value may be infinite
        if self.reduction == "none":
            return batch.at_decisions(values, place).reshape(batch.shape)
        return values.sum() if self.reduction == "sum" else values.sum() / counted.sum().clamp_min(1)


def in_chunks(logits_chunk: LogitsChunk, vocabulary: int) -> bool:
    """Whether terms over a vocabulary of this size are computed in chunks, without the whole table."""
    return vocabulary >= _LARGE_VOCABULARY if logits_chunk == "auto" else logits_chunk is not None


def gather_inputs(keys: Sequence[NestedKey], rows: TensorDictBase, index: Tensor) -> TensorDictBase:
    """The inputs of a head, ``[B, T, H]`` each, at ``index`` (int64 ``[N]``) of the flattened batch: ``[N, H]``."""
    missing = [key for key in keys if rows.get(key, None) is None]
    if missing:
        advice = "The trunk must write it; for 'residual' heads build the actor with expose_pre_norm=True."
        raise missing_entry("A head", missing, rows, advice)
    entries = {key: rows.get(key).flatten(0, 1).index_select(0, index) for key in keys}
    return TensorDict(entries, batch_size=index.shape, device=rows.device)


def kl_controller(kl_weight: float | KLController) -> KLController | None:
    """What gives a loss the weight of its divergence; None for a weight of zero, which is not computed."""
    if isinstance(kl_weight, KLController):
        return kl_weight
    finite("kl_weight", float(kl_weight))
    return as_controller(kl_weight) if kl_weight else None


def _check_entry(name: str, value: Tensor, shape: torch.Size) -> None:
    """Raise unless an entry has the dtype and shape that go with tokens of ``shape``."""
    if name == "tokens" and value.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"tokens must be int64 or int32, got {value.dtype}: convert them with .long().")
    if name in _MASKS and value.dtype != torch.bool:
        raise TypeError(f"{name} must be bool, got {value.dtype}: convert it with .bool().")
    if name != "tokens" and name not in _MASKS and not value.is_floating_point():
        raise TypeError(f"{name} must be a float, got {value.dtype}: convert it with .float().")
    expected = (*shape[:-1], 1) if name == "terminated" else tuple(shape)
    if tuple(value.shape) != expected:
        raise ValueError(f"{name} must have shape {expected} to go with tokens, got {tuple(value.shape)}.")
