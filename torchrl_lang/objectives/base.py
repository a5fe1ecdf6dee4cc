"""The base of the losses over rows: it reads a batch's decisions, rewards and ends, and reduces terms."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal, Self, TypeAlias

import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDict, TensorDictBase, TensorDictParams
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModuleBase, dispatch
from torch import Tensor, nn
from torchrl.objectives import LossModule, ValueEstimators
from torchrl.objectives.value import ValueEstimatorBase

from torchrl_lang import schema
from torchrl_lang._checks import check_given, check_options
from torchrl_lang.functional import decision_mask, shift_left, turn_end_mask
from torchrl_lang.functional.advantages import clock
from torchrl_lang.functional.decisions import find_decisions, row_length, trained_states, until_last_decision
from torchrl_lang.functional.value_terms import divisor, masked_mean
from torchrl_lang.modules.actor import LOGITS, split_actor
from torchrl_lang.modules.decoding.utterance_actor import UtteranceActor
from torchrl_lang.modules.features import reads_features
from torchrl_lang.modules.frozen.frozen_copy import FrozenActor
from torchrl_lang.modules.frozen.reference_holder import ReferenceHolder
from torchrl_lang.modules.head_values import ACTION_VALUE, STATE_VALUE, UTTERANCE_VALUE, States
from torchrl_lang.modules.row_scoring import DecisionBatch, RowScorer
from torchrl_lang.modules.trunk import HIDDEN
from torchrl_lang.objectives.networks import token_limit, trained_params, vocabulary
from torchrl_lang.schema import check_entry, check_values, find_entry, refuse

Policy: TypeAlias = UtteranceActor | ProbabilisticTensorDictSequential
"""A language actor, or an utterance actor over one."""
ActorNormalizer = Literal["all", "action"]
"""Divisor of the policy's term: the number of real tokens, or of those that the agent wrote."""
LogitsChunk = int | Literal["auto"] | None
"""Positions whose values over the vocabulary exist at a time; None for all, ``"auto"`` decides by the vocabulary."""

# From this vocabulary size on, chunks cost less time than the whole table, and far less memory.
_LARGE_VOCABULARY = 512

ValueType: TypeAlias = ValueEstimators | ValueEstimatorBase | type[ValueEstimatorBase] | str | None
"""Ways to choose a value estimator, as in TorchRL; None for a loss's default."""


def in_chunks(logits_chunk: LogitsChunk, vocabulary: int) -> bool:
    """Whether terms over a vocabulary of this size are computed in chunks, without the whole table."""
    return vocabulary >= _LARGE_VOCABULARY if logits_chunk == "auto" else logits_chunk is not None


def over_rows(forward: Callable[[Any, TensorDictBase], TensorDictBase]) -> Callable[..., Any]:
    """Let the ``forward`` of a loss take tensors by ``in_keys``, as TorchRL's do, and a batch without rows.

    Such a batch, as of a collector in which no episode ended, has losses of zero with gradients of zero, by way of a
    row without an action.
    """

    @functools.wraps(forward)
    def wrapper(self: Any, tensordict: TensorDictBase) -> TensorDictBase:
        tokens = tensordict.get(self.tensor_keys.tokens, None)
        if tokens is None or tokens.numel():
            return forward(self, tensordict)
        batch = tokens.shape[:-1]
        one = [max(size, 1) for size in batch]
        row = TensorDict(batch_size=one, device=tensordict.device)
        for key, value in tensordict.items(True, True):
            if value.shape[: len(batch)] == batch:
                row.set(key, value.new_zeros((*one, *value.shape[len(batch) :])))
        first = torch.arange(tokens.shape[-1], device=tokens.device) == 0
        out = forward(self, row.set(self.tensor_keys.attention_mask, first.expand(*one, -1)))
        if self.reduction == "none":
            for key in [key for key in out.keys() if key.startswith("loss_")]:
                out.set(key, out.get(key)[:0].reshape(tokens.shape))
        return out

    return dispatch(source="_all_in_keys")(wrapper)


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
    def counts(self) -> Tensor:
        """Bool ``[N]``: which decisions count."""
        return self.counts_at(self.place)

    def counts_at(self, place: Tensor) -> Tensor:
        """Bool ``[M]``: which places of the flattened batch count."""
        return torch.ones_like(place, dtype=torch.bool) if self.mask is None else self.mask.flatten()[place]

    def bootstrap(self, next_value: Tensor) -> Tensor:
        """The value after each row's last decision, ``[N] -> [B]``: zero where the task ended."""
        last = self.last.nonzero().squeeze(-1)
        rows, width = self.decision.shape
        value = next_value.new_zeros(rows).index_copy(0, self.place[last] // width, next_value[last])
        return torch.where(self.row_terminated, 0, value)


_UNIT, _WEIGHT, _POSITIVE, _NUMBER = "[0, 1]", "[0, inf)", "(0, inf)", "(-inf, inf)"
# What an option may be, by its name, see check_options: it means the same in every loss.
_OPTIONS: dict[str, Any] = {
    **dict.fromkeys(("gamma", "turn_gamma", "lmbda", "turn_lmbda", "qvalue_lmbda", "threshold"), _UNIT),
    **dict.fromkeys(("value_weight", "qvalue_weight", "actor_weight", "transition_weight"), _WEIGHT),
    **dict.fromkeys(("cql_weight", "margin_weight", "advantage_temperature"), _WEIGHT),
    **dict.fromkeys(("cql_temperature", "weight_clip", "value_clip", "beta", "reward_scale"), _POSITIVE),
    "max_engine_weight": _POSITIVE,
    **dict.fromkeys(("margin", "value_min", "value_max", "entropy_weight"), _NUMBER),
    **dict.fromkeys(("desirable_weight", "undesirable_weight"), _WEIGHT),
    "label_smoothing": "[0, 0.5)",
    "expectile": "(0, 1)",
    "reduction": ("mean", "sum", "none"),
    "actor_normalizer": ("all", "action"),
    "advantage_weighting": ("exp", "sign"),
    "target": ("td", "mc", "lambda"),
    "level": ("token", "utterance", "row"),
    "bootstrap": ("first", "mean"),
    "loss_critic_type": ("l2", "l1", "smooth_l1"),
    "kl_estimator": ("k1", "k2", "k3", "exact"),
    "average_gae": (True, False),
    "ratio": ("token", "turn", "row"),
    "surrogate": ("ppo", "cispo"),
}
_OPTIONAL = {"turn_gamma", "turn_lmbda", "weight_clip", "max_engine_weight", "value_clip", "value_min", "value_max"}


def check_named(**options: Any) -> None:
    """Check options by their names, in the table above; others are allowed anything."""
    known = {name: (value, _OPTIONS[name]) for name, value in options.items() if name in _OPTIONS}
    check_given(**{name: known.pop(name) for name in _OPTIONAL & known.keys()})
    check_options(**known)
    if options.get("advantage_weighting") == "sign" and not 0 < options["advantage_temperature"] <= 1:
        weights = "weights are advantage_temperature for better actions and 1 - advantage_temperature for others"
        found = f"above 0 and at most 1, got {options['advantage_temperature']}"
        raise ValueError(f"With advantage_weighting='sign' {weights}: it must be {found}.")


class RowLoss(ReferenceHolder, LossModule):
    """Base of the losses over rows. Abstract: a loss fills in ``forward``.

    It reads the entries of a row by configurable keys, finds the decisions once, and evaluates heads only where a loss
    needs them. Dtypes, shapes and values (right padding, masks, token ids, finite rewards) are checked in every call,
    before the trunk runs, also under ``torch.compile``. The trunk reads each row up to the last decision or the state
    that bootstraps, and with a ``transition_weight`` all but a last token that nothing follows.
    """

    @dataclass
    class _AcceptedKeys:
        """Keys that ``set_keys`` can change, with their defaults: entries of rows, of the actor, and of heads."""

        tokens: NestedKey = schema.TOKENS
        attention_mask: NestedKey = schema.ATTENTION_MASK
        agent_mask: NestedKey = schema.AGENT_MASK
        token_reward: NestedKey = schema.TOKEN_REWARD
        terminated: NestedKey = schema.TERMINATED
        train_mask: NestedKey = schema.TRAIN_MASK
        features: NestedKey = schema.FEATURES
        features_mask: NestedKey = schema.FEATURES_MASK
        hidden: NestedKey = HIDDEN
        logits: NestedKey = LOGITS
        action_value: NestedKey = ACTION_VALUE
        utterance_value: NestedKey = UTTERANCE_VALUE
        state_value: NestedKey = STATE_VALUE

    default_keys = _AcceptedKeys
    tensor_keys: Any

    # The entries without which a loss cannot read a row; further ones of other shapes; how to get those of either.
    _row_entries: tuple[str, ...] = ("tokens", "attention_mask", "agent_mask", "token_reward", "terminated")
    _more_entries: tuple[str, ...] = ()
    _sources: Mapping[str, str] = {}
    # The values that heads write, and the heads whose shapes have been looked at.
    _kinds: Mapping[str, str] = {"qvalue_network": ACTION_VALUE, "value_network": STATE_VALUE}
    _tried: frozenset[str] = frozenset()
    # What the estimators of TorchRL's names fix of the loss, and where its targets come from.
    _estimators: Mapping[ValueEstimators, Mapping[str, Any]] = {}
    _targets: str = "it imitates what the rows hold and has no value targets"

    # Options and parts that not every loss has.
    _has_actor = True
    _takes_guidance = False
    value_trunk: TensorDictModuleBase | None
    weight_clip: float | None = None
    gamma: float
    turn_gamma: float | None = None
    reference: FrozenActor | None = None

    def __init__(
        self,
        actor_network: Policy | None,
        *,
        transition_weight: float = 0.0,
        actor_normalizer: ActorNormalizer = "all",
        end_of_action: int | None = None,
        logits_chunk: LogitsChunk = "auto",
        reduction: str | None = None,
    ) -> None:
        super().__init__()
        if self._has_actor:
            if not isinstance(actor_network, UtteranceActor):
                split_actor(actor_network)  # raises unless it is a language actor
            elif actor_network.decoder.rule.guidance is not None and not self._takes_guidance:
                raise ValueError(f"{type(self).__name__} trains the model's own distribution: give no guidance=.")
            self.actor_network: Any = actor_network
        check_given(logits_chunk=(logits_chunk, ("auto",) if isinstance(logits_chunk, str) else 1))
        self._set_options(logits_chunk=logits_chunk, reduction="mean" if reduction is None else reduction)
        self._set_options(transition_weight=transition_weight, actor_normalizer=actor_normalizer)
        self._set_options(end_of_action=end_of_action)

    def _set_options(self, **options: Any) -> None:
        """Check options by their names and set them."""
        check_named(**options)
        for name in ("end_of_action", "rest"):
            if (token := options.get(name)) is not None:
                limit = vocabulary(self.actor_network)
                if not 0 <= token < (float("inf") if limit is None else limit):
                    raise ValueError(f"{name}={token} is no token id: ids lie in [0, {limit}).")
        for name, value in options.items():
            setattr(self, name, value)

    def make_value_estimator(
        self, value_type: ValueType = None, *, device: Any = None, differentiable: bool = False, **hyperparams: Any
    ) -> Self:
        """Choose targets by TorchRL's names, set their discounts and lambdas, and return the loss.

        Args:
            value_type: the estimator, or its name such as ``"td0"``; by default the first that the loss has.
                :class:`~torchrl_lang.objectives.PPOLoss` also takes TorchRL's classes and instances.
            device: accepted as in TorchRL; numbers are computed where the rows are.
            differentiable: no loss has targets with gradients.
            **hyperparams: ``gamma``, ``turn_gamma`` and, where the estimator leaves them open, ``lmbda`` and
                ``turn_lmbda``; of GAE also ``average_gae``.

        Raises:
            NotImplementedError: the loss has no such estimator, or ``differentiable`` is True.
            ValueError: a number lies outside [0, 1].
            TypeError: a hyperparameter is unknown.
        """
        value_type = self.default_value_estimator if value_type is None else value_type
        if isinstance(value_type, str):
            value_type = next((kind for kind in ValueEstimators if kind.name.lower() == value_type.lower()), value_type)
        if value_type not in self._estimators:
            asked, has = getattr(value_type, "__name__", value_type), [kind.name for kind in self._estimators]
            known = f"the value estimators {has}" if has else "no value estimators"
            raise NotImplementedError(f"{type(self).__name__} has {known}, got {asked}: {self._targets}.")
        self._refuse_gradients(differentiable)
        fixed = self._estimators[value_type]
        clocks = ("gamma", "lmbda", "turn_gamma", "turn_lmbda", "average_gae")
        names = [name for name in clocks if name not in fixed and hasattr(self, name)]
        if unknown := sorted(set(hyperparams) - set(names)):
            raise TypeError(f"Unknown hyperparameters {unknown}: give some of {names}.")
        self._set_options(**fixed, **hyperparams)
        self.value_type = value_type
        return self

    def _refuse_gradients(self, differentiable: bool) -> None:
        if differentiable:
            reason = "its targets are constants, and gradients through them would be those of another loss"
            raise NotImplementedError(f"{type(self).__name__} has no differentiable=True: {reason}. Leave it out.")

    @property
    def value_estimator(self) -> TensorDictModuleBase:
        """The module that writes value targets into rows; NotImplementedError where a loss computes its own."""
        raise NotImplementedError(f"{type(self).__name__} has no value_estimator to call on rows: {self._targets}.")

    # -- parameters of each network ------------------------------------------------------------------------------------

    @property
    def actor_network_params(self) -> TensorDictParams:
        """Parameters of the actor, each once where weights are tied: a group of an optimizer.

        A trunk that value heads share belongs to the actor, and so does an embedding that a Q head is tied to.
        """
        return trained_params(self.actor_network)

    @property
    def value_trunk_params(self) -> TensorDictParams:
        """Parameters of the trunk that value heads read, the source of target parameters.

        Without a ``value_trunk`` they are the actor's, among ``actor_network_params``: no group of their own.
        """
        return TensorDict.from_module(self._value_trunk, as_module=True)

    def get_stateful_net(self, network_name: str, copy: bool | None = None) -> nn.Module:
        """A network as a module whose parameters are those of the loss; ``copy=False`` gives the loss's own module."""
        if f"{network_name}_params" in self._modules:
            return super().get_stateful_net(network_name, copy)
        network = getattr(self, network_name)
        return network if copy is False else deepcopy(network, {id(weight): weight for weight in network.parameters()})

    def from_stateful_net(self, network_name: str, stateful_net: nn.Module) -> None:
        """Copy the state of a module into the network of this name."""
        if f"{network_name}_params" in self._modules:
            super().from_stateful_net(network_name, stateful_net)
        else:
            getattr(self, network_name).load_state_dict(stateful_net.state_dict())

    def reset_parameters_recursive(self) -> None:
        """Refused with a NotImplementedError: a language model has no first weights to go back to."""
        advice = "build the networks and the loss again, or load a state_dict that was kept"
        raise NotImplementedError(f"{type(self).__name__} does not initialize the weights of its networks: {advice}.")

    # -- what it reads -------------------------------------------------------------------------------------------------

    def _forward_value_estimator_keys(self, **kwargs: NestedKey) -> None:
        """Called by ``set_keys``: checks names of the actor's entries; no value estimator has keys of its own."""
        if kwargs.keys() & {"hidden", "logits"} and getattr(self, "actor_network", None) is not None:
            keys, written = self.tensor_keys, list(self.language_actor.out_keys)
            prob = self.scorer.actor_parts.prob
            if "hidden" in kwargs and keys.hidden not in written:
                raise ValueError(f"The actor writes {written}, no {keys.hidden!r}: give the entry that its head reads.")
            if "logits" in kwargs and keys.logits not in prob.in_keys:
                raise ValueError(f"The actor's distribution reads {prob.in_keys}, no {keys.logits!r}: give its entry.")

    @property
    def scorer(self) -> RowScorer:
        """Computes the log-probability of the agent's tokens under the distribution that the actor samples from."""
        return self._scorer(self.actor_network)

    def _scorer(self, actor: nn.Module) -> RowScorer:
        return RowScorer(actor, self.tensor_keys.hidden)

    @property
    def language_actor(self) -> ProbabilisticTensorDictSequential:
        """Trunk, head and distribution of the policy."""
        return self.scorer.language_actor

    @property
    def _policy_trunk(self) -> TensorDictModuleBase:
        return self.scorer.actor_parts.trunk

    @property
    def _value_trunk(self) -> TensorDictModuleBase:
        return self._policy_trunk if self.value_trunk is None else self.value_trunk

    def _policy_states(self, rows: TensorDictBase) -> States:
        """Output of the policy's trunk for ``rows``."""
        return {key: rows.get(key) for key in self._policy_trunk.out_keys}

    @property
    def in_keys(self) -> list[NestedKey]:
        """Entries that ``forward`` reads, in the order in which it takes them as arguments."""
        names = (*self._row_entries, *self._more_entries, *(("features",) if self._reads_features else ()))
        return [getattr(self.tensor_keys, name) for name in names]

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
        return any(reads_features(network) for name, network in self.named_children() if name not in self._kinds)

    @property
    def _all_in_keys(self) -> list[NestedKey]:
        return [*self.in_keys, *self.optional_in_keys]

    def _find(self, tensordict: TensorDictBase, names: Sequence[str] | None = None) -> TransitionBatch:
        """Derive all that the terms need from the rows; ``tensordict`` is left as it was.

        It has the entries ``names``, by default those that ``forward`` reads.
        """
        entries = self._entries(tensordict, self._row_entries if names is None else names)
        mask = self._mask(tensordict, entries)
        tokens = self._tokens(entries, mask)
        attention, agent_mask = entries["attention_mask"], entries["agent_mask"]
        found, decision = find_decisions(attention, agent_mask), decision_mask(agent_mask)
        state_place = found.row * tokens.shape[-1] + found.position
        place = state_place[found.state]
        reward = entries.get("token_reward", torch.zeros_like(tokens, dtype=torch.float32))
        next_reward = shift_left(reward)
        ended = entries.get("terminated", torch.ones_like(attention[:, :1])).reshape(-1)
        return TransitionBatch(
            rows=self._trunk_input(tensordict, tokens, self._read(attention, agent_mask, ended)),
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

    def _entries(self, tensordict: TensorDictBase, names: Sequence[str]) -> dict[str, Tensor]:
        """The row's entries, flattened to ``[B, ...]``, with clear errors for what cannot be a row."""
        schema.refuse_steps(tensordict, self.tensor_keys.tokens)
        entries = {name: self._needed(tensordict, name) for name in names}
        shape = entries["tokens"].shape
        for name, value in entries.items():
            if value.shape == (*shape, 1):  # as TorchRL's estimators write them
                entries[name] = value = value.squeeze(-1)
            check_entry(name, value, shape)
        return {name: value.reshape(-1, value.shape[-1]) for name, value in entries.items()}

    def _needed(self, tensordict: TensorDictBase, name: str) -> Tensor:
        advice = f"{name}: {self._sources.get(name, 'add it')}, or name it with set_keys({name}=...)."
        return find_entry(type(self).__name__, getattr(self.tensor_keys, name), advice, tensordict)

    def _mask(self, tensordict: TensorDictBase, entries: dict[str, Tensor]) -> Tensor | None:
        """Bool ``[B, T]`` of the positions that count, by ``loss_mask_key`` and ``train_mask``; None where all do."""
        agent = entries["agent_mask"]
        train_mask = tensordict.get(self.tensor_keys.train_mask, None)
        counted = None
        if train_mask is not None:  # it is given at tokens; loss masks are given at the states before them
            check_entry("train_mask", train_mask, tensordict.get(self.tensor_keys.tokens).shape)
            counted = trained_states(train_mask.reshape(agent.shape), agent)
        for key in self._loss_mask_keys():
            mask = tensordict.get(key, None)
            if mask is not None:
                if mask.dtype != torch.bool:
                    raise TypeError(f"The mask {key!r} must be bool, got {mask.dtype}: convert it with .bool().")
                shape = tensordict.get(self.tensor_keys.tokens).shape
                if mask.shape[: len(shape) - 1] != shape[:-1] or mask.numel() not in (agent.shape[0], agent.numel()):
                    expected = f"{list(shape)}, or {list(shape[:-1])} to count whole rows"
                    raise ValueError(f"The mask {key!r} must have shape {expected}, got {list(mask.shape)}.")
                mask = mask.reshape(agent.shape[0], -1).expand_as(agent)
                counted = mask if counted is None else counted & mask
        return counted

    def _tokens(self, entries: dict[str, Tensor], mask: Tensor | None) -> Tensor:
        """The tokens, int64, after a look at the values of the rows that count."""
        limit = None
        if (actor := getattr(self, "actor_network", None)) is not None:  # the smallest id that it cannot read or write
            limits = [limit for limit in (vocabulary(actor), token_limit(actor)) if limit]
            limit = min(limits) if limits else None
        names = ("tokens", "attention_mask", "agent_mask", "token_reward")
        counted = None if mask is None else mask.any(-1)
        tokens = check_values(*map(entries.get, names), vocab_size=limit, counted=counted)  # type: ignore[arg-type]
        # Padding and rows that do not count may hold any id, and the trunk looks it up.
        return tokens.long().clamp(0, None if limit is None else limit - 1)

    def _refuse(self, batch: TransitionBatch, rules: Sequence[tuple[Tensor, str]]) -> None:
        """Raise ValueError for the first decision that counts and breaks a rule, bool ``[N]``, see :func:`refuse`."""
        at_tokens = [(batch.at_tokens(broken & batch.counts), text) for broken, text in rules]
        batch.place = refuse(batch.place, at_tokens, batch.tokens)

    def _read(self, attention: Tensor, agent_mask: Tensor, terminated: Tensor) -> Tensor:
        """Bool ``[B, T]``: the tokens up to the last state of each row that a term reads; no other is computed."""
        if not self.transition_weight:
            return until_last_decision(attention, agent_mask, terminated)
        position = torch.arange(attention.shape[-1], device=attention.device)
        end = (row_length(attention) - terminated.long()).clamp_min(1)  # nothing follows the last token of an ended row
        return attention & (position < end[:, None])

    def _trunk_input(self, tensordict: TensorDictBase, tokens: Tensor, read: Tensor) -> TensorDictBase:
        """A shallow copy of the rows with batch size ``[B]``, so that what modules write stays out of the input."""
        lazy = isinstance(tensordict, LazyStackedTensorDict)
        rows = tensordict.to_tensordict() if lazy else tensordict.copy()
        batch = tensordict.get(self.tensor_keys.tokens).shape[:-1]
        rows = rows.select(*(key for key, value in rows.items(True, True) if value.shape[: len(batch)] == batch))
        rows.batch_size = batch  # without what belongs to several rows, such as the index of a pair
        rows = rows.reshape(-1)
        # A trunk has in_keys of its own, whatever set_keys called the entries of the rows.
        rows.set(self.tensor_keys.tokens, tokens).set(self.tensor_keys.attention_mask, read)
        if self._reads_features:
            self._needed(rows, "features")
        keys = self.tensor_keys
        for key, given in ((schema.FEATURES, keys.features), (schema.FEATURES_MASK, keys.features_mask)):
            value = rows.get(given, None)
            rows = rows if value is None else rows.set(key, value)
        return rows.set(schema.TOKENS, tokens).set(schema.ATTENTION_MASK, read)

    # -- clocks and results --------------------------------------------------------------------------------------------

    def _turn_ends(self, batch: TransitionBatch) -> Tensor:
        """True at the last decision of each utterance, bool ``[B, T]``, see :func:`turn_end_mask`."""
        end, decoder = self.end_of_action, self.scorer.decoder
        if end is None and decoder is not None:
            end = decoder.control.end_of_action
        return turn_end_mask(batch.attention_mask, batch.agent_mask, batch.tokens, end)

    def _clock(self, batch: TransitionBatch, inside: float, across: float | None, like: Tensor) -> Tensor | float:
        """``across`` after the last decision of an utterance, ``inside`` after others, ``[B, T]``, or one number."""
        return inside if across is None else clock(self._turn_ends(batch), across, inside, like)

    def _discount(self, batch: TransitionBatch, like: Tensor) -> Tensor | float:
        """Discount of the step after each decision, ``[N]`` in the dtype of ``like``, or one number for all."""
        discount = self._clock(batch, self.gamma, self.turn_gamma, like)
        return discount.flatten()[batch.place] if isinstance(discount, Tensor) else discount

    def _reduce_decisions(self, values: Tensor, batch: TransitionBatch) -> Tensor:
        """Reduce one value a decision, ``[N]``: mean or sum over what counts, or all at their places, ``[*B, T]``."""
        return self._reduce(values, batch, batch.place, batch.counts)

    def _reduce(self, values: Tensor, batch: TransitionBatch, place: Tensor, counted: Tensor) -> Tensor:
        """Reduce values that belong to places of the flattened batch, of which some are ``counted``, each ``[M]``."""
        values = torch.where(counted, values, 0)  # not multiplied: a masked value may be infinite
        if self.reduction == "none":
            return batch.at_decisions(values, place).reshape(batch.shape)
        return values.sum() if self.reduction == "sum" else values.sum() / divisor(counted)

    def _output(
        self, batch: TransitionBatch, losses: dict[str, Tensor], metrics: dict[str, Tensor], mask: Tensor | None = None
    ) -> TensorDict:
        """All ``out_keys``: zero where a term has weight zero, NaN of metrics that no term computed.

        Metrics with a value for each decision, or for each place of ``mask``, become means over those that count.
        """
        computed = next(iter(losses.values()), batch.reward)
        zero = computed.new_zeros(batch.shape if self.reduction == "none" else ())
        nan = zero.new_full((), torch.nan)
        empty = {name: zero if name.startswith("loss_") else nan for name in self.out_keys}
        counted = batch.counts if mask is None else mask
        each = {name: metric.detach() for name, metric in metrics.items()}
        means = {name: masked_mean(metric, counted) if metric.ndim else metric for name, metric in each.items()}
        return TensorDict({**empty, **losses, **means})
