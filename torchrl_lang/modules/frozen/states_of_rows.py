"""States below the first trained layer that one training hands on to the next."""

from __future__ import annotations

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from torchrl_lang.modules.frozen.frozen_copy import fingerprint
from torchrl_lang.modules.frozen.frozen_states import autocast_of, lower_weights, states_name
from torchrl_lang.modules.frozen.lower_layers import are_alike, first_trunk, with_frozen_states
from torchrl_lang.modules.trunk import Trunk
from torchrl_lang.schema import ATTENTION_MASK, FROZEN_STATES, TOKENS


class StatesOfRows:
    """Hands the states of :func:`~torchrl_lang.modules.with_frozen_states` on between models that were loaded apart.

    There a model reads the states of its own tensors only. Here the contents count: the states of the last rows are
    handed on to the same rows if the lower layers have the same weights, bit by bit, and the same dtype, device and
    autocast. One row is computed, because configurations may differ as well.

    Examples:
        >>> import copy
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_lang.modules import causal_lm, language_actor, train_top_layers
        >>> from torchrl_lang.modules.frozen.states_of_rows import StatesOfRows
        >>> lm = causal_lm("llama", vocab_size=11, layers=3, width=8, heads=2, max_length=16)
        >>> one, other = (language_actor(copy.deepcopy(lm)) for _ in range(2))
        >>> _ = train_top_layers(one, 1), train_top_layers(other, 1)
        >>> tokens, mask = torch.randint(11, (2, 5)), torch.ones(2, 5, dtype=torch.bool)
        >>> rows, states = TensorDict(tokens=tokens, attention_mask=mask, batch_size=[2]), StatesOfRows()
        >>> first, then = states.carrying(one, rows), states.carrying(other, rows)
        >>> torch.testing.assert_close(one(first)["logits"], other(then)["logits"])
    """

    def __init__(self) -> None:
        self._kept: tuple[tuple[str, ...], TensorDictBase] | None = None

    def carrying(self, actor: nn.Module, rows: TensorDictBase, *, limit: int | None = None) -> TensorDictBase:
        """As :func:`~torchrl_lang.modules.with_frozen_states`, with states of an earlier call where they are the same.

        Args:
            actor: a language actor, an utterance actor or a loss with one.
            rows: ``[N]``, with ``tokens`` and ``attention_mask``, ``[N, T]``.
            limit: bytes that the states may take; default any number.
        """
        trunk = first_trunk(actor)
        if trunk is None or not trunk.frozen_layers:
            return rows
        lower = _contents(trunk)
        if self._kept is not None and self._kept[0] == lower and _are_of(self._kept[1], trunk, rows):
            name = str(states_name(trunk.model, trunk.frozen_layers))
            return rows.copy().set(FROZEN_STATES, TensorDict({name: self._kept[1]}, batch_size=rows.batch_size))
        carrying = with_frozen_states(actor, rows, limit=limit)
        found = carrying.get(FROZEN_STATES, None)
        self._kept = None if found is None else (lower, next(iter(found.values())))
        return carrying


def _contents(trunk: Trunk) -> tuple[str, ...]:
    """Identify the weights, device and autocast that the states below the first trained layer depend on."""
    weights = lower_weights(trunk.model, trunk.frozen_layers)
    digest = fingerprint((str(number), weight) for number, weight in enumerate(weights))
    device = weights[0].device
    return bytes(digest.tolist()).hex(), str(device), str(autocast_of(device))


def _are_of(kept: TensorDictBase, trunk: Trunk, rows: TensorDictBase) -> bool:
    """Whether states ``[N, L]`` are those of these rows, and of the trunk in the first row."""
    tokens, mask = rows.get(TOKENS).long(), rows.get(ATTENTION_MASK)
    known: Tensor = kept.get(TOKENS)
    width = known.shape[-1]
    if len(known) != len(tokens) or bool(mask[:, width:].any()):
        return False
    if not torch.equal(known, ((tokens + 1) * mask)[:, :width]):
        return False
    device = trunk.model.device
    own, real = tokens[:1, :width].to(device), mask[:1, :width]
    states = next(iter(trunk.frozen_states(own, real.to(device)).values())).get("states")
    return are_alike(kept.get("states")[:1][real], states.to(tokens.device)[real])
