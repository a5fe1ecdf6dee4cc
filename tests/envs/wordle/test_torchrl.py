"""Wordle and its players under TorchRL's own collectors, batched environments and transforms."""

from __future__ import annotations

import warnings

import torch

from tests.envs.wordle.helpers import action
from torchrl_lang.envs.wordle import WordleEnv, demo_words, wordle_tokenizer

WORDS = demo_words(30)


def make(batch: int = 4, seed: int | None = 0, **kwargs) -> WordleEnv:
    return WordleEnv(WORDS, batch_size=[batch], seed=seed, **kwargs)


def check_games(data) -> None:
    """Every finished game is a row whose rewards add up to its return."""
    done = data["next", "done"].squeeze(-1)
    assert done.any()
    rows = data["next"][done]
    text = [wordle_tokenizer().decode(row["tokens"][row["attention_mask"]].tolist()) for row in rows.unbind(0)]
    assert all(t.startswith("<a>") and t.endswith("</eod>") for t in text)
    solved = torch.tensor(["<g><g><g><g><g></s></eod>" in t for t in text])
    tries = torch.tensor([t.count("</a>") for t in text])
    assert torch.equal(rows["token_reward"].sum(-1), -(tries - solved.long()).float())


def test_compiled_step_without_graph_breaks_is_the_step():
    kwargs = {"rules": "official", "consistent": True, "guesses": "words"}
    plain, compiled = make(**kwargs), make(**kwargs)
    torch.compiler.reset()  # EnvBase.step is one function for all environments: others fill its cache
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = torch.compile(compiled.step, fullgraph=True, backend="eager")
        first, second = plain.reset(), compiled.reset()
        for guesses in (("zzzzz", *WORDS[:3]), tuple(WORDS[3:7])):
            act = action(plain, *guesses)
            first = plain.step(first.set("action", act))["next"]
            second = step(second.set("action", act))["next"]
            assert set(first.keys()) == set(second.keys())
            for key in first.keys():
                assert torch.equal(first[key], second[key]), key
