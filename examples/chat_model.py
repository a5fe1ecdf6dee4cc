"""A chat model of 150,000 words from its template to PPO: environment, dataset, BC, ILQL, a saved agent, a new process.

The model and the tokenizer have random content, so that this runs without a download. With names on the Hugging Face
hub replace `chat_tokenizer` by `AutoTokenizer.from_pretrained` and `causal_lm` by `load_causal_lm`.
"""

import random
import re
import subprocess
import sys

import torch
from tensordict.nn import TensorDictModuleBase
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torchrl.collectors import Collector
from torchrl.objectives import SoftUpdate
from transformers import PreTrainedTokenizerFast

from torchrl_lang.data import EpisodeRows, row_buffer
from torchrl_lang.envs import TextGameEnv
from torchrl_lang.evaluation import play_games
from torchrl_lang.modules import (
    UtteranceActor,
    ValueGuidance,
    ValueHead,
    causal_lm,
    default_qvalue_head,
    language_actor,
    load_agent,
    qvalue_module,
    save_agent,
    value_module,
)
from torchrl_lang.objectives import BCLoss, ILQLLoss, PPOLoss
from torchrl_lang.text import ChatTokenizer, RowFormat
from torchrl_lang.training import adamw, muon_adamw, train_steps
from torchrl_lang.transforms import KLConstrainedTransform, RowReference, frozen_copy

TEMPLATE = (  # ChatML, with the tools in the system prompt
    "{% if messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}"
    "{% if tools %}\n# Tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
    "<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class CountOn:
    """Asks for the digit after a digit, three times."""

    def reset(self, seed):
        self.digits = [random.Random(seed * 3 + turn).randrange(10) for turn in range(3)]
        return f"{self.digits[0]}?"

    def step(self, text):
        right = text == str((self.digits.pop(0) + 1) % 10)
        return (f"{self.digits[0]}?" if self.digits else ""), float(right), not self.digits


class Sloppy(TensorDictModuleBase):
    """Repeats the digit half of the time, answers correctly in three of ten cases, and otherwise at random."""

    in_keys, out_keys = ["tokens", "attention_mask"], ["action"]

    def __init__(self, tokenizer):
        super().__init__()
        self.tokenizer, self.draw = tokenizer, random.Random(0)

    def forward(self, td):
        actions = []
        for row in td:
            digit = int(re.findall(r"(\d)\?", self.tokenizer.decode(row["tokens"][row["attention_mask"]]))[-1])
            answers = [str(digit), str((digit + 1) % 10), str(self.draw.randrange(10))]
            text = self.draw.choices(answers, weights=[0.5, 0.3, 0.2])[0]
            actions.append([*self.tokenizer.encode_action(text), self.tokenizer.control.end_of_action])
        return td.set("action", torch.tensor(actions))


def chat_tokenizer(words=150_000):
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*letters, *(f"Ġword{i}" for i in range(words))])}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    names = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    backend.add_special_tokens([AddedToken(name, special=True) for name in names])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<|endoftext|>", eos_token="<|im_end|>", chat_template=TEMPLATE
    )


def look(direction: str):
    """
    Look around.

    Args:
        direction: where to
    """


def make_env(tokenizer, games, seed):
    return TextGameEnv(CountOn, tokenizer, row_length=640, action_length=2, batch_size=[games], seed=seed)


def collect(env, policy, batches, **options):
    frames = 3 * env.batch_size[0]
    return Collector(
        env, policy, frames_per_batch=frames, total_frames=frames * batches, auto_register_policy_transforms=False
    )


def offline():
    """Collect games, imitate them, learn their values, and save the agent."""
    source = chat_tokenizer()
    tokenizer = ChatTokenizer(source, RowFormat.from_chat_template(source, system="Count on.", tools=[look]))
    collector, rows_of = collect(make_env(tokenizer, 64, seed=0), Sloppy(tokenizer), 12), EpisodeRows()
    rows = torch.cat([rows_of(steps) for steps in collector])
    collector.shutdown()
    print(f"{len(rows)} games, mean return of 3: {rows['token_reward'].sum(-1).mean():.2f}", flush=True)

    torch.manual_seed(0)
    lm = causal_lm(
        "qwen2", vocab_size=tokenizer.vocab_size, layers=2, width=32, heads=2, max_length=640, initializer_range=0.1
    )
    actor, batches = language_actor(lm), row_buffer(rows, 16, seed=0)
    q, v = qvalue_module(default_qvalue_head(lm)), value_module(ValueHead(32))  # tied: the vocabulary is large
    losses = {
        "BC": BCLoss(actor),
        "ILQL": ILQLLoss(actor, q, v, expectile=0.8, cql_weight=0.05, actor_normalizer="action", logits_chunk=4096),
    }
    for name, loss in losses.items():
        target = SoftUpdate(loss, tau=0.05) if name == "ILQL" else None
        optimizer = muon_adamw(loss, 3e-3)
        for _ in train_steps(loss, batches.sample, optimizer, steps=150, target_updater=target, max_grad_norm=1.0):
            pass
        guidance = ValueGuidance(loss.target_qvalue_network(), beta=4.0) if name == "ILQL" else None
        policy = UtteranceActor(actor, tokenizer.control, 2, guidance=guidance, method="greedy")
        games = play_games(make_env(tokenizer, 32, seed=1), policy, games=64, seed=1)
        print(f"{name}, greedy: {games.returns.mean():.2f}", flush=True)
    save_agent("agent", policy, tokenizer, task={"name": "count on"}, data="games of a sloppy player")


def online():
    """Load the agent and improve its language model near a frozen copy of it."""
    agent = load_agent("agent", seed=0)
    actor, value = agent.policy.decoder.actor, ValueHead(32)
    policy = UtteranceActor(actor, agent.tokenizer.control, 2, value=value, seed=0)
    reference = frozen_copy(UtteranceActor(actor, agent.tokenizer.control, 2))
    penalty, ppo = KLConstrainedTransform(RowReference(reference), 0.05), PPOLoss(policy, value_module(value))
    optimizer, rows_of = adamw(ppo, 1e-3), EpisodeRows(carry=["token_log_prob", "state_value"])
    collector = collect(make_env(agent.tokenizer, 32, seed=2), policy, 15)
    for iteration, steps in enumerate(collector):
        rows = ppo.estimate(penalty(rows_of(steps)), reuse_values=True)
        for _ in train_steps(ppo, row_buffer(rows, 16).sample, optimizer, steps=4, max_grad_norm=1.0):
            pass
        if iteration % 7 == 0:
            print(f"PPO, {iteration:2d}: {rows['raw_reward'].sum(-1).mean():.2f}, sampled", flush=True)
    collector.shutdown()


if __name__ == "__main__":
    if sys.argv[1:] == ["online"]:
        online()
    else:
        offline()
        subprocess.run([sys.executable, __file__, "online"], check=True)  # a process without any of the above
