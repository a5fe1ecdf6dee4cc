"""What the tests of Wordle share: rows and actions from text, and the rules written once more in plain Python."""

import torch
from torch import Tensor

from tests.envs.helpers import say_after
from torchrl_lang.envs.wordle import WordleEnv, wordle_tokenizer
from torchrl_lang.envs.wordle.transcript import Turns, turns_of_rows

TOKENIZER = wordle_tokenizer()
CONTROL = TOKENIZER.control
SYMBOL = {symbol: number for number, symbol in enumerate(TOKENIZER.symbols)}


def letters(*words: str) -> Tensor:
    return torch.tensor([[ord(letter) - ord("a") for letter in word] for word in words])


def play(env: WordleEnv, td, *guesses: str):
    return say_after(env, td.clone(), *guesses)


def text(td) -> str:
    return TOKENIZER.decode(td["tokens"][td["attention_mask"]].tolist())


def plain_feedback(guess: str, word: str, rules: str) -> list[int]:
    """The rules as one would tell them: green first, then each letter left in the word colours one guess letter."""
    colours = [2 if g == w else 0 for g, w in zip(guess, word, strict=True)]
    left = [w for w, colour in zip(word, colours, strict=True) if colour == 0]
    for place, letter in enumerate(guess):
        if colours[place]:
            continue
        if rules == "ilql":
            colours[place] = int(letter in word)
        elif letter in left:
            left.remove(letter)
            colours[place] = 1
    return colours


def games(player, batch: int = 400, turns: int = 4, seed: int = 0, rules: str = "official"):
    """The rows before each move and the guesses, [turn][N]; the hidden word is on no list, so that no game ends."""
    env = WordleEnv(["fuzzy"], batch_size=[batch], seed=seed, rules=rules)
    td, before, guesses = env.reset(), [], []
    for _ in range(turns):
        before.append(turns_of_rows(td))
        td = player(td)
        guesses.append(td["action"][:, :5])
        assert (td["action"][:, 5] == 30).all()
        td = env.step(td)["next"]
    return before, guesses


def turns_of(*histories, rules: str = "official"):
    """One row for each history of ``(guess, hidden word)``, or ``None`` for an invalid guess."""
    guess = torch.zeros(len(histories), 6, 5, dtype=torch.int64)
    colours, answered, tries = torch.zeros_like(guess), [], []
    for row, history in enumerate(histories):
        heard = [move for move in history if move is not None]
        for turn, (word, hidden) in enumerate(heard):
            guess[row, turn] = letters(word)[0]
            colours[row, turn] = torch.tensor(plain_feedback(word, hidden, rules))
        answered.append(len(heard))
        tries.append(len(history))
    return Turns(guess, colours, torch.tensor(answered), torch.tensor(tries))
