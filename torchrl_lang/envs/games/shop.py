"""Selling in words: a text game about hidden limits, with things to sell in training and others in tests."""

from __future__ import annotations

import random
from functools import cache
from typing import Literal

from torchrl_lang._checks import check_options
from torchrl_lang.envs.games.guess import numbers_in

_LIMITS = (4, 5, 6, 7, 8, 9, 10)
"""The most that a customer pays, in tenths of the price on the tag; each is equally likely."""
_FAR = 1.25
"""A price above this multiple of the limit is far too high."""
_THINGS = {
    "training": "lamp chair table mirror carpet clock vase basket kettle teapot blanket pillow bicycle guitar drum "
    "violin camera radio book painting candle hat coat scarf umbrella suitcase knife bowl plate ladder",
    "testing": "armchair telescope saddle flute helmet stove barrel curtain lantern chessboard",
}
_OPENINGS = (
    "A customer looks at the {item}. The tag shows {tag} coins. Customer: What do you ask for it?",
    "Customer: I like this {item}. It is tagged with {tag} coins. What is your price?",
    "Customer: How much is the {item} for me? I see a tag with {tag} coins.",
    "Customer: Good day! The {item} with the {tag} on the tag, what would it cost me?",
)
_CLOSE = ("That is a little too much.", "Almost, but a bit more than I have.", "Slightly too expensive for me.")
_TOO_HIGH = ("That is far too much!", "Much too expensive for me.", "No way, that is way over what I can pay.")
_DEAL = ("Deal! Here are {price} coins.", "Agreed, {price} coins.", "I take it for {price}.")
_LEAVES = ("Then I will go. Good bye.", "Too much, still. I am leaving.", "No. I look elsewhere.")
_NO_PRICE = ("How many coins?", "Please name a price.")
_OFFERS = ("You can have it for {}.", "I ask {} coins.", "{} coins.", "My price is {} coins.", "For you, {}.")


class Shop:
    """Sell one thing to a customer with a hidden limit; the return is the price, as a share of that on the tag.

    A price is the first number in a text. The customer pays it if it is at most the limit, which is 40 % to 100 % of
    the tag; otherwise the reply is that it is a little or far (over a quarter of the limit) too much, and
    the customer leaves after the last offer. A text without a price is a wasted offer. A :class:`TextGame`.

    Thing, tag, limit and phrases are drawn from the seed.

    Args:
        things: ``"training"`` or ``"testing"``: disjoint sets of things.
        turns: offers in a game.

    Examples:
        >>> from torchrl_lang.envs.games import Shop
        >>> game = Shop()
        >>> game.reset(seed=2)
        'A customer looks at the bowl. The tag shows 20 coins. Customer: What do you ask for it?'
        >>> game.step("20 coins.")
        ('Much too expensive for me.', 0.0, False)
        >>> game.step("Well, 8?")
        ('Deal! Here are 8 coins.', 0.4, True)
    """

    def __init__(self, *, things: Literal["training", "testing"] = "training", turns: int = 3) -> None:
        check_options(things=(things, tuple(_THINGS)), turns=(turns, 1))
        self.things, self.turns = _THINGS[things].split(), turns

    def reset(self, seed: int) -> str:
        """See :class:`TextGame`."""
        self._rng, self._turn = random.Random(seed), 0
        item, self.tag = self._rng.choice(self.things), 10 * self._rng.randint(2, 9)
        self.limit = self.tag * self._rng.choice(_LIMITS) // 10
        return self._rng.choice(_OPENINGS).format(item=item, tag=self.tag)

    def step(self, text: str) -> tuple[str, float, bool]:
        """See :class:`TextGame`."""
        self._turn += 1
        price = next(iter(numbers_in(text)), None)
        if price is not None and price <= self.limit:
            return self._rng.choice(_DEAL).format(price=price), price / self.tag, True
        if self._turn == self.turns:
            return self._rng.choice(_LEAVES), 0.0, True
        if price is None:
            return self._rng.choice(_NO_PRICE), 0.0, False
        return self._rng.choice(_TOO_HIGH if price > _FAR * self.limit else _CLOSE), 0.0, False

    def optimal_return(self) -> float:
        """The greatest mean return, exact: the best price after each reply, for each tag.

        Examples:
            >>> from torchrl_lang.envs.games import Shop
            >>> round(Shop(turns=1).optimal_return(), 4)  # 60 % of the tag, which five of seven customers pay
            0.4286
        """
        tags = range(20, 91, 10)
        total = sum(_total(tuple(tag * tenths // 10 for tenths in _LIMITS), self.turns) / tag for tag in tags)
        return total / (len(tags) * len(_LIMITS))


@cache
def _total(limits: tuple[int, ...], turns: int) -> int:
    """The greatest sum of prices over customers with these limits."""
    if not limits or not turns:
        return 0

    def after(price: int) -> int:
        paid = sum(price <= limit for limit in limits) * price
        far = tuple(limit for limit in limits if price > _FAR * limit)
        close = tuple(limit for limit in limits if limit < price <= _FAR * limit)
        return paid + _total(far, turns - 1) + _total(close, turns - 1)

    return max(after(price) for price in range(min(limits), int(_FAR * max(limits)) + 2))


class ShopPlayer:
    """Sells in :class:`Shop` as a function for :class:`~torchrl_lang.envs.TextPlayer`, not well.

    Its first price is 5 % to 120 % of the tag, and each later one 10 % to 90 % of the one before, whatever the reply
    was.

    Examples:
        >>> import random
        >>> from torchrl_lang.envs.games import ShopPlayer
        >>> ShopPlayer()(["Customer: How much is the lamp for me? I see a tag with 40 coins."], random.Random(0))
        'My price is 41 coins.'
    """

    def __call__(self, texts: list[str], rng: random.Random) -> str:
        """The next offer after the texts of a game so far."""
        if len(texts) == 1:
            price = numbers_in(texts[0])[0] * rng.uniform(0.05, 1.2)
        else:
            price = numbers_in(texts[-2])[0] * rng.uniform(0.1, 0.9)
        return rng.choice(_OFFERS).format(max(1, round(price)))
