"""Texts of all of Unicode through every entry point: each comes back normalized, or an error names its place."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import traceback
import unicodedata
import warnings
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch

from tests.campaigns.jsonl import ALPHABET, tokenizers
from tests.campaigns.report import Outcome, outcomes
from tests.data.chat_templates import EXACT, tokenizer_of
from tests.envs.reddit.csv_writer import POSITIVE, write_folder
from tests.rows import to_row
from torchrl_lang.data import dataset_from_jsonl, dataset_from_records
from torchrl_lang.envs import EnvGame, PromptEnv, TextGameEnv
from torchrl_lang.envs import visual_dialogue as vd
from torchrl_lang.envs.reddit.data import CommentRows
from torchrl_lang.envs.reddit.folder import WORDS, CommentFolder, RedditReward
from torchrl_lang.envs.reddit.task import RedditTask
from torchrl_lang.envs.visual_dialogue.data import SceneRows
from torchrl_lang.envs.visual_dialogue.prepare import measured_tokens, texts_of
from torchrl_lang.text import (
    CharTokenizer,
    ChatTokenizer,
    Episode,
    RowFormat,
    Tokenizer,
    Turn,
    from_row,
    word_tokenizer,
)
from torchrl_lang.text.tokenizer_files import transformers_tokenizer

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
MARKS = [chr(code) for code in range(0x300, 0x370)] + ["\u1161", "\u11a8", "\u093c", "\U0001d165", "\u0345"]
BIDI = [*"\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069", "\u05d0", "\u0627"]
BREAKS = ["\r\n", "\r", "\n", "\n\r", "\x85", "\u2028", "\x0b", "\x0c", "\ufeff"]
PIECES = [
    *"aAéÅ\u2019“…—🙂",
    "👩\u200d💻",
    "🇩🇪",
    "</a>",
    "<s>",
    "<|pad|>",
    "</eod>",
    "<stop>",
    UNKNOWN,
    "\uffff",
    "\u1100",
]
PIECES += ['"', ","]


def _any(random: Random) -> str:
    code = random.choice([random.randrange(0x250), random.randrange(0x10000), random.randrange(0x110000)])
    return chr(code) if not 0xD800 <= code < 0xE000 else "?"


KINDS: dict[str, Callable[[Random], str]] = {
    "any": _any,
    "ascii": lambda random: chr(random.randrange(32, 127)),
    "controls": lambda random: chr(random.choice([random.randrange(32), random.randrange(0x7F, 0xA0), 0x41])),
    "marks": lambda random: random.choice([random.choice(MARKS), random.choice("aeAo\u1100"), _any(random)]),
    "bidi": lambda random: random.choice([*BIDI, "a", " "]),
    "breaks": lambda random: random.choice([*BREAKS, "a", " "]),
    "pieces": lambda random: random.choice(PIECES),
}


def text_of(random: Random, kind: str) -> str:
    length = random.choice([0, 1, 2, 5, 12, 40]) if random.random() > 0.01 else random.randrange(2000, 10_000)
    return "".join(KINDS[kind](random) for _ in range(length))


def normal(text: str) -> str:
    return unicodedata.normalize("NFC", re.sub("\r\n?", "\n", text))


def read_with(tokenizer: CharTokenizer, text: str) -> str:
    """The text with the unknown symbol for what the alphabet lacks; symbols of several characters are of known ones."""
    return "".join(c if c in tokenizer.symbols else UNKNOWN for c in normal(text))


class Failed(Exception):
    """A verdict that is a failure."""


def same(found: object, expected: object, what: str = "text") -> None:
    if found != expected:
        raise Failed("silent acceptance", f"{what}: {ascii(found)[:300]} instead of {ascii(expected)[:300]}")


def last_shown(td: Any, tokenizer: Tokenizer) -> str:
    """What the environment wrote last; a row has no turn for an empty text."""
    turns = from_row(td[0], tokenizer).turns
    return turns[-1].text if turns and not turns[-1].by_agent else ""


def refused(call: Callable[[], object], *places: str, of: str | None = None) -> None:
    """The call raises an error that names the places, and a character ``of`` a text."""
    try:
        call()
    except ValueError as error:
        message = str(error)
        named = of is None or any(repr(c) in message for c in {*of, *normal(of)})
        if not (named and all(place in message for place in places) and len(message) < 3000):
            raise Failed("unclear refusal", message[:500]) from error
    else:
        raise Failed("silent acceptance", f"expected an error that names {places}")


class World:
    """What all texts meet; the models are trained once."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.plain = CharTokenizer.from_alphabet(ALPHABET)
        self.known = CharTokenizer.from_texts(["".join(map(chr, range(32, 127))), "éÅ\u2019“🙂\n"])
        self.theirs = transformers_tokenizer(self.known)
        self.bytes: Tokenizer = tokenizers()["bytes"]
        source = tokenizer_of(EXACT["chatml"])
        self.chat = ChatTokenizer(source, RowFormat.from_chat_template(source))
        vd.generate_visual_dialogues(home / "dialogues", {"train": 12, "val": 3}, feature_size=64, npy=True)
        data = self.dialogues("train")
        options = {"guesser_epochs": 1, "answerer_epochs": 1, "width": 8}
        vd.train_dialogue_models(data.dialogues, data.features, **options).save(home / "models")

    def dialogues(self, split: str) -> vd.VisualDialogues:
        return vd.VisualDialogues.in_folder(self.home / "dialogues", split)

    @cached_property
    def models(self) -> vd.LocalDialogueModels:
        return vd.LocalDialogueModels(self.home / "models", self.dialogues("val").features.all())


# -- entry points: each returns whether the text was accepted ---------------------------------------------------------


def tokenizer_of_texts(world: World, text: str, random: Random, home: Path) -> bool:
    for tokenizer in (CharTokenizer.from_texts([text]), word_tokenizer(["it is", text])):
        plain = set(text) <= {"\n", *map(chr, range(32, 127))}
        same(tokenizer.decode(tokenizer.encode(text)), normal(text))
        same(tokenizer.unknown is None, plain and "it" in tokenizer.symbols, "unknown symbol")
        if UNKNOWN in text:
            refused(partial(tokenizer.encode_action, text), of=UNKNOWN)
        else:
            same(tokenizer.encode_action(text), tokenizer.encode(text), "utterance")
    same(world.known.decode(world.known.encode(text)), read_with(world.known, text))
    same(world.theirs(text)["input_ids"], world.known.encode(text), "ids of transformers")
    same(world.bytes.decode(world.bytes.encode(text)), text)
    if set(text) <= set(ALPHABET):
        same(world.plain.decode(world.plain.encode(text)), text)
        return True
    refused(partial(world.plain.encode, text), of=text)
    return UNKNOWN not in text


def dialogues_of_lines(world: World, text: str, random: Random, home: Path) -> bool:
    path = home / "dialogues.jsonl"
    turns = [{"role": "user", "text": text}, {"role": "agent", "text": text}]
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
    form: Any = random.choice([{"turns": turns}, {"messages": messages}, {"prompt": text, "completion": text}])
    lines = [{"prompt": "a", "completion": "b"}, form]
    content = "\n".join(json.dumps(line, ensure_ascii=random.random() < 0.5) for line in lines)
    path.write_text(content, encoding="utf-8", newline="")
    if not set(text) <= set(ALPHABET):
        call = partial(dataset_from_jsonl, path, home / "plain", world.plain, 10 + 2 * len(normal(text)))
        refused(call, str(path), "line 2", of=text)
    tokenizer, length = CharTokenizer.from_texts(["ab", text]), 10 + 2 * len(normal(text))
    if UNKNOWN in text:
        refused(partial(dataset_from_jsonl, path, home / "data", tokenizer, length), str(path), "line 2", of=UNKNOWN)
        refused(partial(dataset_from_records, lines, home / "data", tokenizer, length), "record 2", of=UNKNOWN)
        return False
    for dataset in (
        dataset_from_jsonl(path, home / "data", tokenizer, length),
        dataset_from_records(lines, home / "records", tokenizer, length),
    ):
        same([turn.text for turn in dataset.episode(1).turns], [normal(text)] * 2)
    return True


def comments(world: World, text: str, random: Random, home: Path) -> bool:
    """The text trains in one folder, and in another it comes only after training."""
    row = [(text, 1, text)]
    for name, trains in (("trains", True), ("unseen", False)):
        rows = [*row, ("other", 1, "some")] if trains else [("other", 1, "some"), *row]
        folder = write_folder(home / name, rows, [("more words", -1, "some text")])
        for file, index in (("train", [0]), ("eval", [1]), ("test", [2])):
            (folder / f"{file}_idxs.json").write_text(json.dumps(index))
        source = CommentFolder(str(folder), index_files=True)
        if not text.strip() or "\0" in text:
            refused(partial(source.split, "train"), POSITIVE, "line 2" if trains else "line 3")
            continue
        task = RedditTask.of(source, RedditReward("score"), scale=1.0)
        tokenizer = source.tokenizer(WORDS)
        assert isinstance(tokenizer, CharTokenizer)
        expected = normal(text) if trains else read_with(tokenizer, text)
        data = task.data("train")
        plain = CommentRows(data, lambda texts: [0.0] * len(texts), world.plain, task.row_length + len(normal(text)))
        if trains and not set(text) <= set(ALPHABET):
            refused(partial(plain, range(1), 0), f"{POSITIVE} line 2", of=text)
        rows_of = CommentRows(data, task.clean_reward(), tokenizer, task.row_length)
        if trains and UNKNOWN in text:
            refused(partial(rows_of, range(1), 0), f"{POSITIVE} line 2", of=UNKNOWN)
        elif trains:
            turns = from_row(rows_of(range(1), 0)[0], tokenizer).turns
            same([(turn.text, turn.reward) for turn in turns], [(expected, None), (expected, 1.0)])
        env = task.env(1, split="train" if trains else "val")
        td = env.reset(game_seed=torch.tensor([0]))
        same(last_shown(td, tokenizer), expected)
        td = env.step(task.player("data", seed=0).policy(td))["next"]
        known = expected.replace(UNKNOWN, "")
        same(from_row(td[0], tokenizer).turns[1].text, known, "comment of the player")
        same(td["reward"].item(), 1.0 if known == normal(text) else 0.0, "reward")
    return bool(text.strip()) and "\0" not in text


def dialogue_files(world: World, text: str, random: Random, home: Path) -> bool:
    question = text if text.endswith("?") else f"{text}?"
    rounds = [{"question": text, "answer": text}, *[{"question": "so", "answer": "no"}] * 9]
    train, features = home / "visdial_0.5_train.json", home / "images_train.npy"
    train.write_text(json.dumps([{"caption": text, "image_id": 1, "dialog": rounds}]))
    np.save(features, np.ones((1, 64), dtype=np.float32))
    cache = home / "cache.json"
    cache.write_text(json.dumps([[0.5] + [0.01] * 10]))
    data = vd.VisualDialogues(train, features, "train", rewards=cache)
    if not set(text) <= set(ALPHABET):
        place = "item 0.caption"
        refused(partial(measured_tokens, world.plain, {train: data.dialogues}), str(train), place, of=text)
    tokenizer = word_tokenizer(texts_of(data.dialogues), unknown=True)
    tokens = measured_tokens(tokenizer, {train: data.dialogues})
    rewards = vd.DialogueRewards(mode="env_stops")
    make = partial(SceneRows(data, tokenizer, tokens.row_length, rewards=rewards), range(1), 0)
    if UNKNOWN in text:
        refused(make, of=UNKNOWN)
    else:
        turns = from_row(make()[0], tokenizer).turns
        same([turn.text for turn in turns[:3]], [normal(text), normal(question), normal(text)])
    unseen = word_tokenizer([], unknown=True)
    limits = {"row_length": 3 * len(normal(text)) + 200, "action_length": len(normal(question)) + 2}
    env = vd.VisualDialogueEnv(data, world.models, unseen, **limits)
    td = env.reset(game_seed=torch.tensor([0]))
    same(last_shown(td, unseen), read_with(unseen, text))
    action = torch.full((1, env.action_length), unseen.control.pad)
    ids = [*unseen.encode(question), unseen.control.end_of_action][: env.action_length]
    action[0, : len(ids)] = torch.tensor(ids)
    td = env.step(td.set("action", action))["next"]
    same(td["reward"].item() in (-1.0, 0.0), True, "reward")
    return UNKNOWN not in text


class Game:
    def __init__(self, text: str) -> None:
        self.text = text

    def reset(self, seed: int) -> str:
        return self.text

    def step(self, text: str) -> tuple[str, float, bool]:
        return self.text, 1.0, text == "x"


def games(world: World, text: str, random: Random, home: Path) -> bool:
    limits: Any = {"row_length": 3 * len(normal(text)) + 40, "action_length": 4}
    tokenizer = random.choice([world.known, world.bytes, CharTokenizer.from_texts([text, "b"])])
    expected = read_with(tokenizer, text) if isinstance(tokenizer, CharTokenizer) else text
    if tokenizer is world.bytes:
        limits["row_length"] = 12 * len(text) + 40
    env = TextGameEnv(partial(Game, text), tokenizer, on_bad_text="raise", **limits)
    td = env.reset()
    same(last_shown(td, tokenizer), expected)
    ids = torch.tensor([[*tokenizer.encode("b")[:1], *[tokenizer.control.end_of_action] * 3]])
    td = env.step(td.set("action", ids))["next"]
    same(bool(td["truncated"]), False, "truncated")
    same(last_shown(td, tokenizer), expected)
    prompts = PromptEnv([text], lambda prompts, texts: [0.0] * len(texts), tokenizer, on_bad_text="raise", **limits)
    same(last_shown(prompts.reset(), tokenizer), expected)
    if set(text) <= set(ALPHABET):
        return True
    strict = TextGameEnv(partial(Game, text), world.plain, on_bad_text="raise", **limits)
    refused(strict.reset, "Game", of=text)
    lenient = TextGameEnv(partial(Game, text), world.plain, **limits)
    td = lenient.reset()
    td = lenient.step(td.set("action", torch.tensor([[0, *[world.plain.control.end_of_action] * 3]])))["next"]
    same(bool(td["truncated"]), True, "truncated")
    return True


def chats(world: World, text: str, random: Random, home: Path) -> bool:
    episode = Episode([Turn(f"q: {text}"), Turn(text, 1.0), Turn(f"a: {text}")], terminated=True)
    row = to_row(episode, world.chat, 40 * len(text) + 60)
    same(from_row(row, world.chat), episode, "episode")
    again = to_row(from_row(row, world.chat), world.chat, row["tokens"].shape[-1])
    same(again["tokens"].tolist(), row["tokens"].tolist(), "row")
    return True


def typed(world: World, text: str, random: Random, home: Path) -> bool:
    """What a person, or a program that plays through ``EnvGame``, writes."""
    limits: Any = {"row_length": 2 * len(normal(text)) + 40, "action_length": len(normal(text)) + 2}
    game = EnvGame(TextGameEnv(partial(Game, "b"), world.known, **limits), invalid_reply="refused")
    game.reset(0)
    reply = game.step(text)[0]
    valid = UNKNOWN not in read_with(world.known, text)
    same(reply, "b" if valid else "refused", "reply")
    return valid


ENTRIES: dict[str, Callable[[World, str, Random, Path], bool]] = {
    "tokenizers": tokenizer_of_texts,
    "dialogues of lines": dialogues_of_lines,
    "comments": comments,
    "visual dialogues": dialogue_files,
    "games and prompts": games,
    "chats": chats,
    "typed": typed,
}


def attack(number: int, seed: int, world: World) -> list[list[str]]:
    """Send one text through all entry points; returns ``[entry, verdict, detail]`` of each."""
    random = Random(f"{seed} {number}")
    kind = list(KINDS)[number % len(KINDS)]
    text, results = text_of(random, kind), []
    for name, entry in ENTRIES.items():
        home = world.home / f"{number}-{name}"
        home.mkdir()
        verdict, detail = "accepted", ""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                verdict = "accepted" if entry(world, text, random, home) else "refused"
        except Failed as failure:
            verdict, detail = failure.args
        except Exception:
            verdict, detail = "traceback", traceback.format_exc()[-1500:]
        finally:
            shutil.rmtree(home)
        results.append([name, verdict, f"{kind} {ascii(text)[:300]}\n{detail}"])
    return results


def campaign(count: int, seed: int, *, only: int | None = None) -> Iterator[Outcome]:
    """Send ``count`` texts through all entry points; ``only`` one of them where a number is given."""
    with tempfile.TemporaryDirectory(prefix="campaign-") as name:
        world, numbers = World(Path(name)), [number for number in range(count) if only in (None, number)]
        yield from outcomes({str(number): partial(attack, number, seed, world) for number in numbers}, timeout=60)
