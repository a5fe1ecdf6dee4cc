"""Commands made safe, feedback cleaned, observations written, words for a tokenizer."""

import pytest

from torchrl_lang.envs.textworld.text import TEMPLATES, Template, clean_command, clean_feedback, is_meta


@pytest.mark.parametrize(
    ("text", "command"),
    [
        *(("  Go   EAST ", "go east"), ("go\x00 east", "go east"), ("\x00", ""), ("", "")),
        ("\\mput apple", "mput apple"),  # the interpreter's hot keys begin with one, and hang
        *(("go\\east", "go east"), ("\x1b[2Jlook", "[2jlook"), ("bob, save", "bob"), ('look "save"', "look")),
        *((f"look{stop}save", "look") for stop in ("\n", ". ", ".", " then ")),
        *((text, text) for text in ("strengthen door", "put type-a key on king-size bed")),
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
    + ["tw-extra-infos description", "SAVE game", " (save)"]
    + ["print_stuff", "superbriefly", "transcripts on", "o x"],  # to the engine they are the same
)
def test_meta_commands(text):
    assert is_meta(clean_command(text))


def test_commands_of_the_game():
    texts = ["take saved note", "examine brief", "n", "look", "goal", "help", "", "!!", "score"]
    assert not any(is_meta(clean_command(text)) for text in texts)


def test_feedback_loses_picture_status_prompt_and_spare_space():
    picture = "\n\n     ________  __    __ \n    |        \\|  \\  |  \\\n     \\$$$$$$$$| $$  | $$\n"
    picture += "      \\$$    \\$$  \\$$$ \n\n"
    status = "\n>" + 60 * " " + "-= Old Room =-3/12"
    said = f"{picture}Find it!\n\n-= Old  Room =-\nDark.\n\n\n{status}"
    assert clean_feedback(said) == "Find it!\n-= Old Room =-\nDark."
    end = "Would you like to RESTART, RESTORE a saved game, QUIT or UNDO the last command?\n> "
    assert clean_feedback(f"Taken.\n\n   *** The End ***\n\n{end}") == "Taken.\n*** The End ***"
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
        (TEMPLATES["lower"], "you go."),
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
