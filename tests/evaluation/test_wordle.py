"""The real environment with real players, scripted and learned."""

from __future__ import annotations

import torch
from torchrl.envs.utils import ExplorationType

from torchrl_lang.envs import TokenEnv
from torchrl_lang.envs.wordle import OptimalPlayer, RandomWordPlayer, WordleEnv
from torchrl_lang.evaluation import TILES, format_transcript, play_games, summarize, unanswered
from torchrl_lang.modules import UtteranceActor, causal_lm, language_actor

WORDS = ["crane", "slate", "point", "purge", "abide", "sugar", "moist", "light"]


def invalid(records):
    return unanswered(records.rows, WordleEnv(WORDS).tokenizer.control)


def test_scripted_players_play_the_same_games_again():
    player = RandomWordPlayer(WORDS, seed=0)
    first = play_games(WordleEnv(WORDS, 16), player, games=40, seed=3)
    again = play_games(WordleEnv(WORDS, 16), player, games=40, seed=3)
    assert torch.equal(first.rows["tokens"], again.rows["tokens"])
    # A game won at the k-th guess returns 1 - k, a lost one -6.
    solved = first.last_reward == 0
    assert torch.equal(first.returns, torch.where(solved, 1 - first.turns, -6).float())
    summary = summarize(first, invalid=invalid)
    assert summary.win_rate == solved.double().mean()
    assert summary.invalid_rate == 0


def test_the_better_player_has_the_better_summary():
    scores = [
        summarize(play_games(WordleEnv(WORDS, 32), player, games=64))
        for player in (RandomWordPlayer(WORDS, seed=0), OptimalPlayer(WORDS, seed=0))
    ]
    assert scores[1].mean_return > scores[0].mean_return
    assert scores[1].win_rate == 1


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


def test_sampled_or_greedy():
    policy, env = language_policy(), WordleEnv(WORDS, 8)
    sampled, greedy = (
        play_games(env, policy, games=8, exploration=kind).rows["tokens"]
        for kind in (ExplorationType.RANDOM, ExplorationType.DETERMINISTIC)
    )
    assert len(greedy[:, 1:6].unique(dim=0)) == 1
    assert len(sampled[:, 1:6].unique(dim=0)) == 8


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


def test_transcripts_have_tiles():
    env = WordleEnv(["crane"], 1)
    records = play_games(env, RandomWordPlayer(["crane"], seed=0), games=1)
    assert format_transcript(records.rows[0], env.tokenizer, spelling=TILES) == "> crane  (0)\n< 🟩🟩🟩🟩🟩"
