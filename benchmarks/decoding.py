"""Cached decoding: what value guidance adds, and how acting compares with a plain forward pass over the same rows."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from benchmarks.common import interleaved, ratio, row
from torchrl_lang.modules import QValueHead, UtteranceActor, ValueGuidance, ValueHead, causal_lm, language_actor
from torchrl_lang.modules.actor import split_actor
from torchrl_lang.schema import ControlTokens

# The tokens of Wordle: 26 letters, 3 colours, 6 control tokens; a guess is 5 letters and its end.
CONTROL = ControlTokens(pad=29, end_of_action=30, end_of_state=31, begin_state=32, begin_action=33, end_of_dialogue=34)
VOCABULARY, ACTION_LENGTH, TURNS, BATCH = 35, 6, 6, 256
MAX_GUIDED_RATIO, MIN_ACTING_RATIO = 1.2, 0.5


def run(quick: bool = False) -> list[dict[str, Any]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return _run(repeats=2 if quick else 5)
    finally:
        torch.set_num_threads(threads)


def _run(repeats: int) -> list[dict[str, Any]]:
    lm = causal_lm(vocab_size=VOCABULARY, layers=4, width=128, heads=4, max_length=96, pad=CONTROL.pad).eval()
    actor = language_actor(lm)
    # Without the end among the allowed tokens every utterance has full length, guided or not.
    forbidden = (*CONTROL.forbidden_in_action(), CONTROL.end_of_action)
    guides = {
        "plain": None,
        "guided": ValueGuidance(QValueHead(128, VOCABULARY), beta=4.0),
        "guided and clipped": ValueGuidance(QValueHead(128, VOCABULARY), ValueHead(128), beta=4.0, clip=0.0),
    }
    policies = {
        name: UtteranceActor(actor, CONTROL, ACTION_LENGTH, guidance=guidance, forbidden=forbidden, seed=0)
        for name, guidance in guides.items()
    }
    game = _game()

    def act(policy: UtteranceActor) -> Callable[[], None]:
        return lambda: [policy(entry.clone()) for entry in game[:-1]] and None

    def forward() -> None:
        with torch.no_grad():
            split_actor(actor).trunk(game[-1].clone())

    jobs = {name: act(policy) for name, policy in policies.items()} | {"forward": forward}
    times = interleaved(jobs, repeats)
    # Every utterance of 6 tokens passes 4 through the trunk: the first comes with the prompt, the last is certain, and
    # the one before it need not be read.
    acted = sum(int(entry["attention_mask"].sum()) + BATCH * (ACTION_LENGTH - 2) for entry in game[:-1])
    read = int(game[-1]["attention_mask"].sum())
    speed = (acted / read) * ratio(times, "forward", "plain")
    plain = statistics.median(times["plain"])
    return [
        *(
            row(
                f"decoding: {name} / plain cached, time",
                ratio(times, name, "plain"),
                "x",
                MAX_GUIDED_RATIO,
                at_most=True,
            )
            for name in ("guided", "guided and clipped")
        ),
        row("acting / plain forward, trunk tokens per second", speed, "x", MIN_ACTING_RATIO),
        row("acting, trunk tokens per second", acted / plain, "tokens/s"),
        row("acting, utterances per second", BATCH * TURNS / plain, "utterances/s"),
    ]


def _game() -> list[TensorDict]:
    """The transcripts of 256 games before each turn and after the last; one guess in ten is invalid: no colours."""
    length, rows = torch.ones(BATCH, dtype=torch.int64), []
    for _ in range(TURNS + 1):
        rows.append(_transcripts(length))
        length = length + torch.where(torch.rand(BATCH) < 0.1, 6, 12)
    return rows


def _transcripts(length: Tensor) -> TensorDict:
    width = 1 + 12 * TURNS + ACTION_LENGTH
    attention = torch.arange(width) < length[:, None]
    tokens = torch.randint(26, (BATCH, width)).masked_fill(~attention, CONTROL.pad)
    trimmed = {"tokens": tokens, "attention_mask": attention}
    return TensorDict({key: value[:, : int(length.max())] for key, value in trimmed.items()}, batch_size=[BATCH])
