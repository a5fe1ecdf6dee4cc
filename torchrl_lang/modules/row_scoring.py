"""Score whole rows with a language model: the distributions at all decisions from one forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor, nn

from torchrl_lang import schema
from torchrl_lang.functional import decision_mask, shift_left
from torchrl_lang.functional.decisions import until_last_decision
from torchrl_lang.functional.kl import categorical_entropy
from torchrl_lang.functional.precision import upcast_half
from torchrl_lang.modules.actor import LOGITS, linear_layer, split_actor
from torchrl_lang.modules.decoding.decoder import Decoder
from torchrl_lang.modules.decoding.guidance import VALUE_STATES
from torchrl_lang.modules.decoding.model_runner import read_rows
from torchrl_lang.modules.features import RowFeatures, reads_features
from torchrl_lang.modules.head_values import States, apply_head
from torchrl_lang.modules.trunk import HIDDEN, Trunk, trunk_of
from torchrl_lang.schema import AGENT_MASK, ATTENTION_MASK, TOKENS, entry


@dataclass
class DecisionBatch:
    """Rows ``[B, W]`` and their ``N`` decisions, the states whose next token the agent wrote, in reading order."""

    tokens: Tensor
    """int64 ``[B, W]``."""
    attention_mask: Tensor
    """bool ``[B, W]``."""
    place: Tensor
    """int64 ``[N]``: decisions in a batch flattened to ``[B * W]``."""
    action: Tensor
    """int64 ``[N]``: the token written there."""
    agent_mask: Tensor
    """bool ``[B, W]``."""
    shape: torch.Size
    """``[*B, T]``, the shape of the input."""
    rows: TensorDictBase
    """Entries of the rows ``[*B]``: ``tokens`` and, if there are, features and frozen states."""

    @staticmethod
    def read(tensordict: TensorDictBase) -> DecisionBatch:
        """The decisions of the rows in ``tensordict``; a ValueError if it holds steps of a rollout."""
        schema.refuse_steps(tensordict)
        tokens, attention, agent_mask = (entry(tensordict, key) for key in (TOKENS, ATTENTION_MASK, AGENT_MASK))
        shape = tokens.shape
        tokens, attention, agent_mask = (x.reshape(-1, shape[-1]) for x in (tokens, attention, agent_mask))
        width = max(int(attention.sum(-1).max()), 1) if tokens.shape[0] else 1
        tokens, attention, agent_mask = (x[:, :width] for x in (tokens.long(), attention, agent_mask))
        place = decision_mask(agent_mask).flatten().nonzero().squeeze(-1)
        action = shift_left(tokens).flatten()[place]
        rows = tensordict.select(TOKENS, schema.FEATURES, schema.FEATURES_MASK, schema.FROZEN_STATES, strict=False)
        return DecisionBatch(tokens, attention, place, action, agent_mask, shape, rows)

    @property
    def features(self) -> RowFeatures | None:
        """The features of the rows, if they have some: ask where a trunk reads them, others may call a column so."""
        return RowFeatures.read(self.rows, self.rows.get(TOKENS).shape[:-1])

    @property
    def empty(self) -> bool:
        """Whether there are no decisions: models may fail on empty batches."""
        return self.place.shape[0] == 0

    def zeros(self) -> Tensor:
        """Zero for every token, float32 ``[*B, T]``."""
        return torch.zeros(self.shape, device=self.tokens.device)

    def slot(self, end_of_action: int, place: Tensor | None = None) -> Tensor:
        """Index of each action in its utterance, int64 ``[N]``, from 0; ``end_of_action`` ends an utterance.

        At other places of ``[B * W]``, the index that an action written after them has, int64 ``[M]``.
        """
        unfinished = self.agent_mask & (self.tokens != end_of_action)
        position = torch.arange(self.tokens.shape[-1], device=self.tokens.device).expand(self.tokens.shape)
        before = torch.where(unfinished, -1, position).cummax(-1).values  # the last token before the utterance
        return (position - before).flatten()[self.place if place is None else place]

    def at_decisions(self, values: Tensor, place: Tensor | None = None, *, fill: float = 0.0) -> Tensor:
        """Values of decisions, or of other places in ``[B * W]``, ``[N]``, as ``[B, W]`` with ``fill`` elsewhere."""
        dense = values.new_full((self.tokens.numel(),), fill)
        return dense.index_copy(0, self.place if place is None else place, values).reshape(self.tokens.shape)

    def at_tokens(self, values: Tensor) -> Tensor:
        """Scatter values of decisions, ``[N]``, to the agent's tokens, ``[*B, T]``; zero elsewhere."""
        dense = self.at_decisions(values, self.place + 1)
        padding = self.shape[-1] - dense.shape[-1]
        return nn.functional.pad(dense, (0, padding)).reshape(self.shape)


# Number of logits in memory at a time: 32 MB of float32.
_LOGITS_AT_ONCE = 2**23


class LinearLogits(NamedTuple):
    """Logits as a linear function of a state, so that a divergence can compute them in chunks."""

    key: str
    """The input of the head."""
    weight: Tensor
    """float ``[V, H]``."""
    bias: Tensor | None
    """float ``[V]``."""
    temperature: float
    forbidden: Tensor
    """bool ``[V]``: True for tokens that cannot be generated."""


class RowScorer:
    """Computes log-probabilities of the agent's tokens in whole rows, under a language actor or an utterance actor.

    Args:
        actor: a language actor, whose distribution is the softmax over the vocabulary at temperature 1; or an
            :class:`~torchrl_lang.modules.UtteranceActor`, with its temperature, filters, forbidden tokens, values and
            the forced end of the last slot.
        hidden: the entry that separates the trunk from the head, see :func:`split_actor`.
    """

    def __init__(self, actor: nn.Module, hidden: NestedKey = HIDDEN) -> None:
        decoder = getattr(actor, "decoder", actor)
        self.decoder = decoder if isinstance(decoder, Decoder) else None
        """Of an utterance actor; None for a language actor."""
        self.language_actor: Any = actor if self.decoder is None else self.decoder.actor
        """Trunk, head and distribution."""
        self.actor_parts = split_actor(self.language_actor, hidden)

    @property
    def trunk(self) -> Trunk | None:
        """The trunk, if it is a :class:`Trunk`."""
        return trunk_of(self.actor_parts.trunk)

    @property
    def has_values(self) -> bool:
        """Whether values change the distribution."""
        return self.decoder is not None and self.decoder.rule.guidance is not None

    def states(self, batch: DecisionBatch, *, whole: bool = False) -> States:
        """Run the trunk (and the values' own trunk, if any) over the rows, each state ``[B, W, ...]``.

        The rows are read up to their last decisions, unless states behind these are needed, too.
        """
        trunk = self.actor_parts.trunk
        value_trunk = None if self.decoder is None else self.decoder.value_trunk
        features = batch.features if reads_features(trunk) or reads_features(value_trunk) else None
        frozen = batch.rows.get(schema.FROZEN_STATES, None)
        real = batch.attention_mask if whole else until_last_decision(batch.attention_mask, batch.agent_mask)
        rows = (batch.tokens, real, features, None if frozen is None else frozen.reshape(-1))
        states = read_rows(trunk, *rows)
        value: States = {}
        if value_trunk is not None:
            value = read_rows(value_trunk, *rows)
        return states | {VALUE_STATES + key: tensor for key, tensor in value.items() if isinstance(key, str)}

    def log_prob(self, batch: DecisionBatch, states: States) -> Tensor:
        """Log-probability of each action, float ``[N]``."""
        parts = [(batch.place[part], batch.action[part, None]) for part in self.parts(batch, states)]
        log_prob = [self.log_softmax(states, place).gather(-1, action) for place, action in parts]
        return self.with_certain_ends(batch, torch.cat(log_prob).squeeze(-1))

    def entropy(self, batch: DecisionBatch, states: States) -> Tensor:
        """Entropy in nats of each decision's distribution, float ``[N]``; zero where the end is certain."""
        parts = [self.log_softmax(states, batch.place[part]) for part in self.parts(batch, states)]
        return torch.where(self.certain(batch), 0.0, torch.cat([categorical_entropy(part) for part in parts]))

    def with_certain_ends(self, batch: DecisionBatch, log_prob: Tensor) -> Tensor:
        """Log-probabilities ``[N]`` with those of last slots replaced: 0 for the end of an utterance, else ``-inf``."""
        if self.decoder is None:
            return log_prob
        impossible = batch.action != self.decoder.control.end_of_action
        forced = torch.zeros_like(log_prob).masked_fill(impossible, -torch.inf)
        return torch.where(self.certain(batch), forced, log_prob)

    def log_softmax(self, states: States, place: Tensor) -> Tensor:
        """Log-probability of every token at ``M`` positions, ``[M, V]``."""
        chosen = {key: value.flatten(0, 1).index_select(0, place) for key, value in states.items()}
        chosen = self._with_logits(chosen)
        if self.decoder is not None:
            return self.decoder.rule(chosen)
        return upcast_half(chosen[LOGITS]).log_softmax(-1)

    def parts(self, batch: DecisionBatch, states: States) -> Iterator[slice]:
        """Slices of the decisions whose logits take a few dozen megabytes each."""
        one = self._with_logits({key: value.flatten(0, 1)[:1] for key, value in states.items()})
        n, size = batch.place.shape[0], max(_LOGITS_AT_ONCE // one[LOGITS].shape[-1], 1)
        return (slice(start, min(start + size, n)) for start in range(0, n, size))

    def certain(self, batch: DecisionBatch, place: Tensor | None = None) -> Tensor:
        """True where only the end of the utterance is possible (its last slot), bool ``[N]``, or ``[M]`` for places."""
        if self.decoder is None:
            return torch.zeros_like(batch.place if place is None else place, dtype=torch.bool)
        return batch.slot(self.decoder.control.end_of_action, place) >= self.decoder.action_length - 1

    def possible(self, values: Tensor, certain: Tensor) -> Tensor:
        """Values of every token, ``[M, V]``, with ``-inf`` at tokens that the decoder cannot write.

        Filters do not count. ``certain`` is that of the places of the values, bool ``[M]``.
        """
        if self.decoder is None:
            return upcast_half(values)
        is_end = torch.arange(values.shape[-1], device=values.device) == self.decoder.control.end_of_action
        forced = upcast_half(values).masked_fill(~is_end, -torch.inf)  # though elsewhere the end may be forbidden
        return torch.where(certain[:, None], forced, self.decoder.rule.allowed(values))

    def linear(self) -> LinearLogits | None:
        """The logits as a linear function of a state; None with filters, values or a head that is not linear."""
        head: Any = self.actor_parts.head
        layer = linear_layer(head)
        if layer is None:
            return None
        weight, bias = layer.weight, layer.bias
        forbidden = torch.zeros(weight.shape[0], dtype=torch.bool, device=weight.device)
        temperature = 1.0
        if self.decoder is not None:
            rule = self.decoder.rule
            if not rule.only_scales:
                return None
            temperature = rule.temperature
            forbidden[rule.forbidden_beside(forbidden)] = True
            if rule.vocab_size is not None:
                forbidden[rule.vocab_size :] = True
        return LinearLogits(head.in_keys[0], weight, bias, temperature, forbidden)

    def _with_logits(self, states: States) -> States:
        head = self.actor_parts.head
        return states if head is None else states | {LOGITS: apply_head(head, states, LOGITS)}


def row_log_prob(actor: nn.Module, rows: TensorDictBase) -> Tensor:
    """Log-probability of every token of the agent, with gradients, from one forward pass over the rows.

    Args:
        actor: a language actor or an :class:`~torchrl_lang.modules.UtteranceActor`, see :class:`RowScorer`.
        rows: ``tokens``, ``attention_mask`` and ``agent_mask``, each ``[*B, T]``; and features for an actor that reads
            them, see :func:`~torchrl_lang.modules.with_features`.

    Returns:
        float ``[*B, T]``, zero on tokens that the agent did not write.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_lang.modules import causal_lm, language_actor, row_log_prob
        >>> actor = language_actor(causal_lm(vocab_size=12, layers=1, width=16, heads=2, max_length=8))
        >>> rows = TensorDict(
        ...     tokens=torch.tensor([[4, 1, 2, 9, 0]]),
        ...     attention_mask=torch.tensor([[True, True, True, True, False]]),
        ...     agent_mask=torch.tensor([[False, True, True, False, False]]),
        ...     batch_size=[1],
        ... )
        >>> row_log_prob(actor, rows) < 0
        tensor([[False,  True,  True, False, False]])
    """
    scorer = RowScorer(actor)
    batch = DecisionBatch.read(rows)
    if batch.empty:
        return batch.zeros()
    return batch.at_tokens(scorer.log_prob(batch, scorer.states(batch)))
