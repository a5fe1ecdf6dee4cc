"""The log-probability of what the agent did, under a frozen reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tensordict import NestedKey, TensorDictBase
from torchrl.data import Composite, TensorSpec

from torchrl_lang.transforms.exact_kl import row_log_probs
from torchrl_lang.transforms.keys import key_list
from torchrl_lang.transforms.reference_transform import ReferenceTransform
from torchrl_lang.transforms.references import RowReference, as_policy, as_reference

__all__ = ["ReferenceModelLogProbTransform"]


class ReferenceModelLogProbTransform(ReferenceTransform):
    """Writes the log-probability of the taken action under a frozen reference.

    The log-probability has the shape that the reference's distribution gives it: ``[*B]`` for an action, ``[*B, K]``
    for the tokens of an utterance, ``[*B, T]`` for the tokens of a row, zero where the agent wrote nothing. It is
    written under ``"next"`` in an environment and on steps, into the data itself on rows and flat data.

    The reference runs without gradients, in evaluation mode and on its ``in_keys`` only; its other outputs are dropped.
    It is not in ``parameters()`` and follows ``.to()``. The ``state_dict`` holds a fingerprint of its weights, or with
    ``embed_weights`` the weights, which loading restores. Loading beside another reference raises, so that a resumed
    run does not take the trained policy for its own reference.

    Args:
        reference: an actor (of which a frozen copy is made: weights that train are copied, frozen ones shared), a
            :class:`FrozenActor`, the key of stored log-probabilities, a language-model wrapper of TorchRL, a function
            ``tensordict -> log_prob``, or any :class:`Reference`; see :func:`as_reference`.
        in_keys: the entries that the reference reads, default those of its actor.
        action_key: the key of the action, default as its actor writes it.
        out_key: the key of the log-probability; default ``"ref_log_prob"``, in the action's group.
        embed_weights: keep the weights of the reference in the ``state_dict``.
        policy: for whole rows: the actor that trains. Where the data has no log-probability of it, that is written too,
            in the same pass: lower layers that both share run once.

    Raises:
        TypeError: ``reference`` is nothing that can score an action.
        KeyError: on calls, an entry is missing.
        RuntimeError: on ``load_state_dict``, the checkpoint was made with another reference; on calls, weights that the
            reference shares with the policy have changed (a compiled call does not check).

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import TensorDictModule
        >>> from torchrl.modules import ProbabilisticActor
        >>> from torchrl_lang.transforms import ReferenceModelLogProbTransform
        >>> net = TensorDictModule(torch.nn.Linear(3, 2), in_keys=["observation"], out_keys=["logits"])
        >>> actor = ProbabilisticActor(net, in_keys=["logits"], distribution_class=torch.distributions.Categorical,
        ...                            return_log_prob=True)
        >>> transform = ReferenceModelLogProbTransform(actor)
        >>> steps = actor(TensorDict(observation=torch.randn(4, 3), batch_size=[4]))
        >>> torch.equal(transform(steps)["ref_log_prob"], steps["action_log_prob"])
        True
        >>> list(transform.parameters()), list(transform.state_dict())
        ([], ['reference_fingerprint'])
    """

    def __init__(
        self,
        reference: Any,
        *,
        in_keys: Sequence[NestedKey] | None = None,
        action_key: NestedKey | Sequence[NestedKey] | None = None,
        out_key: NestedKey | None = None,
        embed_weights: bool = False,
        policy: Any = None,
    ) -> None:
        reference = as_reference(reference, in_keys=in_keys, action_key=action_key)
        out_key = reference.action_keys.ref_log_prob if out_key is None else key_list(out_key)[0]
        super().__init__([out_key], reference, embed_weights=embed_weights)
        self.out_key = out_key
        self.policy = None if policy is None else as_policy(policy, rows=True)
        if not (self.policy is None or isinstance(reference, RowReference)):
            raise ValueError(
                f"policy= is for a reference of whole rows, got a {type(reference).__name__}: give the policy to "
                "KLDivergenceTransform instead."
            )

    def _compute(self, root: TensorDictBase, out: TensorDictBase) -> None:
        self.check_reference()
        key = self.reference.action_keys.log_prob[0]
        if isinstance(self.policy, RowReference) and root.get(key, None) is None:
            log_prob, ref_log_prob = row_log_probs(self.policy, self.reference, root)
            out.set(key, log_prob)
        else:
            ref_log_prob = self.reference.log_prob(root, out)
        out.set(self.out_key, ref_log_prob)

    def _new_specs(self, specs: Composite) -> dict[NestedKey, TensorSpec]:
        spec = self.reference.log_prob_spec(self.environment, specs)
        return {self.out_key: spec, **self.reference.state_specs(self.environment, specs)}
