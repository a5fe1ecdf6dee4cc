"""Makers of games: fresh ones that resume exactly, and datasets in parts that survive interruptions."""

from __future__ import annotations

import signal

import pytest
import torch
from torchrl.envs import TransformedEnv
from torchrl.envs.transforms import RewardScaling

from tests.processes import spawned
from torchrl_lang._files import folders
from torchrl_lang.data import EpisodeSampler, FreshEpisodes, PolicySampler, generate_in_parts, load_dataset
from torchrl_lang.data.generate import play_to_end
from torchrl_lang.envs.games import CorridorEnv, CorridorPlayer
from torchrl_lang.envs.wordle import RandomWordPlayer, WordleEnv, demo_words

WORDS = demo_words(30)


def games(batch=16):
    return PolicySampler(WordleEnv(WORDS, [batch]), RandomWordPlayer(WORDS, prob_smart=0.5))


class Counted(EpisodeSampler):
    """Two rows a game with its number, and a failure at one of them."""

    def __init__(self, fails_at=None):
        self.sampler, self.calls, self.fails_at = games(), [], fails_at
        super().__init__(self.sampler.tokenizer, self.sampler.row_length)

    def __call__(self, numbers, seed):
        self.calls.append(numbers)
        if self.fails_at in numbers:
            raise KeyboardInterrupt
        rows = torch.cat([self.sampler(numbers, seed)] * 2)
        rows["number"] = torch.tensor([*numbers] * 2)
        return rows


def content(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_all_rows_play_one_whole_game():
    env = WordleEnv(WORDS, [8], seed=0)
    rows = play_to_end(env, RandomWordPlayer(WORDS, prob_smart=1.0, seed=0))
    assert rows.shape == (8,)
    assert rows["terminated"].all()
    again = WordleEnv(WORDS, [8], seed=0).reset()
    assert (play_to_end(env, RandomWordPlayer(WORDS, prob_smart=1.0, seed=0), again)["terminated"]).all()


def test_games_depend_on_their_numbers_and_seed_only():
    sampler = games()
    first = sampler(range(0, 40), seed=1)
    before = torch.get_rng_state()
    sampler(range(40, 50), seed=1)
    assert torch.equal(before, torch.get_rng_state())
    assert (sampler(range(0, 40), seed=1) == first).all()
    assert len(first) == 40
    for other in (sampler(range(40, 80), seed=1), sampler(range(0, 40), seed=2)):
        assert not (other["tokens"] == first["tokens"]).all()


def test_rewards_are_those_after_transforms():
    env = CorridorEnv(length=3, batch_size=[8], seed=0)
    player = CorridorPlayer(env.tokenizer, length=3)
    plain = PolicySampler(env, player)(range(8), 0)["token_reward"]
    scaled = PolicySampler(TransformedEnv(env, RewardScaling(0.0, 3.0)), player)(range(8), 0)["token_reward"]
    assert plain.any()
    torch.testing.assert_close(scaled.sum(-1), 3 * plain.sum(-1))


def test_fresh_games_never_repeat_and_resume_exactly():
    fresh = FreshEpisodes(games(), 24, games=32, seed=3)
    before = [fresh.sample() for _ in range(3)]
    state = fresh.state_dict()
    after = [fresh.sample() for _ in range(3)]
    other = FreshEpisodes(games(batch=16), 24, games=32, seed=0)
    other.load_state_dict(state)
    assert all((a == b).all() for a, b in zip(after, (other.sample() for _ in range(3)), strict=True))
    assert state == {"seed": 3, "round": 2, "position": 8}
    # The first rounds hold all games of the sampler, each once.
    rows = torch.cat([FreshEpisodes(games(), 64, games=32, seed=3, trim=False).sample()["tokens"]])
    made = torch.cat([games()(range(start, start + 32), 3)["tokens"] for start in (0, 32)])
    assert sorted(map(tuple, rows.tolist())) == sorted(map(tuple, made.tolist()))
    assert all(batch["attention_mask"].any(0).all() for batch in before)  # trimmed


def test_a_dataset_in_parts_holds_the_games_in_order(tmp_path):
    sampler = Counted()
    dataset = generate_in_parts(
        sampler, tmp_path / "data", games=40, games_per_part=16, seed=5, notes={"words": WORDS}, progress=False
    )
    expected = torch.cat([Counted()(range(start, min(start + 16, 40)), 5) for start in (0, 16, 32)])
    assert (dataset[:] == expected).all()
    assert dataset.manifest["notes"] == {"sampler": "Counted", "words": WORDS}
    assert load_dataset(tmp_path / "data", verify=True).manifest["seed"] == 5
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_an_interrupted_call_continues_with_the_missing_parts(tmp_path):
    options = {"games": 40, "games_per_part": 8, "seed": 5, "progress": False}
    with pytest.raises(KeyboardInterrupt):
        generate_in_parts(Counted(fails_at=20), tmp_path / "data", **options)
    assert not (tmp_path / "data").exists()
    sampler = Counted()
    generate_in_parts(sampler, tmp_path / "data", **options)
    assert sampler.calls == [range(16, 24), range(24, 32), range(32, 40)]
    generate_in_parts(Counted(), tmp_path / "whole", **options)
    assert content(tmp_path / "data") == content(tmp_path / "whole")


def test_parts_of_other_arguments_are_not_mixed(tmp_path):
    options = {"games": 40, "games_per_part": 8, "progress": False}
    with pytest.raises(KeyboardInterrupt):
        generate_in_parts(Counted(fails_at=20), tmp_path / "data", seed=5, **options)
    with pytest.raises(ValueError, match=r"other arguments \(seed\)"):
        generate_in_parts(Counted(), tmp_path / "data", seed=6, **options)
    generate_in_parts(Counted(), tmp_path / "data", seed=6, overwrite=True, **options)
    generate_in_parts(Counted(), tmp_path / "whole", seed=6, **options)
    assert content(tmp_path / "data") == content(tmp_path / "whole")


def test_existing_datasets_are_kept(tmp_path):
    options = {"games": 8, "games_per_part": 8, "progress": False}
    generate_in_parts(Counted(), tmp_path / "data", **options)
    sampler = Counted()
    with pytest.raises(FileExistsError, match="overwrite=True"):
        generate_in_parts(sampler, tmp_path / "data", **options)
    assert not sampler.calls
    generate_in_parts(sampler, tmp_path / "data", overwrite=True, **options)
    for bad in ({"games": 0}, {"games_per_part": 0}, {"workers": 0}):
        with pytest.raises(ValueError, match="at least 1"):
            generate_in_parts(sampler, tmp_path / "other", **{**options, **bad})


@pytest.mark.slow
def test_processes_write_the_same_files(tmp_path):
    options = {"games": 48, "games_per_part": 16, "seed": 5, "progress": False}
    handler = signal.getsignal(signal.SIGINT)
    with spawned():
        generate_in_parts(games(), tmp_path / "data", workers=2, **options)
    generate_in_parts(games(), tmp_path / "whole", **options)
    assert content(tmp_path / "data") == content(tmp_path / "whole")
    assert signal.getsignal(signal.SIGINT) == handler
    assert not folders.is_unfinished(tmp_path / "data")
