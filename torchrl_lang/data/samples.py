"""Episodes from samples with one reward each, the form of trlx: a text, or prompts and outputs in turn."""

from __future__ import annotations

from collections.abc import Sequence

from torchrl_lang._files import shorten
from torchrl_lang.text.episodes import Episode, Turn

__all__ = ["from_samples"]


def from_samples(samples: Sequence[str | Sequence[str]], rewards: Sequence[float]) -> list[Episode]:
    """One terminated episode for each sample; its reward belongs to the agent's last turn.

    trlx's ILQL subtracts the mean of the rewards and divides by their standard deviation. Here they stay as they are.

    Args:
        samples: each a text of the agent, or texts of prompt and output in turn, ``(prompt, output)`` or
            ``(prompt, output, prompt, output, ...)``. An empty first prompt is omitted: the agent begins.
        rewards: a number for each sample.

    Raises:
        ValueError: a sample has no text, no output after its last prompt or other content than texts, or the numbers of
            samples and rewards differ.

    Examples:
        >>> from torchrl_lang.data import from_samples
        >>> short, long = from_samples(["ab", ("2 + 2", "4", "right?", "yes")], [0.5, 1.0])
        >>> [(turn.text, turn.reward) for turn in short.turns]
        [('ab', 0.5)]
        >>> [(turn.text, turn.reward) for turn in long.turns]
        [('2 + 2', None), ('4', 0.0), ('right?', None), ('yes', 1.0)]
    """
    if len(samples) != len(rewards):
        raise ValueError(f"Give a reward for each sample, got {len(samples)} samples and {len(rewards)} rewards.")
    return [_episode(n, sample, reward) for n, (sample, reward) in enumerate(zip(samples, rewards, strict=True))]


def _episode(number: int, sample: str | Sequence[str], reward: float) -> Episode:
    texts = ["", sample] if isinstance(sample, str) else list(sample)
    if not texts or len(texts) % 2 or not all(isinstance(text, str) for text in texts):
        raise ValueError(
            f"Sample {number} must be a text or prompts and outputs in turn, the last one an output, got "
            f"{shorten(sample)}."
        )
    turns = [Turn(text, 0.0 if place % 2 else None) for place, text in enumerate(texts)]
    turns[-1] = Turn(texts[-1], float(reward))
    return Episode(turns if texts[0] else turns[1:], terminated=True)
