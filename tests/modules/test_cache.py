from __future__ import annotations

import pytest
import torch

from tests.modules.toys import KINDS, rows, tiny_lm
from torchrl_lang.modules import Trunk, causal_lm
from torchrl_lang.modules.decoding.cache import RowCache

OTHERS = ("qwen3", "mistral", "gpt_neox", "phi", "opt", "gemma")


def read(trunk, cache, tokens, start):
    positions = torch.arange(start, start + tokens.shape[1]).expand(tokens.shape[0], -1)
    return cache.extend(trunk, tokens, positions)[0]


@pytest.mark.parametrize("kind", KINDS + OTHERS)
@torch.no_grad()
def test_reading_in_pieces_equals_reading_at_once(kind):
    extra = {} if kind in KINDS else {"layers": 2, "width": 16, "heads": 2, "max_length": 40, "vocab_size": 12}
    trunk = Trunk(tiny_lm(kind) if kind in KINDS else causal_lm(kind, **extra).eval())
    assert trunk.supports_cache
    tokens, cache = torch.randint(6, (3, 12)), RowCache(15)
    pieces = [cache.extend(trunk, tokens[:, :4])[0], read(trunk, cache, tokens[:, 4:5], 4)]
    pieces.append(read(trunk, cache, tokens[:, 5:], 5))
    torch.testing.assert_close(torch.cat(pieces, 1), trunk(tokens), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_ragged_rows_go_on_each_at_its_own_position(kind):
    trunk, batch = Trunk(tiny_lm(kind)), rows(longest=12)
    length, more = batch["attention_mask"].sum(-1), torch.randint(6, (7, 3))
    cache = RowCache(15)
    cache.extend(trunk, batch["tokens"][:, :12])  # the padding of short rows leaves keys, to be overwritten
    steps = [cache.extend(trunk, more[:, i, None], length[:, None] + i, visible=13 + i)[0] for i in range(3)]
    for row in range(7):
        alone = torch.cat([batch["tokens"][row, : length[row]], more[row]])
        expected = trunk(alone[None])[0, -3:]
        torch.testing.assert_close(torch.cat(steps, 1)[row], expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_later_turn_feeds_only_its_new_tokens():
    trunk, tokens, cache = Trunk(tiny_lm()), torch.randint(6, (2, 10)), RowCache(10)
    cache.extend(trunk, tokens[:, :3])
    first = read(trunk, cache, tokens[:, 3:7], 3)
    again = read(trunk, cache, tokens[:, 3:7], 3)  # reading the same places again changes nothing
    torch.testing.assert_close(first, again)
    torch.testing.assert_close(read(trunk, cache, tokens[:, 7:], 7), trunk(tokens)[:, 7:], atol=1e-5, rtol=1e-5)


def test_values_may_be_narrower_than_keys():
    """As in multi-head latent attention."""
    lm = causal_lm(
        "deepseek_v3",
        vocab_size=11,
        layers=1,
        width=16,
        heads=2,
        max_length=24,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=6,
        first_k_dense_replace=1,
    )
    trunk, row, cache = Trunk(lm.eval()), torch.randint(11, (2, 9)), RowCache(9)
    with torch.no_grad():
        cache.extend(trunk, row[:, :5])
        for place in range(5, 9):
            (hidden,) = cache.extend(trunk, row[:, place : place + 1], torch.full((2, 1), place))
            torch.testing.assert_close(hidden[:, 0], trunk(row)[:, place], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_weights_of_mixed_dtypes(kind):
    lm = causal_lm(kind, vocab_size=11, layers=1, width=16, heads=2, max_length=24).eval()
    lm.get_input_embeddings().bfloat16()
    embeddings = lm.get_input_embeddings()
    embeddings.register_forward_hook(lambda module, args, out: out.float())
    trunk, row, cache = Trunk(lm), torch.randint(11, (2, 6)), RowCache(6)
    assert trunk.model.dtype == torch.bfloat16
    with torch.no_grad():
        cache.extend(trunk, row[:, :4])
        (hidden,) = cache.extend(trunk, row[:, 4:], torch.tensor([[4, 5]]).expand(2, 2))
        torch.testing.assert_close(hidden, trunk(row)[:, 4:], rtol=1e-4, atol=1e-5)
