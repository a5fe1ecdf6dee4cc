"""A frozen utterance actor as reference: one utterance a step, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torch.distributions import Distribution
from torchrl.data import Composite, TensorSpec, Unbounded
from torchrl.envs import EnvBase

from torchrl_lang.modules import UtteranceActor
from torchrl_lang.modules.frozen.frozen_copy import HeldActor
from torchrl_lang.schema import DONE
from torchrl_lang.transforms.base import required
from torchrl_lang.transforms.keys import ActionKeys
from torchrl_lang.transforms.references.from_actor import ActorReference

__all__ = ["UtteranceReference"]


class UtteranceReference(ActorReference):
    """An :class:`~torchrl_lang.modules.UtteranceActor` as reference of single turns.

    Log-probabilities are those of acting, with the actor's temperature, filters, forbidden tokens and forced end, so
    they compare with the ``token_log_prob`` of acting. It takes one pass over transcript and utterance a turn; for
    whole episodes :class:`RowReference` scores all turns in one pass.

    The log-probability is float ``[*B, K]``, zero after the end of an utterance and on rows that are done.

    Args:
        frozen: the actor, see :func:`~torchrl_lang.transforms.frozen_copy`.
        in_keys: see :class:`ActorReference`.
    """

    def __init__(self, frozen: HeldActor, *, in_keys: Sequence[NestedKey] | None = None) -> None:
        if not isinstance(frozen.actor, UtteranceActor):
            raise TypeError(f"An UtteranceReference needs an UtteranceActor, got {type(frozen.actor).__name__}.")
        super().__init__(frozen, in_keys=in_keys)
        self.action_keys = ActionKeys.utterance()

    def log_prob(self, tensordict: TensorDictBase, carry: TensorDictBase) -> Tensor:
        """See :class:`Reference`."""
        advice = "It is the turn to score. For whole rows pass RowReference(frozen_copy(actor)) as the reference."
        action = required(type(self).__name__, self.action_keys.action[0], advice, tensordict)
        done: Any = tensordict.get(DONE, None)
        with self.frozen.eval_mode():
            if done is None or not done.any():
                return self._dist(self.inputs(tensordict)).token_log_prob(action)
            alive = ~done.squeeze(-1)
            if not alive.any():
                return torch.zeros(action.shape, device=action.device)
            found = self._dist(self.inputs(tensordict)[alive]).token_log_prob(action[alive])
            out = found.new_zeros(action.shape)
            out[alive] = found
            return out

    def distribution(self, tensordict: TensorDictBase, carry: TensorDictBase) -> Distribution:
        """Not for utterances: their exact divergence is a sum over all utterances.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "The exact divergence of whole utterances has no closed form. Use an estimator (estimator='k3'), or score "
            "whole rows (RowReference), where the exact divergence of each token is computed."
        )

    def log_prob_spec(self, env: EnvBase, specs: Composite) -> TensorSpec:
        """See :class:`Reference`."""
        return Unbounded(env.full_action_spec[self.action_keys.action[0]].shape, device=env.device)
