"""Acting turn by turn: against one plain forward over the same rows, against ``generate``, and in games of Wordle."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from tensordict import TensorDict
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.bare_decoding import BareDecoding
from benchmarks.common import device, interleaved, median, one_core, ratio, row, synchronized
from torchrl_lang.envs.wordle import WordleEnv, wordle_tokenizer
from torchrl_lang.evaluation import play_games
from torchrl_lang.modules import QValueHead, UtteranceActor, ValueGuidance, ValueHead, causal_lm, language_actor
from torchrl_lang.modules.decoding.model_runner import CachedRunner

ON_CUDA = True
CONTROL = wordle_tokenizer().control
VOCABULARY, ACTION_LENGTH, TURNS, WIDTH, LAYERS = 35, 6, 6, 128, 4
ROW_LENGTH = 2 + 12 * TURNS
BATCHES, MAIN, WORDLE_BATCH, WORDS = (64, 256, 1024), 256, 64, 200
MAX_GUIDED_RATIO, MIN_ACTING_RATIO, MIN_OVER_GENERATE, MAX_TURN_RATIO, PAPER_GAMES = 1.2, 0.7, 3.0, 1.25, 31.0
# Without the end among the allowed tokens every utterance has full length, guided or not.
SMOKE = {"BATCHES": (2, 4), "MAIN": 2, "WORDLE_BATCH": 2, "WORDS": 20, "WIDTH": 16, "LAYERS": 1}
FORBIDDEN = (*CONTROL.forbidden_in_action(), CONTROL.end_of_action)

Policy = Callable[[Tensor, Tensor], Tensor]
"""Chooses actions: ``tokens, attention_mask [N, T] -> action [N, K]``."""


@one_core()
def run(quick: bool = False) -> list[dict[str, Any]]:
    return _run(repeats=2 if quick else 7)


def _run(repeats: int) -> list[dict[str, Any]]:
    lm = causal_lm(vocab_size=VOCABULARY, layers=LAYERS, width=WIDTH, heads=4, max_length=96, pad=CONTROL.pad)
    lm = lm.to(device()).eval()
    guided = ValueGuidance(QValueHead(WIDTH, VOCABULARY).to(device()), beta=4.0)
    rows = _guidance(lm, guided, repeats)
    for n in BATCHES:
        rows += _acting(lm, guided, n, repeats)
    return [*rows, _wordle(lm, guided, repeats)]


def _guidance(lm: PreTrainedModel, guided: ValueGuidance, repeats: int) -> list[dict[str, Any]]:
    """What values cost, and what reading each token once saves."""
    heads = QValueHead(WIDTH, VOCABULARY).to(device()), ValueHead(WIDTH).to(device())
    clipped = ValueGuidance(*heads, beta=4.0, clip=0.0)
    jobs = {
        "plain": Game(MAIN, _policy(lm)).play,
        "guided": Game(MAIN, _policy(lm, guided)).play,
        "guided and clipped": Game(MAIN, _policy(lm, clipped)).play,
        "rereading all rows": Game(MAIN, _policy(lm, guided, prefix_cache=False)).play,
    }
    times = interleaved(jobs, repeats)
    costs = [
        row(f"decoding: {name} / plain, time", ratio(times, name, "plain"), "x", MAX_GUIDED_RATIO, at_most=True)
        for name in ("guided", "guided and clipped")
    ]
    saved = ratio(times, "rereading all rows", "guided")
    return [*costs, row("acting: rereading all rows each turn / prefix reuse, time", saved, "x")]


def _acting(lm: PreTrainedModel, guided: ValueGuidance, n: int, repeats: int) -> list[dict[str, Any]]:
    """Whole games of ``n`` rows, value-guided, beside one forward pass over their transcripts.

    The rows are those after the last action; its answer is left out, as no policy reads it. The
    time of acting includes the values, the replies and all else that a turn takes.
    """
    game = Game(n, _policy(lm, guided))
    tokens, attention = game.play()
    game.turn_times.clear()
    width = int(attention.sum(-1).max())

    def forward() -> None:
        with torch.no_grad():
            lm.base_model(inputs_embeds=lm.get_input_embeddings()(tokens[:, :width]), use_cache=False)

    bare = BareDecoding(lm, n, _calls())
    jobs: dict[str, Callable[[], Any]] = {"forward": forward, "acting": game.play, "bare": bare.play}
    # Turns 2 and 6 alone, of the five calls that each turn takes.
    jobs |= {f"bare turn {turn}": BareDecoding(lm, n, _calls()[5 * turn - 5 : 5 * turn]).play for turn in (2, 6)}
    if n <= MAIN:
        jobs |= {
            "compiled": Game(n, _policy(lm, guided, compile=True)).play,
            "plain": Game(n, _policy(lm)).play,
            "generate": Game(n, _generate(lm)).play,
        }
    times = interleaved(jobs, repeats if n <= MAIN else max(repeats // 2, 2))
    turn = [float(median(seconds)) for seconds in zip(*game.turn_times, strict=True)]
    read = int(attention.sum())
    what = f"acting, batch {n}:"
    # Each real token of these rows counts once on both sides, so the ratio of the rates is that of the times.
    speed = ratio(times, "forward", "acting")
    note = f"{_profile(game)}; the forward pass: {read / median(times['forward']):,.0f} tokens/s."
    growth = ratio(times, "bare turn 6", "bare turn 2")
    growing = f"the bound's own is {growth:.2f}x: each token attends to more, whose keys and values come from memory."
    rows = [
        row(f"{what} tokens/s over a plain forward's", speed, "x", MIN_ACTING_RATIO, note=note),
        row(f"{what} turn 6 / turn 2, time", turn[5] / turn[1], "x", MAX_TURN_RATIO, at_most=True, note=growing),
        row(f"{what} turn 6 / turn 1 (1 new token, not 8), time", turn[5] / turn[0], "x"),
        row(f"{what} tokens of transcripts", median(read / seconds for seconds in times["acting"]), "tokens/s"),
    ]
    bound = f"products and attention of these calls, no norm, no cache written, no word chosen; {_bytes(game)}"
    rows.insert(1, row(f"{what} a bound for this speed", ratio(times, "forward", "bare"), "x", note=bound))
    if "compiled" in jobs:
        compiled = ratio(times, "forward", "compiled")
        rows.insert(1, row(f"{what} the same with the trunk compiled", compiled, "x"))
    if "generate" in jobs:
        rows.append(row(f"{what} over generate, plain", ratio(times, "generate", "plain"), "x", MIN_OVER_GENERATE))
        rows.append(row(f"{what} over generate, values on our side only", ratio(times, "generate", "acting"), "x"))
    return rows


def _profile(game: Game) -> str:
    """Where the time of a game goes, in words."""
    calls: list[tuple[int, int, float]] = []  # rows, tokens of each, seconds
    read = CachedRunner._extend

    def timed(runner: CachedRunner, tokens: Tensor, *arguments: Any, **options: Any) -> Any:
        synchronized()
        began = time.perf_counter()
        states = read(runner, tokens, *arguments, **options)
        synchronized()
        calls.append((*tokens.shape, time.perf_counter() - began))
        return states

    with patch.object(CachedRunner, "_extend", timed):
        began = time.perf_counter()
        game.play()
        whole = time.perf_counter() - began
    game.turn_times.pop()
    parts, rest = [], 1.0
    for name, chosen in (
        ("one token a row", [call for call in calls if call[1] == 1]),
        ("several", [call for call in calls if call[1] > 1]),
    ):
        seconds, tokens = sum(call[2] for call in chosen), sum(call[0] * call[1] for call in chosen)
        parts.append(f"{seconds / whole:.0%} of the time in calls of {name} ({tokens / seconds:,.0f} tokens/s)")
        rest -= seconds / whole
    return ", ".join([*parts, f"{rest:.0%} outside of the model"])


def _calls() -> list[tuple[int, int]]:
    """New tokens of each row and slots looked at, call by call.

    First a word's last letter, its end and its answer, then the next word but for its last letter and end.
    """
    calls = []
    for turn in range(TURNS):
        begin = 1 + 2 * ACTION_LENGTH * turn
        calls += [(ACTION_LENGTH + 2 if turn else 1, begin)]
        calls += [(1, begin + place) for place in range(1, ACTION_LENGTH - 1)]
    return calls


def _bytes(game: Game) -> str:
    """What the calls of one token must read beside the weights: the keys and values of all tokens before."""
    visible = sum(slots for new, slots in _calls() if new == 1)
    megabytes = 2 * 4 * 4 * WIDTH * game.valid.shape[1] * visible / 1e6  # keys and values, layers, bytes
    return f"calls of one token read {megabytes:,.0f} MB of keys and values a game, which a forward pass never stores."


def _wordle(lm: PreTrainedModel, guided: ValueGuidance, repeats: int) -> dict[str, Any]:
    """Games of Wordle, environment and record keeping included; an untrained policy uses all of its six tries."""
    actor = UtteranceActor(language_actor(lm), CONTROL, ACTION_LENGTH, guidance=guided, forbidden=FORBIDDEN, seed=0)
    words = [f"{a}{b}xyz" for a in "abcdefghijklmnopqrst" for b in "abcdefghij"][:WORDS]
    env, games = WordleEnv(words, batch_size=[WORDLE_BATCH], device=device()), 2 * WORDLE_BATCH
    times = interleaved({"play": lambda: play_games(env, actor, games=games)}, repeats)
    speed = median(games / seconds for seconds in times["play"])
    return row(f"Wordle, {WORDS} words, batch {WORDLE_BATCH}, value-guided", speed, "games/s", PAPER_GAMES)


class Game:
    """Six turns of rows as Wordle's, a word and its colours each; one word in ten is invalid and gets no colours."""

    def __init__(self, n: int, policy: Policy) -> None:
        generator = torch.Generator().manual_seed(n)
        self.policy = policy
        self.valid = (torch.rand(TURNS, n, generator=generator) >= 0.1).to(device())
        colours = torch.randint(26, 29, (TURNS, n, ACTION_LENGTH - 1), generator=generator)
        ends = torch.full((TURNS, n, 1), CONTROL.end_of_state)
        self.replies = torch.cat([colours, ends], -1).to(device())
        self.turn_times: list[list[float]] = []

    def play(self) -> tuple[Tensor, Tensor]:
        """Rows and masks as they stand after the last word, before it is answered."""
        n, place = self.valid.shape[1], torch.arange(ROW_LENGTH, device=device())
        tokens = torch.full((n, ROW_LENGTH), CONTROL.pad, device=device())
        tokens[:, 0] = CONTROL.begin_action
        length, seconds = torch.ones(n, dtype=torch.int64, device=device()), []
        for valid, reply in zip(self.valid, self.replies, strict=True):
            began = time.perf_counter()
            action = self.policy(tokens, place < length[:, None])
            synchronized()
            seconds.append(time.perf_counter() - began)
            spot = length[:, None] + torch.arange(2 * ACTION_LENGTH, device=device())
            tokens = tokens.scatter(-1, spot, torch.cat([action, reply], -1))
            said = length + ACTION_LENGTH
            length = torch.where(valid, said + ACTION_LENGTH, said)
            tokens = tokens.masked_fill(place >= length[:, None], CONTROL.pad)
        self.turn_times.append(seconds)
        return tokens, place < said[:, None]


def _policy(
    lm: PreTrainedModel, guidance: ValueGuidance | None = None, *, compile: bool = False, **options: Any
) -> Policy:
    options = {"guidance": guidance, "forbidden": FORBIDDEN, "seed": 0} | options
    actor = UtteranceActor(language_actor(lm, compile=compile), CONTROL, ACTION_LENGTH, **options)

    def act(tokens: Tensor, attention_mask: Tensor) -> Tensor:
        entries = {"tokens": tokens, "attention_mask": attention_mask}
        return actor(TensorDict(entries, batch_size=tokens.shape[:1])).get("action")

    return act


def _generate(lm: PreTrainedModel) -> Policy:
    """An agent built on ``generate``: rows padded on the left, as it wants them, sampling, its cache, no values."""

    @torch.no_grad()
    def act(tokens: Tensor, attention_mask: Tensor) -> Tensor:
        length = attention_mask.sum(-1)
        width = int(length.max())
        source = (
            torch.arange(width, device=device()) - (width - length)[:, None]
        )  # where each token of the padded row comes from
        prompt = tokens.gather(-1, source.clamp_min(0)).masked_fill(source < 0, CONTROL.pad)
        return lm.generate(
            prompt,
            attention_mask=(source >= 0).long(),
            min_new_tokens=ACTION_LENGTH,
            max_new_tokens=ACTION_LENGTH,
            do_sample=True,
            top_k=0,
            suppress_tokens=list(FORBIDDEN),
            pad_token_id=CONTROL.pad,
        )[:, width:]

    return act
