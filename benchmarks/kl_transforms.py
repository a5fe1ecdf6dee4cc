"""KL transforms: rows beside a plain forward, a step beside one without, exact divergences, TorchRL's own path."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from typing import Any, Literal

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import Tensor, nn
from torch.distributions import Categorical, kl_divergence
from torchrl.data import Bounded, Composite, TensorSpec, Unbounded
from torchrl.data import Categorical as CategoricalSpec
from torchrl.envs import Compose, EnvBase, TransformedEnv
from torchrl.modules import ProbabilisticActor, TanhNormal

from benchmarks import kl_torchrl
from benchmarks.common import interleaved, one_core, ratio, row
from benchmarks.memory import peak_bytes
from benchmarks.wordle_batches import wordle_batches
from torchrl_lang.functional import categorical_kl
from torchrl_lang.functional.kl import projected_kl
from torchrl_lang.modules import causal_lm, language_actor
from torchrl_lang.transforms import (
    KLConstrainedTransform,
    KLDivergenceTransform,
    ReferenceModelLogProbTransform,
    frozen_copy,
)

MAX_SCORING_RATIO, MAX_STEP_MS = 1.1, 0.3
# The demo's model, and one twice as wide and a layer deeper: real games of Wordle. A vocabulary such as GPT-2's.
SIZES = {"3 layers, 64 wide, V=35": (3, 64, 35), "4 layers, 128 wide, V=35": (4, 128, 35)}
LARGE, LARGE_SIZE = "2 layers, 128 wide, V=50,257", (2, 128, 50_257)
ENVS, STEPS = 64, 40
VOCABULARY, POSITIONS, HIDDEN, CHUNK = 50_000, 64, 128, 1024
BYTES_PER_POSITION = 32 * CHUNK
SMOKE = {"LARGE_SIZE": (1, 32, 512), "STEPS": 1, "VOCABULARY": 512, "POSITIONS": 8}


@one_core()
def run(quick: bool = False) -> list[dict[str, Any]]:
    batches = wordle_batches()
    return [
        *_scoring(batches, quick),
        *_step("continuous", *_continuous(), quick),
        *_step("categorical", *_categorical(), quick),
        *_exact(repeats=3 if quick else 9),
        *kl_torchrl.compare(batches[0], repeats=5 if quick else 25),
    ]


def _scoring(batches: list[TensorDictBase], quick: bool) -> list[dict[str, Any]]:
    """ReferenceModelLogProbTransform on rows beside Hugging Face's forward pass with the logits of all positions."""
    rows = []
    for name, size in SIZES.items():
        rows += _scored(name, size, batches, repeats=12 if quick else 64)
    synthetic = [_dialogues(8, 128, LARGE_SIZE[2]) for _ in range(2)]
    return rows + _scored(LARGE, LARGE_SIZE, synthetic, repeats=3 if quick else 16)


def _scored(name: str, size: tuple[int, int, int], batches: list[TensorDictBase], repeats: int) -> list[dict[str, Any]]:
    layers, width, vocabulary = size
    lm = causal_lm(vocab_size=vocabulary, layers=layers, width=width, heads=4, max_length=128).eval()

    def forward(batch: TensorDictBase) -> None:
        with torch.no_grad():
            lm(input_ids=batch["tokens"], attention_mask=batch["attention_mask"].long(), use_cache=False)

    def score(groups: int | Literal["auto"]) -> Callable[[TensorDictBase], Any]:
        transform = ReferenceModelLogProbTransform(language_actor(lm, length_groups=groups))
        return lambda batch: transform(batch.copy())

    def in_turn(job: Callable[[TensorDictBase], Any]) -> Callable[[], Any]:
        """Another batch every time, the same for every job of a round."""
        turn = itertools.cycle(batches)
        return lambda: job(next(turn))

    jobs = {"forward": forward, "rows": score("auto"), "together": score(1)}
    times = interleaved({label: in_turn(job) for label, job in jobs.items()}, repeats)
    said = sum(int(batch["agent_mask"].sum()) for batch in batches) / len(batches)
    seconds = statistics.median(times["rows"])
    return [
        row(f"rows, {name}: scoring / forward", ratio(times, "rows", "forward"), "x", MAX_SCORING_RATIO, at_most=True),
        row(f"rows, {name}: scoring, batch not split by length / forward", ratio(times, "together", "forward"), "x"),
        row(f"rows, {name}: agent's tokens scored per second", said / seconds, "tokens/s"),
    ]


def _dialogues(rows: int, width: int, vocabulary: int) -> TensorDict:
    """Rows of turns by turns: the environment writes 10 tokens, the agent 10, over a half to the whole of the width."""
    length = torch.randint(width // 2, width + 1, (rows,))
    position = torch.arange(width)
    attention = position < length[:, None]
    tokens = torch.randint(1, vocabulary, (rows, width)).masked_fill(~attention, 0)
    entries = {"tokens": tokens, "attention_mask": attention, "agent_mask": attention & (position % 20 >= 10)}
    return TensorDict(entries, batch_size=[rows])


class _Walk(EnvBase):
    """As cheap as an environment can be: the action is added to the observation."""

    def __init__(self, action_spec: TensorSpec) -> None:
        super().__init__(batch_size=[ENVS])
        self.observation_spec = Composite(observation=Unbounded((ENVS, 8)), shape=(ENVS,))
        self.action_spec = action_spec
        self.reward_spec = Unbounded((ENVS, 1))

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        return TensorDict({"observation": torch.zeros(ENVS, 8), **self._going_on()}, batch_size=self.batch_size)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        moved = tensordict["observation"] + 0.1 * tensordict["action"].reshape(ENVS, -1).sum(-1, keepdim=True)
        entries = {"observation": moved, "reward": moved[:, :1], **self._going_on()}
        return TensorDict(entries, batch_size=self.batch_size)

    def _going_on(self) -> dict[str, Tensor]:
        return {key: torch.zeros(ENVS, 1, dtype=torch.bool) for key in ("done", "terminated")}

    def _set_seed(self, seed: int | None) -> None:
        """Nothing here is random."""


def _continuous() -> tuple[ProbabilisticActor, TensorSpec]:
    net = nn.Sequential(_mlp(4), NormalParamExtractor())
    module = TensorDictModule(net, in_keys=["observation"], out_keys=["loc", "scale"])
    options = {"distribution_class": TanhNormal, "return_log_prob": True}
    return ProbabilisticActor(module, in_keys=["loc", "scale"], **options), Bounded(-1, 1, (ENVS, 2))


def _categorical() -> tuple[ProbabilisticActor, TensorSpec]:
    module = TensorDictModule(_mlp(5), in_keys=["observation"], out_keys=["logits"])
    options = {"distribution_class": Categorical, "return_log_prob": True}
    return ProbabilisticActor(module, in_keys=["logits"], **options), CategoricalSpec(5, (ENVS,))


def _mlp(out: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, out))


def _step(kind: str, actor: ProbabilisticActor, action_spec: TensorSpec, quick: bool) -> list[dict[str, Any]]:
    """What the transforms add to a step beyond the reference's own forward pass: all, and one after the other."""
    whole = KLConstrainedTransform(actor, 0.1, limit=1e6)
    parts = [type(part).__name__ for part in whole.transforms]

    def taken(env: EnvBase) -> Callable[[], TensorDictBase]:
        with torch.no_grad():
            step = actor(env.reset())
        return lambda: env.step(step.copy())  # as a collector does: without a "next" from before

    def env_with(n: int) -> EnvBase:
        return TransformedEnv(_Walk(action_spec), Compose(*(part.clone() for part in whole.transforms[:n])))

    plain, forward = taken(TransformedEnv(_Walk(action_spec))), _forward(actor, _Walk(action_spec))
    steps = {str(n): taken(env_with(n)) for n in range(1, len(parts))}
    steps[str(len(parts))] = taken(TransformedEnv(_Walk(action_spec), whole))
    # Done in turn, step and forward take longer than each by itself: neither finds its code and data in the caches.
    alone = {"plain": plain, "forward": forward, "0": lambda: (plain(), forward())}
    times = interleaved({name: _many(job) for name, job in (alone | steps).items()}, repeats := 10 if quick else 60)
    name, every = f"step of {ENVS}, {kind} policy", str(len(parts))
    return [
        row(f"{name}: all four, beyond step and forward", _extra(times, every, "0"), "ms", MAX_STEP_MS, at_most=True),
        row(f"{name}: all four, beyond both measured apart", _extra(times, every, "plain", "forward"), "ms"),
        *(row(f"{name}: {part}", _extra(times, str(n + 1), str(n)), "ms") for n, part in enumerate(parts)),
        row(f"{name}: the reference's forward", _extra(times, "forward"), "ms"),
        row(f"{name}: the step without transforms", _extra(times, "plain"), "ms"),
        *_compiled(name, {"all": steps[every], "plain": plain, "forward": forward}, repeats),
    ]


def _forward(actor: ProbabilisticActor, env: EnvBase) -> Callable[[], Tensor]:
    """What no transform can spare: distribution and log-probability of the same data under a frozen copy."""
    reference = frozen_copy(actor)
    with torch.no_grad():
        step = actor(env.reset())
    inputs, action = step.select(*actor.in_keys), step["action"]

    @torch.no_grad()
    def forward() -> Tensor:
        return reference.actor.get_dist(inputs).log_prob(action)

    return forward


def _compiled(name: str, jobs: dict[str, Callable[[], Any]], repeats: int) -> list[dict[str, Any]]:
    """The same with step, step without transforms and forward each compiled."""
    try:
        times = interleaved({key: _many(torch.compile(job)) for key, job in jobs.items()}, repeats)
    except Exception as error:  # whatever the compiler cannot do here is the finding
        return [row(f"{name}: compiles", 0, "1 = yes", note=kl_torchrl.said(error))]
    return [
        row(f"{name}, compiled: all four, beyond both measured apart", _extra(times, "all", "plain", "forward"), "ms"),
        row(f"{name}, compiled: the whole step", _extra(times, "all"), "ms"),
    ]


def _many(job: Callable[[], Any]) -> Callable[[], None]:
    def jobs() -> None:
        for _ in range(STEPS):
            job()

    return jobs


def _extra(times: dict[str, list[float]], whole: str, *without: str) -> float:
    """Milliseconds a step, median of the differences of neighbouring runs."""
    rounds = zip(times[whole], *(times[name] for name in without), strict=True)
    return statistics.median(first - sum(others) for first, *others in rounds) * 1000 / STEPS


def _exact(repeats: int) -> list[dict[str, Any]]:
    """Exact divergences over a large vocabulary beside ``kl_divergence`` of two Categoricals."""
    logits, ref_logits = torch.randn(POSITIONS, VOCABULARY), torch.randn(POSITIONS, VOCABULARY)
    hidden, ref_hidden = torch.randn(POSITIONS, HIDDEN), torch.randn(POSITIONS, HIDDEN)
    weight, ref_weight = (torch.randn(VOCABULARY, HIDDEN) / HIDDEN**0.5 for _ in range(2))
    allowed = torch.zeros(VOCABULARY, dtype=torch.bool)  # nothing is forbidden, and it is looked at
    pairs: dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor]]] = {
        "two logits tensors": (
            lambda: categorical_kl(logits, ref_logits, chunk_size=CHUNK),
            lambda: kl_divergence(Categorical(logits=logits), Categorical(logits=ref_logits)),
        ),
        "hidden states": (
            lambda: projected_kl(hidden, weight, ref_hidden, ref_weight, forbidden=allowed, chunk_size=CHUNK),
            lambda: kl_divergence(Categorical(logits=hidden @ weight.T), Categorical(logits=ref_hidden @ ref_weight.T)),
        ),
    }
    rows = []
    for name, (ours, naive) in pairs.items():
        with torch.no_grad():
            times = interleaved({"ours": ours, "naive": naive}, repeats)
            held, naively = (peak_bytes(job) / POSITIONS for job in (ours, naive))
        label = f"exact, V={VOCABULARY:,}, from {name}"
        rows += [
            row(f"{label}: most bytes held a position", held, "bytes", BYTES_PER_POSITION, at_most=True),
            row(f"{label}: the same of kl_divergence", naively, "bytes"),
            row(f"{label}: time / kl_divergence", ratio(times, "ours", "naive"), "x"),
        ]
    return [*rows, _exact_rows()]


def _exact_rows() -> dict[str, Any]:
    """KLDivergenceTransform on rows, both models' passes over them included."""
    policy, reference = (
        language_actor(causal_lm(vocab_size=VOCABULARY, layers=2, width=HIDDEN, heads=4, max_length=128))
        for _ in range(2)
    )
    transform = KLDivergenceTransform("exact", policy=policy, reference=reference, chunk_size=CHUNK)
    rows = _dialogues(8, 128, VOCABULARY)
    held = peak_bytes(lambda: transform(rows.copy())) / int(rows["agent_mask"].sum())
    name = f"exact, V={VOCABULARY:,}, KLDivergenceTransform on rows: most bytes held a token of the agent"
    return row(name, held, "bytes", BYTES_PER_POSITION, at_most=True)
