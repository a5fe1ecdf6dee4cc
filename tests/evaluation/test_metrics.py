from __future__ import annotations

import json
import math
import statistics

import pytest
import scipy.stats
import torch
from tensordict import TensorDict

from torchrl_lang import evaluation
from torchrl_lang.envs.wordle import WordleEnv
from torchrl_lang.evaluation import GameRecords, distinct_n, format_table, ngram_entropy, over_seeds, summarize
from torchrl_lang.evaluation.metrics import lmrl_gym_score, unanswered
from torchrl_lang.evaluation.tables import format_legend
from torchrl_lang.modules import causal_lm, language_actor, row_log_prob
from torchrl_lang.text import CharTokenizer, Episode, Turn, to_rows


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
    assert (summary.games, summary.mean_return, summary.win_rate, summary.lost) == (4, -2.5, 0.75, 1)
    # Sample variance 5/3, so the standard error is sqrt(5/3/4).
    assert summary.return_error == pytest.approx(math.sqrt(5 / 12))
    assert summary.win_error == pytest.approx(math.sqrt(0.75 * 0.25 / 4))
    assert summary.guesses == {2: 1, 3: 1, 4: 1}
    assert (summary.mean_turns, summary.truncated_rate) == (3.25, 0.25)
    assert summary.kl_per_token is summary.invalid_rate is None
    again = json.loads(json.dumps(summary.as_dict(), allow_nan=False))
    assert again["guesses"] == {"2": 1, "3": 1, "4": 1}
    assert again["name"] == "ilql"
    assert summary.scalars()["return"] == -2.5
    assert None not in summary.scalars().values()
    one = records([-6.0], [6], [True])
    one.last_reward.fill_(-1.0)
    assert (summarize(one).return_error, summarize(one).win_error, summarize(one).win_rate) == (None, None, 0)
    assert "-6.00" in format_table([summarize(one)])
    short = records([-1.0], [1], [True])
    assert summarize(short, invalid=lambda games: games.turns).invalid_rate == 1
    one.last_reward.fill_(1.0)
    assert summarize(one).win_rate == 1
    with pytest.raises(ValueError, match="no games"):
        summarize(records([], [], []))


def test_optional_statistics_are_in_summary_log_and_table():
    ratio, entropy = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([4.0, 3.0, 2.0, 1.0])
    summary = summarize(
        records(*GAMES, log_ratio=ratio, entropy=entropy),
        won=lambda r: r.returns >= -2,
        invalid=lambda r: torch.tensor([0, 1, 0, 1]),
        metrics={"luck": lambda games: games.turns / 4},
    )
    assert (summary.win_rate, summary.lost, summary.guesses) == (0.5, 2, {2: 1, 3: 1})
    assert summary.invalid_rate == pytest.approx(2 / 13)
    # Of 26 tokens in four games.
    assert [summary.kl_per_token, summary.kl_per_game, summary.entropy] == pytest.approx([10 / 26, 2.5, 10 / 26])
    assert summary.scalars()["luck"] == summary.as_dict()["metrics"]["luck"] == summary.metrics["luck"] == 13 / 16
    other = evaluation.Summary("b", 1000, -3.25, 0.125, 0.0, 0.1, 2.0)
    lines = format_table([summary, other]).splitlines()
    assert lines[0].split()[4:] == ["turns", "turns", "won", "invalid", "KL/token", "entropy", "luck"]
    assert lines[2].split()[-7:] == ["3.25", "2.50", "15.4", "%", "0.385", "0.385", "0.812"]
    assert lines[3].split()[-6:] == ["2.00", *["-"] * 5]  # nothing won, so no mean number of turns
    assert "-3.25 ± 0.12" in lines[3]
    assert len({len(line) for line in lines}) == 1
    assert format_table([other]).splitlines()[0].split() == ["player", "games", "return", "won", "turns"]
    legend = format_legend([summary], turns="guesses", metrics={"luck": "what is left", "other": "not shown"})
    assert legend.splitlines()[4:6] == [
        "turns      mean number of guesses of a game, all games",
        "turns won  likewise, games won alone",
    ]
    assert legend.splitlines()[-1] == "luck       what is left"


def test_unanswered_utterances_of_real_games():
    env = WordleEnv(["slate"], 2, guesses=["slate", "crane"])
    end = env.tokenizer.control.end_of_action
    said = iter([("crane", "zzzzz"), ("zzzzz", "cran"), ("", "cranes"), *[("crane", "z")] * 3])
    say = lambda td: [(env.tokenizer.encode(word) + [end] * 6)[:6] for word in next(said)]  # noqa: E731
    games = evaluation.play_games(env, lambda td: td.set("action", torch.tensor(say(td))), games=2, seed=0)
    assert unanswered(games.rows, env.tokenizer.control).tolist() == [2, 6]
    rate = summarize(games, invalid=lambda r: unanswered(r.rows, env.tokenizer.control)).invalid_rate
    assert rate == 8 / 12


def test_data_with_the_worst_return_have_half_of_the_score():
    assert [lmrl_gym_score(value, worst=-6, data=-6, best=-1) for value in (-6, -1)] == [50, 100]


def test_over_seeds():
    values = [0.2, 0.5, 0.8, 0.9]
    summary, error = over_seeds("x", values), statistics.stdev(values) / 2
    assert (summary.mean, summary.error) == pytest.approx((0.6, error))
    assert summary.interval == pytest.approx((0.6 - 3.1824 * error, 0.6 + 3.1824 * error))
    assert over_seeds("x", [1.0]).interval is None
    assert "-" in evaluation.format_seed_table([over_seeds("x", [1.0])])
    for bad in ([], [math.nan]):
        with pytest.raises(ValueError, match="x needs"):
            over_seeds("x", bad)
    for number in (*range(2, 13), 21, 61):  # from 12 values on the error is about 2 / (number - 1)**4
        many, error = over_seeds("x", [float(i) for i in range(number)]), 2 / (number - 1) ** 4
        found = (many.interval[1] - many.mean) / many.error
        assert found == pytest.approx(scipy.stats.t.ppf(0.975, number - 1), abs=1e-4 if number < 12 else 1.3 * error)


# -- texts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("texts", "n", "distinct", "entropy"),
    [
        (["a b a b"], 1, 2 / 4, math.log(2)),
        (["a b a b"], 2, 2 / 3, math.log(3) - 2 / 3 * math.log(2)),
        (["a b", "a b", "b a"], 2, 2 / 3, math.log(3) - 2 / 3 * math.log(2)),  # none reaches over the end
        (["a", "", "a b c"], 3, 1.0, 0.0),
        (["same words"] * 10, 2, 1 / 10, 0.0),
        (["a\n b\t c"], 2, 1.0, math.log(2)),
    ],
)
def test_ngrams_by_hand(texts, n, distinct, entropy):
    assert distinct_n(texts, n) == pytest.approx(distinct)
    assert ngram_entropy(iter(texts), n) == pytest.approx(entropy, abs=1e-12)
    for measure in (distinct_n, ngram_entropy):
        assert measure(["a b c a b"]) == measure(["a b c a b"], 2) != measure(["a b c a b"], 3)
        for wrong in ((["a b", "c"], 3), (texts, 0)):
            with pytest.raises(ValueError, match=r"None of \d+ texts has"):
                measure(*wrong)


TOKENIZER = CharTokenizer.from_alphabet("abc")


def small_model():
    torch.manual_seed(0)
    return causal_lm(vocab_size=TOKENIZER.vocab_size, layers=1, width=8, heads=2, max_length=12).eval()


def test_imitation_loss_and_perplexity_count_the_agents_tokens_alone():
    episodes = [Episode([Turn("abc"), Turn(text, reward=0.0)], True) for text in ("ab", "c", "")]
    rows, lm = to_rows(episodes, TOKENIZER, 12), small_model()
    logs = []
    for row in rows:
        ids = row["tokens"][row["attention_mask"]].long()
        with torch.no_grad():
            log_probs = lm(ids[None]).logits[0].double().log_softmax(-1)
        for place in range(len(ids) - 1):
            if row["agent_mask"][place + 1]:
                logs.append(log_probs[place, ids[place + 1]].item())
    assert len(logs) == 3 + 2 + 1  # with the ends of the turns
    actor = language_actor(lm)
    assert evaluation.perplexity(actor, rows) == pytest.approx(math.exp(-sum(logs) / len(logs)), rel=1e-4)
    for batch_size in (256, 2):
        loss = evaluation.imitation_loss(actor, rows, batch_size=batch_size)
        assert loss == pytest.approx(-float(row_log_prob(actor, rows).detach().sum()) / 6, rel=1e-5)
    with pytest.raises(ValueError, match="3 rows have no token of the agent"):
        evaluation.imitation_loss(actor, rows.clone().set("agent_mask", torch.zeros_like(rows["agent_mask"])))


@pytest.mark.parametrize(("bias", "expected"), [(0.0, 9.0), (math.nan, math.nan), (1e4, math.inf)])
def test_perplexity_of_uniform_models_models_without_numbers_and_impossible_tokens(bias, expected):
    rows = to_rows([Episode([Turn("ab", reward=0.0)], True)], TOKENIZER, 8)
    lm, head = small_model(), torch.nn.Linear(8, TOKENIZER.vocab_size)
    torch.nn.init.constant_(head.weight, 0.0)
    head.bias.data = bias * torch.eye(TOKENIZER.vocab_size)[TOKENIZER.control.pad]  # which the agent never writes
    lm.set_output_embeddings(head)
    assert evaluation.perplexity(language_actor(lm), rows) == pytest.approx(expected, nan_ok=True)
