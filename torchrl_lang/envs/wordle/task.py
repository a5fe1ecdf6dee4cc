"""Wordle as a task of the recipes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count, repeat
from typing import Any, ClassVar

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase

from torchrl_lang.data.generate import EpisodeSampler
from torchrl_lang.envs import wordle
from torchrl_lang.envs.wordle.human import HumanGames, read_tweets
from torchrl_lang.envs.wordle.optimal import ExactValues
from torchrl_lang.envs.wordle.rules import CandidateSets, Rules
from torchrl_lang.envs.wordle.samplers import AdversarialGames, BranchedGames
from torchrl_lang.envs.wordle.transcript import read_turns
from torchrl_lang.envs.wordle.words import common_words, load_words
from torchrl_lang.evaluation import GameRecords, KnownValues, Summary, summarize
from torchrl_lang.evaluation.metrics import unanswered
from torchrl_lang.evaluation.transcripts import TILES
from torchrl_lang.recipes.tasks.base import Player, Task, named_player
from torchrl_lang.recipes.tasks.wordle import HABIT, MEDIOCRE, PRESETS, SolveWordle, WordleData, WordlePlay
from torchrl_lang.schema import AGENT_MASK, ATTENTION_MASK, TOKENS
from torchrl_lang.text import Tokenizer

_FIRST_TURN = 13
"""Tokens of a first turn: five letters and five colours, and the control tokens before, between and after them."""


@dataclass(frozen=True)
class WordleTask(Task):
    """Wordle with a list of words that may be hidden."""

    name: ClassVar[str] = "wordle"
    data_options = WordleData
    play_options = WordlePlay
    presets = PRESETS
    spelling = TILES
    turns_name = "guesses"
    action_length = 6  # five letters and the end of the action

    words: tuple[str, ...]
    rules: Rules = "official"

    @classmethod
    def of(cls, words: str, rules: Rules = "official") -> WordleTask:
        """``words``: how many of the shipped ones, ``"all"`` of them, or the path of a file."""
        if words == "all":
            return cls(tuple(common_words()), rules)
        return cls(tuple(wordle.demo_words(int(words)) if words.isdecimal() else load_words(words)), rules)

    @classmethod
    def from_notes(cls, notes: Mapping[str, Any]) -> WordleTask:
        """See :meth:`Task.from_notes`."""
        task = super().from_notes(notes)
        return cls(tuple(load_words(task.words)), task.rules)

    def tokenizer(self) -> Tokenizer:
        """One tokenizer for all Wordle games."""
        return wordle.wordle_tokenizer()

    def env(self, batch_size: int, **options: Any) -> wordle.WordleEnv:
        """See :meth:`Task.env`."""
        return wordle.WordleEnv(list(self.words), [batch_size], rules=self.rules, **options)

    def known_values(self, rows: TensorDictBase) -> list[KnownValues]:
        """Second guesses that agree with the colours of the first, where there are 5 to 40 such words."""
        letters = wordle.WordIndex(list(self.words)).letters
        exact, sets = ExactValues(list(self.words), self.rules), CandidateSets(letters, self.rules)
        tokens = rows.get(TOKENS).long()
        turns = read_turns(tokens, rows.get(ATTENTION_MASK), rows.get(AGENT_MASK))
        fitting = turns.until(1).filter(sets)
        size, valid = sets.size(fitting), turns.tries == turns.answered
        chosen = valid & (turns.answered >= 1) & (size >= 5) & (size <= 40)
        words_left = dict(zip(map(tuple, tokens[chosen, :_FIRST_TURN].tolist()), fitting[chosen], strict=True))
        states = []
        for first_turn, words in words_left.items():
            members = sets.members(words).nonzero().squeeze(-1)
            values = torch.tensor(exact.guesses(tuple(members.tolist())))
            states.append(KnownValues(torch.tensor(first_turn), letters[members], values))
        return states

    def behavior_policy(self, options: WordleData) -> Player:
        """The scripted player."""
        return self.player(options.player, options.seed)

    def maker(self, options: WordleData) -> EpisodeSampler | None:
        """The maker of the games, if they are not those of one player."""
        if options.make == "games":
            return None
        if options.tweets is not None:
            tweets = read_tweets(options.tweets)
            print(tweets.report())
            human = HumanGames(tweets, self.words, guesses=wordle.guess_words(), rules=self.rules)
            missed = f"{human.impossible()} of {len(human.games)} games fit no hidden word of the list"
            print(f"{missed} and are never drawn")
            return human
        kind = BranchedGames if options.make == "branched" else AdversarialGames
        return kind(self.env(min(options.batch, options.games)))

    def player(self, name: str, seed: int | None = None) -> Player:
        """A scripted player.

        careful: a word that agrees with all colours. careless: half of its guesses are any word. lmrl: two thirds are,
        as in LMRL-Gym's data (their code's mixture, with the share that gives their mean return). wrong: a word that
        the colours rule out. optimal: the largest expected reduction of the words that are left (myopic). mediocre: a
        careful, a careless or a wrong player, drawn for each game. habit: the same with a poor favourite first word,
        see :data:`HABIT`.
        """
        options: Any = {"words": self.words, "rules": self.rules, "seed": seed}
        make: dict[str, Callable[[], TensorDictModuleBase]] = {
            "careful": lambda: wordle.RandomWordPlayer(prob_smart=1.0, **options),
            "careless": lambda: wordle.RandomWordPlayer(prob_smart=0.5, **options),
            "lmrl": lambda: wordle.RandomWordPlayer(prob_smart=1 / 3, **options),
            "random": lambda: wordle.RandomWordPlayer(**options),
            "wrong": lambda: wordle.WrongPlayer(**options),
            "repeat": lambda: wordle.RepeatPlayer(**options),
            "optimal": lambda: wordle.OptimalPlayer(**options),
            "mediocre": lambda: self._mixture({None: 1.0}, seed),
            "habit": lambda: self._mixture({(HABIT[1],): HABIT[0], HABIT[2]: 1 - HABIT[0]}, seed),
        }
        return Player(named_player(name, make)())

    def _mixture(self, openers: Mapping[tuple[str, ...] | None, float], seed: int | None) -> wordle.MixturePlayer:
        """A careful, a careless or a wrong player in each game, with openers of some probability."""
        seeds = repeat(None) if seed is None else count(seed)
        players, probabilities = [], []
        for first, chance in openers.items():
            options: Any = {"rules": self.rules, "openers": first}
            players.append(wordle.RandomWordPlayer(self.words, prob_smart=1.0, seed=next(seeds), **options))
            players.append(wordle.RandomWordPlayer(self.words, prob_smart=0.5, seed=next(seeds), **options))
            players.append(wordle.WrongPlayer(self.words, seed=next(seeds), **options))
            probabilities += [chance * share for share in MEDIOCRE]
        return wordle.MixturePlayer(players, probabilities, per="game", seed=next(seeds))

    def summary(self, records: GameRecords, name: str) -> Summary:
        """Metrics of games, with the rate of invalid guesses."""
        control = wordle.wordle_tokenizer().control
        return summarize(records, name=name, invalid=lambda games: unanswered(games.rows, control))

    def play(self, seed: int) -> None:
        """Let a person play one game."""
        wordle.play_human(self.env(1, seed=seed))


def main(options: SolveWordle) -> None:
    """Solve, print the result and save the tree."""
    if options.out is not None and options.out.exists():
        raise FileExistsError(f"{options.out} exists: delete it, or give another --out.")
    guesses = wordle.guess_words() if options.guesses == "all" else options.guesses
    limits: Any = {"rules": options.rules, "opener": options.opener, "max_tries": options.max_tries}
    tree = wordle.solve(options.task().words, guesses=guesses, **limits)
    expected = f"{tree.expected_guesses:.4f} guesses expected ({tree.total} in total)"
    print(f"{len(tree.words)} words: {expected}, first guess {tree.guesses[0]}")
    for tries, words in tree.histogram.items():
        lost = tree.max_tries is not None and tries > tree.max_tries
        print(f"{'lost' if lost else tries:>6} {words:6} {'word' if words == 1 else 'words'}")
    if options.out is not None:
        tree.save(options.out)
        print(f"wrote {options.out}")
