"""Texts after which an utterance stops."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchrl_lang.text.chat_tokenizer import decode_action
from torchrl_lang.text.tokenizers import Tokenizer

__all__ = ["StopStrings"]


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
        return torch.tensor([self._stops(ids) for ids in tokens.tolist()], dtype=torch.bool, device=tokens.device)

    def _stops(self, ids: list[int]) -> bool:
        written = decode_action(self.tokenizer, ids[-self._window :])
        return any(text in written for text in self.texts)
