"""The real environment with real players, scripted and learned."""

from __future__ import annotations

import torch
from torchrl.envs.utils import ExplorationType

from torchrl_lang.envs import TokenEnv
from torchrl_lang.envs.wordle import OptimalPlayer, RandomWordPlayer, WordleEnv, wordle_tokenizer
from torchrl_lang.evaluation import TILES, format_transcript, play_games, summarize, unanswered
from torchrl_lang.modules import UtteranceActor, causal_lm, language_actor

WORDS = ["crane", "slate", "point", "purge", "abide", "sugar", "moist", "light"]


def invalid(records):
    return unanswered(records.rows, WordleEnv(WORDS).tokenizer.control)


def test_scripted_players_play_the_same_games_again_and_the_better_one_scores_higher():
    player = RandomWordPlayer(WORDS, seed=0)
    env, expert = WordleEnv(WORDS, 16), OptimalPlayer(WORDS, seed=0)
    first, again, best = (play_games(env, who, games=40, seed=3) for who in (player, player, expert))
    assert torch.equal(first.rows["tokens"], again.rows["tokens"])
    # A game won at the k-th guess returns 1 - k, a lost one -6.
    solved = first.last_reward == 0
    assert torch.equal(first.returns, torch.where(solved, 1 - first.turns, -6).float())
    summary, other = summarize(first, invalid=invalid), summarize(best)
    assert summary.win_rate == solved.double().mean()
    assert summary.invalid_rate == 0
    assert other.mean_return > summary.mean_return
    assert other.win_rate == 1
    assert "🟩🟩🟩🟩🟩" in format_transcript(best.rows[0], wordle_tokenizer(), spelling=TILES)


def language_policy(**options) -> UtteranceActor:
    torch.manual_seed(0)
    env = WordleEnv(WORDS)
    lm = causal_lm(vocab_size=env.tokenizer.vocab_size, layers=1, width=16, heads=2, max_length=96)
    actor = language_actor(lm)
    return UtteranceActor(actor, env.tokenizer.control, env.action_length, diagnostics=True, seed=0, **options)


def test_a_language_model_reports_kl_and_entropy():
    plain, sharp = (
        summarize(play_games(WordleEnv(WORDS, 8), language_policy(temperature=t), games=12), invalid=invalid)
        for t in (1.0, 0.05)
    )
    for summary in (plain, sharp):
        assert summary.win_rate == 0
        assert 0 < summary.invalid_rate <= 1
    assert sharp.kl_per_token > plain.kl_per_token + 0.05
    assert sharp.kl_per_game > sharp.kl_per_token
    assert 0 < sharp.entropy < plain.entropy < torch.tensor(30.0).log()
    kinds = (ExplorationType.RANDOM, 8), (ExplorationType.DETERMINISTIC, 1)
    for kind, different in kinds:
        rows = play_games(WordleEnv(WORDS, 8), language_policy(), games=8, exploration=kind).rows
        assert len(rows["tokens"][:, 1:6].unique(dim=0)) == different


def test_one_token_a_turn():
    """The same utterances, written token by token, make the same rows and returns."""
    script = torch.tensor([WordleEnv(WORDS).tokenizer.encode(word) + [30] for word in ("crane", "purge", "slate")])
    letters, whole = script.flatten(), play_games(WordleEnv(WORDS, 4), _recite(script), games=4)
    tokens = play_games(TokenEnv(WordleEnv(WORDS, 4)), _recite(letters), games=4)
    assert torch.equal(whole.rows["tokens"], tokens.rows["tokens"])
    assert torch.equal(whole.returns, tokens.returns)
    assert torch.equal(whole.agent_tokens, tokens.turns)


def _recite(script: torch.Tensor):
    turn = iter(range(10**6))
    return lambda td: td.set("action", script[next(turn) % len(script)].expand(*td.batch_size, *script.shape[1:]))
