from __future__ import annotations

import pytest
import torch
from tensordict.nn import TensorDictModule
from torchrl.envs import StepCounter, TransformedEnv
from torchrl.envs.utils import ExplorationType

from torchrl_lang.envs import TokenEnv
from torchrl_lang.envs.games import CorridorEnv
from torchrl_lang.envs.wordle import WordleEnv
from torchrl_lang.evaluation import GameRecords, play_games, summarize
from torchrl_lang.evaluation.metrics import unanswered
from torchrl_lang.modules import UtteranceActor, causal_lm, language_actor
from torchrl_lang.schema import ROW_KEYS, check_row


def assert_equal(one: GameRecords, other: GameRecords) -> None:
    for name in ("returns", "turns", "terminated", "truncated", "last_reward", "agent_tokens"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    for key in ROW_KEYS:
        assert torch.equal(one.rows[key], other.rows[key]), key


@pytest.mark.parametrize("batch", [1, (2, 3), 32])
def test_same_episodes_for_any_batch(corridor, straight, batch):
    env, one = corridor(batch), corridor(11)
    records = play_games(env, straight(env), games=11, seed=7)
    assert len(records) == 11
    assert_equal(records, play_games(one, straight(one), games=11, seed=7))


def test_it_does_not_wait_for_games_that_are_not_wanted(corridor, straight):
    first, second = play_games(corridor(2), straight(corridor(2)), games=2, seed=1).turns.tolist()
    assert first < second
    move, calls = straight(corridor(2)), []
    play_games(corridor(2), lambda td: calls.append(1) or move(td), games=1, seed=1)
    assert len(calls) == first


def test_counts_of_each_game_and_what_the_data_says_of_its_ends(corridor, straight):
    env = corridor(8)
    records = play_games(env, straight(env), games=20)
    check_row(records.rows, vocab_size=env.tokenizer.vocab_size)
    assert torch.equal(records.terminated, ~records.truncated)
    assert torch.equal(records.returns, -(records.turns - records.terminated.long()).float())
    assert torch.equal(records.returns, records.rows["token_reward"].sum(-1))
    assert torch.equal(records.agent_tokens, 2 * records.turns)  # a letter and its end
    assert torch.equal(records.agent_tokens, records.rows["agent_mask"].sum(-1))
    assert torch.equal(records.last_reward == 0, records.terminated)
    assert_equal(records, GameRecords.from_rows(records.rows, env.tokenizer.control))
    ends = {"terminated": torch.arange(20) % 2 == 0, "truncated": torch.arange(20) % 3 == 0}
    for shape in ((20,), (20, 1)):
        rows = records.rows.clone().update({name: end.view(shape) for name, end in ends.items()})
        again = GameRecords.from_rows(rows, env.tokenizer.control)
        assert torch.equal(again.terminated, ends["terminated"])
        assert torch.equal(again.truncated, ends["truncated"])


class Sampler(torch.nn.Module):
    """Says a random letter, and how likely it was: uniformly here, twice as likely for the behaviour model."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.generator = generator
        self.dropout = torch.nn.Dropout()
        self.modes: set[bool] = set()

    def forward(self, tokens):
        self.modes.add(self.dropout.training)
        letter = torch.randint(8, 10, (*tokens.shape[:-1], 1), generator=self.generator)
        action = torch.cat([letter, torch.full_like(letter, END)], -1)
        log_prob = torch.full(action.shape, -2.0)
        return action, log_prob, log_prob / 4, -log_prob


END = CorridorEnv(8).tokenizer.control.end_of_action
OUT = ["action", "token_log_prob", "behavior_log_prob", "token_entropy"]


def test_diagnostics_are_sums_over_written_tokens(corridor):
    env = corridor(4)
    records = play_games(env, TensorDictModule(Sampler(), ["tokens"], OUT), games=10)
    torch.testing.assert_close(records.log_prob, -2.0 * records.agent_tokens)
    torch.testing.assert_close(records.log_ratio, -1.5 * records.agent_tokens)
    torch.testing.assert_close(records.entropy, 2.0 * records.agent_tokens)


@pytest.mark.parametrize("own", [False, True])
def test_playing_leaves_streams_and_modes_alone(corridor, own):
    generator = torch.Generator().manual_seed(5) if own else None
    policy = TensorDictModule(Sampler(generator), ["tokens"], OUT)
    policy.module.dropout.train()
    policy.module.training = False
    torch.manual_seed(0)
    before = torch.get_rng_state()
    stream = None if generator is None else generator.get_state()
    first = play_games(corridor(4), policy, games=10, seed=2)
    assert torch.equal(torch.get_rng_state(), before)
    assert generator is None or torch.equal(generator.get_state(), stream)
    assert policy.module.modes == {False}
    assert policy.module.dropout.training
    assert not policy.module.training
    torch.rand(17)
    assert_equal(first, play_games(corridor(4), policy, games=10, seed=2))
    assert not torch.equal(first.rows["tokens"], play_games(corridor(4), policy, games=10, seed=3).rows["tokens"])


def test_entries_of_the_last_observation_are_kept(corridor, straight):
    env, base = corridor(4), corridor(11)
    counted = TransformedEnv(env, StepCounter())
    cut = play_games(TransformedEnv(corridor(4), StepCounter(max_steps=2)), straight(env), games=11, seed=7)
    records = play_games(counted, straight(env), games=11, seed=7, keep=["step_count", "truncated", "tokens"])
    assert sorted(records.kept.keys()) == ["step_count", "tokens", "truncated"]
    assert torch.equal(records.kept["tokens"], records.rows["tokens"])
    assert torch.equal(records.kept["step_count"], records.turns)
    assert torch.equal(records.kept["truncated"], records.truncated)
    assert cut.turns.tolist() == records.turns.clamp_max(2).tolist()  # a transform may end games before the env does
    assert torch.equal(cut.rows["token_reward"].sum(-1), cut.returns)
    assert records.turns.unique().numel() > 1
    plain = play_games(base, straight(base), games=11, seed=7)
    assert_equal(records, plain)
    assert plain.kept.is_empty()
    with pytest.raises(KeyError, match=r'"won" not found in .*tokens'):
        play_games(base, straight(base), games=2, keep=["won"])
    with pytest.raises(ValueError, match="games"):
        play_games(base, straight(base), games=0)


# -- Wordle with scripted and learned players --------------------------------------------------------------------------

WORDS = ["crane", "slate", "point", "purge", "abide", "sugar", "moist", "light"]


def test_a_language_model_reports_kl_and_entropy_and_plays_sampled_or_greedy():
    env = WordleEnv(WORDS, 8)
    control = env.tokenizer.control
    torch.manual_seed(0)
    actor = language_actor(causal_lm(vocab_size=35, layers=1, width=16, heads=2, max_length=96))
    options = {"diagnostics": True, "seed": 0}
    plain, sharp = (UtteranceActor(actor, control, 6, temperature=t, **options) for t in (1.0, 0.05))
    games = (play_games(env, policy, games=12) for policy in (plain, sharp))
    one, other = (summarize(each, invalid=lambda records: unanswered(records.rows, control)) for each in games)
    assert plain._prefix_cache.transcripts is None  # keys and values of games that are over
    assert one.win_rate == 0 < one.invalid_rate <= 1
    assert other.kl_per_token > one.kl_per_token + 0.05
    assert other.kl_per_game > other.kl_per_token
    assert 0 < other.entropy < one.entropy < torch.tensor(30.0).log()
    for kind, different in ((ExplorationType.RANDOM, 8), (ExplorationType.DETERMINISTIC, 1)):
        rows = play_games(env, plain, games=8, exploration=kind).rows
        assert len(rows["tokens"][:, 1:6].unique(dim=0)) == different


def test_one_token_a_turn():
    """The same utterances, written token by token, make the same rows and returns."""
    script = torch.tensor([WordleEnv(WORDS).tokenizer.encode(word) + [30] for word in ("crane", "purge", "slate")])

    def recite(script):
        turn = iter(range(10**6))
        return lambda td: td.set("action", script[next(turn) % len(script)].expand(*td.batch_size, *script.shape[1:]))

    whole = play_games(WordleEnv(WORDS, 4), recite(script), games=4)
    tokens = play_games(TokenEnv(WordleEnv(WORDS, 4)), recite(script.flatten()), games=4)
    assert torch.equal(whole.rows["tokens"], tokens.rows["tokens"])
    assert torch.equal(whole.returns, tokens.returns)
    assert torch.equal(whole.agent_tokens, tokens.turns)
