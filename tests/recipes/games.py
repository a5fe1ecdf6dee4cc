"""Environment factories that tests of recipes name as tasks; workers import them, too."""

import torch

from torchrl_lang.envs import PromptEnv, TextGameEnv
from torchrl_lang.text import CharTokenizer, ChatTokenizer, HFTokenizer, RowFormat


class Shown:
    """Shows the answer as one of three unit vectors, and every other time a constant beside it."""

    def reset(self, seed):
        generator = torch.Generator().manual_seed(seed)
        self.answer = int(torch.randint(3, (), generator=generator))
        self.features = torch.stack([torch.eye(3)[self.answer], torch.ones(3)])[: 1 + seed % 2]
        return "?"

    def step(self, text):
        return "", float(text == str(self.answer)), True


def shown_env(batch_size, *, features=True, **options):
    size = (2, 3) if features else None
    tokenizer = CharTokenizer.from_alphabet("012?")
    return TextGameEnv(Shown, tokenizer, row_length=8, action_length=2, batch_size=batch_size, features=size, **options)


class Greeting:
    """Rewards what begins with an h."""

    def reset(self, seed):
        return "hi"

    def step(self, text):
        return "", float(text.startswith("h")), True


def greeting_env(batch_size, *, model, chat=True, **options):
    """With the tokenizer of the folder ``model``."""
    tokenizer = ChatTokenizer(model, RowFormat.from_chat_template(model)) if chat else HFTokenizer(model)
    return TextGameEnv(Greeting, tokenizer, row_length=60, action_length=4, batch_size=batch_size, **options)


def length_env(batch_size, *, row_length=30, **options):
    """Rewards long words, of the letters of the dialogues of ``test_dialogues.py``."""
    tokenizer = CharTokenizer.from_alphabet("bcdghilnostuwy", unknown=True)
    sizes = {"row_length": row_length, "action_length": 6, "batch_size": batch_size}
    return PromptEnv(["big", "hot"], lambda _, words: [len(word) for word in words], tokenizer, **sizes, **options)


def letters_env(batch_size, **options):
    """Rewards the letter b."""
    sizes = {"row_length": 8, "action_length": 4, "batch_size": batch_size}
    tokenizer = CharTokenizer.from_alphabet("abc")
    return PromptEnv(["a"], lambda _, said: [float(text.count("b")) for text in said], tokenizer, **sizes, **options)
