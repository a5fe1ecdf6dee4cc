"""The distribution of the next token, and texts after which an utterance stops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchrl_lang._checks import Count, checked
from torchrl_lang.functional import filter_logits
from torchrl_lang.functional.precision import upcast_half
from torchrl_lang.modules.actor import LOGITS
from torchrl_lang.modules.decoding.guidance import ValueGuidance
from torchrl_lang.modules.head_values import States
from torchrl_lang.modules.heads import few_of_many
from torchrl_lang.text.chat_tokenizer import decode_action
from torchrl_lang.text.tokenizers import Tokenizer

# Additional candidates for tokens that tie with the k-th best one, which happens in half precision.
_TIES = 14


class NextTokenDistribution(nn.Module):
    """``log softmax(filter(logits / temperature) + guidance)`` over the tokens that are allowed.

    Forbidden tokens are masked first, so they do not count in the filters. Temperature, top-k, top-p and min-p apply to
    the language model's logits only, before the value term; a token that they remove stays removed. If filter and a
    ``"sign"`` term together would remove all tokens, the value term is omitted.

    If ``top_k`` is small compared with the vocabulary, only these tokens are computed: filters, values and
    normalisation use ``[N, k]``. Top-p alone may keep any number, so everything is computed.

    Args:
        forbidden: ids that must not be generated.
        vocab_size: ids from here on are forbidden too (a model may have more than its tokenizer); None for no limit.
        temperature: above zero.
        top_k: number of tokens to keep.
        top_p: probability to keep.
        min_p: least probability to keep, relative to that of the most likely token.
        guidance: the value term.

    Examples:
        >>> import torch
        >>> from torchrl_lang.modules.decoding.next_token import NextTokenDistribution
        >>> rule = NextTokenDistribution([0], temperature=0.5)
        >>> rule({"logits": torch.tensor([[9.0, 1.0, 1.0]])}).exp()
        tensor([[0.0000, 0.5000, 0.5000]])
    """

    forbidden: Tensor

    @checked
    def __init__(
        self,
        forbidden: Sequence[int] = (),
        *,
        vocab_size: Count | None = None,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        guidance: ValueGuidance | None = None,
    ) -> None:
        super().__init__()
        # Invalid settings should fail here, not at the first token.
        filter_logits(torch.zeros(1, 2), temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        self.register_buffer("forbidden", torch.tensor(list(forbidden), dtype=torch.int64), persistent=False)
        self.vocab_size, self.guidance = vocab_size, guidance
        self.temperature, self.top_k, self.top_p, self.min_p = temperature, top_k, top_p, min_p

    def forward(self, states: States) -> Tensor:
        """Log-probability of every next token, ``[N, V]``; ``states`` has ``logits`` and the inputs of guidance."""
        logits = self.allowed(states[LOGITS])
        tokens = self._candidates(logits)
        if tokens is None:
            return self._log_prob(logits, states)
        among = self._log_prob(logits.gather(-1, tokens), states, tokens)
        return among.new_full(logits.shape, -torch.inf).scatter_(-1, tokens, among)

    def _candidates(self, logits: Tensor) -> Tensor | None:
        """Tokens that include all that top-k keeps, int64 ``[N, k]``; None if the full vocabulary is cheaper."""
        if self.top_k is None or not few_of_many(self.top_k + _TIES, logits.shape[-1]):
            return None
        values, tokens = logits.topk(self.top_k + _TIES, -1)
        # Ties with the k-th token are kept as well: if they reach the last candidate, there may be more.
        beyond = (values[..., -1] >= values[..., self.top_k - 1]) & values[..., -1].isfinite()
        return None if bool(beyond.any()) else tokens

    def _log_prob(self, logits: Tensor, states: States, tokens: Tensor | None = None) -> Tensor:
        """Log-probability among some tokens, with their logits; by default among all."""
        filters: Any = {"top_k": self.top_k, "top_p": self.top_p, "min_p": self.min_p}
        logits = filter_logits(logits, temperature=self.temperature, **filters)
        if self.guidance is None:
            return logits.log_softmax(-1)
        # A constant: it depends on the logits only through the set of removed tokens.
        base = logits if self.guidance.include_logits else logits.masked_fill(logits.isfinite(), 0.0)
        guided = base + self.guidance.term(states, tokens)
        if self.guidance.weighting == "sign":
            guided = torch.where(guided.isneginf().all(-1, keepdim=True), base, guided)
        return guided.log_softmax(-1)

    @property
    def only_scales(self) -> bool:
        """Whether a temperature is all that changes the allowed logits: no filter and no values."""
        return all(change is None for change in (self.top_k, self.top_p, self.min_p, self.guidance))

    def behavior(self, states: States) -> Tensor:
        """Log-probability under the language model alone, unfiltered, with the same tokens forbidden."""
        return self.allowed(states[LOGITS]).log_softmax(-1)

    def forbidden_beside(self, values: Tensor) -> Tensor:
        """The forbidden ids, int64, on the device of ``values``: a model may be moved without what decodes it."""
        if self.forbidden.device != values.device:
            with torch.inference_mode(False):  # a loss may save it for its gradients later
                self.forbidden = self.forbidden.to(values.device)
        return self.forbidden

    def allowed(self, logits: Tensor) -> Tensor:
        """The logits with ``-inf`` at forbidden tokens, half precision converted to float32."""
        logits = upcast_half(logits).index_fill(-1, self.forbidden_beside(logits), -torch.inf)
        if self.vocab_size is not None and self.vocab_size < logits.shape[-1]:
            logits[..., self.vocab_size :] = -torch.inf
        return logits


class StopStrings:
    """Finds utterances that contain one of some texts, however the model divides it into tokens.

    An utterance that stops keeps the text and has no end-of-action token. The environment writes the end instead, as
    after any utterance without one, so no token that the policy did not sample counts as its own.

    Args:
        texts: at least one text, none of them empty.
        tokenizer: decodes the utterances.

    Raises:
        ValueError: there is no text, or one is empty.

    Examples:
        >>> import torch
        >>> from torchrl_lang.text import CharTokenizer
        >>> from torchrl_lang.modules import StopStrings
        >>> tokenizer = CharTokenizer.from_alphabet("abc")
        >>> stop = StopStrings(["bc"], tokenizer)
        >>> stop(torch.tensor([tokenizer.encode("abc"), tokenizer.encode("bab")]))
        tensor([ True, False])
    """

    def __init__(self, texts: Sequence[str], tokenizer: Tokenizer) -> None:
        self.texts = tuple([texts] if isinstance(texts, str) else texts)
        if not self.texts or "" in self.texts:
            raise ValueError(f"Stop strings are texts of at least one character, got {list(self.texts)}.")
        self.tokenizer = tokenizer
        # A token has at least one byte, but some are empty in the text: a few more do no harm.
        self._window = 8 + max(len(text.encode()) for text in self.texts)

    def __call__(self, tokens: Tensor) -> Tensor:
        """Whether utterances without padding, int64 ``[N, L]``, now contain a text near their end, bool ``[N]``."""
        written = [decode_action(self.tokenizer, ids[-self._window :]) for ids in tokens.tolist()]
        found = [any(text in end for text in self.texts) for end in written]
        return torch.tensor(found, dtype=torch.bool, device=tokens.device)
