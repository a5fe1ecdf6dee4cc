"""Guidance by a second language model whose token probabilities are action values (Q-SFT, arXiv 2411.05193)."""

from __future__ import annotations

from collections.abc import Mapping

from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModuleBase
from torch import Tensor

from torchrl_lang.functional.precision import upcast_half
from torchrl_lang.modules.actor import ACTION_VALUE, LOGITS, split_actor
from torchrl_lang.modules.decoding.guidance import ValueGuidance

__all__ = ["LikelihoodGuidance", "TokenProbabilities"]


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
        >>> from torchrl_lang.modules import LikelihoodGuidance, UtteranceActor, causal_lm, language_actor
        >>> control, size = CharTokenizer.from_alphabet("abc").control, {"layers": 1, "width": 8, "heads": 2}
        >>> pi, p = (language_actor(causal_lm(vocab_size=11, max_length=16, **size)) for _ in range(2))
        >>> policy = UtteranceActor(pi, control, 4, guidance=LikelihoodGuidance(p, beta=8.0), method="greedy")
        >>> policy.decoder.rule.guidance.beta
        8.0
    """

    def __init__(self, model: ProbabilisticTensorDictSequential, *, beta: float, ratio: bool = False) -> None:
        trunk, head, _ = split_actor(model)
        super().__init__(TokenProbabilities(head), beta=beta, value_trunk=trunk)
        self.ratio = ratio

    def forward(self, hidden: Tensor, hidden_pre_norm: Tensor | None = None) -> Tensor:
        """The term for every next token, ``[N, H] -> [N, V]``, from what the model's own trunk writes.

        Raises:
            ValueError: with ``ratio``, which also needs the logits of the actor that is guided.
        """
        if self.ratio:
            raise ValueError(
                "With ratio=True the values are divided by the probabilities of the actor that is guided, which hidden "
                f"states of shape {tuple(hidden.shape)} do not hold: call term(states) with its '{LOGITS}' in states."
            )
        return super().forward(hidden, hidden_pre_norm)

    def term(self, states: Mapping[str, Tensor], tokens: Tensor | None = None) -> Tensor:
        """See :meth:`ValueGuidance.term`; with ``ratio`` it also reads the actor's ``logits``."""
        if not self.ratio:
            return super().term(states, tokens)
        value = self._least_q(self._own(states)) / upcast_half(states[LOGITS]).softmax(-1)
        term = self.beta * value.nan_to_num(0.0).clamp_max(1.0)
        return term if tokens is None else term.gather(-1, tokens)


class TokenProbabilities(TensorDictModuleBase):
    """What a language model's trunk wrote -> ``action_value`` ``[N, 1, V]``: the probability of every next token."""

    def __init__(self, head: TensorDictModuleBase | None) -> None:
        super().__init__()
        self.head = head
        self.in_keys, self.out_keys = [LOGITS] if head is None else list(head.in_keys), [ACTION_VALUE]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write ``action_value``."""
        logits = (tensordict if self.head is None else self.head(tensordict)).get(LOGITS)
        return tensordict.set(ACTION_VALUE, upcast_half(logits).softmax(-1).unsqueeze(-2))
