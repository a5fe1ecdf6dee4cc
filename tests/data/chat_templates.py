"""Chat templates in the style of known families, and small byte-level tokenizers for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from torchrl_lang.text import ChatTokenizer, RowFormat

CORPUS = [
    "user assistant system model is it a red dog? yes no maybe. I think so, because the cat sat on the mat.",
    "What is 2 + 2? The answer is 4.\n\nTurn: 1\n\n\nscore = -1.5;  look at {'name': 'door'} and [INST] open it.",
    "Ünïcode: 日本語, emoji 😀 and العربية.",
]
PIECES = [*"abc XYZ 0129 .,!? \n \t", "  ", "\n\n", "the cat", " red", "Ü", "日本", "😀", "e\u0301", "العربية"]
PIECES += ["user\n", "{'a': 1}", "{", '"}', "<b>", "INST", "[/", "</"]
MARKERS = ["<|im_end|>", "<|im_start|>user\n", "</s>", "<think>", "<|eot_id|>", "<end_of_turn>", "<tool_call>\n"]
MARKERS += ["<|im_end|>\n<|im_start|>user\n", "<|im_start|>assistant\n", "<tool_response>\n", "\n</tool_response>"]
"""Pieces of texts, and such as look like the markup of a template."""
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Words, single digits, punctuation and runs of white space, as in recent families."""


@dataclass(frozen=True)
class Family:
    template: str
    special: tuple[str, ...]
    end: str
    plain: tuple[str, ...] = ()
    """Added tokens that are not special."""
    pad: str | None = None
    bos: str | None = None
    options: dict = field(default_factory=dict)


CHATML = (
    "{% if messages[0].role != 'system' and default_system is defined %}"
    "<|im_start|>system\n{{ default_system }}<|im_end|>\n{% endif %}"
    "{% if tools %}<|im_start|>tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SMOLLM2 = CHATML.replace("default_system is defined", "true").replace("{{ default_system }}", "You are a helper.")
"""With a system prompt of its own."""
TOOL_CHATML = (
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.previtem is not defined or loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.nextitem is not defined or loop.nextitem.role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{% if m.content or not loop.first %}{{ '\n' }}{% endif %}"
    "<tool_call>\n{{ (call.function or call) | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As Qwen2.5 writes calls of tools and, in one message of the user, their answers."""
QWEN3 = (
    "{% set last = messages | length - 1 %}{% for m in messages %}"
    "{% set text = m.content %}"
    "{% if m.role == 'assistant' and '</think>' in text and loop.index0 < last %}"
    "{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ text }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
QWEN3_TOOLS = QWEN3.replace(
    "messages | length - 1 %}",
    "messages | length - 1 %}{% set ns = namespace(question=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.question = loop.index0 %}{% endif %}{% endfor %}",
).replace("loop.index0 < last", "loop.index0 < ns.question")
"""Thoughts after the last question stay, as Qwen3's template keeps them between calls of tools."""
QWEN3_CALLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% set ns = namespace(text=m.content, thought='') %}"
    "{% if m.role == 'assistant' %}"
    "{% if m.reasoning_content is string %}{% set ns.thought = m.reasoning_content %}"
    "{% elif '</think>' in ns.text %}"
    "{% set ns.thought = ns.text.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set ns.text = ns.text.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if loop.last %}<think>\n{{ ns.thought.strip('\n') }}\n</think>\n\n{% endif %}{{ ns.text }}"
    "{% for call in m.tool_calls or [] %}{% if ns.text or not loop.first %}{{ '\n' }}{% endif %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": '
    "{{ call.function.arguments | tojson }}}\n</tool_call>"
    "{% endfor %}{% else %}{{ ns.text }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As Qwen3 writes the last answer: after its thought, or an empty one; and calls of tools after that."""
DEEPSEEK = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}"
    "{% elif m.role == 'user' %}<|User|>{{ m.content }}{% else %}"
    "<|Assistant|>{{ m.content.split('</think>')[-1] }}<|end_of_sentence|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% set first = '' %}{% if messages[0].role == 'system' %}"
    "{% set first = messages[0].content ~ '\n\n' %}{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %} [INST] {{ first if loop.first else '' }}{{ m.content }} [/INST]"
    "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
MISTRAL_LAST = (
    "{{ bos_token }}{% set system = '' %}{% if messages[0].role == 'system' %}"
    "{% set system = messages[0].content ~ '\n\n' %}{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ system if loop.last else '' }}{{ m.content }}[/INST]"
    "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token }}[INST] {{ m.content | trim }} [/INST]"
    "{% else %} {{ m.content | trim }} </s>{% endif %}{% endfor %}"
)
PHI3 = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
ZEPHYR = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
IM = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
HEADERS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|finetune_right_pad_id|>")

EXACT = {
    "chatml": Family(CHATML, IM, "<|im_end|>", ("<think>", "</think>", "<tool_call>"), pad="<|endoftext|>"),
    "phi3": Family(PHI3, ("<|endoftext|>", "<|end|>", *ROLES), "<|endoftext|>", pad="<unk>"),
    "zephyr": Family(ZEPHYR, ("</s>", "<unk>"), "</s>", pad="</s>"),
    "llama3": Family(LLAMA3, HEADERS, "<|eot_id|>", bos="<|begin_of_text|>"),
    "gemma": Family(GEMMA, ("<start_of_turn>", "<end_of_turn>"), "<end_of_turn>", pad="<pad>", bos="<bos>"),
    "mistral": Family(MISTRAL, ("</s>", "<unk>"), "</s>", bos="<s>"),
}
"""Families whose rows equal the template's dialogues."""

FIRST_PROMPT_ONLY = {
    "qwen3": Family(QWEN3, IM, "<|im_end|>", ("<think>", "</think>"), pad="<|endoftext|>"),
    "qwen3 without thinking": Family(
        QWEN3, IM, "<|im_end|>", ("<think>", "</think>"), pad="<|endoftext|>", options={"enable_thinking": False}
    ),
    "deepseek": Family(
        DEEPSEEK, ("<|User|>", "<|Assistant|>", "<|end_of_sentence|>"), "<|end_of_sentence|>", ("<think>", "</think>"),
        pad="<pad>", bos="<|begin_of_sentence|>",
    ),
}  # fmt: skip
"""Families whose first prompt only equals the template's."""


def tokenizer_of(family: Family, corpus: Sequence[str] = CORPUS) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with the tokens and the template of a family, and pieces of the words of a corpus."""
    backend = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Sequence([split, to_bytes]), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(corpus, trainer)
    special = dict.fromkeys((*family.special, *(t for t in (family.pad, family.bos) if t)))
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    backend.add_tokens([AddedToken(name, special=False, normalized=False) for name in family.plain])
    roles = {"eos_token": family.end, "pad_token": family.pad, "bos_token": family.bos}
    options = {role: token for role, token in roles.items() if token} | {"clean_up_tokenization_spaces": False}
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=family.template, **options)


def chat_tokenizer(family: Family, **options: Any) -> ChatTokenizer:
    """The tokenizer of a family for rows; options of its row format."""
    source = tokenizer_of(family)
    return ChatTokenizer(source, RowFormat.from_chat_template(source, **options))


def chat(*texts: str) -> list[dict[str, str]]:
    """Messages of the user and the assistant in turn."""
    return [{"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(texts)]
