"""Online Q at the decisions of a batch, computed in the form that a term of a loss needs."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDictBase, TensorDictParams
from tensordict.nn import TensorDictModule
from torch import Tensor

from torchrl_lang.functional.precision import upcast_half
from torchrl_lang.modules.head_values import ACTION_VALUE, UTTERANCE_VALUE, with_heads
from torchrl_lang.objectives.heads import read_head

__all__ = ["QValues", "taken_values"]


class QValues:
    """Q of the ``N`` decisions of a batch. Each form is computed at most once, when a term first asks for it.

    ``states`` are the inputs of ``network`` at the decisions, ``action`` the tokens that were written, int64 ``[N]``,
    ``key`` that of the output, and ``counted`` the decisions whose losses count, None where all do.
    """

    def __init__(
        self,
        network: TensorDictModule,
        params: TensorDictParams,
        states: TensorDictBase,
        action: Tensor,
        key: Any,
        counted: Tensor | None,
    ) -> None:
        self._network, self._params, self._states, self._action, self._key = network, params, states, action, key
        # Decisions are left out rather than multiplied by zero: a masked value may be infinite.
        self._kept = None if counted is None else counted.nonzero().squeeze(-1)
        self._taken: Tensor | None = None
        self._table: Tensor | None = None

    @property
    def table(self) -> Tensor:
        """Q(s, .) of all tokens, ``[N, n_q, V]``."""
        if self._table is None:  # no cached_property: before Python 3.12 its lock breaks the compiler's graph
            with self._params.to_module(self._network):
                self._table = read_head(self._network, self._states, self._key, ACTION_VALUE)
        return self._table

    @property
    def taken(self) -> Tensor:
        """Q(s, a) of the tokens that were written, ``[N, n_q]``; free of charge after a term over the vocabulary."""
        if self._taken is None:
            if self._table is not None:
                self._taken = _pick(self._table, self._action)
            else:
                with self._params.to_module(self._network):
                    self._taken = taken_values(self._network, self._states, self._action, self._key)
        return self._taken

    def in_chunks(self, name: str, **options: Any) -> tuple[Tensor, Tensor]:
        """A term over the vocabulary by the network's own method ``name``, which never builds the table.

        Returns:
            The sum over heads and over the decisions that count; and the sum over heads of each, ``[N]``.
        """
        states, action = self._states, self._action
        if self._kept is not None:
            states, action = states[self._kept], action[self._kept]
        inputs = [states.get(key) for key in self._network.in_keys]
        with self._params.to_module(self._network):
            total, each, taken = getattr(self._network.module, name)(*inputs, action, **options)
        if self._taken is None:
            self._taken = self._put_back(taken)
        return total, self._put_back(each.sum(-1))

    def _put_back(self, values: Tensor) -> Tensor:
        """Values of the decisions that count among all ``N``, zero elsewhere."""
        if self._kept is None:
            return values
        return values.new_zeros((self._action.shape[0], *values.shape[1:])).index_copy(0, self._kept, values)


def taken_values(network: TensorDictModule, states: TensorDictBase, action: Tensor, key: Any) -> Tensor:
    """Q of the tokens that were written, ``[N, n_q]``, by the head's own method ``taken`` where it has one."""
    method = getattr(getattr(network, "module", None), "taken", None)
    if method is not None:
        return upcast_half(with_heads(method(*(states.get(key) for key in network.in_keys), action), UTTERANCE_VALUE))
    return _pick(read_head(network, states, key, ACTION_VALUE), action)


def _pick(action_value: Tensor, action: Tensor) -> Tensor:
    """The taken action's value of each head: ``[N, n_q, V]``, ``[N]`` -> ``[N, n_q]``."""
    return action_value.gather(-1, action[:, None, None].expand(-1, action_value.shape[1], 1)).squeeze(-1)
