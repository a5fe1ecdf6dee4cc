"""The tokens of a template's steps as tables, so that batches of steps are encoded without a loop over them."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_lang.algorithm_distillation.language.quantizers import FiniteQuantizer
from torchrl_lang.algorithm_distillation.language.step_template import Slot, StepTemplate, TokenKind
from torchrl_lang.algorithm_distillation.language.step_text import end_index, entry_values, has_no_reward
from torchrl_lang.text import CharTokenizer, Tokenizer

__all__ = ["Part", "StepTokens", "Tokens", "encode_word", "template_tokenizer"]

Part = Literal["state", "action", "outcome"]
"""What of a step: all before its action, the action, or all after it."""


class Tokens(NamedTuple):
    """Tokens of steps, some of which are left out."""

    ids: Tensor
    """int64 ``[*B, W]``."""
    kept: Tensor
    """bool ``[*B, W]``: False where a step has no such token."""
    kind: Tensor
    """int64 ``[W]``: a :class:`TokenKind`."""


def template_tokenizer(template: StepTemplate) -> CharTokenizer:
    """A tokenizer of the words of a template: one token for each word, or for each character of a decimal number.

    Examples:
        >>> from torchrl_lang.algorithm_distillation.language import Levels, StepTemplate, template_tokenizer
        >>> template = StepTemplate.spelled([Levels(range(5))], Levels(range(2), ["west", "east"]), Levels([0, 1]))
        >>> tokenizer = template_tokenizer(template)
        >>> tokenizer.decode(tokenizer.encode(" at 3 go east got 0")), len(tokenizer.encode(" at 3 go east got 0"))
        (' at 3 go east got 0', 6)
    """
    return CharTokenizer.from_alphabet(template.vocabulary())


def encode_word(word: str, tokenizer: Tokenizer) -> list[int]:
    """The tokens of a word with the space before it."""
    return tokenizer.encode(f" {word}")


class _Table(NamedTuple):
    """The tokens of each word that a slot may hold, and of nothing in the last row."""

    ids: Tensor
    """int64 ``[words + 1, P]``."""
    kept: Tensor
    """bool ``[words + 1, P]``."""


class StepTokens:
    """Encodes steps with a tokenizer: a table for each slot of the template maps numbers to tokens.

    A word may have several tokens, as in a pretrained tokenizer. The tokens are those of the steps' text: each word is
    encoded with the space before it.

    Args:
        template: a template whose quantizers all have finitely many words.
        tokenizer: encodes the words.

    Raises:
        ValueError: a quantizer has no finite number of words, or the tokenizer cannot encode a word.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_lang.algorithm_distillation.language import Levels, StepTemplate
        >>> from torchrl_lang.algorithm_distillation.language import StepTokens, template_tokenizer
        >>> template = StepTemplate.compact([Levels(range(5))], Levels(range(2), ["west", "east"]), Levels([0, 1]))
        >>> tokens = StepTokens(template, template_tokenizer(template))
        >>> steps = TensorDict(observation=torch.tensor([[3], [4]]), action=torch.tensor([1, 0]), batch_size=[2])
        >>> tokens.encode(steps, "state").ids.tolist(), tokens.encode(steps, "action").ids.tolist()
        ([[3], [4]], [[6], [5]])
    """

    def __init__(self, template: StepTemplate, tokenizer: Tokenizer) -> None:
        if not template.is_finite:
            raise ValueError(
                "Tables of tokens need quantizers with finitely many words, but the template has decimals: use Bins or "
                "Levels."
            )
        self.template, self.tokenizer = template, tokenizer
        self._tables = [_table(slot, tokenizer) for slot in template.slots]
        actions = [place for place, slot in enumerate(template.slots) if slot.kind == TokenKind.ACTION]
        self._places = {
            "state": range(actions[0]),
            "action": range(actions[0], actions[-1] + 1),
            "outcome": range(actions[-1] + 1, len(template.slots)),
        }

    @property
    def longest_step(self) -> int:
        """The largest number of tokens of a step."""
        return sum(int(table.kept.sum(-1).max()) for table in self._tables)

    def words(self, kind: TokenKind) -> list[Tensor]:
        """The tokens of the words of each slot of a kind, int64 ``[words]``.

        Raises:
            ValueError: a word has several tokens.
        """
        found = []
        for slot, table in zip(self.template.slots, self._tables, strict=True):
            if slot.kind == kind:
                if (table.kept[:-1].sum(-1) != 1).any():
                    raise ValueError(
                        f"A word of the {kind.name.lower()} is several tokens: choose words that the tokenizer has as "
                        f"one token, or use template_tokenizer(template)."
                    )
                found.append(table.ids[:-1, 0])
        return found

    def encode(self, steps: TensorDictBase, *parts: Part) -> Tokens:
        """The tokens of parts of steps ``[*B]``, by default of whole steps; only the entries of the parts are read.

        Raises:
            KeyError, ValueError: an entry is missing or has another shape, or a number has no word.
        """
        places = [place for part in parts or ("state", "action", "outcome") for place in self._places[part]]
        ids, kept, kind = [], [], []
        for place in places:
            slot, table = self.template.slots[place], self._tables[place]
            index = self._index(slot, steps, len(table.ids) - 1).cpu()
            ids.append(table.ids[index])
            kept.append(table.kept[index])
            kind += [int(slot.kind)] * table.ids.shape[-1]
        return Tokens(torch.cat(ids, -1), torch.cat(kept, -1), torch.tensor(kind))

    def _index(self, slot: Slot, steps: TensorDictBase, nothing: int) -> Tensor:
        """The row of a slot's table for each step, int64 ``[*B]``."""
        index = torch.zeros(steps.batch_size, dtype=torch.int64, device=steps.device)
        if isinstance(slot.quantizer, FiniteQuantizer):
            index = slot.quantizer.index(entry_values(steps, self.template, slot))
        if len(slot.words) > 1:
            index = index * len(slot.words) + end_index(steps)
        if slot.optional:
            index = torch.where(has_no_reward(steps, self.template), nothing, index)
        return index


def _table(slot: Slot, tokenizer: Tokenizer) -> _Table:
    """The words of a slot in the order of their numbers, each with its ends, and their tokens."""
    numbers = slot.quantizer.words if isinstance(slot.quantizer, FiniteQuantizer) else ("",)
    words = [number + end for number in numbers for end in slot.words]
    encoded = [encode_word(word, tokenizer) if word else [] for word in [*words, ""]]
    width = max(map(len, encoded))
    ids = torch.zeros(len(encoded), width, dtype=torch.int64)
    kept = torch.zeros(len(encoded), width, dtype=torch.bool)
    for place, tokens in enumerate(encoded):
        ids[place, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
        kept[place, : len(tokens)] = True
    return _Table(ids, kept)
