"""Commands made safe, feedback cleaned, observations written, words for a tokenizer."""

from __future__ import annotations

import pytest

from torchrl_lang.envs.textworld import TEMPLATES, Template
from torchrl_lang.envs.textworld.text import clean_command, clean_feedback, is_meta
from torchrl_lang.text import word_tokenizer
from torchrl_lang.text.tokenizer_files import tokenizer_from_config

from .conftest import COIN


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("go east", "go east"),
        ("  Go   EAST ", "go east"),
        ("go\x00 east", "go east"),
        ("\x00", ""),
        ("\\mput apple", "mput apple"),  # the interpreter's hot keys begin with one, and hang
        ("go\\east", "go east"),
        ("\x1b[2Jlook", "[2jlook"),
        ("look\nquit", "look"),
        ("look. save", "look"),
        ("look.save", "look"),
        ("look then save", "look"),
        ("strengthen door", "strengthen door"),
        ("bob, save", "bob"),
        ('look "save"', "look"),
        ("put type-a key on king-size bed", "put type-a key on king-size bed"),
        ("", ""),
        ("caf\N{LATIN SMALL LETTER E WITH ACUTE}\ud800", "caf\N{LATIN SMALL LETTER E WITH ACUTE}"),
    ],
)
def test_one_safe_command(text, command):
    assert clean_command(text) == command


@pytest.mark.parametrize(
    "text",
    ["save", "script", "restart", "restore", "quit", "q", "undo", "again", "g", "oops x", "verify", "version"]
    + ["notify off", "verbose", "brief", "superbrief", "transcript on", "unscript", "noscript", "y", "yes", "no"]
    + ["print_state", "enable print state option", "restrict commands", "tw-print max_score"]
    + ["tw-extra-infos description", "SAVE game", " (save)"],
)
def test_meta_commands(text):
    assert is_meta(clean_command(text))


@pytest.mark.parametrize("text", ["take saved note", "examine brief", "n", "look", "goal", "help", "", "!!", "score"])
def test_commands_of_the_game(text):
    assert not is_meta(clean_command(text))


def test_feedback_loses_picture_status_prompt_and_spare_space():
    picture = "\n\n     ________  __    __ \n    |        \\|  \\  |  \\\n     \\$$$$$$$$| $$  | $$\n"
    picture += "      \\$$    \\$$  \\$$$ \n\n"
    status = "\n>" + 60 * " " + "-= Old Room =-3/12"
    assert (
        clean_feedback(f"{picture}Find it!\n\n-= Old  Room =-\nDark.\n\n\n{status}")
        == "Find it!\n-= Old Room =-\nDark."
    )
    end = (
        "\n\n   *** The End ***\n\nWould you like to RESTART, RESTORE a saved game, QUIT or UNDO the last command?\n> "
    )
    assert clean_feedback(f"Taken.{end}") == "Taken.\n*** The End ***"
    assert clean_feedback("Are you sure you want to quit? >") == "Are you sure you want to quit? >"


STATE = {
    "feedback": "\nYou Go.\n\n\n>" + 99 * " " + "-= Old Room =-0/1",
    "description": "-= Old Room =-\nDark.",
    "inventory": "You carry: a lamp.",
    "objective": "Find it!",
    "admissible_commands": ["examine lamp", "go east", "look"],
    "acted": True,
}


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (Template(), "You Go."),
        (Template(lower=True), "you go."),
        (Template(reply="{room}|{inventory}|{objective}"), "Old Room|You carry: a lamp.|Find it!"),
        (Template(reply="{commands}", hide=("examine", "look")), "go east"),
        (TEMPLATES["exits"], "go east"),
        (TEMPLATES["rooms"], "old room: go east"),
        (TEMPLATES["orders"], "done in old room"),
        (TEMPLATES["short"], "old room: go east"),
        (TEMPLATES["commands"], "You Go.\nYou can examine lamp, go east, look."),
    ],
)
def test_templates(template, text):
    assert template.write("reply", STATE) == text


def test_outcomes_are_told():
    template = Template("[{outcome}]", "[{outcome}]")
    told = [template.write("reply", {**STATE, "acted": acted}) for acted in (True, False, None)]
    assert told == ["[done]", "[failed]", "[]"]
    assert template.infos == {"admissible_commands"}


def test_words_are_lossless_and_in_no_order_of_texts():
    texts = ["Go east, take the coin.", "The coin\nis here; 12 of them!", "You can go east, take coin."]
    tokenizer = word_tokenizer(texts)
    assert tokenizer.config() == word_tokenizer(texts[::-1]).config()
    for text in [*texts, *COIN, "unknown words, too: ~{}|\n  two  spaces ", ""]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer_from_config(tokenizer.config()).encode(texts[0]) == tokenizer.encode(texts[0])


def test_a_thing_reads_the_same_within_and_at_the_end_of_a_command():
    tokenizer = word_tokenizer(["Put the milk on the stove.", "take milk from couch, take milk"])
    milk = tokenizer.encode(" milk")
    assert len(milk) == 1
    assert tokenizer.encode("take milk")[-1:] == tokenizer.encode("take milk from couch")[1:2] == milk
    assert tokenizer.encode("Put the milk on the stove.")[2:3] == milk


def test_rare_words_are_spelt():
    tokenizer = word_tokenizer(["a red red blue"], min_count=2)
    assert " red" in tokenizer.symbols
    assert " blue" not in tokenizer.symbols
