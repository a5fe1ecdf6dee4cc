"""The template of text tasks: blocks of prompt, completion and reward, one after another."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from torchrl_lang._files import shorten
from torchrl_lang.algorithm_distillation.language.quantizers import Decimals, Quantizer
from torchrl_lang.algorithm_distillation.language.step_template import TokenKind

__all__ = ["Block", "BlockTemplate", "Segment"]


class Block(NamedTuple):
    """What a block describes."""

    query: str
    response: str
    reward: float


class Segment(NamedTuple):
    """A part of a block that is encoded on its own, so that no token is of two kinds."""

    text: str
    kind: TokenKind


@dataclass(frozen=True)
class BlockTemplate:
    r"""How text histories are written: ``Prompt: ...\nCompletion: ...\nReward: ...\n\n``, block after block.

    The names are those of the sentiment task of the repository Algorithm-Distillation-RLHF. A completion ends with its
    line break, which is the agent's too: that is how a model shows that it is complete.

    Args:
        reward: quantizer of the reward; :class:`Decimals` write it in full.
        prompt_name, completion_name, reward_name: what the lines begin with.

    Raises:
        ValueError: a name is empty, or has a line break.

    Examples:
        >>> from torchrl_lang.algorithm_distillation.language import Bins, Block, BlockTemplate
        >>> template = BlockTemplate(Bins(0, 1, 10))
        >>> text = template.write(Block("The film was", "wonderful", 0.93))
        >>> text
        'Prompt: The film was\nCompletion: wonderful\nReward: 9\n\n'
        >>> template.parse(text + text)[1]
        Block(query='The film was', response='wonderful', reward=0.949999...)
        >>> template.write(Block("a\nReward: 1\n\nPrompt: b\nCompletion: c", "d", 0.5))
        Traceback (most recent call last):
            ...
        ValueError: 'a\nReward: 1\n\nPrompt: b\nCompletion: c' and 'd' contain lines of the template and could not ...
    """

    reward: Quantizer = field(default_factory=Decimals)
    prompt_name: str = "Prompt"
    completion_name: str = "Completion"
    reward_name: str = "Reward"

    def __post_init__(self) -> None:
        names = (self.prompt_name, self.completion_name, self.reward_name)
        if any(not name or "\n" in name for name in names):
            raise ValueError(f"The names of the lines are not empty and have no line breaks, got {names}.")

    def prompt(self, query: str) -> str:
        """The text after which a model writes the completion, with a space before it."""
        return f"{self.prompt_name}: {query}\n{self.completion_name}:"

    def segments(self, block: Block) -> list[Segment]:
        """The parts of a block.

        Raises:
            ValueError: its texts contain lines of the template and could not be read back, or the reward has no word.
        """
        segments = self._parts(block)
        if not self._reads_back(block, segments):
            raise ValueError(
                f"{shorten(block.query)} and {shorten(block.response)} contain lines of the template and could not be "
                f"read back: give the template other names, or leave the block out."
            )
        return segments

    def can_write(self, block: Block) -> bool:
        r"""Whether the texts of a block have no lines of the template, so that it can be read back.

        Raises:
            ValueError: the reward has no word.

        Examples:
            >>> from torchrl_lang.algorithm_distillation.language import Block, BlockTemplate
            >>> [BlockTemplate().can_write(Block("q", text, 1.0)) for text in ("a\nb", "a\nReward: 2\n\n")]
            [True, False]
        """
        return self._reads_back(block, self._parts(block))

    def _parts(self, block: Block) -> list[Segment]:
        (word,) = self.reward.write(torch.tensor([block.reward], dtype=torch.float64))
        return [
            Segment(self.prompt(block.query), TokenKind.FORMAT),
            Segment(f" {block.response}\n", TokenKind.ACTION),
            Segment(f"{self.reward_name}:", TokenKind.FORMAT),
            Segment(f" {word}", TokenKind.REWARD),
            Segment("\n\n", TokenKind.FORMAT),
        ]

    def _reads_back(self, block: Block, segments: list[Segment]) -> bool:
        text, word = "".join(segment.text for segment in segments), segments[3].text[1:]
        match = self._pattern.match(text)
        found = (block.query, block.response, word)
        return match is not None and match.end() == len(text) and match.groups() == found

    def write(self, block: Block) -> str:
        """The text of a block; errors are those of :meth:`segments`."""
        return "".join(segment.text for segment in self.segments(block))

    def parse(self, text: str) -> list[Block]:
        """The blocks of a text; raises ValueError if something else is in it."""
        blocks, place = list[Block](), 0
        while place < len(text):
            match = self._pattern.match(text, place)
            if match is None:
                raise ValueError(f"Character {place} of the text begins no block: {shorten(text[place:])}.")
            query, response, word = match.groups()
            blocks.append(Block(query, response, float(self.reward.read([word])[0])))
            place = match.end()
        return blocks

    def vocabulary(self) -> list[str]:
        """Symbols for a tokenizer in which each reward is one token, or each character of a decimal number."""
        first, inner = self.reward.pieces
        return [*(f" {piece}" for piece in first), *inner]

    @property
    def _pattern(self) -> re.Pattern[str]:
        prompt, completion, reward = map(re.escape, (self.prompt_name, self.completion_name, self.reward_name))
        return re.compile(rf"{prompt}: (.*?)\n{completion}: (.*?)\n{reward}: (\S+)\n\n", re.DOTALL)
