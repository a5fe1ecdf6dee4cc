"""Makers of games: fresh ones that resume exactly, and datasets in parts that survive interruptions."""

from __future__ import annotations

import shutil
import signal

import pytest
import torch
from torchrl.envs import TransformedEnv

from tests.data.conftest import speak
from tests.processes import spawned
from torchrl_lang.data import FreshEpisodes, PolicySampler, generate_dataset, generate_in_parts, load_dataset
from torchrl_lang.data.generate import EpisodeSampler
from torchrl_lang.envs.wordle import RandomWordPlayer, WordleEnv, demo_words
from torchrl_lang.modules import UtteranceActor, causal_lm, language_actor
from torchrl_lang.transforms import KLConstrainedTransform, frozen_copy

EPISODES = 30


def make(talk, folder, *, batch, **kwargs):
    env = talk(batch_size=batch, row_length=96, patience=6)
    options = {"episodes": EPISODES, "seed": 3, "progress": False, "policy": speak, **kwargs}
    policy, folder = options.pop("policy"), folder / f"{batch}"
    return env, generate_dataset(env, policy, folder, **options)


def content(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize("batch", [[64], [2, 3]])
def test_the_data_set_holds_the_first_episodes_to_begin(talk, tmp_path, batch):
    """Short or long, episode k of the seed is row k; so the batch size does not matter."""
    env, dataset = make(talk, tmp_path, batch=batch)
    turns = [sum(turn.by_agent for turn in dataset.episode(k).turns) for k in range(len(dataset))]
    assert turns == env.lengths(torch.arange(EPISODES)).tolist()


def test_the_same_seed_gives_the_same_files(talk, tmp_path):
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    folders = []
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        (tmp_path / name).mkdir()
        folders.append(make(talk, tmp_path / name, batch=[8], seed=seed, policy=None)[1].folder)
        torch.rand(3)
        torch.random.set_rng_state(before)
    first, second, other = map(content, folders)
    assert first == second
    assert first["rows/tokens.memmap"] != other["rows/tokens.memmap"]


def test_the_manifest_tells_who_played_and_a_progress_bar_how_well(talk, tmp_path, capsys):
    def fall_over(td):
        raise RuntimeError("tired")

    with pytest.raises(RuntimeError, match="tired"):
        make(talk, tmp_path, batch=[8], policy=fall_over)
    assert list(tmp_path.iterdir()) == []
    capsys.readouterr()
    _, dataset = make(talk, tmp_path, batch=[8], policy=None, notes={"patience": 6}, progress=True)
    assert "mean_return" in capsys.readouterr().err
    found = tuple(dataset.manifest[key] for key in ("notes", "source", "seed", "episodes"))
    assert found == ({"patience": 6}, "random tokens in Talk", 3, EPISODES)
    with pytest.raises(FileExistsError):
        make(talk, tmp_path, batch=[8])
    make(talk, tmp_path, batch=[8], overwrite=True)
    assert capsys.readouterr().err == ""


def test_rewards_less_a_penalty_are_refused(talk, tmp_path):
    env = talk(batch_size=[4], row_length=96, patience=6)
    lm = causal_lm(vocab_size=env.tokenizer.vocab_size, layers=1, width=8, heads=1, max_length=96)
    actor = language_actor(lm)
    policy = UtteranceActor(actor, env.tokenizer.control, 4, seed=0)
    env = TransformedEnv(env, KLConstrainedTransform(frozen_copy(policy), 0.1))
    with pytest.raises(ValueError, match="less a divergence penalty"):
        generate_dataset(env, policy, tmp_path / "x", episodes=8, seed=0, progress=False)
    assert list(tmp_path.iterdir()) == []


WORDS = demo_words(12)


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


def test_games_depend_on_their_numbers_and_seed_only():
    sampler = games()
    first = sampler(range(0, 40), seed=1)
    before = torch.get_rng_state()
    sampler(range(40, 50), seed=1)
    assert torch.equal(before, torch.get_rng_state())
    assert (sampler(range(0, 40), seed=1) == first).all()
    assert len(first) == 40
    assert (sampler(range(17), seed=1) == first[:17]).all()  # one more than are played at a time
    for other in (sampler(range(40, 80), seed=1), sampler(range(0, 40), seed=2)):
        assert not (other["tokens"] == first["tokens"]).all()


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
    rows = FreshEpisodes(games(), 64, games=32, seed=3).sample()["tokens"]
    made = torch.cat([games()(range(start, start + 32), 3)["tokens"] for start in (0, 32)])[:, : rows.shape[1]]
    assert sorted(map(tuple, rows.tolist())) == sorted(map(tuple, made.tolist()))
    assert all(batch["attention_mask"].any(0).all() for batch in before)  # trimmed


def test_a_dataset_in_parts_holds_the_games_in_order(tmp_path):
    sampler, part = Counted(), tmp_path / "data"
    options = {"games": 20, "games_per_part": 16, "seed": 5, "notes": {"words": WORDS}, "progress": False}
    dataset = generate_in_parts(sampler, part, **options)
    expected = torch.cat([Counted()(range(0, 16), 5), Counted()(range(16, 20), 5)])
    assert (dataset[:] == expected).all()
    assert dataset.manifest["notes"] == {"sampler": "Counted", "words": WORDS}
    assert load_dataset(part, verify=True).manifest["seed"] == 5
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
    sampler.calls.clear()
    with pytest.raises(FileExistsError, match="overwrite=True"):
        generate_in_parts(sampler, part, **options)
    with pytest.raises(ValueError, match="at least 1"):
        generate_in_parts(sampler, tmp_path / "other", **{**options, "games": 0})
    assert not sampler.calls
    assert len(generate_in_parts(sampler, part, overwrite=True, **options | {"games": 4})) == 8


def test_an_interrupted_call_continues_with_the_missing_parts(tmp_path):
    """With other arguments it is refused, or begins anew."""
    options = {"games": 20, "games_per_part": 8, "progress": False}
    for overwrite, calls in ((False, [range(8, 16), range(16, 20)]), (True, None)):
        with pytest.raises(KeyboardInterrupt):
            generate_in_parts(Counted(fails_at=10), tmp_path / "data", seed=5, **options)
        assert not (tmp_path / "data").exists()
        with pytest.raises(ValueError, match=r"other arguments \(seed\)"):
            generate_in_parts(Counted(), tmp_path / "data", seed=6, **options)
        sampler, seed = Counted(), 5 + overwrite
        generate_in_parts(sampler, tmp_path / "data", seed=seed, overwrite=overwrite, **options)
        assert calls is None or sampler.calls == calls
        generate_in_parts(Counted(), tmp_path / f"whole {seed}", seed=seed, **options)
        assert content(tmp_path / "data") == content(tmp_path / f"whole {seed}")
        shutil.rmtree(tmp_path / "data")


@pytest.mark.slow
def test_processes_write_the_same_files(tmp_path):
    options = {"games": 32, "games_per_part": 16, "seed": 5, "progress": False}
    handler = signal.getsignal(signal.SIGINT)
    with spawned():
        generate_in_parts(games(), tmp_path / "data", workers=2, **options)
    generate_in_parts(games(), tmp_path / "whole", **options)
    assert content(tmp_path / "data") == content(tmp_path / "whole")
    assert signal.getsignal(signal.SIGINT) == handler
