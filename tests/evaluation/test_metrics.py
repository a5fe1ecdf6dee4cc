from __future__ import annotations

import json
import math

import pytest
import torch
from tensordict import TensorDict

from torchrl_lang.evaluation import GameRecords, Summary, format_legend, format_table, play_games, summarize, unanswered


def records(returns: list[float], turns: list[int], won: list[bool], **extra: torch.Tensor) -> GameRecords:
    ended = torch.tensor(won, dtype=torch.bool)
    return GameRecords(
        rows=TensorDict(batch_size=[len(returns)]),
        returns=torch.tensor(returns),
        turns=torch.tensor(turns, dtype=torch.int64),
        terminated=ended,
        truncated=~ended,
        last_reward=torch.where(ended, 0.0, -1.0),
        agent_tokens=2 * torch.tensor(turns),
        **extra,
    )


GAMES = ([-1.0, -3.0, -2.0, -4.0], [2, 4, 3, 4], [True, True, True, False])


def test_by_hand():
    summary = summarize(records(*GAMES), name="ilql")
    assert summary.games == 4
    assert summary.mean_return == -2.5
    # Sample variance 5/3, so the standard error is sqrt(5/3/4).
    assert summary.return_error == pytest.approx(math.sqrt(5 / 12))
    assert summary.win_rate == 0.75
    assert summary.win_error == pytest.approx(math.sqrt(0.75 * 0.25 / 4))
    assert summary.guesses == {2: 1, 3: 1, 4: 1}
    assert summary.lost == 1
    assert summary.mean_turns == 3.25
    assert summary.truncated_rate == 0.25
    assert summary.kl_per_token is None
    assert summary.invalid_rate is None


def test_a_metric_of_the_task_is_in_summary_log_and_table():
    summary = summarize(records(*GAMES), name="ilql", metrics={"optimality": lambda games: games.turns / 4})
    assert summary.metrics == {"optimality": 13 / 16}
    assert summary.scalars()["optimality"] == summary.as_dict()["metrics"]["optimality"] == 13 / 16
    table = format_table([summary, summarize(records(*GAMES), name="bc")]).splitlines()
    assert [line.split()[-1] for line in (table[0], *table[2:])] == ["optimality", "0.812", "-"]


def test_kl_and_entropy_are_weighted_by_tokens():
    ratio, entropy = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([4.0, 3.0, 2.0, 1.0])
    summary = summarize(records(*GAMES, log_ratio=ratio, entropy=entropy))
    assert summary.kl_per_token == pytest.approx(10 / 26)
    assert summary.kl_per_game == 2.5
    assert summary.entropy == pytest.approx(10 / 26)


def test_won_and_invalid_are_the_callers():
    summary = summarize(records(*GAMES), won=lambda r: r.returns >= -2, invalid=lambda r: torch.tensor([0, 1, 0, 1]))
    assert (summary.win_rate, summary.lost, summary.guesses) == (0.5, 2, {2: 1, 3: 1})
    assert summary.invalid_rate == pytest.approx(2 / 13)


def test_a_single_game_has_no_error():
    summary = summarize(records([-1.0], [2], [True]))
    assert summary.return_error is None
    assert "-1.00" in format_table([summary])


def test_a_task_may_end_without_being_won():
    lost = records([-6.0], [6], [True])
    lost.last_reward.fill_(-1.0)
    assert summarize(lost).win_rate == 0


def test_no_games():
    with pytest.raises(ValueError, match="no games"):
        summarize(records([], [], []))


def test_json_and_scalars():
    summary = summarize(records(*GAMES), name="bc")
    again = json.loads(json.dumps(summary.as_dict(), allow_nan=False))
    assert again["guesses"] == {"2": 1, "3": 1, "4": 1}
    assert again["name"] == "bc"
    assert summary.scalars()["return"] == -2.5
    assert None not in summary.scalars().values()


def test_unanswered_utterances_of_real_games(guess):
    env = guess(2)
    end = env.tokenizer.control.end_of_action
    # Row 0 says: 0, x, (nothing), 0. Row 1 says: x, 12 (two digits), 0 without an end, x.
    script = iter([[[0, end, 0], [13, end, 0]], [[13, end, 0], [1, 2, end]], [[end, 0, 0], [0, 13, 13]],
                   [[0, end, end], [13, end, 0]]])  # fmt: skip
    env.set_seed(0)
    games = play_games(
        env, lambda td: td.set("action", torch.tensor(next(script))), games=2, seed=_seed_above_zero(env)
    )
    assert unanswered(games.rows, env.tokenizer.control).tolist() == [2, 4]
    rate = summarize(games, invalid=lambda r: unanswered(r.rows, env.tokenizer.control)).invalid_rate
    assert rate == 6 / 8


def _seed_above_zero(env) -> int:
    """A seed whose first two hidden digits are not 0, so that nobody wins."""
    for seed in range(20):
        env.set_seed(seed)
        env.reset()
        if (env._task["hidden"] > 0).all():
            return seed
    raise AssertionError("no such seed")


def test_turns_are_those_of_all_games_and_of_games_won():
    """2, 4, 3 and 4 turns, the last game lost: 13 / 4, and 9 / 3 without it."""
    summary = summarize(records(*GAMES, entropy=torch.ones(4)), metrics={"luck": lambda games: games.turns})
    lines = format_table([summary]).splitlines()
    assert lines[0].endswith("turns  turns won  entropy   luck")
    assert lines[2].split()[-4:] == ["3.25", "3.00", "0.154", "3.250"]  # 4 nats of 26 tokens
    legend = format_legend([summary], turns="guesses", metrics={"luck": "what is left", "other": "not shown"})
    assert legend.splitlines()[4:] == [
        "turns      mean number of guesses of a game, all games",
        "turns won  likewise, games won alone",
        "entropy    mean entropy of the policy, nats a token",
        "luck       what is left",
    ]


def test_table_lines_up_and_leaves_out_empty_columns():
    rows = [Summary("a", 10, -1.0, 0.5, 1.0, 0.0, 2.0, {2: 10}), Summary("b", 1000, -3.25, 0.125, 0.5, 0.1, 2.0)]
    lines = format_table(rows).splitlines()
    assert lines[0].split() == ["player", "games", "return", "won", "turns", "turns", "won"]
    assert len({len(line) for line in lines}) == 1
    assert "-3.25 ± 0.12" in lines[3]
    assert lines[3].endswith("-")  # nothing won, so no mean number of turns
