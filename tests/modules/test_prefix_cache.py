"""What an actor keeps from turn to turn changes the cost of a turn and nothing else."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tensordict import TensorDict

from tests.modules.test_decoding import K, guidance, spoken
from tests.modules.toys import CONTROL, KINDS, rows, tiny_lm
from torchrl_lang.modules import Trunk, UtteranceActor, causal_lm, language_actor
from torchrl_lang.modules.decoding.cache import RowCache
from torchrl_lang.modules.decoding.prefix_cache import WeightSnapshot

N, WIDTH = 7, 60
EXACT = {"atol": 1e-6, "rtol": 1e-6}  # models compute in double precision; log-probabilities are kept in single
KEYS = ("action_log_prob", "token_log_prob", "behavior_log_prob", "token_entropy")


def lm_of(kind="gpt2", **options):
    return tiny_lm(kind, max_length=WIDTH + K, **options).double()


def own_values():
    return guidance(clip=0.5, value_trunk=Trunk(lm_of(seed=5))).double()


def pair(lm, **options):
    """Two actors over the same weights: one that reuses prefixes, one that does not."""
    options = {"seed": 3, "diagnostics": True, "temperature": 1.3} | options
    actor = language_actor(lm)
    return [UtteranceActor(actor, CONTROL, K, prefix_cache=flag, **options) for flag in (True, False)]


def grown(batch, action, reply=3):
    """The rows with the utterance and a ragged answer of letters behind them."""
    said, length = spoken(action).sum(-1), batch["attention_mask"].sum(-1)
    answer, more = torch.randint(6, (len(action), reply)), said + torch.randint(1, reply + 1, (len(action),))
    tokens = batch["tokens"].clone()
    for row, (begin, spent) in enumerate(zip(length.tolist(), said.tolist(), strict=True)):
        tokens[row, begin : begin + spent + reply] = torch.cat([action[row, :spent], answer[row]])
    mask = torch.arange(tokens.shape[-1]) < (length + more)[:, None]
    return TensorDict(tokens=tokens.masked_fill(~mask, CONTROL.pad), attention_mask=mask, batch_size=[len(action)])


def agree(actors, batch):
    kept, anew = (actor(batch.clone()) for actor in actors)
    assert torch.equal(kept["action"], anew["action"])
    for key in KEYS:
        torch.testing.assert_close(kept[key], anew[key], **EXACT)
    return kept


class Counter:
    """Tokens that pass a trunk."""

    def __init__(self, trunk):
        self.tokens = 0
        norm = trunk.model.ln_f if hasattr(trunk.model, "ln_f") else trunk.model.norm
        norm.register_forward_hook(self._add)

    def _add(self, module, args, out):
        self.tokens += out.shape[:-1].numel()

    def take(self):
        tokens, self.tokens = self.tokens, 0
        return tokens


WAYS = [("gpt2", "plain", "sample"), ("gpt2", "exp", "greedy"), ("gpt2", "own trunk", "best_of")]
WAYS += [("llama", "own trunk", "beam"), ("qwen2", "own trunk", "sample")]


@pytest.mark.parametrize(("kind", "guide", "method"), WAYS)
def test_a_dialogue_goes_as_it_would_without(kind, guide, method):
    guides = {"plain": None, "exp": guidance().double(), "own trunk": own_values()}
    actors, batch = pair(lm_of(kind), guidance=guides[guide], method=method), rows(N, WIDTH, longest=9)
    for _ in range(4):
        batch = grown(batch, agree(actors, batch)["action"])


def full_utterances(**options):
    """Actors that never end before the last slot, so that costs can be counted."""
    forbidden = (*CONTROL.forbidden_in_action(), CONTROL.end_of_action)
    return pair(lm_of(), forbidden=forbidden, **options)


def test_a_turn_costs_its_own_tokens():
    guide = own_values()
    actors = full_utterances(guidance=guide)
    counters = [Counter(actors[0].decoder.actor[0].module), Counter(guide.value_trunk.module)]
    batch, costs = rows(N, WIDTH, longest=1), []
    for _ in range(5):
        action = actors[0](batch)["action"]
        costs.append([counter.take() for counter in counters])
        reply = torch.randint(6, (N, 3))
        length = int(batch["attention_mask"][0].sum())
        batch["tokens"][:, length : length + K + 3] = torch.cat([action, reply], -1)
        batch["attention_mask"][:, : length + K + 3] = True
    # Of each utterance all but two tokens pass while it is decoded; those two and the reply come with the next turn.
    assert costs[0] == [N * (1 + K - 2)] * 2
    assert costs[1:] == [[N * (2 + 3 + K - 2)] * 2] * 4


def test_only_rows_that_begin_anew_are_read_anew():
    actor = full_utterances()[0]
    batch = rows(40, WIDTH, longest=1)
    batch["tokens"][:, :50] = torch.randint(6, (40, 50))
    batch["attention_mask"][:, :50] = True
    counter = Counter(actor.decoder.actor[0].module)
    action = actor(batch.clone())["action"]
    whole = counter.take()
    batch = grown(batch, action, reply=1)
    batch["tokens"][3, 0] = (batch["tokens"][3, 0] + 1) % 6
    actor(batch)
    assert whole == 40 * (50 + K - 2)
    # The row that changed has its 56 tokens read alone, the others three each; all go on token by token.
    assert counter.take() == 39 * 3 + 56 + 40 * (K - 2)


def reset(batch):
    fresh, new = torch.rand(len(batch)) < 0.4, rows(len(batch), WIDTH, longest=9, seed=int(torch.randint(99, ())))
    return TensorDict({key: torch.where(fresh[:, None], new[key], batch[key]) for key in batch.keys()}, batch.shape)


def shrink(batch):
    shorter = (batch["attention_mask"].sum(-1) - torch.randint(4, (len(batch),))).clamp_min(1)
    mask = torch.arange(WIDTH) < shorter[:, None]
    return TensorDict(tokens=batch["tokens"], attention_mask=mask, batch_size=batch.shape)


def edit(batch):
    batch = batch.clone()
    batch["tokens"][torch.arange(len(batch)), torch.randint(3, (len(batch),))] = 5
    return batch


DISTURBANCES = {
    "nothing": lambda batch: batch,
    "resets": reset,
    "shorter rows": shrink,
    "another order": lambda batch: batch[torch.randperm(len(batch))],
    "rows that are done": lambda batch: batch.set("done", torch.rand(len(batch), 1) < 0.5),
    "another number of rows": lambda batch: batch[: int(torch.randint(2, len(batch), ()))],
    "a token changed": edit,
    "int32": lambda batch: batch.set("tokens", batch["tokens"].int()),
}


def test_whatever_comes_in_between():
    torch.manual_seed(0)
    actors, batch = pair(lm_of("llama"), guidance=own_values()), rows(N, WIDTH, longest=9)
    names = [*DISTURBANCES, *DISTURBANCES]
    for name in (names[i] for i in torch.randperm(len(names)).tolist()):
        said = agree(actors, DISTURBANCES[name](batch.clone()))
        if len(said) == N and int(batch["attention_mask"].sum(-1).max()) + K + 3 < WIDTH:
            batch = grown(said.select("tokens", "attention_mask"), said["action"])
            batch["tokens"] = batch["tokens"].long()
        else:
            batch = rows(N, WIDTH, longest=9, seed=int(torch.randint(99, ())))


def step(lm):
    optimiser = torch.optim.AdamW(lm.parameters(), lr=0.05)
    lm(torch.randint(6, (2, 5))).logits.logsumexp(-1).sum().backward()
    optimiser.step()


CHANGES = {
    "step": step,
    "data": lambda lm: [parameter.data.mul_(1.05) for parameter in lm.parameters()],
    "load": lambda lm: lm.load_state_dict({key: value * 1.05 for key, value in lm.state_dict().items()}),
    "one weight": lambda lm: lm.get_input_embeddings().weight.data[0, 3].add_(1e-3),
    "float": lambda lm: lm.float(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_weights_start_anew(change):
    lm, batch = lm_of(), rows(N, WIDTH, longest=9)
    actors = pair(lm)
    trunk = Trunk(lm)
    watch = WeightSnapshot([trunk])
    for _ in range(2):
        batch = grown(batch, agree(actors, batch)["action"])
    assert watch.unchanged([trunk])
    CHANGES[change](lm)
    assert not watch.unchanged([trunk])
    if lm.dtype == torch.float64:
        agree(actors, batch)
    else:
        assert torch.equal(*(actor(batch.clone())["action"] for actor in actors))


def test_a_hook_that_comes_later_runs_and_counts_for_all_tokens_after_forget():
    lm, batch, calls = lm_of(), rows(N, WIDTH, longest=9), []
    kept, anew = pair(lm)
    batch = grown(batch, agree((kept, anew), batch)["action"])

    def louder(module, args, out):
        calls.append(1)
        return out * 1.05

    lm.base_model.h[0].register_forward_hook(louder)
    kept(batch.clone())
    assert calls
    kept.forget()
    anew(batch.clone())  # so that both have drawn equally often
    agree((kept, anew), batch)


def test_adapters_that_are_switched_or_merged_start_anew():
    torch.manual_seed(1)
    config = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
    lm, batch = get_peft_model(lm_of(), config).double().eval(), rows(N, WIDTH, longest=9)
    actors = pair(lm)
    batch = grown(batch, agree(actors, batch)["action"])
    with lm.disable_adapter():
        batch = grown(batch, agree(actors, batch)["action"])
    batch = grown(batch, agree(actors, batch)["action"])
    lm.base_model.merge_adapter()
    agree(actors, batch)


def test_autocast_starts_anew():
    lm, batch = tiny_lm(max_length=WIDTH + K), rows(N, WIDTH, longest=9)
    actors = pair(lm, method="greedy")
    batch = grown(batch, actors[0](batch.clone())["action"])
    with torch.autocast("cpu", torch.bfloat16):
        kept, anew = (actor(batch.clone())["token_log_prob"] for actor in actors)
    assert torch.equal(kept, anew)  # both read everything from the beginning
    batch = grown(batch, actors[0](batch.clone())["action"])
    kept, anew = (actor(batch.clone())["token_log_prob"] for actor in actors)
    torch.testing.assert_close(kept, anew, atol=1e-4, rtol=1e-4)


def test_small_changes_show_in_half_precision():
    trunk = Trunk(tiny_lm().bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        watch = WeightSnapshot([trunk])
        assert watch.unchanged([trunk])
        weight = trunk.model.h[1].attn.c_attn.weight.data
        weight[3, 5] += weight[3, 5].abs() * 2**-7
        assert not watch.unchanged([trunk])


def test_inference_mode_and_back():
    actors, batch = pair(lm_of()), rows(N, WIDTH, longest=9)
    for mode in (True, True, False, True):
        with torch.inference_mode(mode):
            said = agree(actors, batch)["action"]
        batch = grown(batch, said.clone())


def kept_of(actor):
    return actor._prefix_cache.transcripts


def test_copies_and_state_dicts_know_nothing_of_it():
    actor, batch = pair(lm_of(), method="greedy")[0], rows(N, WIDTH, longest=9)
    keys, size = set(actor.state_dict()), len(pickle.dumps(actor))
    expected = actor(batch.clone())["action"]
    assert kept_of(actor) is not None
    assert set(actor.state_dict()) == keys
    assert len(pickle.dumps(actor)) < size + 1000
    for twin in (copy.deepcopy(actor), pickle.loads(pickle.dumps(actor))):  # noqa: S301
        assert kept_of(twin) is None
        assert torch.equal(twin(batch.clone())["action"], expected)
    actor.forget()
    assert kept_of(actor) is None


def test_rows_that_come_trimmed_find_room():
    actors, batch = full_utterances(), rows(N, WIDTH, longest=2)
    counter = Counter(actors[0].decoder.actor[0].module)
    for _ in range(5):
        longest = int(batch["attention_mask"].sum(-1).max())
        counter.take()
        trimmed = {key: value[:, :longest] for key, value in batch.items()}
        action = actors[0](TensorDict(trimmed, batch_size=[N]))["action"]
        cost = counter.take()
        batch = grown(batch, action)
        assert longest + K <= kept_of(actors[0]).size <= 1.5 * (longest + K)
    assert cost <= N * (2 + 3 + K - 2)


def test_a_call_that_fails_leaves_nothing_wrong_behind():
    actors, batch = pair(lm_of()), rows(N, WIDTH, longest=9)
    batch = grown(batch, agree(actors, batch)["action"])
    tokens = torch.zeros(N, WIDTH + 2, dtype=torch.int64)
    for actor in actors:
        with pytest.raises(ValueError, match="exceed the model's"):
            actor(TensorDict(tokens=tokens, attention_mask=tokens == 0, batch_size=[N]))
    assert kept_of(actors[0]) is None
    agree(actors, batch)


OTHERS = ("mistral", "gpt_neox", "opt", "gemma")


@pytest.mark.parametrize("kind", KINDS + OTHERS)
@torch.no_grad()
def test_reading_in_pieces_equals_reading_at_once(kind):
    other = {"layers": 2, "width": 16, "heads": 2, "max_length": 40, "vocab_size": 12}
    trunk = Trunk(tiny_lm(kind) if kind in KINDS else causal_lm(kind, **other).eval())
    assert trunk.cache_obstacle is None
    tokens, cache = torch.randint(6, (3, 12)), RowCache(15)
    pieces = [cache.extend(trunk, tokens[:, :4])]
    for start, end in ((4, 5), (5, 12)):
        pieces.append(cache.extend(trunk, tokens[:, start:end], torch.arange(start, end).expand(3, -1)))
    torch.testing.assert_close(torch.cat(pieces, 1), trunk(tokens), atol=1e-5, rtol=1e-5)


def test_weights_of_mixed_dtypes():
    lm = causal_lm("llama", vocab_size=11, layers=1, width=16, heads=2, max_length=24).eval()
    lm.get_input_embeddings().bfloat16()
    embeddings = lm.get_input_embeddings()
    embeddings.register_forward_hook(lambda module, args, out: out.float())
    trunk, row, cache = Trunk(lm), torch.randint(11, (2, 6)), RowCache(6)
    assert trunk.model.dtype == torch.bfloat16
    with torch.no_grad():
        cache.extend(trunk, row[:, :4])
        hidden = cache.extend(trunk, row[:, 4:], torch.tensor([[4, 5]]).expand(2, 2))
        torch.testing.assert_close(hidden, trunk(row)[:, 4:], rtol=1e-4, atol=1e-5)
