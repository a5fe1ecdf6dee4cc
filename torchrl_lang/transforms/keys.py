"""The default keys of the KL transforms: an action, its log-probability, its reward, its divergence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tensordict import NestedKey, unravel_key

from torchrl_lang.schema import ACTION, AGENT_MASK, REWARD, TOKEN_LOG_PROB, TOKEN_REWARD, TOKENS

__all__ = ["KL", "REF_LOG_PROB", "ActionKeys", "key_list", "last_name", "sibling"]

REF_LOG_PROB = "ref_log_prob"
KL = "kl"


@dataclass(frozen=True)
class ActionKeys:
    """Keys of an action, its log-probability under the policy that chose it, its reward, and the mask of its tokens.

    Examples:
        >>> from torchrl_lang.transforms import ActionKeys
        >>> ActionKeys.of_action(("agents", "action")).kl
        ('agents', 'kl')
        >>> ActionKeys.row().mask
        'agent_mask'
    """

    action: tuple[NestedKey, ...]
    """The action; several for a composite action."""
    log_prob: tuple[NestedKey, ...]
    """Its log-probability under the policy; several are summed."""
    reward: NestedKey
    ref_log_prob: NestedKey = REF_LOG_PROB
    kl: NestedKey = KL
    mask: NestedKey | None = None
    """bool, the shape of the log-probability: True on the tokens that count; None where all do."""

    @classmethod
    def of_action(
        cls,
        action: NestedKey | Sequence[NestedKey] = ACTION,
        log_prob: NestedKey | Sequence[NestedKey] | None = None,
    ) -> ActionKeys:
        """One action a step, in TorchRL's names; the keys of a nested action are in its group."""
        actions = key_list(action)
        group = actions[0][:-1] if isinstance(actions[0], tuple) and len(actions) == 1 else ()
        own = [sibling(key, f"{last_name(key)}_log_prob") for key in actions]
        log_probs = own if log_prob is None else key_list(log_prob)
        reward, ref, kl = (unravel_key((*group, name)) for name in (REWARD, REF_LOG_PROB, KL))
        return cls(tuple(actions), tuple(log_probs), reward, ref, kl)

    def named(self, name: str) -> ActionKeys:
        """The same with a prefix on the keys that are written, for a second reference.

        Examples:
            >>> from torchrl_lang.transforms import ActionKeys
            >>> ActionKeys.of_action().named("style").kl
            'style_kl'
        """
        ref, kl = (sibling(key, f"{name}_{last_name(key)}") for key in (self.ref_log_prob, self.kl))
        return replace(self, ref_log_prob=ref, kl=kl)

    @classmethod
    def utterance(cls) -> ActionKeys:
        """One utterance a step, its log-probability token by token, ``[*B, K]``."""
        return cls((ACTION,), (TOKEN_LOG_PROB,), REWARD)

    @classmethod
    def row(cls) -> ActionKeys:
        """A whole episode as one row of tokens, everything ``[*B, T]``."""
        return cls((TOKENS,), (TOKEN_LOG_PROB,), TOKEN_REWARD, mask=AGENT_MASK)


def key_list(keys: NestedKey | Sequence[NestedKey]) -> list[NestedKey]:
    """One key (a string or a nested tuple) or several as a list."""
    return [unravel_key(key) for key in ([keys] if isinstance(keys, (str, tuple)) else keys)]


def last_name(key: NestedKey) -> str:
    """The name of an entry within its group."""
    return key[-1] if isinstance(key, tuple) else key


def sibling(key: NestedKey, name: str) -> NestedKey:
    """The entry ``name`` in the group of ``key``."""
    return unravel_key((*key[:-1], name)) if isinstance(key, tuple) else name
