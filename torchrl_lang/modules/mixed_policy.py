"""Turns played by somebody else in between, to be remembered and not learned."""

from __future__ import annotations

import math

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from torchrl_lang.functional import RandomStream
from torchrl_lang.modules.actor import STATE_VALUE
from torchrl_lang.modules.stochastic import is_stochastic
from torchrl_lang.schema import ACTION, DONE, IS_EXAMPLE, TOKENS, TRAIN_MASK, entry

__all__ = ["MixedPolicy"]


class MixedPolicy(TensorDictModuleBase):
    """A policy in whose place another player speaks now and then: exploration, and examples in the transcript.

    In each row and turn, with probability ``prob`` and independently of all others, the utterance is the example's. The
    episode goes on from it, and what it earned is earned; it just is not what the policy would have said, so that its
    tokens are not to be learned as if it were. Rows that are done get no example. What the policy says in the other
    rows is what it would say without, and in rows with an example it is not asked: it sees them as done.

    Beside what ``policy`` writes it writes

    ==============  =================  =================================================================================
    key             dtype, shape       meaning
    ==============  =================  =================================================================================
    ``is_example``  bool ``[*B, 1]``   the turn is the example's
    ``train_mask``  bool ``[*B, K]``   False on the tokens of such a turn
    ==============  =================  =================================================================================

    and, in rows with an example, zero into whatever the policy writes (``token_log_prob``, say), NaN into
    ``state_value``; but for the action and for what it reads again, which is its memory.

    To train on such games carry ``train_mask`` into the rows, ``rows_from_rollout(steps, unfinished="drop",
    carry=["token_log_prob", "train_mask"])``: the losses of this library leave those tokens out by themselves. Rewards
    kept near a reference do with ``KLConstrainedTransform(..., mask_key="train_mask")``.

    Under TorchRL's ``set_exploration_type(ExplorationType.DETERMINISTIC)`` the policy speaks alone. Otherwise examples
    are played in evaluation, too: evaluate the policy itself.

    Args:
        policy: writes ``action``, int64 ``[*B, K]``.
        example: writes ``action``, e.g. :class:`~torchrl_lang.envs.textworld.RandomAdmissiblePlayer`; whatever else it
            writes is dropped.
        prob: probability of an example.
        seed: of the stream that chooses the turns; without one it takes a seed from the operating system. A copy,
            pickled or not, goes on with the same numbers if a seed was given, and takes a new seed if not.

    Raises:
        ValueError: ``prob`` is no probability, or one of the two does not write ``action``; on calls, they write
            actions of different shapes.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import TensorDictModule
        >>> from torchrl_lang.modules import MixedPolicy
        >>> ones, twos = (TensorDictModule(lambda tokens, n=n: torch.full_like(tokens[..., :2], n), ["tokens"],
        ...                                ["action"]) for n in (1, 2))
        >>> policy = MixedPolicy(ones, twos, 0.5, seed=0)
        >>> said = policy(TensorDict(tokens=torch.zeros(4, 6, dtype=torch.int64), batch_size=[4]))
        >>> torch.equal(said["action"] == 2, said["is_example"].expand(4, 2))
        True
        >>> torch.equal(said["train_mask"], said["action"] == 1)
        True
    """

    def __init__(
        self, policy: TensorDictModuleBase, example: TensorDictModuleBase, prob: float, *, seed: int | None = None
    ) -> None:
        super().__init__()
        if not 0 <= prob <= 1:
            raise ValueError(f"prob is a probability, got {prob}.")
        for name, player in (("policy", policy), ("example", example)):
            if ACTION not in getattr(player, "out_keys", ()):
                raise ValueError(
                    f"{name} must be a module of tensordicts that writes '{ACTION}', this {type(player).__name__} "
                    f"writes {list(getattr(player, 'out_keys', ()))}."
                )
        self.policy, self.example, self.prob = policy, example, prob
        self.stream = RandomStream(seed)
        self.in_keys = list(dict.fromkeys([TOKENS, *policy.in_keys, *example.in_keys]))
        self.out_keys = list(dict.fromkeys([*policy.out_keys, IS_EXAMPLE, TRAIN_MASK]))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write an utterance for every row, and whose it is."""
        tokens = entry(tensordict, TOKENS)
        done = tensordict.get(DONE, None)
        if done is None:
            done = torch.zeros((*tokens.shape[:-1], 1), dtype=torch.bool, device=tokens.device)
        chosen = self._chosen(done) & ~done
        said = self.policy(tensordict.copy().set(DONE, done | chosen))
        shown = action = said.get(ACTION)
        if self.prob and is_stochastic():  # else nobody needs what the example reads
            shown = self.example(tensordict.copy().set(DONE, done | ~chosen)).get(ACTION)
        if action.shape != shown.shape:
            raise ValueError(
                f"The policy's actions are {tuple(action.shape)} and the example's {tuple(shown.shape)}: give both one "
                "action_length."
            )
        for key in self.policy.out_keys:
            value = said.get(key, None)
            if value is not None:
                tensordict.set(key, value if self._is_memory(key) else _without(value, chosen, key))
        tensordict.set(ACTION, torch.where(chosen, shown, action))
        tensordict.set(IS_EXAMPLE, chosen)
        return tensordict.set(TRAIN_MASK, (~chosen).expand(action.shape).clone())

    def _is_memory(self, key: NestedKey) -> bool:
        """Whether the policy reads again what it writes there, as ``"h"`` and ``("next", "h")`` of a recurrent one."""
        parts = key if isinstance(key, tuple) else (key,)
        read = [known if isinstance(known, tuple) else (known,) for known in self.policy.in_keys]
        return parts in read or (parts[0] == "next" and parts[1:] in read)

    def _chosen(self, like: Tensor) -> Tensor:
        """The rows of this turn that get an example, were they not done, bool ``[*B, 1]``."""
        if not is_stochastic():
            return torch.zeros_like(like)
        return (self.stream.uniform(tuple(like.shape)) < self.prob).to(like.device)


def _without(value: Tensor, chosen: Tensor, key: NestedKey) -> Tensor:
    """What the policy wrote, ``[*B, ...]``, with nothing in it of the rows that are not its own, bool ``[*B, 1]``."""
    batch = chosen.shape[:-1]
    nothing = math.nan if (key[-1] if isinstance(key, tuple) else key) == STATE_VALUE else 0
    return value.masked_fill(chosen.reshape(*batch, *[1] * (value.ndim - len(batch))), nothing)
