"""Training at large vocabularies beside the plain language-model step: time, arithmetic and peak memory, one core."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn
from torchrl.objectives import SoftUpdate
from transformers import PreTrainedModel

from benchmarks.common import device, interleaved, median, one_core, ratio, row
from benchmarks.memory import peak_bytes
from benchmarks.naive_ilql import NaiveILQL
from benchmarks.plain import plain_step
from torchrl_lang.modules import (
    QValueHead,
    TiedQValueHead,
    ValueGuidance,
    ValueHead,
    causal_lm,
    language_actor,
    qvalue_module,
    value_module,
)
from torchrl_lang.modules.decoding.next_token import NextTokenDistribution
from torchrl_lang.objectives import ILQLLoss, PPOLoss
from torchrl_lang.training import total_loss

ON_CUDA = True
WIDTH, LAYERS = 128, 2


class Case(NamedTuple):
    """A vocabulary, a batch, and by how much its peak memory should lie below the naive form's."""

    vocabulary: int
    rows: int
    length: int
    rows_for_memory: int
    lighter: dict[str, float]


CASES = (
    Case(50_257, 8, 96, 8, {"CQL off": 15.0, "CQL on": 5.0}),
    Case(151_936, 4, 64, 12, {"CQL off": 10.0, "CQL on": 10.0}),
)
SMOKE = {"CASES": (Case(512, 2, 16, 2, {"CQL off": 15.0, "CQL on": 5.0}),)}
MAX_RATIO = 1.10
MAX_RATIO_GPT2 = 1.35
MAX_ARITHMETIC = 1.2
MAX_OVER_PPO = 1.10
# Where a form needs no more than the plain step, its share beyond counts as this part of it.
LEAST_SHARE = 0.02


@one_core()
def run(quick: bool = False) -> list[dict[str, Any]]:
    if quick:
        return _measure(CASES[0], repeats=3)
    return [entry for case in CASES for entry in _measure(case, repeats=3)] + _gpt2_small(repeats=5)


def make_batch(case: Case, rows: int) -> TensorDictBase:
    """Rows of half to full length in turns of eight tokens, every other turn the agent's."""
    g = torch.Generator().manual_seed(0)
    shape = (rows, case.length)
    length = torch.randint(case.length // 2, case.length + 1, (rows, 1), generator=g)
    real = torch.arange(case.length) < length
    agent = (torch.arange(case.length) // 8 % 2 == 1).expand(shape) & real
    return TensorDict(
        tokens=torch.where(real, torch.randint(case.vocabulary, shape, generator=g), 0),
        attention_mask=real,
        agent_mask=agent,
        token_reward=torch.where(agent, torch.randn(shape, generator=g), 0.0),
        terminated=torch.rand(rows, 1, generator=g) < 0.5,
        batch_size=[rows],
    ).to(device())


class Model(NamedTuple):
    """A language model and the heads that losses over it share."""

    lm: PreTrainedModel
    qvalue: QValueHead
    value: ValueHead


def make_model(case: Case, layers: int = LAYERS, width: int = WIDTH, heads: int = 4) -> Model:
    lm = causal_lm(vocab_size=case.vocabulary, layers=layers, width=width, heads=heads, max_length=case.length)
    return Model(lm.to(device()), QValueHead(width, case.vocabulary).to(device()), ValueHead(width).to(device()))


def make_loss(model: Model, *, tied: bool = False, **options: Any) -> ILQLLoss:
    head: QValueHead | TiedQValueHead = model.qvalue
    if tied:
        head = TiedQValueHead(model.lm.config.hidden_size, model.lm.get_output_embeddings()).to(device())
    heads = qvalue_module(head), value_module(model.value)
    loss = ILQLLoss(language_actor(model.lm), *heads, **options)
    SoftUpdate(loss, tau=0.01)
    return loss


def _measure(case: Case, repeats: int) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    model = make_model(case)
    forms: dict[str, nn.Module] = {}
    for name, weight in (("CQL off", 0.0), ("CQL on", 0.01)):
        for suffix, chunk in (("", "auto"), (", whole table", None)):
            forms[name + suffix] = make_loss(model, cql_weight=weight, logits_chunk=chunk)
        forms[f"{name}, naive"] = NaiveILQL(*model, cql_weight=weight).to(device())
    forms["CQL on, tied heads"] = make_loss(model, tied=True)

    batch = make_batch(case, case.rows)
    for name in case.lighter:
        _check(forms[name], forms[f"{name}, naive"], batch)
    jobs = cleared_steps(model.lm, forms, batch)
    decisions = int(batch["agent_mask"][:, 1:].sum())
    slow = {name: jobs.pop(name) for name in list(jobs) if "naive" in name}
    times = interleaved(jobs | {"arithmetic": _arithmetic(case.vocabulary, decisions)}, repeats)
    naive_times = interleaved({"plain": jobs["plain"]} | slow, max(1, repeats // 3))
    policies = {
        "PPO": PPOLoss(language_actor(model.lm), value_module(model.value)),
        "PPO, whole table": PPOLoss(language_actor(model.lm), value_module(model.value), logits_chunk=None),
    }
    forms |= policies
    batch = make_batch(case, case.rows_for_memory)
    batch["token_log_prob"] = torch.where(batch["agent_mask"], -math.log(case.vocabulary), 0.0)
    jobs = cleared_steps(model.lm, forms, policies["PPO"].estimate(batch))
    peaks = {name: peak_bytes(job, device()) / 2**20 for name, job in jobs.items()}
    label = f"V={case.vocabulary:,}"
    return [*_time_rows(label, times, naive_times), *_memory_rows(label, case, peaks), _guided(label, model, repeats)]


def _guided(label: str, model: Model, repeats: int) -> dict[str, Any]:
    """The next token of 64 rows under top-k 50: values of all tokens beside those of the tokens that are kept."""
    table = nn.Sequential(model.qvalue)  # a module that is not known to compute less
    states = {"logits": torch.randn(64, model.qvalue.vocab_size), "hidden": torch.randn(64, WIDTH)}
    states = {name: value.to(device()) for name, value in states.items()}

    def job(qvalue: nn.Module) -> Callable[[], None]:
        rule = NextTokenDistribution(top_k=50, guidance=ValueGuidance(qvalue, beta=1.0)).to(device())
        return torch.no_grad()(lambda: rule(states))

    times = interleaved({"all": job(table), "kept": job(model.qvalue)}, max(3, repeats))
    return row(
        f"{label}: guided word of 64 rows under top-k, values of all / of those kept", ratio(times, "all", "kept"), "x"
    )


def _gpt2_small(repeats: int) -> list[dict[str, Any]]:
    """A trunk of the size of GPT-2 small, where the vocabulary is the lesser part."""
    torch.manual_seed(0)
    case = Case(50_257, 4, 64, 4, {})
    model = make_model(case, layers=12, width=768, heads=12)
    forms = {"CQL on": make_loss(model), "CQL on, tied heads": make_loss(model, tied=True)}
    batch = make_batch(case, case.rows)
    times = interleaved(cleared_steps(model.lm, forms, batch), repeats)
    return [
        row(
            f"GPT-2 small, V={case.vocabulary:,}: ILQL, {name} / plain step",
            ratio(times, name, "plain"),
            "x",
            MAX_RATIO_GPT2 if "tied" in name else None,
            at_most=True,
        )
        for name in forms
    ]


def ilql_step(form: nn.Module, batch: TensorDictBase) -> Callable[[], None]:
    def step() -> None:
        losses = form(batch)
        total = sum(losses.values()) if isinstance(losses, dict) else total_loss(losses)
        total.backward()

    return step


def cleared_steps(
    lm: nn.Module, forms: Mapping[str, nn.Module], batch: TensorDictBase, plain: str = "plain"
) -> dict[str, Callable[[], None]]:
    """The plain step and those of all forms; their gradients count in their peaks and are gone before the next one."""
    steps = {plain: partial(plain_step, lm, batch)} | {name: ilql_step(form, batch) for name, form in forms.items()}

    def cleared(step: Callable[[], None]) -> Callable[[], None]:
        def job() -> None:
            step()
            for module in (lm, *forms.values()):
                module.zero_grad()

        return job

    return {name: cleared(step) for name, step in steps.items()}


def _arithmetic(vocabulary: int, decisions: int) -> Callable[[], None]:
    """Each Q head's three products with its last layer, at decisions: what exact CQL has to compute."""
    features, weight = (torch.randn(n, 2 * WIDTH, device=device()) for n in (decisions, vocabulary))

    def job() -> None:
        for _ in range(2):
            values = features @ weight.T
            values @ weight
            values.T @ features

    return job


def _check(ours: nn.Module, naive: nn.Module, batch: TensorDictBase) -> None:
    """Raise unless both compute the same losses."""
    with torch.no_grad():
        found = ours(batch)
        for name, expected in naive(batch).items():
            torch.testing.assert_close(found[name], expected, rtol=1e-4, atol=1e-6)


def _time_rows(label: str, times: dict[str, list[float]], naive_times: dict[str, list[float]]) -> list[dict[str, Any]]:
    extra = [on - off for on, off in zip(times["CQL on"], times["CQL off"], strict=True)]
    share = median(a / b for a, b in zip(extra, times["arithmetic"], strict=True))
    rows = [row(f"{label}: ILQL, CQL off / plain step", ratio(times, "CQL off", "plain"), "x", MAX_RATIO, at_most=True)]
    rows += [
        row(f"{label}: ILQL, {name} / plain step", ratio(times, name, "plain"), "x")
        for name in times
        if name not in ("plain", "arithmetic", "CQL off")
    ]
    rows += [
        row(f"{label}: ILQL, {name} / plain step", ratio(naive_times, name, "plain"), "x")
        for name in naive_times
        if name != "plain"
    ]
    rows.append(row(f"{label}: what CQL adds / its three products", share, "x", MAX_ARITHMETIC, at_most=True))
    rows.append(row(f"{label}: plain language-model step", median(1000 * took for took in times["plain"]), "ms"))
    return rows


def _memory_rows(label: str, case: Case, peaks: dict[str, float]) -> list[dict[str, Any]]:
    rows = [row(f"{label}: peak of the plain step", peaks["plain"], "MB")]
    beyond = {name: peak - peaks["plain"] for name, peak in peaks.items() if name != "plain"}
    rows += [row(f"{label}: peak beyond the plain step, {name}", size, "MB") for name, size in beyond.items()]
    for name, target in case.lighter.items():
        floor = LEAST_SHARE * peaks["plain"]
        note = None
        if beyond[name] < floor:
            note = f"no more than the plain step; counted as {floor:.0f} MB beyond it"
        value = beyond[f"{name}, naive"] / max(beyond[name], floor)
        rows.append(row(f"{label}: peak beyond plain, naive / ours, {name}", value, "x", target, note=note))
    for name, ppo, limit in (
        ("CQL on", "PPO, whole table", MAX_OVER_PPO),
        ("CQL on, tied heads", "PPO", MAX_OVER_PPO),
        ("CQL on", "PPO", None),  # Q heads of their own have gradients as large as the vocabulary
    ):
        what = f"{label}: peak of ILQL, {name} / of {ppo.replace('PPO', 'PPO with a value head')}"
        rows.append(row(what, peaks[name] / peaks[ppo], "x", limit, at_most=True))
    return rows
