"""A pretrained chat model beside transformers and TRL: the same rows, weights and dtype, on one core.

The game is :class:`~torchrl_lang.envs.games.GuessNumber`, 1 to 15 in four turns, in the model's chat template. TRL's
trainers run their own ``train()``; after each of their steps ours takes its own, so that a busy moment hits both. Each
side has the model as it loads it: ours with linear layers by oneDNN.

* A BC step: ``BCLoss`` beside TRL's ``SFTTrainer`` and a plain transformers step, on 16 games, with all weights and
  with LoRA on all layers. The loss counts the agent's tokens, in the plain step and in TRL's by labels of -100.
* Acting: ``UtteranceActor`` beside ``generate``, 16 new tokens at temperature 1, of 16 games in their first turn and of
  64 in their fourth. ``generate`` reads the whole prompt; the actor has read it up to the turn before.
* The same turn of 16 games by a ``TransformersWrapper`` of TorchRL alone, and as the policy of an environment
  (``WrapperActor``), which also has the log-probabilities of all tokens. Both draw the same tokens.
* An iteration of PPO beside one of TRL's ``GRPOTrainer`` with the game as its environment: 16 games, one epoch in one
  batch, a KL penalty to the model as it was; with all weights, and with LoRA on the last blocks. Every text is a call
  of the environment's tool and no description of it is in the prompt, so that the games have nearly the same tokens.
  TRL does not know that a game is over: it plays all four turns, the last of which gets no reply.
* A game of PPO with short texts: 1 to 7 in three turns, the same opening for all and replies of a word, 64 games an
  iteration in batches of 16, bfloat16 weights, LoRA of float32 on the last ten blocks. TRL is not asked.

``CHAT_MODEL`` names the model, a folder: one that ends its guesses, such as the BC model of ``make demo-chat``, because
TRL limits the tokens of a game and not those of a turn. TRL has an environment of its own, see ``make test-suites``::

    CHAT_MODEL=folder .venv-suites-trl/bin/python -m benchmarks chat_model
"""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import Tensor, nn
from torchrl.modules.llm import TransformersWrapper
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, TrainerCallback

from benchmarks.common import interleaved, median, one_core, ratio, row, seconds, smoking
from benchmarks.stopwatch import Stopwatch
from torchrl_lang.envs import TextGameEnv, TextPlayer
from torchrl_lang.envs.games import GuessNumber, GuessPlayer
from torchrl_lang.evaluation import play_games
from torchrl_lang.functional.decisions import shift_right
from torchrl_lang.modules import UtteranceActor, WrapperActor, causal_lm, language_actor, load_causal_lm
from torchrl_lang.modules.row_scoring import RowScorer
from torchrl_lang.objectives import BCLoss, PPOLoss
from torchrl_lang.recipes.algorithms import PPO
from torchrl_lang.recipes.collect import CollectedGames
from torchrl_lang.recipes.online import OnlineRun, kl_transform, load_initial_policy
from torchrl_lang.recipes.online_algorithms import PPOLearner
from torchrl_lang.schema import AGENT_MASK, ATTENTION_MASK, TOKENS
from torchrl_lang.text import ChatTokenizer, RowFormat
from torchrl_lang.training import adamw, total_loss

SYSTEM = "You play a game. Answer with one short guess."
TURNS, NEW_TOKENS, GAMES = 4, 16, 16
TARGETS = {"all weights": 0.6, "LoRA": 0.5}
LORA = {"r": 16, "lora_alpha": 32}
LAST = 6
"""Blocks with adapters online."""
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LR, KL = 1e-5, 0.05


def tiny_model(folder: Path) -> Path:
    """A chat model for a smoke run."""
    from tests.data.chat_templates import EXACT, tokenizer_of

    tokenizer = tokenizer_of(EXACT["chatml"])
    tokenizer.save_pretrained(folder)
    size: Any = {"layers": 2, "width": 16, "heads": 2, "max_length": 1024}
    causal_lm("llama", vocab_size=len(tokenizer), pad=tokenizer.pad_token_id, **size).save_pretrained(folder)
    return folder


class Table:
    """The game of the benchmark with a chat model: its rows, and a new copy of the model for each job."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.chat = folder, ChatTokenizer(folder, RowFormat.from_chat_template(folder, system=SYSTEM))
        self.action_length = NEW_TOKENS + 1
        blocks = AutoConfig.from_pretrained(folder, trust_remote_code=False).num_hidden_layers
        self.last = [*range(max(blocks - LAST, 0), blocks)]

    def lm(self) -> PreTrainedModel:
        """The model as this library loads it."""
        return load_causal_lm(self.folder, dtype=torch.float32)

    def theirs(self) -> PreTrainedModel:
        """The model as transformers loads it."""
        return AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32, trust_remote_code=False)

    def env(self, games: int, *, seed: int = 0, **options: Any) -> TextGameEnv:
        length = len(self.chat.encode_opening(GuessNumber().reset(0))) + TURNS * (self.action_length + 24)
        given: Any = {"row_length": length, "action_length": self.action_length, "batch_size": games, "seed": seed}
        return TextGameEnv(GuessNumber, self.chat, **{**given, **options})

    def rows(self, games: int) -> TensorDictBase:
        """Scripted games ``[games]``."""
        player = TextPlayer(GuessPlayer(), self.chat, self.action_length, seed=0)
        return play_games(self.env(games), player, games=games).rows

    def prompts(self, rows: TensorDictBase, turn: int) -> TensorDictBase:
        """The rows before the agent's utterance number ``turn``, of those that have it."""
        number = _turn_number(rows)
        rows, number = rows[number[:, -1] >= turn], number[number[:, -1] >= turn]
        known = number < turn
        pad = torch.full_like(rows.get(TOKENS), self.chat.control.pad)
        return rows.select().update({TOKENS: torch.where(known, rows.get(TOKENS), pad), ATTENTION_MASK: known})


@one_core()
def run(quick: bool = False) -> list[dict[str, Any]]:
    given = os.environ.get("CHAT_MODEL")
    if given is None and not smoking():
        print("  nothing measured: give the folder of a chat model by CHAT_MODEL")
        return []
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        table = Table(Path(given) if given else tiny_model(Path(place)))
        repeats = 3 if quick else 8
        found = [*acting_rows(table, repeats), wrapper_row(table, repeats), short_row(table, Path(place), repeats)]
        if find_spec("trl") is None:
            print("  TRL is not installed here: its rows are left out")
            return found
        found += training_rows(table, Path(place), repeats)
        for lora in (False, True):
            found += online_rows(table, Path(place), repeats, lora=lora)
        return found


# -- acting ------------------------------------------------------------------------------------------------------------


def acting_rows(table: Table, repeats: int) -> list[dict[str, Any]]:
    lm, theirs, found = table.lm().eval(), table.theirs().eval(), []
    for games, turn, target in ((16, 1, 1.5), (64, 4, 4.0)):
        jobs = Acting(table, lm, theirs, games, turn)
        times: dict[str, list[float]] = {"ours": [], "generate": []}
        jobs.ours(), jobs.generate()
        for _ in range(1 if smoking() else repeats):
            for name in times:
                written, took = getattr(jobs, name)()
                times[name].append(took / written)
        what = f"acting, {games} games, turn {turn}:"
        found.append(row(f"{what} ours", median(1 / took for took in times["ours"]), "tokens/s"))
        found.append(row(f"{what} ours / generate", ratio(times, "generate", "ours"), "x", target))
    return found


class Acting:
    """One turn of many games; each way returns the number of tokens that it wrote and its seconds."""

    def __init__(self, table: Table, lm: PreTrainedModel, theirs: PreTrainedModel, games: int, turn: int) -> None:
        rows = table.rows(4 * games)
        rows = rows[_turn_number(rows)[:, -1] >= turn][:games]  # the same games in both prompts
        self.before = table.prompts(rows, turn - 1) if turn > 1 else None
        self.now, self.theirs, self.control = table.prompts(rows, turn), theirs, table.chat.control
        assert len(self.now) == games
        self.actor = UtteranceActor(language_actor(lm), self.control, table.action_length, seed=0)
        length = self.now.get(ATTENTION_MASK).sum(-1)
        width = int(length.max())
        place = torch.arange(width) - (width - length)[:, None]  # left padding
        tokens = self.now.get(TOKENS).gather(-1, place.clamp(min=0))
        self.prompt = {
            "input_ids": torch.where(place >= 0, tokens, self.control.pad),
            "attention_mask": (place >= 0).long(),
        }

    def ours(self) -> tuple[int, float]:
        self.actor.forget()
        with torch.no_grad():
            if self.before is not None:
                self.actor(self.before.clone())
            out: list[Any] = []
            took = seconds(lambda: out.append(self.actor(self.now.clone())))
        return int((out[0]["action"] != self.control.pad).sum()), took

    def generate(self) -> tuple[int, float]:
        options: Any = {
            "max_new_tokens": NEW_TOKENS + 1,
            "do_sample": True,
            "top_k": 0,
            "pad_token_id": self.control.pad,
        }
        out: list[Any] = []
        end = self.control.end_of_action
        with torch.no_grad():
            took = seconds(lambda: out.append(self.theirs.generate(**self.prompt, eos_token_id=end, **options)))
        new = out[0][:, self.prompt["input_ids"].shape[1] :]
        before_end = (new == end).cumsum(-1) - (new == end).int() == 0
        return int(before_end.sum()), took


def wrapper_row(table: Table, repeats: int) -> dict[str, Any]:
    """Measure a turn of an environment by a wrapper, in times of a call of the wrapper alone."""
    control, prompts = table.chat.control, table.prompts(table.rows(GAMES), 1)
    options: Any = {"max_new_tokens": NEW_TOKENS, "do_sample": True, "pad_token_id": control.pad}
    wrapper = TransformersWrapper(
        table.lm().eval(),
        tokenizer=AutoTokenizer.from_pretrained(table.folder, trust_remote_code=False),
        input_mode="tokens",
        pad_output=True,
        return_log_probs=True,
        generate_kwargs={**options, "eos_token_id": control.end_of_action},
    )
    actor = WrapperActor(wrapper, control, table.action_length)
    read = [row[TOKENS][row[ATTENTION_MASK]] for row in prompts.unbind(0)]
    masks = ("masks", "all_attention_mask")
    alone = lazy_stack([TensorDict().set(wrapper.input_key, x).set(masks, torch.ones_like(x).bool()) for x in read])

    def seeded(policy: Callable[[Any], Any], given: Any) -> Callable[[], Any]:
        def job() -> None:
            torch.manual_seed(0)
            with torch.no_grad():
                policy(given.clone())

        return job

    times = interleaved({"actor": seeded(actor, prompts), "wrapper": seeded(wrapper, alone)}, repeats)
    return row(
        f"acting, {GAMES} games: WrapperActor / its wrapper", ratio(times, "actor", "wrapper"), "x", 1.05, at_most=True
    )


def _turn_number(rows: TensorDictBase) -> Tensor:
    """How many utterances of the agent have begun at each token, int64 ``[N, T]``."""
    mask = rows.get(AGENT_MASK)
    return (mask & ~shift_right(mask)).cumsum(-1)


# -- offline: a BC step ------------------------------------------------------------------------------------------------


def training_rows(table: Table, place: Path, repeats: int) -> list[dict[str, Any]]:
    rows, found = table.rows(GAMES), []
    for name, target in TARGETS.items():
        times = bc_times(table, rows, place / name, repeats, lora=name == "LoRA")
        for other in ("SFTTrainer", "plain"):
            at_most = target if other == "SFTTrainer" else None
            what = f"BC step, {name}: ours / {other}"
            found.append(row(what, ratio(times, "ours", other), "x", at_most, at_most=True))
        found.append(row(f"BC step, {name}: ours", median(times["ours"]), "s"))
    return found


def bc_times(table: Table, rows: TensorDictBase, place: Path, repeats: int, *, lora: bool) -> dict[str, list[float]]:
    """Seconds of steps of each kind, taken in turns inside TRL's own training loop."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    ours, plain = Ours(table.lm(), rows, lora=lora), Plain(table.theirs(), rows, lora=lora)
    turns = Turns({"ours": ours.step, "plain": plain.step}, "SFTTrainer")
    real = [(one[TOKENS][one[ATTENTION_MASK]], one[AGENT_MASK][one[ATTENTION_MASK]]) for one in rows.unbind(0)]
    labels = [torch.where(mask, tokens, -100).tolist() for tokens, mask in real]
    data = Dataset.from_dict({"input_ids": [tokens.tolist() for tokens, _ in real], "labels": labels})
    trainer = SFTTrainer(
        model=adapted(table.theirs()) if lora else table.theirs(),
        args=SFTConfig(per_device_train_batch_size=GAMES, max_length=None, **shared(place, repeats)),
        train_dataset=data,
        processing_class=AutoTokenizer.from_pretrained(table.folder, trust_remote_code=False),
        callbacks=[turns],
    )
    trainer.train()
    return turns.times


class Turns(TrainerCallback):
    """After each step of a trainer, but the first, which warms up, the other jobs take theirs."""

    def __init__(self, jobs: dict[str, Callable[[], Any]], name: str) -> None:
        self.jobs, self.name = jobs, name
        self.times: dict[str, list[float]] = {key: [] for key in (*jobs, name)}
        self._began = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._began = perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        taken = {self.name: perf_counter() - self._began} | {name: seconds(job) for name, job in self.jobs.items()}
        if state.global_step > 1 or smoking():
            for name, took in taken.items():
                self.times[name].append(took)


def shared(place: Path, repeats: int) -> dict[str, Any]:
    """Options of both of TRL's trainers."""
    return {
        "output_dir": str(place),
        "max_steps": 1 if smoking() else repeats + 1,
        "learning_rate": LR,
        "gradient_checkpointing": False,  # recomputes the activations: slower
        "bf16": False,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 1000,
    }


def adapted(lm: PreTrainedModel) -> Any:
    """The model with adapters on all of its layers."""
    from peft import get_peft_model

    return get_peft_model(lm, adapters())


def adapters(**options: Any) -> Any:
    """PEFT's description of the adapters."""
    from peft import LoraConfig

    given: Any = {"task_type": "CAUSAL_LM", "target_modules": LINEAR, **LORA, **options}
    return LoraConfig(**given)


class Ours:
    """This library's training step."""

    def __init__(self, lm: PreTrainedModel, rows: TensorDictBase, *, lora: bool) -> None:
        lm = adapted(lm) if lora else lm
        self.loss, self.rows = BCLoss(language_actor(lm), transition_weight=0.0, actor_normalizer="action"), rows
        self.optimizer = adamw(self.loss, LR)

    def step(self) -> None:
        total_loss(self.loss(self.rows)).backward()
        nn.utils.clip_grad_norm_(self.loss.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


class Plain:
    """The step of a program on transformers alone."""

    def __init__(self, lm: PreTrainedModel, rows: TensorDictBase, *, lora: bool) -> None:
        self.lm = adapted(lm) if lora else lm
        self.lm.train()
        real = rows.get(ATTENTION_MASK)
        width = int(real.sum(-1).max())
        tokens = rows.get(TOKENS)[:, :width]
        labels = torch.where(rows.get(AGENT_MASK)[:, :width], tokens, -100)
        self.batch = {"input_ids": tokens, "attention_mask": real[:, :width].long(), "labels": labels}
        self.weights = [weight for weight in self.lm.parameters() if weight.requires_grad]
        self.optimizer = torch.optim.AdamW(self.weights, LR)

    def step(self) -> None:
        self.lm(**self.batch).loss.backward()
        nn.utils.clip_grad_norm_(self.weights, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


# -- online: an iteration of PPO and of GRPO --------------------------------------------------------------------------


def online_rows(table: Table, place: Path, repeats: int, *, lora: bool) -> list[dict[str, Any]]:
    name = "LoRA" if lora else "all weights"
    ours = Online(table, place / f"ppo, {name}", **lora_options(table, lora))
    try:
        turns, tokens = grpo(table, place / f"grpo, {name}", ours, repeats, lora=lora)
    finally:
        ours.close()
    speeds = {"ours": rates(ours.tokens, turns["ours"]), "GRPO": rates(tokens, turns["GRPO"])}
    games = {"ours": rates(ours.games, turns["ours"]), "GRPO": [GAMES / s for s in turns["GRPO"]]}
    peaks = {side: peak_of(table.folder, place / f"peak of {side}, {name}", side, lora) for side in ("PPO", "GRPO")}
    over, more = ratio(speeds, "ours", "GRPO"), ratio(games, "ours", "GRPO")
    shares = ", ".join(f"{part} {share:.0%}" for part, share in ours.shares().items())
    return [
        row(f"{name}: PPO iteration / TRL's GRPO iteration, tokens/s", over, "x", 3.0, note=shares),
        row(f"{name}: PPO iteration / TRL's GRPO iteration, games/s", more, "x"),
        row(f"{name}: PPO iteration, tokens of the agent", median(speeds["ours"]), "tokens/s"),
        row(f"{name}: GRPO iteration, tokens of the agent", median(speeds["GRPO"]), "tokens/s"),
        row(f"{name}: a game of PPO", median(1 / rate for rate in games["ours"]), "s"),
        row(f"{name}: a game of GRPO", median(1 / rate for rate in games["GRPO"]), "s"),
        *(row(f"{name}: {side} iteration, peak memory of its process", peak, "MB") for side, peak in peaks.items()),
    ]


def lora_options(table: Table, lora: bool) -> dict[str, Any]:
    """Options of the recipe."""
    return {"lora_rank": LORA["r"], "lora_layers": len(table.last)} if lora else {}


def rates(numbers: list[int], times: list[float]) -> list[float]:
    """What the last iterations did a second, of which these are the times."""
    return [n / s for n, s in zip(numbers[-len(times) :], times, strict=True)]


def make_env(batch_size: int, *, seed: int | None, device: Any, folder: str) -> TextGameEnv:
    """The environment of the recipe."""
    return Table(Path(folder)).env(batch_size, seed=seed or 0, device=device)


class ShortGame:
    """Guess a number from 1 to 7 in three turns; the replies have one word."""

    opening = "I am thinking of a number from 1 to 7. You have 3 guesses."

    def reset(self, seed: int) -> str:
        self.number, self.turn = 1 + seed % 7, 0
        return self.opening

    def step(self, text: str) -> tuple[str, float, bool]:
        self.turn += 1
        guess = next((int(char) for char in text if char in "1234567"), 0)
        if guess == self.number:
            return "correct", 1 - 0.1 * (self.turn - 1), True
        return "higher" if guess < self.number else "lower", 0.0, self.turn == 3


def make_short_env(batch_size: int, *, seed: int | None, device: Any, folder: str) -> TextGameEnv:
    """The environment of short texts."""
    chat = Table(Path(folder)).chat
    length = len(chat.encode_opening(ShortGame.opening)) + 3 * 28
    options: Any = {"row_length": length, "action_length": 13, "batch_size": batch_size, "seed": seed or 0}
    return TextGameEnv(ShortGame, chat, device=device, **options)


def short_row(table: Table, place: Path, repeats: int) -> dict[str, Any]:
    """Seconds of a game of PPO with short texts."""
    kept = 2 if smoking() else 10
    weights: Any = {"dtype": "bfloat16", "lora_rank": LORA["r"], "lora_layers": kept}
    ours = Online(table, place / "short", "make_short_env", games=4 * GAMES, batch_size=GAMES, lr=1e-4, **weights)
    try:
        ours.iterate()
        times = [seconds(ours.iterate) for _ in range(1 if smoking() else repeats)]
    finally:
        ours.close()
    per_game = median(1 / rate for rate in rates(ours.games, times))
    return row("short texts, bfloat16, LoRA: a game of PPO", per_game, "s", 0.22, at_most=True)


PARTS: dict[str, list[tuple[Any, str]]] = {
    "acting": [(UtteranceActor, "forward")],
    "reference": [(RowScorer, "states"), (RowScorer, "log_prob")],
    "learning": [(PPOLoss, "forward"), (torch.Tensor, "backward"), (torch.optim.AdamW, "step")],
}


class Online:
    """Iterations of the recipe ``ppo``."""

    def __init__(self, table: Table, place: Path, env: str = "make_env", **more: Any) -> None:
        task = {"task": f"benchmarks.chat_model:{env}", "option": {"folder": str(table.folder)}}
        # A few games more end than were asked for: they fit into the one batch as well.
        sizes: Any = {"games": GAMES, "turns": TURNS, "batch_size": 2 * GAMES, "epochs": 1, "value_warmup": 0}
        given: Any = {**task, **sizes, "kl_coef": KL, "kl_target": None, "lr": LR, **more}
        options = PPO(pretrained=str(table.folder), out=place, **given)
        start = load_initial_policy(options)
        self.loop = OnlineRun(options, start, kl_transform(options, start), PPOLearner(options, start))
        self.loop.games.restart(0)
        self.tokens: list[int] = []
        self.games: list[int] = []
        self.watch, self.spent, self._play = Stopwatch(), 0.0, self.loop.games.play
        self.loop.games.play = self._counted  # type: ignore[method-assign]

    def _counted(self, **options: Any) -> CollectedGames:
        found = self._play(**options)
        self.tokens.append(int(found.rows.get(AGENT_MASK).sum()))
        self.games.append(len(found.rows))
        return found

    def iterate(self) -> None:
        began = perf_counter()
        with self.watch.watching(PARTS):
            self.loop.iterate(len(self.tokens) + 1)
        self.spent += perf_counter() - began

    def shares(self) -> dict[str, float]:
        return {part: took / self.spent for part, took in self.watch.seconds.items()}

    def close(self) -> None:
        self.loop.games.close()


class GuessTool:
    """The game as TRL's trainers take one."""

    def __init__(self) -> None:
        self._game, self._return, self._over = GuessNumber(), 0.0, False

    def reset(self, seed: int = 0, **kwargs: Any) -> str:
        """Begin a game."""
        self._return, self._over = 0.0, False
        return self._game.reset(seed)

    def guess(self, text: str) -> str:
        """Guess the number.

        Args:
            text: the guess.
        """
        if self._over:
            raise RuntimeError("the game is over")
        reply, reward, self._over = self._game.step(text)
        self._return += reward
        return reply

    def get_reward(self) -> float:
        return self._return


TEMPLATE = """{% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}
{{ m.content }}{% for call in m.tool_calls or [] %}{{ call.function }}{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""ChatML, with the tool's replies as messages of the user, as in this library's games."""


def calling_tokenizer(folder: Path) -> Any:
    """The model's tokenizer, to which every text is a call of the tool."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    tokenizer.chat_template = TEMPLATE

    def parse(ids: Any, **options: Any) -> dict[str, Any]:
        call = {"name": "guess", "arguments": {"text": tokenizer.decode(ids, skip_special_tokens=True)}}
        return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}

    tokenizer.parse_response, tokenizer.response_template = parse, {}
    return tokenizer


def grpo(
    table: Table, place: Path, ours: Online, repeats: int, *, lora: bool
) -> tuple[dict[str, list[float]], list[int]]:
    """Seconds of iterations of both, in turns, and the tokens that the model wrote in TRL's."""
    turns, tokens = Turns({"ours": ours.iterate}, "GRPO"), []
    grpo_trainer(table, shared(place, repeats), tokens, lora=lora, callbacks=[turns]).train()
    return turns.times, tokens


def grpo_trainer(table: Table, options: dict[str, Any], tokens: list[int], *, lora: bool, **more: Any) -> Any:
    """TRL's trainer; it appends to ``tokens`` how many the model wrote in each iteration."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    class Counting(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            found = super()._generate_and_score_completions(inputs)
            tokens.append(int(found.get("tool_mask", found["completion_mask"]).sum()))
            return found

    prompt = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": ""}]  # the opening follows
    data = [{"prompt": prompt, "seed": seed} for seed in range(64)]
    return Counting(
        model=table.theirs(),
        args=GRPOConfig(
            per_device_train_batch_size=GAMES,
            num_generations=4,
            max_completion_length=TURNS * (NEW_TOKENS + 40),
            max_tool_calling_iterations=TURNS - 1,
            beta=KL,
            **options,
        ),
        train_dataset=Dataset.from_list(data),
        processing_class=calling_tokenizer(table.folder),
        environment_factory=GuessTool,
        peft_config=adapters(layers_to_transform=table.last) if lora else None,
        **more,
    )


def peak_of(folder: Path, place: Path, side: str, lora: bool) -> float:
    """Megabytes of a process that runs one iteration of ours, ``"PPO"``, or of TRL's, ``"GRPO"``."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_one_iteration, folder, place, side, lora).result()


@one_core()
def _one_iteration(folder: Path, place: Path, side: str, lora: bool) -> float:
    table = Table(folder)
    if side == "PPO":
        ours = Online(table, place, **lora_options(table, lora))
        ours.iterate()
        ours.close()
    else:
        grpo_trainer(table, shared(place, 1) | {"max_steps": 1}, [], lora=lora).train()
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["VmHWM"].split()[0]) / 1024  # getrusage would count the process that began this one, too
