"""BC, BC on the best data and ILQL on games of other libraries: ``python -m benchmarks.suite_games``.

The data are games of a player that acts at random or has a poor habit. Every method learns from them with the same
small model, and plays the same new games with greedy decoding.
"""

from __future__ import annotations

import json
import random
import re
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from torchrl.objectives import SoftUpdate

from torchrl_lang.data import best_rows, row_buffer, row_returns
from torchrl_lang.envs import GymnasiumGame, TextArenaGame, TextGameEnv
from torchrl_lang.evaluation import play_games
from torchrl_lang.modules import (
    QValueHead,
    UtteranceActor,
    ValueGuidance,
    ValueHead,
    causal_lm,
    language_actor,
    qvalue_module,
    value_module,
)
from torchrl_lang.objectives import BCLoss, ILQLLoss
from torchrl_lang.text import CharTokenizer, Episode, Turn, to_rows
from torchrl_lang.training import adamw, train_steps

GAMES, STEPS, TEST_GAMES, SEEDS = 4000, 600, 500, 3
BATCH, BETAS, BEST = 64, (4.0, 16.0, 64.0), (0.3, 0.1)


class Task(NamedTuple):
    make: Callable[[], Any]
    alphabet: str
    action_length: int
    row_length: int
    max_turns: int
    player: Callable[[list[str], random.Random], str]
    """Chooses an utterance from the texts so far: the opening, an utterance, a reply and so on."""
    optimal: Callable[[list[str], random.Random], str]
    """A player that is optimal, or nearly."""
    options: dict[str, Any] = {}
    """Options of ILQL."""
    tau: float = 0.01


HANDS = 4


def blackjack() -> TextArenaGame:
    """Hands of TextArena's Blackjack: the reward is the share of hands won, at the end.

    The text is how the last hand ended (a letter), the score and the dealer's card.
    """

    def observe(text: str) -> str:
        ends = "".join(f"{end[0]} " for end in re.findall(r"you (win|lose|bust|draw)\.", text))
        found = re.findall(r"\(Score: (\d+)\)\nDealer shows: (\w+)", text)
        return ends + (" ".join(found[-1]) if found and "Final scores" not in text else "")

    return TextArenaGame("Blackjack-v0", num_hands=HANDS, observe=observe)


def gamble(texts: list[str], rng: random.Random) -> str:
    """A poor habit: another card in three of four turns, whatever the score."""
    return "hit" if rng.random() < 0.75 else "stand"


def stand_at_15(texts: list[str], rng: random.Random) -> str:
    """Another card below 15. Limits from 12 to 16 do equally well."""
    return "hit" if int(re.findall(r"\d+", texts[-1])[0]) < 15 else "stand"


def frozen_lake() -> GymnasiumGame:
    """Gymnasium's lake with firm ice: cells and moves are letters, and the reward is 1 at the goal, six moves away."""
    import gymnasium

    lake = gymnasium.make("FrozenLake-v1", is_slippery=False, max_episode_steps=MOVES)
    return GymnasiumGame(lake, observe=lambda cell: chr(ord("a") + cell), act="wsen".index)


MOVES = 16
WAY = "seswswswesswweew"
"""A move of a shortest way to the goal for every cell."""


def walk(texts: list[str], rng: random.Random) -> str:
    """A poor habit: 45 % of the moves go west, 35 % are good, the others are any."""
    chance = rng.random()
    good = WAY[ord(texts[-1]) - ord("a")]
    return "w" if chance < HABIT else good if chance < HABIT + GOOD else rng.choice("wsen")


HABIT, GOOD = 0.45, 0.35


def shortest(texts: list[str], rng: random.Random) -> str:
    """A move of a shortest way."""
    return WAY[ord(texts[-1]) - ord("a")]


# Rewards that come many turns later reach the values sooner with returns over several turns.
LONG = {"target": "lambda", "lmbda": 1.0, "turn_lmbda": 0.7}
LAKE = {**LONG, "turn_gamma": 0.9}
TASKS = {
    "TextArena Blackjack": Task(
        blackjack, "0123456789JQKA hitstandwlb", 6, 70 * HANDS, 10 * HANDS, gamble, stand_at_15, LONG
    ),
    "Gymnasium FrozenLake": Task(
        frozen_lake, "abcdefghijklmnopwsen", 2, 4 * MOVES + 8, MOVES, walk, shortest, LAKE, 0.05
    ),
}


def blackjack_env(batch_size: int, **options: Any) -> TextGameEnv:
    """Blackjack as the task of a command."""
    return _env(TASKS["TextArena Blackjack"], batch_size, **options)


def _env(task: Task, batch_size: int, **options: Any) -> TextGameEnv:
    limits = {"row_length": task.row_length, "action_length": task.action_length, "max_turns": task.max_turns}
    return TextGameEnv(task.make, _tokenizer(task), **limits, batch_size=[batch_size], **options)


def _tokenizer(task: Task) -> CharTokenizer:
    return CharTokenizer.from_alphabet(sorted(set(task.alphabet)))


def play(task: Task, player: Callable[[list[str], random.Random], str], games: int, seed: int) -> list[Episode]:
    """Games of a scripted player."""
    rng, game, episodes = random.Random(seed), task.make(), []
    for _ in range(games):
        texts = [game.reset(rng.randrange(2**31))]
        turns, terminated, truncated = [Turn(texts[0])] if texts[0] else [], False, False
        while not (terminated or truncated):
            texts.append(player(texts, rng))
            reply, reward, terminated, *rest = game.step(texts[-1])
            truncated = bool(rest and rest[0])
            texts.append(reply)
            turns.append(Turn(texts[-2], float(reward)))
            turns += [Turn(reply)] if reply else []
        episodes.append(Episode(turns, terminated=terminated, truncated=truncated))
    return episodes


def model(tokenizer: CharTokenizer, row_length: int) -> Any:
    return causal_lm(vocab_size=tokenizer.vocab_size, layers=2, width=64, heads=4, max_length=row_length)


def learn_bc(rows: TensorDict, tokenizer: CharTokenizer, row_length: int) -> tuple[Any, None]:
    actor = language_actor(model(tokenizer, row_length))
    loss = BCLoss(actor)
    for _ in train_steps(loss, row_buffer(rows, BATCH).sample, adamw(loss, 1e-3), steps=STEPS, max_grad_norm=1.0):
        pass
    return actor, None


def learn_ilql(rows: TensorDict, tokenizer: CharTokenizer, task: Task) -> tuple[Any, Any]:
    actor, vocabulary = language_actor(model(tokenizer, task.row_length)), tokenizer.vocab_size
    q, v = qvalue_module(QValueHead(64, vocabulary)), value_module(ValueHead(64))
    options = {"turn_gamma": 0.95, **task.options}
    loss = ILQLLoss(actor, q, v, expectile=0.8, gamma=1.0, cql_weight=0.01, **options)
    target = SoftUpdate(loss, tau=task.tau)
    batches, optimizer = row_buffer(rows, BATCH), adamw(loss, 1e-3)
    for _ in train_steps(loss, batches.sample, optimizer, steps=STEPS, target_updater=target, max_grad_norm=1.0):
        pass
    return actor, loss


def evaluate(task: Task, actor: Any, guidance: Any, seed: int, games: int) -> list[float]:
    env, options = _env(task, 100), {"action_length": task.action_length, "guidance": guidance, "method": "greedy"}
    policy = UtteranceActor(actor, env.tokenizer.control, **options)
    return play_games(env, policy, games=games, seed=seed).returns.tolist()


def run(task: Task, seed: int) -> dict[str, float]:
    """Mean returns by policy."""
    torch.manual_seed(seed)
    tokenizer = _tokenizer(task)
    rows = to_rows(play(task, task.player, GAMES, seed), tokenizer, task.row_length)
    found = {"data": row_returns(rows).mean().item()}
    best = {f"BC best {fraction:.0%}": best_rows(rows, fraction=fraction) for fraction in BEST}
    for name, data in {"BC": rows, **best}.items():
        actor, _ = learn_bc(data, tokenizer, task.row_length)
        found[name] = statistics.mean(evaluate(task, actor, None, 10_000 + seed, TEST_GAMES))
    actor, loss = learn_ilql(rows, tokenizer, task)
    for beta in BETAS:
        guidance = ValueGuidance(loss.target_qvalue_network(), beta=beta)
        games = evaluate(task, actor, guidance, 10_000 + seed, TEST_GAMES)
        found[f"ILQL beta {beta:g}"] = statistics.mean(games)
    best_games = play(task, task.optimal, TEST_GAMES, 10_000 + seed)
    found["optimal player"] = row_returns(to_rows(best_games, tokenizer, task.row_length)).mean().item()
    return found


def main(names: list[str]) -> None:
    results: dict[str, Any] = {}
    for name, task in TASKS.items():
        if names and not any(part in name for part in names):
            continue
        start = time.perf_counter()
        found = [run(task, seed) for seed in range(SEEDS)]
        print(f"\n{name}, {GAMES} games, {STEPS} steps, {time.perf_counter() - start:.0f} s for {SEEDS} seeds")
        for policy in found[0]:
            values = [one[policy] for one in found]
            error = statistics.stdev(values) / SEEDS**0.5
            print(
                f"| {policy} | {statistics.mean(values):.3f} ± {error:.3f} | {', '.join(f'{v:.3f}' for v in values)} |"
            )
        results[name] = found
        versions = {package: version(package) for package in ("torch", "textarena", "gymnasium")}
        path = Path(__file__).parent / "results" / "suite_games.json"
        path.write_text(json.dumps({"versions": versions, "mean_returns": results}, indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
