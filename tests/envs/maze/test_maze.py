"""The maze of LMRL-Gym: its texts and rules by hand, its starts, its states, its players and its task."""

from pathlib import Path

import pytest
import torch

from tests.envs.helpers import last_words, say_after, transcript
from tests.recipes.commands import from_own_notes
from torchrl_lang._files import FileError
from torchrl_lang.data import rows_from_rollout
from torchrl_lang.envs.maze import Maze, MazeEnv, OptimalPlayer, ReactivePlayer, reactive_optimum, reactive_return
from torchrl_lang.envs.maze.optimum import HABIT
from torchrl_lang.envs.maze.task import MazeTask, normalized_return
from torchrl_lang.evaluation import play_games
from torchrl_lang.recipes.algorithms import BC, train
from torchrl_lang.recipes.datasets import generate_once
from torchrl_lang.recipes.load_run import load_run
from torchrl_lang.recipes.tasks.maze import MazeData
from torchrl_lang.schema import ROW_KEYS

MAZE = Maze()


def start_at(*cell):
    """The number of the start in a cell."""
    return torch.tensor([MAZE.starts.tolist().index(MAZE.cells.index(cell))])


def play(env, cell, *texts):
    """Rewards and the last observation of a game."""
    td, rewards = env.reset(start=start_at(*cell)), []
    for text in texts:
        td = say_after(env, td, text)
        rewards.append(td["reward"].item())
    return rewards, td


def test_the_free_cells():
    rows = {1: [*range(1, 6), *range(7, 12)], 2: [3, 9], 3: [3, 9], 4: [3, 9], 5: range(3, 10), 6: [6], 7: [6], 8: [6]}
    assert set(MAZE.cells) == {(row, column) for row, columns in rows.items() for column in columns}


@pytest.mark.parametrize(
    ("cell", "walls"),
    [
        ((1, 1), "There are walls to your left, above you, below you."),
        ((1, 3), "There is a wall above you."),
        ((1, 10), "There are walls above you, below you."),
        ((1, 11), "There are walls to your right, above you, below you."),
        ((3, 9), "There are walls to your right, to your left."),
        ((5, 3), "There are walls to your left, below you."),
        ((5, 6), "There is a wall above you."),
    ],
)
def test_texts_by_hand(cell, walls):
    number = MAZE.cells.index(cell)
    assert MAZE.text(number, "partial") == walls
    own = {(1, 10): "1, 1 0", (1, 11): "1, 1 1"}.get(cell, f"{cell[0]}, {cell[1]}")
    told = f"The goal is at position 8, 6. Your current position is at position {own}. {walls}"
    assert MAZE.text(number, "full") == told
    assert Maze("#####\n#...#\n#.G.#\n#...#\n#####").text(1, "partial") == "There is a wall above you."


def test_games_by_hand():
    env = MazeEnv(batch_size=[1])
    sideways, upright = "There are walls above you, below you.", "There are walls to your right, to your left."
    rewards, td = play(env, (5, 5), "move up", "move left", "move right", "move down")  # into a wall, to 5, 4 and back
    assert rewards == [-1.0] * 4
    assert transcript(env, td).count(sideways) == 5
    assert not td["done"]
    moves = ["move right", "move down", "move down", "move down"]
    rewards, td = play(env, (5, 5), *moves)
    assert rewards == [-1.0, -1.0, -1.0, 0.0]
    told = ["There is a wall above you.", upright, upright, "Success"]
    turns = "".join(f"{move}</a>{text}</s>" for move, text in zip(moves, told, strict=True))
    assert transcript(env, td) == f"<s>{sideways}</s>{turns}</eod>"
    assert (bool(td["terminated"]), bool(td["truncated"])) == (True, False)


@pytest.mark.parametrize("said", ["", "Success", "There is a wall above you.", "move downmove down"])
def test_what_is_no_move_costs_4_and_moves_nothing(said):
    env = MazeEnv(batch_size=[1])
    rewards, td = play(env, (7, 6), said, "move down")
    assert rewards == [-4.0, 0.0]
    assert "There are walls to your right, to your left." in transcript(env, td).split("</a>")[-2]


@pytest.mark.parametrize("last", ["move down", "Success"])
def test_the_turn_after_the_last_move_fails_whatever_it_is(last):
    env = MazeEnv(max_moves=2, batch_size=[1])
    rewards, td = play(env, (7, 6), "move up", "move down", last)
    assert rewards == [-1.0] * 3
    assert last_words(env, td) == "Failure</s>"
    assert (bool(td["terminated"]), bool(td["truncated"])) == (False, True)
    rewards, td = play(env, (7, 6), "move up", "move down")
    assert not td["done"]
    assert play(env, (6, 6), "move down", "move down")[1]["terminated"]


def test_the_worst_return_of_moves():
    env = MazeEnv(observation="full", batch_size=[1])
    rewards, td = play(env, (1, 1), *["move up"] * 101)
    assert (sum(rewards), bool(td["truncated"])) == (-101.0, True)
    # As many turns fit a row if each has a token too many.
    rewards, td = play(env, (1, 1), *["move upmove up"] * 101)
    assert (sum(rewards), last_words(env, td)) == (-401.0, "Failure</s>")


def test_25_episodes_begin_once_in_each_cell_and_in_an_order_of_the_seed():
    cells = []
    for seed in (0, 0, 1):
        env = MazeEnv(batch_size=[75], seed=seed)
        env.reset()
        cells.append(env._current("cell"))
        assert all(part.sort().values.equal(MAZE.starts) for part in cells[-1].split(25))
    assert (cells[0].equal(cells[1]), cells[0].equal(cells[2])) == (True, False)
    assert len({tuple(part.tolist()) for part in cells[0].split(25)}) > 1


def test_a_row_is_continued_from_a_start_that_fits_it():
    env = MazeEnv(batch_size=[400], seed=0)
    one = MazeEnv(batch_size=[1])
    rows = play(one, (1, 7), "move right", "move left")[1].select(*ROW_KEYS)
    env.reset(rows.expand(400).clone(), set_state=True)
    assert {MAZE.cells[cell] for cell in env._current("cell").tolist()} == {(1, 1), (1, 7)}
    rows = play(one, (1, 2), "", "move up")[1].select(*ROW_KEYS)
    env.reset(rows.expand(400).clone(), set_state=True)
    alike = {(1, 2), (1, 4), (1, 8), (1, 10), (5, 4), (5, 5), (5, 7), (5, 8)}
    assert {MAZE.cells[cell] for cell in env._current("cell").tolist()} == alike
    rows = play(one, (1, 2), "move right")[1].select(*ROW_KEYS)  # to where a wall is above only
    env.reset(rows.expand(400).clone(), set_state=True)
    assert {MAZE.cells[cell] for cell in env._current("cell").tolist()} == {(1, 3), (1, 9), (5, 6)}
    one.reset(rows, set_state=True, start=start_at(5, 5))
    assert MAZE.cells[one._current("cell").item()] == (5, 6)
    with pytest.raises(ValueError, match="texts that no game from its start"):
        one.reset(rows, set_state=True, start=start_at(1, 4))


@pytest.mark.parametrize("plan", ["", "####\n#.G#", "###\n#G#\n###", "####\n#.x#\n####", "######\n#.#.G#\n######"])
def test_refused_plans(plan):
    with pytest.raises(ValueError, match=r"A maze is lines|No path leads from \(1, 1\)"):
        Maze(plan)


def test_refused_options():
    for call, noun in [
        (lambda: OptimalPlayer(MAZE, "none"), "observation must be one of"),
        (lambda: ReactivePlayer(MAZE, "partial", torch.ones(3, 4)), r"policy must have shape \[7, 4\]"),
        (lambda: reactive_return(MAZE, "full", torch.ones(7, 4)), r"policy must have shape \[25, 4\]"),
        (lambda: MazeEnv(batch_size=[1]).reset(start=torch.tensor([25])), r"start must lie in \[0, 25\)"),
    ]:
        with pytest.raises(ValueError, match=noun):
            call()


def test_a_player_without_memory_has_its_optimum():
    env = MazeEnv(batch_size=[500])
    policy = reactive_optimum(MAZE, "partial")
    returns = play_games(env, ReactivePlayer(MAZE, "partial", policy, seed=0), games=2000).returns
    assert abs(returns.mean() + 12.6) < 4 * returns.std() / 2000**0.5


def test_a_player_without_skill_moves_by_habit():
    env = MazeEnv(batch_size=[100], seed=0)
    rollout = env.rollout(40, OptimalPlayer(MAZE, "partial", skill=0.0, seed=0), break_when_any_done=False)
    named = rollout["action"][..., 0] - env.tokenizer.encode("move left")[0]
    share = torch.bincount(named.flatten(), minlength=4) / 4000
    torch.testing.assert_close(share, torch.tensor(HABIT), atol=0.03, rtol=0)  # four standard deviations


def test_the_best_player_goes_on_after_the_mistakes_of_another():
    """What is no move teaches nothing, and a wrong move is undone."""
    env = MazeEnv(batch_size=[1])
    player = OptimalPlayer(MAZE, "partial")
    _, td = play(env, (1, 1), "", "move right", "Success", "move left")
    moves = []
    while not td["done"]:
        moves.append(env.tokenizer.symbols[player(td)["action"][0, 0]])
        td = env.step(td)["next"]
    assert moves == [*["move right"] * 2, *["move down"] * 4, *["move right"] * 3, *["move down"] * 3]
    assert len(rows_from_rollout(env.rollout(30, player), unfinished="drop")) == 1


def test_the_score_of_lmrl_gym():
    """Figures of its tables: ILQL with -52.9 has 76.3, PPO with -6.84 would have 100."""
    assert normalized_return(-52.9, "partial") == pytest.approx(76.3, abs=0.05)
    assert [normalized_return(value, "full") for value in (-101.0, -92.0, -83.0)] == [0, 25, 50]
    assert normalized_return(-7.24, "partial") == pytest.approx(116.2, abs=0.05)


@pytest.mark.parametrize("observation", ["full", "partial"])
def test_scripted_players_in_a_table(observation):
    task = MazeTask(observation)
    games = task.number_of_games(None)
    played = {
        name: task.evaluate(task.player(name, 0).policy, games=20 * games, seed=0, batch=500)[0]
        for name in task.baselines
    }
    best, worst = played["optimal"], played["random"]
    assert best.metrics["regret"] == pytest.approx(0, abs=1e-9)
    assert best.win_rate == 1
    assert worst.mean_return < -80
    assert set(best.metrics) == set(task.metric_meanings)
    without_memory = {"full": -6.84, "partial": -12.6}[observation]
    assert played["memoryless"].mean_return == pytest.approx(without_memory, abs=1.5)


def test_known_values_of_first_moves():
    task = MazeTask("full")
    env = task.env(25, seed=0)
    states = task.known_values(env.reset())
    near = env.tokenizer.encode(env.maze.text(env.maze.cells.index((7, 6)), "full"))[0]
    known = next(one for one in states if one.tokens[1] == near)
    # Down arrives; up costs 1, and then 1 and 0 to come back; walls cost 1.
    assert (len(states), known.values.tolist()) == (25, [-1.0, -1.0, -2.0, 0.0])
    assert env.tokenizer.decode(known.utterances[3].tolist()) == "move down"


@pytest.mark.parametrize("change", [{"observation": "none"}, {"max_moves": 0}])
def test_damaged_notes(change):
    assert from_own_notes(MazeTask("full", 7)) == MazeTask("full", 7)
    with pytest.raises(FileError):
        from_own_notes(MazeTask(), **change)


def test_the_data_have_the_mean_return_of_the_published_ones():
    task, options = MazeTask(), MazeData(out=Path("data"))
    returns = task.evaluate(task.behavior_policy(options).policy, games=1000, seed=0, batch=500)[1].returns
    assert abs(returns.mean() + 83) < 4 * returns.std() / 1000**0.5


def test_a_model_that_imitates_the_best_player_has_the_optimum(tmp_path):
    generate_once(MazeData(out=tmp_path / "data", observation="full", player="optimal", games=200))
    options = {"steps": 150, "eval_every": 150, "lr": 5e-3}
    train(BC.for_task(MazeTask, data=tmp_path / "data", out=tmp_path / "bc", **options))
    run = load_run(tmp_path / "bc")
    summary, _ = run.task.evaluate(run.policy(method="greedy"), games=25, seed=0)
    assert summary.mean_return == pytest.approx(-6.84)
    assert summary.metrics["normalized"] == pytest.approx(100)
