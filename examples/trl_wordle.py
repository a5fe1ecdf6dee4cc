"""TRL's GRPOTrainer on this library's Wordle: one step of a tiny model that has learned to call the tool.

Needs TRL (pip install trl datasets). Any text game takes Wordle's place. For a real model drop `tiny_model`: its own
tokenizer and chat template must support tools.
"""

from pathlib import Path

import torch
import trl
from datasets import Dataset
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from torchrl_lang.envs import EnvGame, WordleEnv, trl_environment
from torchrl_lang.envs.adapters.tools import Tools
from torchrl_lang.training import adamw

WORDS = ["crane", "slate", "geese", "abide"]
COLOURS = {"<g>": "green ", "<y>": "yellow ", "<b>": "grey "}


def spell_out(text):
    for short, long in COLOURS.items():
        text = text.replace(short, long)
    return text.strip()


Wordle = trl_environment(
    lambda: EnvGame(
        WordleEnv(WORDS, batch_size=[1]), observe=spell_out, invalid_reply="not a word", invalid_reward=-1.0
    ),
    method="guess",
    doc="Guess the hidden word of five letters.",
    argument_doc="the guess",
)
PROMPT = [{"role": "user", "content": "Find the word."}]
schemas = Tools([Wordle().guess]).schemas


def call(word):
    function = {"name": "guess", "arguments": {"text": word}}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def game(word, reply):
    return [*PROMPT, call(word), {"role": "tool", "name": "guess", "content": reply}, call("slate")]


def tiny_model(dialogues):
    """A byte-level tokenizer with the template of Qwen2.5, and a random model."""
    template = (Path(trl.__file__).parent / "chat_templates" / "qwen2_5.jinja").read_text()
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    learner = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([str(schemas), template, *map(str, dialogues)], learner)
    backend.add_special_tokens([AddedToken(t, special=True) for t in ("<|im_start|>", "<|im_end|>", "<|endoftext|>")])
    backend.add_tokens([AddedToken(t, special=False) for t in ("<tool_call>", "</tool_call>")])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=template, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return tokenizer, Qwen2ForCausalLM(config)


torch.manual_seed(0)
dialogues = [game(word, reply) for word in WORDS for reply in ("grey " * 5, "green " * 5)]
tokenizer, model = tiny_model(dialogues)
optimizer = adamw(model, 3e-3)
for step in range(150):  # imitation: call the tool with some word
    dialogue = dialogues[step % len(dialogues)]
    ids = tokenizer.apply_chat_template(dialogue, tools=schemas, return_dict=True, return_tensors="pt")["input_ids"]
    loss = model(input_ids=ids, labels=ids).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"imitation loss {loss.item():.3f}")

trainer = GRPOTrainer(
    model=model,
    processing_class=tokenizer,
    train_dataset=Dataset.from_list([{"prompt": PROMPT, "seed": seed} for seed in range(4)]),
    environment_factory=Wordle,
    args=GRPOConfig(
        output_dir="trl_wordle",
        max_steps=1,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=200,
        max_tool_calling_iterations=4,
        learning_rate=1e-4,
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
    ),
)
before = model.lm_head.weight.detach().clone()
trainer.train()
log = next(entry for entry in trainer.state.log_history if "reward" in entry)
print(f"reward {log['reward']:.2f}, calls of the tool per game {log['tools/call_frequency']:.2f}")
print(f"weights changed by {(model.lm_head.weight - before).norm():.4f}")
