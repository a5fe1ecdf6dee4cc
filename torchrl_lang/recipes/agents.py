"""Make an agent of a finished run, and talk to an agent or a run in the terminal."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torchrl_lang.recipes.algorithms.training import TaskOptions
from torchrl_lang.recipes.options import option, required


@dataclass(frozen=True, kw_only=True)
class DecodingOptions(TaskOptions, group="evaluation"):
    """How the policy of a run decodes."""

    beta: float | None = option(
        None, "weight of the values in the policy of a run; none: that of its evaluations in training", ge=0
    )
    method: Literal["sample", "greedy", "beam", "best_of"] | None = option(
        None, "decoding method of a run; none: that of its evaluations in training"
    )


@dataclass(frozen=True, kw_only=True)
class Export(DecodingOptions, task_from=("run", "config.json")):
    """Save the policy of a finished run as an agent: a Hugging Face folder with a model card."""

    run: Path = required("folder of a finished run")
    out: Path = required("folder of the agent; an agent that is there is replaced, other folders are kept")


@dataclass(frozen=True, kw_only=True)
class Chat(DecodingOptions):
    """Talk to a saved agent or to the policy of a finished run."""

    run: Path = required("folder of an agent or of a finished run")


def export(options: Export) -> Path:
    """Save the agent; returns its folder."""
    from torchrl_lang.recipes.load_run import load_run  # torch takes a second

    run = load_run(options.run, options.given_task())
    folder = run.save_agent(options.out, beta=options.beta, method=options.method)
    print(f"{folder}: agent, with a card in README.md; `python -m torchrl_lang chat {folder}` talks to it")
    return folder


def chat(options: Chat) -> None:
    """Talk in the terminal until `/quit` or the end of the input."""
    from torchrl_lang.modules import load_agent
    from torchrl_lang.modules.reply import chat as talk
    from torchrl_lang.modules.reply import replies
    from torchrl_lang.recipes.load_run import load_run

    if sys.stdin is None:
        raise ValueError("Standard input is closed: open it to talk.")
    if not (options.run / "model").is_dir():
        load_agent(options.run).chat()
        return
    run = load_run(options.run, options.given_task())
    policy, _ = run.prescribed(options.beta, options.method)
    talk(lambda messages: replies(policy, run.tokenizer, run.action_length, [messages])[0])
