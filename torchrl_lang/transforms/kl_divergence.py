"""The divergence of the policy from its reference, estimated from what was done or exact."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Literal

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torch.distributions import Distribution
from torchrl.data import Composite, TensorSpec, Unbounded

from torchrl_lang.functional import KLDirection, kl_estimate
from torchrl_lang.functional.checks import one_of
from torchrl_lang.transforms.base import required
from torchrl_lang.transforms.compose_utils import environment_of
from torchrl_lang.transforms.exact_kl import distribution_kl, row_kl
from torchrl_lang.transforms.keys import KL, REF_LOG_PROB, ActionKeys, key_list
from torchrl_lang.transforms.reference_transform import ReferenceTransform
from torchrl_lang.transforms.references import Reference, RowReference, as_policy, as_reference
from torchrl_lang.transforms.references.from_actor import sum_heads

__all__ = ["Estimator", "KLDivergenceTransform", "MissingLogProb"]

Estimator = Literal["k1", "k2", "k3", "exact"]
MissingLogProb = Literal["error", "zero"]


class KLDivergenceTransform(ReferenceTransform):
    """Writes the divergence of the policy from its reference, in nats, for every action, token or sequence.

    With ``rho = ref(a) / pi(a)`` of the action that was taken, after Schulman (2020,
    http://joschu.net/blog/kl-approx.html):

    ===========  ==========================================  ======================================================
    estimator    reverse, ``KL(pi || ref)``                  what for
    ===========  ==========================================  ======================================================
    ``"k1"``     ``-log rho``                                a penalty in the *reward*: the policy gradient then
                                                             follows the divergence's own, without bias
    ``"k2"``     ``(log rho)**2 / 2``                        a term of a *loss*; its gradient is the divergence's
    ``"k3"``     ``rho - 1 - log rho``                       *watching*: unbiased, never negative, little variance
    ``"exact"``  ``sum_a pi(a) log(pi(a) / ref(a))``         no noise, where the distributions are at hand
    ===========  ==========================================  ======================================================

    k3 in a reward is *not* an unbiased penalty, and k1 in a loss has no gradient in the mean; see
    :func:`~torchrl_lang.functional.kl_estimate`. The exact divergence is the same whatever was done, so as a reward it
    holds an action responsible only for the divergence of later ones, never for its own: watch it, limit it, steer the
    coefficient by it, give it to a critic, but penalise with k1. All log-probabilities are of the policy that acted,
    and estimates need actions that were drawn: those of a deterministic policy estimate nothing. Where a squashed
    action (``TanhNormal``) has come to lie on its bound, its log-probability as drawn and as computed from the action
    part by float32's rounding, by a nat or so; ``"exact"`` knows no such trouble.

    Args:
        estimator: ``"k1"``, ``"k2"``, ``"k3"`` or ``"exact"``.
        direction: ``"reverse"``, ``KL(pi || ref)``, or ``"forward"``, ``KL(ref || pi)``, whose estimates are weighted
            by ``rho`` as the actions come from the policy.
        per: ``"token"``: the shape of the log-probability. ``"sequence"``: summed over whatever lies beyond the batch,
            ``[*B, 1]`` for rows and utterances.
        log_prob_key: the policy's log-probability; several keys (heads of a composite action) are summed.
        ref_log_prob_key: the reference's, from :class:`ReferenceModelLogProbTransform` or a column.
        mask_key: bool, the shape of the log-probability; where False the divergence is zero, whatever stands there.
        out_key: where the divergence goes.
        policy: the actor that is trained, used as it is (no copy). ``"exact"`` takes its distribution from parameters
            in the data (``loc`` and ``scale``, say) where they are, and runs it where not. For estimators it is run
            where the data has no log-probability.
        reference: for ``"exact"``: what :class:`ReferenceModelLogProbTransform` takes.
        chunk_size: for ``"exact"`` over a vocabulary: tokens at a time; memory is at most ``32 * chunk_size`` bytes a
            position, whatever the size of the vocabulary.
        missing: without the policy's log-probability raise (``"error"``), or take the divergence for zero (``"zero"``),
            for random policies, such as that of ``check_env_specs``.
        embed_weights: keep the weights of ``reference`` in the ``state_dict``.
        differentiable: gradients flow to the log-probabilities of an estimator, where they carry any; a reward wants
            none.

    Raises:
        ValueError: unknown options; ``"exact"`` without policy or reference; on calls, shapes that differ.
        KeyError: on calls, a log-probability or the mask is missing.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_lang.transforms import KLDivergenceTransform
        >>> data = TensorDict(action_log_prob=torch.tensor([0.5, 0.9]).log(),
        ...                   ref_log_prob=torch.tensor([0.25, 0.6]).log(), batch_size=[2])
        >>> KLDivergenceTransform()(data)["kl"]
        tensor([0.6931, 0.4055])
        >>> KLDivergenceTransform(log_prob_key="log_prob")(data)
        Traceback (most recent call last):
            ...
        KeyError: "KLDivergenceTransform needs the policy's log-probability ['log_prob']; ..."
    """

    def __init__(
        self,
        estimator: Estimator = "k1",
        *,
        direction: KLDirection = "reverse",
        per: Literal["token", "sequence"] = "token",
        log_prob_key: NestedKey | Sequence[NestedKey] = "action_log_prob",
        ref_log_prob_key: NestedKey = REF_LOG_PROB,
        mask_key: NestedKey | None = None,
        out_key: NestedKey = KL,
        policy: TensorDictModuleBase | Reference | None = None,
        reference: Any = None,
        chunk_size: int = 1024,
        missing: MissingLogProb = "error",
        embed_weights: bool = False,
        differentiable: bool = False,
    ) -> None:
        one_of("estimator", estimator, ("k1", "k2", "k3", "exact"))
        one_of("direction", direction, ("reverse", "forward"))
        one_of("per", per, ("token", "sequence"))
        one_of("missing", missing, ("error", "zero"))
        if estimator == "exact" and (policy is None or reference is None):
            raise ValueError(
                "An exact divergence needs both distributions: pass policy=, the actor that acts, and reference=."
            )
        held = None if reference is None else as_reference(reference)
        super().__init__(key_list(out_key), held, embed_weights=embed_weights)
        self.estimator = estimator
        self.direction: KLDirection = direction
        self.per = per
        self.log_prob_keys = key_list(log_prob_key)
        self.ref_log_prob_key = key_list(ref_log_prob_key)[0]
        self.mask_key = mask_key
        self.chunk_size = chunk_size
        self.differentiable = differentiable
        self.missing: MissingLogProb = missing
        self.acting: Reference | None = None  # scores an environment's actions that came without a log-probability
        rows = held is not None and held.action_keys == ActionKeys.row()
        self.policy = None if policy is None else as_policy(policy, rows=rows)

    def _acted_keys(self) -> list[NestedKey]:
        own = [] if self.policy is None else [*self.policy.in_keys, *self.policy.action_keys.action]
        return [*super()._acted_keys(), *own]

    def _compute(self, root: TensorDictBase, out: TensorDictBase) -> None:
        with nullcontext() if self.differentiable else torch.no_grad():
            kl = self._exact(root, out) if self.estimator == "exact" else self._estimate(root, out)
        if self.mask_key is not None:
            mask = required(type(self).__name__, self.mask_key, "It says which tokens count.", root, out)
            if mask.dtype != torch.bool:
                raise TypeError(f"mask_key={self.mask_key!r} must be bool, got {mask.dtype}: convert it with .bool().")
            if mask.shape != kl.shape:
                raise ValueError(
                    f"mask_key={self.mask_key!r} has shape {tuple(mask.shape)}, the divergence {tuple(kl.shape)}: give "
                    "a mask of the tokens' shape."
                )
            kl = torch.where(mask, kl, 0)  # select rather than multiply: what is masked may be NaN
        if self.per == "sequence" and kl.ndim > root.batch_dims:
            kl = kl.flatten(root.batch_dims).sum(-1, keepdim=True)
        out.set(self.out_keys[0], kl)

    def _estimate(self, root: TensorDictBase, out: TensorDictBase) -> Tensor:
        name = type(self).__name__
        ref = required(name, self.ref_log_prob_key, "Put ReferenceModelLogProbTransform before it.", out, root)
        log_prob = self._log_prob(root, ref)
        if log_prob.shape != ref.shape and _up_to_one(log_prob.shape) == _up_to_one(ref.shape):
            log_prob = log_prob.reshape(ref.shape)
        if log_prob.shape != ref.shape:
            raise ValueError(
                f"{name}: the policy's log-probability {self.log_prob_keys} has shape {tuple(log_prob.shape)}, the "
                f"reference's {self.ref_log_prob_key!r} {tuple(ref.shape)}. Both must be per token or both per "
                "action: choose the entry with log_prob_key=."
            )
        return kl_estimate(log_prob, ref, self.estimator, self.direction)  # type: ignore[arg-type]

    def _log_prob(self, root: TensorDictBase, ref: Tensor) -> Tensor:
        """The policy's log-probability: from the data, from the policy, or, where that is allowed, the reference's."""
        found = [root.get(key, None) for key in self.log_prob_keys]
        if all(value is not None for value in found):
            return sum_heads(found)
        policy = self.acting if self.policy is None and environment_of(self) is not None else self.policy
        if policy is not None:
            return policy.log_prob(root, root.empty())
        if self.missing == "zero":
            return ref
        missing = [key for key, value in zip(self.log_prob_keys, found, strict=True) if value is None]
        raise KeyError(
            f"{type(self).__name__} needs the policy's log-probability {missing}; the data has "
            f"{sorted(map(str, root.keys(True, True)))}. Build the actor with return_log_prob=True, name the entry "
            "with log_prob_key=, or, for a random policy (as check_env_specs has), pass missing='zero'."
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "acting": None}  # a copy would not learn what the policy learns

    def _exact(self, root: TensorDictBase, out: TensorDictBase) -> Tensor:
        policy, reference = self.policy, self.held
        self.check_reference()
        forward = self.direction == "forward"
        if isinstance(policy, RowReference) and isinstance(reference, RowReference):
            return row_kl(policy, reference, root, forward=forward, chunk_size=self.chunk_size)
        p, q = self._policy_distribution(root), reference.distribution(root, out)
        return distribution_kl(*((q, p) if forward else (p, q)), chunk_size=self.chunk_size)

    def _policy_distribution(self, root: TensorDictBase) -> Distribution:
        """From its parameters where the policy left them in the data, for they are of the policy that acted."""
        policy: Any = self.policy
        actor = policy.frozen.actor
        parameters = getattr(actor, "dist_params_keys", None)
        if parameters and all(root.get(key, None) is not None for key in parameters):
            return actor.build_dist_from_params(root)
        return policy.distribution(root, root.empty())

    def _new_specs(self, observation_spec: Composite) -> dict[NestedKey, TensorSpec]:
        if self.estimator == "exact":
            shape, dtype = self._exact_like(observation_spec)
        else:
            if self.ref_log_prob_key not in observation_spec.keys(True, True):
                raise KeyError(
                    f"The environment has no {self.ref_log_prob_key!r}: put ReferenceModelLogProbTransform before "
                    f"{type(self).__name__}."
                )
            ref = observation_spec[self.ref_log_prob_key]
            shape, dtype = ref.shape, torch.promote_types(ref.dtype, torch.float32)
        batch = observation_spec.shape
        if self.per == "sequence" and len(shape) > len(batch):
            shape = torch.Size([*batch, 1])
        return {self.out_keys[0]: Unbounded(shape, dtype=dtype, device=observation_spec.device)}

    def _exact_like(self, observation_spec: Composite) -> tuple[torch.Size, torch.dtype]:
        """From the reference alone: there may be no policy here to run."""
        step = self.held.made_up_step(self.parent, observation_spec)
        dist = self.held.distribution(step, step.copy())
        kl = distribution_kl(dist, dist, chunk_size=self.chunk_size)
        return kl.shape, kl.dtype


def _up_to_one(shape: torch.Size) -> torch.Size:
    return shape[:-1] if shape and shape[-1] == 1 else shape
