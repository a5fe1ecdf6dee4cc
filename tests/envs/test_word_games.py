"""Games in words: their rules, their optima against exhaustive play, and what their players reach."""

import random

import pytest

from tests.envs.helpers import check_game, play
from torchrl_lang.envs.games import GuessNumber, GuessPlayer, Shop, ShopPlayer, shop


def mean(game, player, games):
    return sum(play(game, player, seed)[1] for seed in range(games)) / games


def test_the_rules_of_guessing():
    game = GuessNumber(numbers=9, turns=3)
    assert {game.reset(seed) and game.number for seed in range(9)} == {*range(1, 10)}
    game.reset(4)
    assert "higher" in game.step("4")[0].lower()
    assert "lower" in game.step("perhaps 7, or 5")[0].lower()
    assert game.step("5.")[1:] == (0.8, True)
    game.reset(4)
    assert [game.step(text)[1:] for text in ("five", "10", "")] == [(0.0, False), (0.0, False), (0.0, True)]


def test_guessing_best_is_binary_search():
    assert GuessNumber(numbers=1, turns=1).optimal_return() == 1
    assert GuessNumber(numbers=15, turns=4).optimal_return() == pytest.approx((1 + 2 * 0.9 + 4 * 0.8 + 8 * 0.7) / 15)
    assert GuessNumber(numbers=20, turns=2).optimal_return() == pytest.approx((1 + 2 * 0.9) / 20)
    assert GuessNumber(numbers=5, turns=9).optimal_return() == pytest.approx((1 + 2 * 0.9 + 2 * 0.8) / 5)
    assert mean(GuessNumber(), GuessPlayer(mistakes=0.0), 15) == pytest.approx(GuessNumber().optimal_return())
    assert 0.25 < mean(GuessNumber(), GuessPlayer(), 1500) < 0.33


def replies(tag, limit, *prices):
    """The reply of a customer with this limit to each price, and what was paid."""
    game, found = Shop(turns=len(prices)), []
    game.reset(0)
    game.tag, game.limit = tag, limit
    for price in prices:
        text, reward, done = game.step(f"{price} coins")
        found.append((text, reward * tag))
        if done:
            break
    return found


@pytest.mark.parametrize("tag", [20, 50])
def test_the_best_sale_against_all_pairs_of_prices(tag, monkeypatch):
    monkeypatch.setattr(random.Random, "choice", lambda self, options: options[0])  # one text for each reply
    limits, prices = [tag * tenths // 10 for tenths in range(4, 11)], range(1, tag + 2)
    first = {price: {limit: replies(tag, limit, price, 0)[0] for limit in limits} for price in prices}
    second = {price: {limit: replies(tag, limit, price)[0][1] for limit in limits} for price in prices}
    best = 0
    for price in prices:
        total, heard = sum(paid for _, paid in first[price].values()), {}
        for limit, (text, paid) in first[price].items():
            if not paid:
                heard.setdefault(text, []).append(limit)
        best = max(best, total + sum(max(sum(second[p][x] for x in group) for p in prices) for group in heard.values()))
    assert shop._total(tuple(limits), 2) == pytest.approx(best)


def test_sales_of_the_player_and_of_one_price():
    one, two, three = (Shop(turns=turns).optimal_return() for turns in (1, 2, 3))
    assert one == pytest.approx(5 / 7 * 0.6)
    assert one < two < three < 0.7  # the mean limit
    assert 0.36 < mean(Shop(), ShopPlayer(), 2000) < 0.41
    texts, _ = play(Shop(), lambda texts, rng: "no price", 3)
    assert len(texts) == 7


def test_things_of_tests_are_not_among_those_of_training():
    words = [
        {word for seed in range(400) for word in Shop(things=things).reset(seed).split()}
        for things in ("training", "testing")
    ]
    assert len([word for word in words[1] - words[0] if word.isalpha()]) == 10


@pytest.mark.parametrize("game", [GuessNumber, Shop])
def test_they_are_language_tasks(game):
    check_game(game, "8", "is it 12?", "none", row_length=400, action_length=24)
