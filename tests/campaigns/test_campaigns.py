"""The campaigns in short, and proof that the campaigns can fail: each kind of misbehaviour is given its verdict.

``python -m tests.campaigns NAME --count N --seed S`` attacks as often as one likes; of kills 0 is at every write.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from tests import processes
from tests.campaigns import mutations
from tests.campaigns.artifacts import Artifact, Use
from tests.campaigns.commands import Ended, problem_of_refusal
from tests.campaigns.isolation import Died, run_forked
from tests.campaigns.jsonl import MUTATIONS
from tests.campaigns.jsonl_reader import Bad, read_line
from tests.campaigns.mutations import Mutant, attack
from tests.campaigns.mutators import MUTATORS
from tests.campaigns.report import Outcome, table
from tests.campaigns.texts import KINDS, Failed, refused


@pytest.mark.parametrize(
    ("name", "count", "more"),
    [("mutations", len(MUTATORS) // 4, []), ("jsonl", len(MUTATIONS), []), ("texts", len(KINDS), [])]
    + [("kills", 1, ["--only", "generate.*|train (bc|ppo).*"])],
)
def test_attacks_end_well(name, count, more):
    """A quarter of the kinds of damage, each of lines and texts. In its own program: this process may have threads."""
    ended = processes.run("-m", "tests.campaigns", name, "--count", count, "--seed", "0", *more, timeout=600)
    assert ended.returncode == 0, ended.stdout + ended.stderr[-2000:]


def crash():
    faulthandler.disable()  # its report would look like a failure of the tests
    os.kill(os.getpid(), signal.SIGSEGV)


def fail():
    raise KeyError("x")


def test_what_hangs_or_crashes_is_seen_and_the_rest_goes_on():
    tasks = [lambda: 1, crash, lambda: 2, lambda: time.sleep(60), fail, lambda: 3]
    results = list(run_forked(tasks, timeout=3))
    assert [result.verdict if isinstance(result, Died) else result for result in results] == [
        *(1, "crash", 2, "hang", "error in the campaign", 3)
    ]
    assert "SIGSEGV" in results[1].detail


def read_bytes(folder):
    return {"content": torch.tensor(list((folder / "a.json").read_bytes()))}


def originals(tmp_path, content="{}"):
    original = tmp_path / "original"
    original.mkdir()
    (original / "a.json").write_text(content)
    return original


def verdicts(original, use, mutator, tmp_path):
    mutant = Mutant(0, Artifact("files", original, [use]), Path("a.json"), MUTATORS[mutator], seed=0)
    return [found[1] for found in attack(mutant, tmp_path)]


def refuse(message, kind=ValueError):
    def read(folder):
        raise kind(message.format(folder))

    return read


@pytest.mark.parametrize(
    ("read", "verdict"),
    [
        (read_bytes, "silent acceptance"),
        (lambda folder: {}, "harmless"),
        (refuse("{}/a.json is damaged: write it again."), "refused"),
        (refuse("damaged"), "unclear refusal"),
        (refuse("{}/a.json\nis damaged"), "unclear refusal"),
        (refuse("{}/a.json is damaged", KeyError), "traceback"),
    ],
)
def test_reading_a_damaged_copy(read, verdict, tmp_path):
    original = originals(tmp_path, '{"number": 1, "name": "x"}')
    use = Use("read", None, read, read_bytes(original) if read is read_bytes else {})
    assert verdicts(original, use, "json_drop_field", tmp_path) == [verdict]


def test_foreign_code_is_seen(tmp_path):
    def run_it(folder):
        exec(compile((folder / "foreign.py").read_text().split("from transformers")[0], "foreign", "exec"))
        raise ValueError(f"{folder / 'a.json'} is damaged: write it again.")

    use = Use("read", None, run_it)
    assert verdicts(originals(tmp_path), use, "tree_foreign_code", tmp_path) == ["foreign code ran"]
    assert mutations.TRAP in os.environ
    found = [Outcome("data", "1", "refused"), Outcome("data", "2", "traceback", "KeyError")]
    assert "1 of 2 attacks failed" in table(found)
    assert "traceback: 2" in table(found)


@pytest.mark.parametrize(
    ("ended", "problem"),
    [
        (Ended(2, "", "torchrl_lang: data/meta.json is damaged.\n"), ""),
        (Ended(2, "", "bc: 0/2 step\ntorchrl_lang: data/meta.json is damaged.\n"), ""),
        (Ended(2, "", "torchrl_lang: it is damaged.\n"), "no file is named"),
        (Ended(2, "", "torchrl_lang: meta.json is\ndamaged.\n"), "2 lines instead of one"),
        (Ended(1, "", "torchrl_lang: meta.json is damaged.\n"), "exit status 1"),
        (Ended(None, "", "Traceback (most recent call last):\nKeyError: 'x'\n"), "a traceback"),
    ],
)
def test_refusals_of_commands(ended, problem):
    assert problem_of_refusal(ended, ["meta.json"]).split("\n")[0] == problem


def test_lines_that_state_a_dialogue_and_lines_that_do_not():
    stated = read_line(b'{"turns": [{"role": "user", "text": "a"}, {"role": "agent", "text": "b"}], "reward": 2}', None)
    assert (stated.text, stated.rewards, stated.terminated) == ("<s>a</s>b</a></eod>", [2.0], True)
    assert stated.length(in_bytes=False) == 6
    for line in (b'{"turns": [], "turns": []}', b"{}", b'{"turns": [{"role": "user", "text": "a"}], "reward": NaN}'):
        with pytest.raises(Bad):
            read_line(line, None)


@pytest.mark.parametrize(
    ("message", "verdict"),
    [
        ("a.csv line 2: 'é' is not in the alphabet.", None),
        ("a.csv: 'é' is not in the alphabet.", "unclear refusal"),
        ("a.csv line 2 is wrong.", "unclear refusal"),
        (None, "silent acceptance"),
    ],
)
def test_a_refusal_names_place_and_character(message, verdict):
    def read():
        if message is not None:
            raise ValueError(message)

    if verdict is None:
        refused(read, "a.csv line 2", of="aé")
    else:
        with pytest.raises(Failed, match=verdict):
            refused(read, "a.csv line 2", of="é")
