"""Text games as chat environments that TorchRL's wrappers play."""

from __future__ import annotations

import copy

import pytest
import torch
from tensordict import TensorDict
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torchrl.modules.llm import TransformersWrapper
from torchrl.objectives.llm import MCAdvantage
from transformers import PreTrainedTokenizerFast

from tests.data.chat_templates import CHATML, SMOLLM2
from torchrl_lang.data import rows_from_chat
from torchrl_lang.envs import GameChatEnv, TextGameEnv
from torchrl_lang.envs.game_turn import ToolText
from torchrl_lang.modules import causal_lm
from torchrl_lang.text import ChatTokenizer, RowFormat

END = "<|im_end|>"


def letters(template=CHATML):
    """A tokenizer of single bytes, so that what was sampled is written as it was sampled."""
    bytes_of = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: index for index, letter in enumerate(bytes_of)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = {"pad_token": "<pad>", "eos_token": END, "additional_special_tokens": ["<|im_start|>"]}
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **special)


def wrapper(tokenizer, seed=0, allowed="ab", **options):
    """It samples some letters and the end; ``input_mode`` is "history"."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        lm = causal_lm("qwen2", vocab_size=len(tokenizer), layers=1, width=16, heads=2, max_length=512)
    kept = {tokenizer.convert_tokens_to_ids(name) for name in (*allowed, END)}
    kwargs = {"max_new_tokens": 4, "do_sample": True, "eos_token_id": tokenizer.eos_token_id}
    kwargs["pad_token_id"] = tokenizer.pad_token_id
    kwargs["bad_words_ids"] = [[index] for index in range(len(tokenizer)) if index not in kept]
    options = {"return_log_probs": True, "generate_kwargs": kwargs} | options
    return TransformersWrapper(lm, tokenizer=tokenizer, chat_template=tokenizer.chat_template, **options)


class Count:
    """Counts letters for two or three turns; the seed decides."""

    def reset(self, seed):
        self.left, self.seed = 2 + seed % 2, seed
        return f"game {seed % 1000}"

    def step(self, text):
        self.left -= 1
        reply = "" if self.left == 0 else ToolText("a tool") if self.left == 1 else text.upper()
        return reply, float(len(text)), self.left == 0 and self.seed % 3 > 0, self.left == 0, None


@pytest.mark.parametrize("template", [CHATML, SMOLLM2])
def test_the_rows_of_a_wrapper_are_those_of_our_environment(template):
    """The same games, the same utterances: the same tokens, rewards and ends.

    Where the template adds a system prompt, the wrapper takes a message of the user for a part of each response.
    """
    source = letters(template)
    env = GameChatEnv(Count, seed=3, tokenizer=source)
    torch.manual_seed(2)
    steps = env.rollout(12, wrapper(source, allowed="a"), break_when_any_done=False)
    rows = rows_from_chat(steps)
    assert len(rows) > 3
    replies = [step["next", "history"].prompt[-1] for step in steps[0]]
    assert any(reply.role == "user" and reply.content == "" for reply in replies)
    options = {"row_length": 120, "action_length": 6, "batch_size": [1], "seed": 3}
    own = TextGameEnv(Count, ChatTokenizer(source, RowFormat.from_chat_template(source)), **options)
    ends = steps["next", "done"].flatten().nonzero().flatten().tolist()
    for row, last in zip(rows, ends if ends[-1] == 11 else [*ends, 11], strict=True):
        td, tokens = own.reset(), row["tokens"][row["attention_mask"]]
        assert steps["game_seed"][0, last] == own.game_seed
        begins = [int(p) for p in (row["agent_mask"] & ~row["agent_mask"].roll(1)).nonzero()]
        for begin in begins:
            length = int((~row["agent_mask"][begin:]).int().argmax()) or len(tokens) - begin
            action = torch.full((1, 6), own.tokenizer.control.pad)
            action[0, :length] = tokens[begin : begin + length]
            td = own.step(td.set("action", action))["next"]
        assert torch.equal(td["tokens"][0, : len(tokens)], tokens)
        assert torch.equal(td["token_reward"][0, : len(tokens)], row["token_reward"][: len(tokens)])
        assert row["terminated"] == td["terminated"]
        assert row["truncated"] == (td["truncated"] | ~td["done"])


def test_several_games_and_what_a_game_hears():
    source, heard = letters(), []
    env = GameChatEnv(Count, read=lambda text: heard.append(text) or text, batch_size=(2,), tokenizer=source)
    env.set_seed(3)
    policy, start = wrapper(source), TensorDict(game_seed=torch.tensor([2, 5]), batch_size=[2])
    steps = env.rollout(5, policy, auto_reset=False, tensordict=env.reset(start))
    assert steps["next", "done"].squeeze(-1).tolist() == [[False, True], [False, False]]
    assert heard == [steps[row, turn]["history"].response[0].content for turn in (0, 1) for row in (0, 1)]
    assert steps["next", "reward"].flatten().tolist() == [len(heard[index]) for index in (0, 2, 1, 3)]
    assert list(steps[1, 1]["history"].full.role) == ["user", "assistant", "user", "assistant"]
    assert steps[0, 1]["history"].prompt.role == ["user", "assistant", "tool"]
    with pytest.raises(RuntimeError, match=r"use batch_size=\(1,\), or stop where the first game ends"):
        env.rollout(5, policy, break_when_any_done=False)
    env.set_seed(7)
    seeds = env.reset()["game_seed"].tolist() + env.reset()["game_seed"].tolist()
    env.set_seed(7)
    copied = copy.deepcopy(env)
    assert env.reset()["game_seed"].tolist() == copied.reset()["game_seed"].tolist() == seeds[:2] != seeds[2:]
    assert env.reset(game_seed=torch.tensor([9, 4]))["game_seed"].tolist() == [9, 4]
    unseeded = GameChatEnv(Count)
    assert unseeded.reset()["game_seed"] != copy.deepcopy(unseeded).reset()["game_seed"]


def test_what_is_no_maker_and_no_batch_and_a_response_that_goes_on():
    with pytest.raises(TypeError, match="make_game must be callable, got a Count: pass what makes one"):
        GameChatEnv(Count())
    with pytest.raises(TypeError, match=r"make_game made a dict without reset and step: a game has reset\(seed\) and"):
        GameChatEnv(dict)
    with pytest.raises(ValueError, match=r"batch_size must be \(n,\), a number of conversations, got \(2, 2\)"):
        GameChatEnv(Count, batch_size=(2, 2))
    policy, env = wrapper(letters()), GameChatEnv(Count, batch_size=(8,), seed=0, tokenizer=letters())
    del policy.generate_kwargs["pad_token_id"]
    torch.manual_seed(0)
    with pytest.raises(ValueError, match=r'continues behind its end.*"pad_token_id": tokenizer.pad_token_id'):
        env.rollout(1, policy)


def test_a_group_of_games_of_one_seed():
    env, policy = GameChatEnv(Count, tokenizer=letters()), wrapper(letters())
    groups = MCAdvantage(2, "game_seed", trajectory_return="sum")
    torch.manual_seed(0)
    start, found = TensorDict(game_seed=torch.tensor([7]), batch_size=[1]), None
    for _ in range(2):
        steps = env.rollout(5, policy, auto_reset=False, tensordict=env.reset(start))
        found = groups.inv(steps)
    assert found["game_seed"].unique().tolist() == [7]
    first, second = found["advantage"].reshape(2, 3)
    assert (first + second).abs().max() < 1e-5
    assert (first != 0).all()


def test_games_in_a_row_of_one_seed():
    env = GameChatEnv(Count, batch_size=(4,), group_size=2, seed=0)
    seeds = torch.cat([env.reset()["game_seed"], env.reset()["game_seed"]])
    assert torch.equal(seeds[::2], seeds[1::2])
    assert seeds.unique().numel() == 4
    assert torch.equal(GameChatEnv(Count, batch_size=(4,), seed=0).reset()["game_seed"][:2], seeds[::2][:2])
