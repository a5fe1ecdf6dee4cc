"""The demo: offline RL beside every way of imitating its data, on a graph and in Wordle."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_lang._files import write_file, write_json
from torchrl_lang.data import RowDataset, best_rows
from torchrl_lang.envs.random_walks import DirectedGraph
from torchrl_lang.envs.random_walks.players import FrequentMovePlayer
from torchrl_lang.envs.random_walks.task import RandomWalksData, RandomWalksTask
from torchrl_lang.envs.wordle import MixturePlayer, OptimalPlayer, TreePlayer, WordIndex, solve
from torchrl_lang.envs.wordle.task import WordleData, WordleTask
from torchrl_lang.envs.wordle.transcript import turns_of_rows
from torchrl_lang.evaluation import GameRecords, Summary, format_table, imitation_loss
from torchrl_lang.evaluation.plots import draw_run, new_figure, read_columns, save_figure, tidy
from torchrl_lang.evaluation.transcripts import write_transcripts
from torchrl_lang.modules.save import saved_actor
from torchrl_lang.recipes.compare import decodings, planned_runs, train_missing
from torchrl_lang.recipes.datasets import generate_once, open_dataset, output_folder
from torchrl_lang.recipes.demo_options import METHODS, Demo
from torchrl_lang.recipes.load_run import load_run
from torchrl_lang.recipes.offline import held_out_rows
from torchrl_lang.recipes.tasks.base import DataOptions, Player, Task
from torchrl_lang.schema import AGENT_MASK, ATTENTION_MASK, TOKENS

_METHODS = ("bc", "best-30", "best-10", "ilql")
_HELD_OUT = 500


@dataclass
class Part:
    """One part of the demo, and what it finds: a summary and the games of each player, by its name."""

    title: str
    folder: Path
    data: DataOptions
    steps: int
    """Training steps of each run."""
    scripted: Callable[[Task, RowDataset, int], Mapping[str, Player]]
    """``(task, data, seed)`` to players that learned nothing: perfect imitations of the data, and the optimum last."""
    illustrate: Callable[[Part, list[Any]], None]
    """Draws one game of each of three players into three axes."""
    options: Demo
    task: Task = field(init=False)
    summaries: dict[str, Summary] = field(default_factory=dict)
    records: dict[str, GameRecords] = field(default_factory=dict)
    chosen_beta: float = 0.0
    held_out_loss: float = 0.0
    """Of BC, nats per token."""
    data_entropy: float = 0.0
    """Of the players that made the data on the same episodes, nats per token: no imitation has a lower loss."""
    values_note: str = ""
    minutes: float = 0.0

    @property
    def ilql(self) -> str:
        """Name of the ILQL player with the chosen beta."""
        return f"ILQL, greedy, beta {self.chosen_beta:g}"

    def best(self, prefix: str) -> str:
        """Name of the best player whose name begins with ``prefix``."""
        names = [name for name in self.summaries if name.startswith(prefix)]
        return max(names, key=lambda name: self.summaries[name].mean_return)

    def as_dict(self) -> dict[str, Any]:
        """All figures, for JSON."""
        return {
            "title": self.title,
            "steps": self.steps,
            "eval_games": self.options.eval_games,
            "minutes_of_this_call": round(self.minutes, 2),
            "chosen_beta": self.chosen_beta,
            "bc_held_out_loss": self.held_out_loss,
            "data_entropy": self.data_entropy,
            "values": self.values_note,
            "players": {name: summary.as_dict() for name, summary in self.summaries.items()},
        }


def main(options: Demo) -> Path:
    """Run the demo; returns the folder with tables, pictures, transcripts and ``results.json``."""
    with output_folder(options.out):
        began = time.monotonic()
        found = {name: _PARTS[name](options, options.out / name) for name in dict.fromkeys(options.parts)}
        for number, part in enumerate(found.values(), 1):
            print(f"\n[{number}/{len(options.parts)}] {part.title}", flush=True)
            _run(part)
            # Before anything is printed, so that a closed output loses nothing.
            write_file(part.folder / "table.txt", format_table(list(part.summaries.values())) + "\n")
            draw_page(part.folder / "pictures.png", part)
        minutes = (time.monotonic() - began) / 60
        chosen = {name: getattr(options, name) for name in ("walks", "words", "games", "eval_games", "seed")}
        content: dict[str, Any] = {"options": chosen, "minutes_of_this_call": round(minutes, 2)}
        content |= {name: part.as_dict() for name, part in found.items()}
        write_json(options.out / "results.json", content)
        for part in found.values():
            _print(part)
        print(f"\nall figures: {options.out / 'results.json'}; {minutes:.1f} minutes")
    return options.out


def _graph(options: Demo, folder: Path) -> Part:
    title = "shortest paths on a graph of 20 nodes with 3 exits each, from random walks; reward -1 a move"
    graph: Any = {"nodes": 20, "out_degree": 3, "graph_seed": 7, "max_turns": 12}
    data = RandomWalksData(out=folder / "data", games=options.walks, seed=options.seed, **graph)
    return Part(title, folder, data, options.graph_steps, _scripted_walks, draw_paths, options)


def _wordle(options: Demo, folder: Path) -> Part:
    title = f"Wordle with {options.words} words, from games with a poor favourite first word"
    games: Any = {"games": options.games, "seed": options.seed, "words": str(options.words), "player": "habit"}
    data = WordleData(out=folder / "data", **games)
    return Part(title, folder, data, options.wordle_steps, _scripted_games, draw_tiles, options)


_PARTS = {"graph": _graph, "wordle": _wordle}


def _run(part: Part) -> None:
    """Generate, train and play. What an interrupted call left is continued."""
    began, seed, games = time.monotonic(), part.options.seed, part.options.eval_games
    dataset, part.task = open_dataset(generate_once(part.data))
    shared = {"data": dataset.folder, "steps": part.steps, "seed": seed, "eval-every": -(-part.steps // 8)}
    places = {name: part.folder / name for name in METHODS}
    train_missing(planned_runs(_METHODS, places, {**shared, "held-out": _HELD_OUT}))
    runs = {name: load_run(places[name]) for name in _METHODS}
    rows = held_out_rows(dataset, _HELD_OUT)
    part.held_out_loss = imitation_loss(saved_actor(runs["bc"].model), rows)
    behavior: Any = part.task.behavior_policy(part.data).policy
    part.data_entropy = -float(behavior.log_prob(rows).sum()) / int(rows.get(AGENT_MASK).sum())
    part.values_note, betas = runs["ilql"].values_note, part.options.betas
    found = runs["ilql"].choose_beta(seed=seed + 2000, games=max(games // 4, 1), betas=betas)
    part.chosen_beta = next(iter(found))
    part.summaries["data"] = part.task.summary(GameRecords.from_rows(dataset[:], dataset.tokenizer.control), "data")
    for name, run in runs.items():
        for decoding, policy in decodings(run, betas=(0.0, *betas), seed=seed + 1000):
            _play(part, f"{METHODS[name].title}, {decoding}", Player(policy), dataset)
    for name, player in part.scripted(part.task, dataset, seed + 1000).items():
        _play(part, name, player, dataset)
    part.minutes = (time.monotonic() - began) / 60


def _play(part: Part, name: str, player: Player, dataset: RowDataset) -> None:
    games: Any = {"games": part.options.eval_games, "seed": part.options.seed + 1000, **player.env_options}
    summary, records = part.task.evaluate(player.policy, name=name, **games)
    part.summaries[name], part.records[name] = summary, records
    print(f"{name}: mean return {summary.mean_return:.2f}", flush=True)
    path = part.folder / "transcripts" / f"{name.replace(' ', '_').replace(',', '').replace('%', 'percent')}.txt"
    write_transcripts(path, records, dataset.tokenizer, games=10, title=name, spelling=part.task.spelling)


def _print(part: Part) -> None:
    print(f"\n{part.title}\n\n{format_table(list(part.summaries.values()))}\n")
    print(
        f"Each run trained for {part.steps} steps. Beta was chosen on other games: {part.chosen_beta:g}. "
        f"BC's loss on held-out episodes is {part.held_out_loss:.3f} nats a token; the entropy of the players that "
        f"made them is {part.data_entropy:.3f}.\nILQL's {part.values_note}.\n"
        f"pictures     {part.folder / 'pictures.png'}\ntranscripts  {part.folder / 'transcripts'}"
    )


def _scripted_walks(task: Task, data: RowDataset, seed: int) -> Mapping[str, Player]:
    """The most frequent move of the best walks at each node, and a shortest path."""
    graph, tokenizer = cast(RandomWalksTask, task).graph, task.tokenizer()
    players = dict[str, Player]()
    for fraction in (0.3, 0.1):
        copy = FrequentMovePlayer(graph, tokenizer, best_rows(data, fraction=fraction))
        players[f"perfect copy of the best {round(100 * fraction)} %, greedy"] = Player(copy)
    return players | {"shortest path": task.player("shortest")}


def _scripted_games(task: Task, data: RowDataset, seed: int) -> Mapping[str, Player]:
    """Perfect imitations that begin as the data does and then play on optimally; and the optimum, myopic and exact."""
    words, rules = list(cast(WordleTask, task).words), cast(WordleTask, task).rules
    first = _first_words(data[:])
    best = _first_words(best_rows(data, fraction=0.3))
    favourite = first.most_common(1)[0][0]
    players = [OptimalPlayer(words, rules=rules, openers=[word], seed=seed + i) for i, word in enumerate(best)]
    shares = [count / best.total() for count in best.values()]
    copy = OptimalPlayer(words, rules=rules, openers=[favourite], seed=seed)
    of_best = MixturePlayer(players, shares, per="game", seed=seed)
    return {
        f"perfect copy, greedy: {favourite}, then optimal": Player(copy),
        "perfect copy of the best 30 %'s first words, then optimal": Player(of_best),
        "optimal (myopic)": task.player("optimal", seed),
        "optimal (exact)": Player(TreePlayer(solve(words, rules=rules, progress=False))),
    }


def _first_words(rows: TensorDictBase) -> Counter[str]:
    turns = turns_of_rows(rows)
    known = turns.guess[turns.answered > 0, 0]
    words, counts = known.unique(dim=0, return_counts=True)
    return Counter({WordIndex.text(word): int(count) for word, count in zip(words, counts, strict=True)})


# -- pictures: games, the return over beta, and over training ----------------------------------------------------------

_COLOURS = ("0.45", "#c9b458", "#6aaa64")


def draw_page(path: Path, part: Part) -> Path:
    """Draw a part's page: three games above; below, the return over beta and over training.

    Args:
        path: the PNG file.
        part: the part.
    """
    figure = new_figure(width=14, height=8.4)
    above, below = figure.subfigures(2, 1, height_ratios=[1.05, 1])
    part.illustrate(part, list(above.subplots(1, 3)))
    left, right = below.subplots(1, 2)
    _draw_betas(left, part)
    _draw_training(right, part)
    return save_figure(figure, path, part.title)


def _draw_betas(axes: Any, part: Part) -> None:
    """ILQL's return over the weight of its values, beside the best imitations and the optimum."""
    betas = (0.0, *part.options.betas)
    found = [part.summaries[f"ILQL, greedy, beta {beta:g}"] for beta in betas]
    errors = [summary.return_error or 0.0 for summary in found]
    places = range(len(betas))
    axes.errorbar(places, [s.mean_return for s in found], errors, marker="o", capsize=3, color="tab:red", label="ILQL")
    trained, optimum = part.best("BC"), list(part.summaries)[-1]
    lines = {"data": "data", "best perfect imitation": part.best("perfect copy")}
    lines |= {f"best trained imitation: {trained}": trained, optimum: optimum}
    styles = [":", "-.", "--", "-"]
    for (label, name), style in zip(lines.items(), styles, strict=True):
        axes.axhline(part.summaries[name].mean_return, color="0.4", linewidth=1, linestyle=style, label=label)
    axes.set_xticks(places, [f"{beta:g}" for beta in betas])
    axes.set(xlabel="beta, the weight of the values", title="return by beta, greedy")
    tidy(axes)


def _draw_training(axes: Any, part: Part) -> None:
    """The return of all runs during training, all greedy."""
    for name in _METHODS:
        log = read_columns(part.folder / name / "log.csv")
        draw_run(axes, f"{METHODS[name].title}, greedy", log, "step", "return")
    axes.set(xlabel="step", title="return during training, greedy")
    tidy(axes)


def draw_paths(part: Part, axes: list[Any]) -> None:
    """Draw the walk of each player from the same start, the farthest node of the games."""
    graph = cast(RandomWalksTask, part.task).graph
    imitation = part.best("BC")
    players = {"a walk of the data": "BC, sampled at 1", imitation: imitation, part.ilql: part.ilql}
    records = part.records[part.ilql]
    starts = records.rows.get(TOKENS)[:, 1].long()
    game = int(graph.distance[starts].argmax())
    places = _places(graph)
    for (title, name), panel in zip(players.items(), axes, strict=True):
        path = _path(part.records[name], game, len(graph))
        _draw_graph(panel, graph, places)
        for before, after in pairwise(path):
            _arrow(panel, places[before], places[after], color="tab:red", width=2.0)
        reached = "reaches the goal" if path[-1] == graph.goal else "does not reach the goal"
        panel.set_title(f"{title}: {len(path) - 1} moves, {reached}", fontsize="medium")


def _path(records: GameRecords, game: int, nodes: int) -> list[int]:
    """The nodes of a walk: its start, and those that the environment replied."""
    tokens, agent = records.rows.get(TOKENS)[game], records.rows.get(AGENT_MASK)[game]
    real = records.rows.get(ATTENTION_MASK)[game]
    shown: Tensor = tokens[real & ~agent]
    return [node for node in shown.tolist() if node < nodes]


def _places(graph: DirectedGraph) -> dict[int, tuple[float, float]]:
    """Nodes in columns by their distance to the goal, which is on the right."""
    places = {}
    for distance in graph.distance.unique().tolist():
        nodes = (graph.distance == distance).nonzero().flatten().tolist()
        for order, node in enumerate(nodes):
            places[node] = (-float(distance), order - (len(nodes) - 1) / 2 + 0.15 * (distance % 2))
    return places


def _draw_graph(panel: Any, graph: DirectedGraph, places: Mapping[int, tuple[float, float]]) -> None:
    for before, after in graph.edges.nonzero().tolist():
        _arrow(panel, places[before], places[after], color="0.85", width=0.6)
    for node, (x, y) in places.items():
        color = "tab:green" if node == graph.goal else "0.35"
        panel.plot(x, y, "o", color=color, markersize=13)
        panel.annotate(str(node), (x, y), color="white", ha="center", va="center", fontsize=7)
    panel.set_axis_off()


def _arrow(panel: Any, start: tuple[float, float], end: tuple[float, float], *, color: str, width: float) -> None:
    style = {"arrowstyle": "->", "color": color, "lw": width, "shrinkA": 6, "shrinkB": 6}
    panel.annotate("", end, start, arrowprops=style | {"connectionstyle": "arc3,rad=0.12"})


def draw_tiles(part: Part, axes: list[Any]) -> None:
    """Draw one game of each player with the same hidden word, the game whose lengths are closest to the means."""
    names = ["BC, sampled at 1", part.best("BC"), part.ilql]
    titles = ["like the data (BC, sampled at 1)", *names[1:]]
    turns = torch.stack([part.records[name].turns.double() for name in names])
    game = int((turns - turns.mean(-1, keepdim=True)).abs().sum(0).argmin())
    for name, title, panel in zip(names, titles, axes, strict=True):
        _draw_game(panel, part.records[name], game)
        panel.set_title(f"{title}: return {float(part.records[name].returns[game]):g}", fontsize="medium")


def _draw_game(panel: Any, records: GameRecords, game: int) -> None:
    rows = records.rows[game : game + 1]
    turns = turns_of_rows(rows)
    for row in range(int(turns.answered)):
        word, colours = WordIndex.text(turns.guess[0, row]).upper(), turns.colours[0, row].tolist()
        for column, (letter, colour) in enumerate(zip(word, colours, strict=True)):
            x, y = [column, column + 0.92, column + 0.92, column], [-row, -row, -row - 0.92, -row - 0.92]
            panel.fill(x, y, color=_COLOURS[colour])
            panel.text(column + 0.46, -row - 0.48, letter, color="white", ha="center", va="center", weight="bold")
    panel.set(xlim=(-0.5, 5.5), ylim=(-6.1, 0.2), aspect="equal")
    panel.set_axis_off()
