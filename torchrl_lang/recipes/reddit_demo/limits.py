"""How a decoding is chosen: by the reward, among those that neither collapse nor leave the data's language."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torchrl_lang.recipes.reddit_demo.written import Figures

__all__ = ["RULE", "Limits"]

LEAST_DISTINCT, MOST_PERPLEXITY = 0.8, 1.1
"""Relative to the data's comments."""

RULE = (
    "Each player's decoding was chosen on parents of validation comments: the highest reward without noise among the "
    "decodings whose distinct-2 is at least 80 % and whose perplexity under BC is at most 110 % of those of as many "
    "comments of the data, and of equal ones the more varied. If none keeps the limits, the one nearest to them."
)
"""The rule in words."""


@dataclass(frozen=True)
class Limits:
    """The figures of the data's comments, which decodings are compared with.

    Examples:
        >>> from torchrl_lang.recipes.reddit_demo.limits import Limits
        >>> from torchrl_lang.recipes.reddit_demo.written import Figures
        >>> def figures(reward, perplexity, distinct_2):
        ...     return Figures(100, reward, 0.1, 0.0, perplexity, 0.2, distinct_2, 14.0)
        >>> limits = Limits(figures(-2.0, 3.0, 0.5))
        >>> ways = {"greedy": figures(0, 1.5, 0.1), "wild": figures(0, 9, 0.9), "sampled": figures(-1, 3.2, 0.45)}
        >>> limits.choose(ways), limits.choose({"greedy": ways["greedy"]})
        ('sampled', 'greedy')
    """

    data: Figures

    def excess(self, found: Figures) -> float:
        """By which factor the limits are missed; at most 1 if both are kept."""
        diversity = LEAST_DISTINCT * self.data.distinct_2 / max(found.distinct_2, 1e-9)
        return max(diversity, found.perplexity / (MOST_PERPLEXITY * self.data.perplexity))

    def choose(self, found: Mapping[str, Figures]) -> str:
        """The decoding that the rule chooses, of those with these figures."""
        kept = {name: each for name, each in found.items() if self.excess(each) <= 1}
        if not kept:
            return min(found, key=lambda name: self.excess(found[name]))
        return max(kept, key=lambda name: (kept[name].mean_reward, kept[name].distinct_2))
