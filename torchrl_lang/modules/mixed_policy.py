"""Mix a policy with another one whose turns stay in the transcript but are excluded from training."""

from __future__ import annotations

import math

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from torchrl_lang._checks import Unit, checked
from torchrl_lang._random_stream import RandomStream
from torchrl_lang.modules.head_values import STATE_VALUE
from torchrl_lang.modules.hugging_face import is_stochastic
from torchrl_lang.schema import ACTION, DONE, IS_EXAMPLE, TOKENS, TRAIN_MASK, entry


class MixedPolicy(TensorDictModuleBase):
    """Replaces a policy's turns by those of an example policy at random, for exploration or as demonstrations.

    In each row and turn, independently with probability ``prob``, the example policy writes the utterance. The episode
    continues from it and its reward counts, but its tokens should not be trained on as if the policy had generated
    them. Rows that are done get no example. In the other rows the policy generates the same as without examples; rows
    with an example are passed to it as done.

    The module writes these entries beside those of ``policy``:

    ==============  =================  ==========================================
    key             dtype, shape       meaning
    ==============  =================  ==========================================
    ``is_example``  bool ``[*B, 1]``   the example policy wrote this turn
    ``train_mask``  bool ``[*B, K]``   False on the tokens of such a turn
    ==============  =================  ==========================================

    In rows with an example the entries of the policy are set to zero (such as ``token_log_prob``), ``state_value`` to
    NaN. The action, and entries that the policy reads again (recurrent states), are not.

    To train on such games carry ``train_mask`` into the rows, ``rows_from_rollout(steps, unfinished="drop",
    carry=["token_log_prob", "train_mask"])``: the losses of this library exclude these tokens. KL penalties exclude
    them with ``KLConstrainedTransform(..., mask_key="train_mask")``.

    With TorchRL's ``set_exploration_type(ExplorationType.DETERMINISTIC)`` there are no examples. Otherwise there are
    examples in evaluation, too, so evaluate ``policy`` itself.

    Args:
        policy: writes ``action``, int64 ``[*B, K]``.
        example: writes ``action``, e.g. :class:`~torchrl_lang.envs.textworld.RandomAdmissiblePlayer`; its other entries
            are ignored.
        prob: probability of an example.
        seed: seed of the random choice of turns; by default from the operating system. A copy or pickle continues with
            the same numbers if a seed was given, and takes a new seed otherwise.

    Raises:
        ValueError: ``prob`` is not a probability, or a policy does not write ``action``; on calls, the actions have
            different shapes.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import TensorDictModule
        >>> from torchrl_lang.modules import MixedPolicy
        >>> ones, twos = (TensorDictModule(lambda tokens, n=n: torch.full_like(tokens[..., :2], n), ["tokens"],
        ...                                ["action"]) for n in (1, 2))
        >>> policy = MixedPolicy(ones, twos, 0.5, seed=0)
        >>> out = policy(TensorDict(tokens=torch.zeros(4, 6, dtype=torch.int64), batch_size=[4]))
        >>> torch.equal(out["action"] == 2, out["is_example"].expand(4, 2))
        True
        >>> torch.equal(out["train_mask"], out["action"] == 1)
        True
    """

    @checked
    def __init__(
        self, policy: TensorDictModuleBase, example: TensorDictModuleBase, prob: Unit, *, seed: int | None = None
    ) -> None:
        super().__init__()
        self.policy, self.example, self.prob = policy, example, prob
        self.stream = RandomStream(seed)
        self.in_keys = list(dict.fromkeys([TOKENS, *policy.in_keys, *example.in_keys]))
        self.out_keys = list(dict.fromkeys([*policy.out_keys, IS_EXAMPLE, TRAIN_MASK]))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write an utterance for every row, and which policy generated it."""
        tokens = entry(tensordict, TOKENS)
        done = tensordict.get(DONE, None)
        if done is None:
            done = torch.zeros((*tokens.shape[:-1], 1), dtype=torch.bool, device=tokens.device)
        sampled, chosen = is_stochastic(), torch.zeros_like(done)
        if sampled:  # numbers are drawn for all rows: a row's do not depend on which others are done
            chosen = (self.stream.uniform(tuple(done.shape)) < self.prob).to(done.device) & ~done
        out = self.policy(tensordict.copy().set(DONE, done | chosen))
        example = action = out.get(ACTION)
        if self.prob and sampled:  # otherwise the example policy is not called
            example = self.example(tensordict.copy().set(DONE, done | ~chosen)).get(ACTION)
        if action.shape != example.shape:  # would broadcast
            raise ValueError(f"Actions {[*action.shape]} and {[*example.shape]}: use the same action_length for both.")
        for key in self.policy.out_keys:
            value = out.get(key, None)
            if value is not None:
                tensordict.set(key, value if self._is_memory(key) else _without(value, chosen, key))
        tensordict.set(ACTION, torch.where(chosen, example, action))
        tensordict.set(IS_EXAMPLE, chosen)
        return tensordict.set(TRAIN_MASK, (~chosen).expand(action.shape).clone())

    def _is_memory(self, key: NestedKey) -> bool:
        """Whether the policy reads this entry again, as ``"h"`` and ``("next", "h")`` of a recurrent one."""
        parts = key if isinstance(key, tuple) else (key,)
        read = [known if isinstance(known, tuple) else (known,) for known in self.policy.in_keys]
        return parts in read or (parts[0] == "next" and parts[1:] in read)


def _without(value: Tensor, chosen: Tensor, key: NestedKey) -> Tensor:
    """The policy's entry ``[*B, ...]``, cleared in the ``chosen`` rows, bool ``[*B, 1]``."""
    batch = chosen.shape[:-1]
    nothing = math.nan if (key[-1] if isinstance(key, tuple) else key) == STATE_VALUE else 0
    return value.masked_fill(chosen.reshape(*batch, *[1] * (value.ndim - len(batch))), nothing)
