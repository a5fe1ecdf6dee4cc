"""Value guidance: learned values that are added to a language model's logits in decoding."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModule, TensorDictModuleBase
from torch import Tensor, nn

from torchrl_lang._checks import check_options
from torchrl_lang.functional.precision import upcast_half
from torchrl_lang.modules.actor import LOGITS, joined, split_actor
from torchrl_lang.modules.head_values import ACTION_VALUE, STATE_VALUE, UTTERANCE_VALUE, apply_head, check_writes
from torchrl_lang.modules.heads import ActionValueHead
from torchrl_lang.modules.trunk import HIDDEN, Trunk, trunk_module

VALUE_STATES = "value_"
"""Beginning of the names of a separate value trunk's states."""


class ValueGuidance(nn.Module):
    """The value term of the policy ``softmax(filter(logits / temperature) + term)`` (ILQL, arXiv 2206.11871, eq. 5).

    With ``A = min_k Q_k - V``, the minimum over heads clipped to ``[value_min, value_max]``:

    - ``"exp"``: ``term = beta * A``;
    - ``"sign"``: ``term = log(beta)`` where ``A > 0``, else ``log(1 - beta)``;

    both at most ``clip``. With ``"exp"`` and no ``clip`` the value ``V`` is the same for all tokens and cancels in the
    softmax; it is then not computed, and the term is ``beta * min_k Q_k``.

    Args:
        qvalue: action values, usually those of the target parameters: a :class:`QValueHead`, a
            :class:`TiedQValueHead` or any TensorDictModule that writes ``action_value`` ``[N, n_q, V]``.
        value: state value, a :class:`ValueHead` or a module that writes ``state_value`` ``[N, 1]``. Needed for
            ``"sign"``, for ``clip`` and for ranking by advantage.
        beta: strength; with ``"sign"`` a weight in ``[0, 1]``.
        weighting: ``"exp"`` or ``"sign"``.
        clip: upper bound of the term, e.g. 0 to only reduce probabilities of tokens.
        include_logits: False omits the language model's logits from the sum.
        value_min: lower bound of the action values.
        value_max: upper bound of the action values.
        value_trunk: the values' own trunk, or a TensorDictModule over one, if they do not share the actor's.

    Raises:
        ValueError: ``V`` is needed and missing, ``beta`` is out of range, or a module writes other keys.

    Examples:
        >>> import torch
        >>> from torchrl_lang.modules import QValueHead, ValueGuidance
        >>> guidance = ValueGuidance(QValueHead(8, 5), beta=4.0)
        >>> guidance(torch.randn(3, 8)).shape
        torch.Size([3, 5])
    """

    _values = ACTION_VALUE
    """The key that ``qvalue`` writes."""

    def __init__(
        self,
        qvalue: nn.Module,
        value: nn.Module | None = None,
        *,
        beta: float,
        weighting: Literal["exp", "sign"] = "exp",
        clip: float | None = None,
        include_logits: bool = True,
        value_min: float | None = None,
        value_max: float | None = None,
        value_trunk: Trunk | TensorDictModuleBase | None = None,
    ) -> None:
        super().__init__()
        strength = "[0, 1]" if weighting == "sign" else "(-inf, inf)"
        check_options(weighting=(weighting, ("exp", "sign")), beta=(beta, strength))
        check_writes("qvalue", qvalue, self._values)
        check_writes("value", value, STATE_VALUE)
        self.needs_value = weighting == "sign" or clip is not None
        if self.needs_value and value is None:
            raise ValueError("weighting='sign' and clip need the state value: pass value=.")
        # The trunk before the heads, so that a copy of this module ties a head to the copied trunk.
        self.value_trunk = trunk_module(value_trunk) if isinstance(value_trunk, Trunk) else value_trunk
        self.qvalue, self.value = qvalue, value
        self.beta, self.weighting, self.clip, self.include_logits = beta, weighting, clip, include_logits
        self.value_min, self.value_max = value_min, value_max

    def forward(self, hidden: Tensor) -> Tensor:
        """The term for every next token, ``[N, H] -> [N, V]``."""
        return self._term({HIDDEN: hidden})

    def term(self, states: Mapping[str, Tensor], tokens: Tensor | None = None) -> Tensor:
        """The term for every next token, from a runner's states; or for some tokens, int64 ``[N, k] -> [N, k]``.

        For some tokens a Q head of this library computes only their values, if that is cheaper than all values.
        """
        return self._term(self._own(states), tokens)

    def advantage(self, states: Mapping[str, Tensor], tokens: Tensor | None = None) -> Tensor:
        """``A = min_k Q_k - V`` of every next token, ``[N, V]``, or of some as in :meth:`term`."""
        own = self._own(states)
        return self._least_q(own, tokens) - self._v(own)

    def end_value(self, states: Mapping[str, Tensor], end_of_action: int) -> Tensor:
        """``min_k Q_k`` of ending the utterance in each state, ``[N]``."""
        own = self._own(states)
        state = next(iter(own.values()))
        end = torch.full((state.shape[0], 1), end_of_action, device=state.device)
        return self._least_q(own, end).squeeze(-1)

    def _own(self, states: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        if self.value_trunk is None:
            return states
        return {key[len(VALUE_STATES) :]: value for key, value in states.items() if key.startswith(VALUE_STATES)}

    def _term(self, states: Mapping[str, Tensor], tokens: Tensor | None = None) -> Tensor:
        score = self._least_q(states, tokens)
        if self.needs_value:
            score = score - self._v(states)
        if self.weighting == "exp":
            term = self.beta * score
        else:
            term = torch.where(score > 0, _log(self.beta), _log(1 - self.beta)).to(score.dtype)
        return term if self.clip is None else term.clamp_max(self.clip)

    def _least_q(self, states: Mapping[str, Tensor], tokens: Tensor | None = None) -> Tensor:
        least = self._action_values(states, tokens).amin(-2)
        return least if self.value_min is self.value_max is None else least.clamp(self.value_min, self.value_max)

    def _action_values(self, states: Mapping[str, Tensor], tokens: Tensor | None) -> Tensor:
        """``[N, n_q, V]``, or of some tokens ``[N, n_q, k]``."""
        if tokens is None:
            return apply_head(self.qvalue, states, ACTION_VALUE)
        head: Any = self.qvalue
        if type(head) is TensorDictModule and head.in_keys == [HIDDEN]:
            head = head.module
        if isinstance(head, ActionValueHead) and HIDDEN in states:
            return head.among(states[HIDDEN], tokens)
        everything = apply_head(self.qvalue, states, ACTION_VALUE)
        return everything.gather(-1, tokens.unsqueeze(-2).expand(-1, everything.shape[-2], -1))

    def _v(self, states: Mapping[str, Tensor]) -> Tensor:
        if self.value is None:
            raise ValueError("Ranking by advantage needs the state value: build ValueGuidance with value=.")
        return apply_head(self.value, states, STATE_VALUE)


def _log(x: float) -> float:
    return math.log(x) if x > 0 else -math.inf


class UtteranceValueGuidance(ValueGuidance):
    """Values of finished utterances for ranking: the next-token distribution stays the language model's.

    The policy of ILQL with one value an utterance (arXiv 2206.11871) samples candidates and plays the one with the
    highest ``end_value_weight * min_k Q_k + log_prob_weight * log pi(u | s)``. Q reads the last state of the utterance,
    in which its end is written: ``UtteranceActor(..., method="best_of", candidates=N, end_value_weight=1,
    log_prob_weight=w)``.

    Args:
        qvalue: usually with the target parameters: a :class:`UtteranceQValueHead`, or a TensorDictModule that writes
            ``utterance_value`` ``[N, n_q]``.
        value_trunk: the values' own trunk, or a TensorDictModule over one, if they do not share the actor's.

    Raises:
        ValueError: ``qvalue`` writes other keys.

    Examples:
        >>> import torch
        >>> from torchrl_lang.modules import UtteranceQValueHead, UtteranceValueGuidance
        >>> guidance = UtteranceValueGuidance(UtteranceQValueHead(8))
        >>> guidance.end_value({"hidden": torch.randn(3, 8)}).shape
        torch.Size([3])
    """

    _values = UTTERANCE_VALUE

    def __init__(self, qvalue: nn.Module, *, value_trunk: Trunk | TensorDictModuleBase | None = None) -> None:
        super().__init__(qvalue, beta=0.0, value_trunk=value_trunk)

    def end_value(self, states: Mapping[str, Tensor], end_of_action: int | None = None) -> Tensor:
        """``min_k Q_k`` of the utterance that ends in each state, ``[N]``."""
        return apply_head(self.qvalue, self._own(states), UTTERANCE_VALUE).amin(-1)

    def _term(self, states: Mapping[str, Tensor], tokens: Tensor | None = None) -> Tensor:
        """Zero for every token, ``[]``."""
        return next(iter(states.values())).new_zeros(())


class LikelihoodGuidance(ValueGuidance):
    """The value term ``beta * p(a | s)`` of the policy ``pi(a | s) exp(beta p(a | s)) / Z``.

    The policy of Q-SFT (arXiv 2411.05193), where ``pi`` is the language model that imitates the data, the actor that is
    guided, and ``p`` the one that :class:`~torchrl_lang.objectives.QSFTLoss` trains. ``p`` is the value of a token
    times its probability under ``pi``, so the policy leaves the data's habits only for much better tokens.

    With ``ratio`` the term is ``beta * min(1, p(a | s) / pi(a | s))``, the value itself, which is what the loss backs
    up. It is only noise at tokens that hardly occur: give the actor the loss's ``threshold`` as ``min_p``. That is not
    in the paper.

    Both are at most 1, so ``beta`` is the greatest change of a log-ratio of two tokens.

    Args:
        model: the language actor of ``p``, whose weights the guidance shares.
        beta: strength; 0 leaves ``pi`` as it is.
        ratio: whether to divide by ``pi``.

    Raises:
        ValueError: ``beta`` is not finite.

    Examples:
        >>> from torchrl_lang.text import CharTokenizer
        >>> from torchrl_lang.modules import UtteranceActor, causal_lm, language_actor
        >>> from torchrl_lang.modules.decoding.guidance import LikelihoodGuidance
        >>> control, size = CharTokenizer.from_alphabet("abc").control, {"layers": 1, "width": 8, "heads": 2}
        >>> pi, p = (language_actor(causal_lm(vocab_size=11, max_length=16, **size)) for _ in range(2))
        >>> policy = UtteranceActor(pi, control, 4, guidance=LikelihoodGuidance(p, beta=8.0), method="greedy")
        >>> policy.decoder.rule.guidance.beta
        8.0
    """

    def __init__(self, model: ProbabilisticTensorDictSequential, *, beta: float, ratio: bool = False) -> None:
        trunk, head, _ = split_actor(model)
        values = TensorDictModule(_probabilities, in_keys=[LOGITS], out_keys=[ACTION_VALUE])
        super().__init__(joined([values] if head is None else [head, values]), beta=beta, value_trunk=trunk)
        self.ratio = ratio

    def forward(self, hidden: Tensor) -> Tensor:
        """The term for every next token, ``[N, H] -> [N, V]``, from what the model's own trunk writes.

        Raises:
            ValueError: with ``ratio``, which also needs the logits of the actor that is guided.
        """
        if self.ratio:
            raise ValueError(f"ratio=True needs the '{LOGITS}' of the guided actor: call term(states), not the module.")
        return super().forward(hidden)

    def term(self, states: Mapping[str, Tensor], tokens: Tensor | None = None) -> Tensor:
        """See :meth:`ValueGuidance.term`; with ``ratio`` it also reads the actor's ``logits``."""
        if not self.ratio:
            return super().term(states, tokens)
        value = self._least_q(self._own(states)) / upcast_half(states[LOGITS]).softmax(-1)
        term = self.beta * value.nan_to_num(0.0).clamp_max(1.0)
        return term if tokens is None else term.gather(-1, tokens)


def _probabilities(logits: Tensor) -> Tensor:
    """The probability of every next token as the values of one head, ``[N, V] -> [N, 1, V]``."""
    return upcast_half(logits).softmax(-1).unsqueeze(-2)
