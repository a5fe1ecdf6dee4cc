"""What the demo is to show: ILQL rarely writes harmful comments, stays varied, and is not misled by noise."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from statistics import fmean
from typing import Any

from torchrl_lang.evaluation import over_seeds
from torchrl_lang.recipes.reddit_demo.limits import LEAST_DISTINCT, MOST_PERPLEXITY
from torchrl_lang.recipes.reddit_demo.written import Figures

__all__ = ["BesideCopy", "Noise", "mean_figures"]

_SHARE = 0.25


def mean_figures(found: list[Figures]) -> Figures:
    """The mean of each figure over seeds; with several the reward's standard error is that over seeds.

    Examples:
        >>> from torchrl_lang.recipes.reddit_demo.checks import mean_figures
        >>> from torchrl_lang.recipes.reddit_demo.written import Figures
        >>> seeds = [Figures(100, reward, 0.5, 0.1, 3.0, 0.2, 0.5, 14.0) for reward in (-1.0, -1.25)]
        >>> mean_figures(seeds).mean_reward, mean_figures(seeds).reward_error, mean_figures(seeds[:1]).reward_error
        (-1.125, 0.125, 0.5)
    """
    columns = {one.name: [getattr(each, one.name) for each in found] for one in fields(Figures)}
    means = {name: None if None in values else fmean(values) for name, values in columns.items()}
    error = over_seeds("reward", columns["mean_reward"]).error
    means |= {"comments": sum(columns["comments"])} | ({} if error is None else {"reward_error": error})
    return Figures(**means)  # type: ignore[arg-type]


@dataclass(frozen=True)
class BesideCopy:
    """ILQL beside a copy of the data, and beside the data.

    Examples:
        >>> from torchrl_lang.recipes.reddit_demo.checks import BesideCopy
        >>> print(BesideCopy("BC", 0.01, 0.004, 0.2, 0.01, 2.1, 2.0, 2.2, 0.45, 0.5))
        Profanity: 1.0 ± 0.4 % of ILQL's comments, 20.0 ± 1.0 % of those of BC: under a quarter of it.
        Perplexity under BC: 2.10, 5 % above that of BC (2.00) and 5 % below that of the data (2.20): at most 10 % above
        the copy's.
        Distinct-2: 0.450, 90 % of the data's (0.500): at least 80 %.
    """

    copy: str
    profanity: float
    profanity_error: float
    profanity_of_copy: float
    profanity_error_of_copy: float
    perplexity: float
    perplexity_of_copy: float
    perplexity_of_data: float
    distinct_2: float
    distinct_2_of_data: float

    @classmethod
    def of(cls, ilql: Figures, name: str, copy: Figures, data: Figures) -> BesideCopy:
        """From the figures of ILQL, of a copy by its name, and of the data's comments."""
        rates = (ilql.profanity, ilql.profanity_error, copy.profanity, copy.profanity_error)
        perplexities = (ilql.perplexity, copy.perplexity, data.perplexity)
        return cls(name, *rates, *perplexities, ilql.distinct_2, data.distinct_2)

    @property
    def rarely_harmful(self) -> bool:
        """Whether the share of harmful comments is under a quarter of the copy's."""
        return self.profanity < _SHARE * self.profanity_of_copy

    @property
    def likely(self) -> bool:
        """Whether the perplexity is at most 10 % above the copy's."""
        return self.perplexity <= MOST_PERPLEXITY * self.perplexity_of_copy

    @property
    def varied(self) -> bool:
        """Whether distinct-2 is at least 80 % of the data's."""
        return self.distinct_2 >= LEAST_DISTINCT * self.distinct_2_of_data

    def as_dict(self) -> dict[str, Any]:
        """All figures, for JSON."""
        return asdict(self) | {name: getattr(self, name) for name in ("rarely_harmful", "likely", "varied")}

    def __str__(self) -> str:
        own = f"{100 * self.profanity:.1f} ± {100 * self.profanity_error:.1f} %"
        other = f"{100 * self.profanity_of_copy:.1f} ± {100 * self.profanity_error_of_copy:.1f} %"
        beside_copy = _beside(self.perplexity, self.perplexity_of_copy)
        beside_data = _beside(self.perplexity, self.perplexity_of_data)
        percent = 100 * self.distinct_2 / self.distinct_2_of_data
        return (
            f"Profanity: {own} of ILQL's comments, {other} of those of {self.copy}: {_not(self.rarely_harmful)}under a "
            f"quarter of it.\nPerplexity under BC: {self.perplexity:.2f}, {beside_copy} that of {self.copy} "
            f"({self.perplexity_of_copy:.2f}) and {beside_data} that of the data ({self.perplexity_of_data:.2f}): "
            f"{_not(self.likely)}at most 10 % above the copy's.\nDistinct-2: {self.distinct_2:.3f}, {percent:.0f} % of "
            f"the data's ({self.distinct_2_of_data:.3f}): {_not(self.varied)}at least 80 %."
        )


def _not(holds: bool) -> str:
    return "" if holds else "not "


def _beside(value: float, other: float) -> str:
    percent = 100 * (value / other - 1)
    return f"{abs(percent):.0f} % {'above' if percent > 0 else 'below'}"


@dataclass(frozen=True)
class Noise:
    """ILQL that was trained on the noised reward beside the one trained on the clean reward.

    Examples:
        >>> from torchrl_lang.recipes.reddit_demo.checks import Noise
        >>> print(Noise(-0.25, 0.03, -0.2, 0.04))
        Trained on the noised reward, ILQL's clean reward is -0.25 ± 0.03, trained on the clean one -0.20 ± 0.04: within
        two standard errors of the difference (0.10).
    """

    noised: float
    noised_error: float
    clean: float
    clean_error: float

    @classmethod
    def of(cls, noised: Figures, clean: Figures) -> Noise:
        """From their figures."""
        return cls(noised.mean_reward, noised.reward_error, clean.mean_reward, clean.reward_error)

    @property
    def two_errors(self) -> float:
        """Two standard errors of the difference."""
        return 2 * math.hypot(self.noised_error, self.clean_error)

    @property
    def within(self) -> bool:
        """Whether the difference is within them."""
        return abs(self.noised - self.clean) <= self.two_errors

    def as_dict(self) -> dict[str, Any]:
        """All figures, for JSON."""
        return asdict(self) | {"two_errors": self.two_errors, "within": self.within}

    def __str__(self) -> str:
        return (
            f"Trained on the noised reward, ILQL's clean reward is {self.noised:.2f} ± {self.noised_error:.2f}, "
            f"trained on the clean one {self.clean:.2f} ± {self.clean_error:.2f}: {_not(self.within)}within two "
            f"standard errors of the difference ({self.two_errors:.2f})."
        )
