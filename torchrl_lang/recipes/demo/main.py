"""Run the demo: its two parts, a table and a page of pictures each."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torchrl_lang._files import folder_lock, write_file
from torchrl_lang.envs.random_walks.task import RandomWalksData
from torchrl_lang.envs.wordle.task import WordleData
from torchrl_lang.evaluation import format_table
from torchrl_lang.recipes.datasets import check_place
from torchrl_lang.recipes.demo.graph import draw_paths, scripted_walks
from torchrl_lang.recipes.demo.part import Part, PartResults, run_part
from torchrl_lang.recipes.demo.pictures import draw_page
from torchrl_lang.recipes.demo.wordle import draw_tiles, scripted_games
from torchrl_lang.recipes.load_run import BETAS
from torchrl_lang.recipes.options import Options, option

__all__ = ["Demo", "main"]


@dataclass(frozen=True, kw_only=True)
class Demo(Options):
    """Offline RL beside every way of imitating its data, on a graph and in Wordle: ten minutes on two cores."""

    out: Path = option(Path("runs/demo"), "folder of all results")
    parts: tuple[Literal["graph", "wordle"], ...] = option(("graph", "wordle"), "which parts to run")
    walks: int = option(4000, "random walks in the graph's dataset", at_least=20)
    graph_steps: int = option(700, "training steps of each run on the graph", at_least=1)
    words: int = option(50, "how many of the shipped words", at_least=1, at_most=2250)
    games: int = option(40_000, "games in Wordle's dataset", at_least=20)
    wordle_steps: int = option(3000, "training steps of each run on Wordle", at_least=1)
    eval_games: int = option(1000, "games for each row of a table", at_least=2)
    betas: tuple[float, ...] = option(BETAS, "weights of ILQL's values in the tables", above=0)
    seed: int = option(0, "seed of everything", at_least=0)


def main(options: Demo) -> Path:
    """Run the demo; returns the folder with tables, pictures, transcripts and ``results.json``."""
    check_place(options.out)
    with folder_lock(options.out, "runs this demo"):
        began = time.monotonic()
        found = {}
        for number, name in enumerate(dict.fromkeys(options.parts), 1):
            part = _part(name, options)
            print(f"\n[{number}/{len(options.parts)}] {part.title}", flush=True)
            found[name] = run_part(part, options.out / name)
            _write(found[name], options.out / name)
        minutes = (time.monotonic() - began) / 60
        chosen = {name: getattr(options, name) for name in ("walks", "words", "games", "eval_games", "seed")}
        blocks: dict[str, Any] = {name: results.as_dict() for name, results in found.items()}
        content = {"options": chosen, "minutes_of_this_call": round(minutes, 2), **blocks}
        write_file(options.out / "results.json", json.dumps(content, indent=2) + "\n")
        for name, results in found.items():
            _print(results, options.out / name)
        print(f"\nall figures: {options.out / 'results.json'}; {minutes:.1f} minutes")
    return options.out


def _part(name: Literal["graph", "wordle"], options: Demo) -> Part:
    shared: Any = {"eval_games": options.eval_games, "betas": options.betas, "seed": options.seed}
    if name == "graph":
        return Part(
            title="shortest paths on a graph of 20 nodes with 3 exits each, from random walks; reward -1 a move",
            data=RandomWalksData(
                out=options.out / name / "data",
                games=options.walks,
                seed=options.seed,
                nodes=20,
                out_degree=3,
                graph_seed=7,
                max_turns=12,
            ),
            steps=options.graph_steps,
            scripted=scripted_walks,
            illustrate=draw_paths,
            **shared,
        )
    return Part(
        title=f"Wordle with {options.words} words, from games with a poor favourite first word",
        data=WordleData(
            out=options.out / name / "data",
            games=options.games,
            seed=options.seed,
            words=str(options.words),
            player="habit",
        ),
        steps=options.wordle_steps,
        scripted=scripted_games,
        illustrate=draw_tiles,
        **shared,
    )


def _write(results: PartResults, folder: Path) -> None:
    """Write the files, before anything is printed, so that a closed output loses nothing."""
    write_file(folder / "table.txt", format_table(list(results.summaries.values())) + "\n")
    draw_page(folder / "pictures.png", results)


def _print(results: PartResults, folder: Path) -> None:
    part = results.part
    print(f"\n{part.title}\n\n{format_table(list(results.summaries.values()))}\n")
    print(
        f"Each run trained for {part.steps} steps. Beta was chosen on other games: {results.chosen_beta:g}. "
        f"BC's loss on held-out episodes is {results.held_out_loss:.3f} nats a token; the entropy of the players that "
        f"made them is {results.data_entropy:.3f}.\nILQL's {results.values_note}.\n"
        f"pictures     {folder / 'pictures.png'}\ntranscripts  {folder / 'transcripts'}"
    )
