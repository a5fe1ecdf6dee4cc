"""Any Hugging Face causal language model, by name or from a folder; here a small Qwen made on the spot."""

import tempfile

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from torchrl_lang.modules import causal_lm, language_actor, load_causal_lm
from torchrl_lang.objectives import BCLoss
from torchrl_lang.text import Episode, HFTokenizer, Turn, to_rows

# A name on the hub would do here: HFTokenizer("gpt2"), load_causal_lm("gpt2", tokenizer).
words = {word: index for index, word in enumerate(["[UNK]", "is", "it", "red", "blue", "no", "yes", "?"])}
backend = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
backend.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = HFTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]"))
with tempfile.TemporaryDirectory() as folder:
    causal_lm("qwen2", vocab_size=8, layers=2, width=32, heads=2, max_length=64).save_pretrained(folder)
    lm = load_causal_lm(folder, tokenizer)  # six more embeddings, for the control tokens
print("embeddings", tuple(lm.get_input_embeddings().weight.shape))

dialogue = Episode([Turn("is it red ?", 0.0), Turn("no"), Turn("is it blue ?", 1.0), Turn("yes")], terminated=True)
rows = to_rows([dialogue], tokenizer, row_length=32)
actor = language_actor(lm)
loss = BCLoss(actor, actor_normalizer="action")
optimizer = torch.optim.AdamW(actor.parameters(), lr=1e-2)
for step in range(1, 61):
    optimizer.zero_grad()
    out = loss(rows)["loss_actor"]
    out.backward()
    optimizer.step()
    if step % 20 == 0:
        print(f"step {step}: loss {out.item():.3f}")
