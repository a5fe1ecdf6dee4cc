"""TorchRL's losses and advantages of language models on rows: the same numbers, or an error that names what to use."""

from __future__ import annotations

import pytest
import torch
from torchrl.collectors.llm import LLMCollector
from torchrl.data.llm import History
from torchrl.modules.llm import TransformersWrapper
from torchrl.objectives.llm import DistillationLoss, MCAdvantage, SFTLoss

from tests.data.chat_templates import EXACT, PIECES, chat_tokenizer, tokenizer_of
from tests.data.test_chat import random_rows
from tests.envs.adapters.test_chat_env import Count, letters, wrapper
from torchrl_lang import data
from torchrl_lang.envs import GameChatEnv, WordleEnv
from torchrl_lang.envs.wordle import RandomWordPlayer
from torchrl_lang.evaluation import play_games
from torchrl_lang.functional import group_advantages
from torchrl_lang.modules import UtteranceActor, causal_lm, language_actor, row_log_prob
from torchrl_lang.objectives import BCLoss
from torchrl_lang.text import ChatTokenizer, RowFormat
from torchrl_lang.text.messages import from_messages
from torchrl_lang.transforms import KLConstrainedTransform, KLDivergenceTransform

WORDS = ["crane", "slate", "mouse"]
GENERATION = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def dialogues():
    """Rows with log-probabilities of a teacher, the last step of each, and a wrapper in tokens mode."""
    tokenizer = chat_tokenizer(EXACT["chatml"])
    rows = random_rows(tokenizer, 5, PIECES)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        shape = {"vocab_size": tokenizer.vocab_size, "layers": 1, "width": 16, "heads": 2, "max_length": 900}
        lm, teacher = (causal_lm("qwen2", **shape) for _ in range(2))
    with torch.no_grad():
        for parameter in (*lm.parameters(), *teacher.parameters()):
            parameter.mul_(4 if parameter.ndim > 1 else 1)
    rows["token_log_prob"] = row_log_prob(language_actor(teacher), rows).detach()
    steps = data.chat_from_rows(rows)
    scoring = {"input_mode": "tokens", "generate": False, "return_log_probs": True, "pad_output": False}
    policy = TransformersWrapper(lm, tokenizer=tokenizer_of(EXACT["chatml"]), **scoring)
    return rows, steps[steps["next", "done"].squeeze(-1)], policy


def gradients(model, loss):
    return torch.autograd.grad(loss, list(model.parameters()))


def test_sft_loss(dialogues):
    """BCLoss is the mean over all tokens of the agent; TorchRL's default is the mean over rows of their means."""
    rows, last, policy = dialogues
    lm = policy.model
    for options, ours in (
        ({"reduction": "sum", "normalize_by_seq_length": False}, {"reduction": "sum"}),
        ({"reduction": "mean"}, {}),
    ):
        loss = SFTLoss(policy, **options)
        loss.set_keys(history="tokens")
        found, bc = loss(last).loss_sft, BCLoss(language_actor(lm), actor_normalizer="action", **ours)
        parts = [bc(rows)["loss_actor"]] if ours else [bc(row)["loss_actor"] for row in rows.split(1)]
        expected = torch.stack(parts).mean()
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(gradients(lm, found), gradients(lm, expected), atol=1e-4, rtol=1e-4)


def test_sft_loss_on_histories(dialogues):
    """By its default key the loss reads text again, so the masks of the rows' own tokens do not fit."""
    source = letters(GENERATION)
    tokenizer = ChatTokenizer(source, RowFormat.from_chat_template(source))
    rows = random_rows(tokenizer, 4, ["a", "b c", "dd"])
    lm = wrapper(source).model
    options = {"tokenizer": source, "chat_template": GENERATION, "return_log_probs": True}
    loss = SFTLoss(TransformersWrapper(lm, generate=False, input_mode="history", pad_output=False, **options))
    steps = data.chat_from_rows(rows, tokenizer)
    last = steps[steps["next", "done"].squeeze(-1)]
    expected = -(row_log_prob(language_actor(lm), rows).sum(-1) / rows["agent_mask"].sum(-1)).mean()
    torch.testing.assert_close(loss(last.exclude("masks")).loss_sft, expected, atol=1e-5, rtol=1e-5)


def test_distillation_loss(dialogues):
    """The k3 estimate of the divergence, its mean over the agent's tokens of each row, and then over rows."""
    rows, last, policy = dialogues
    loss = DistillationLoss(policy)
    loss.set_keys(history="tokens", teacher_log_prob=("log_probs", "full"))
    keys = {"log_prob_key": "own", "ref_log_prob_key": "token_log_prob", "mask_key": "agent_mask", "per": "sequence"}
    rows = rows.clone().set("own", row_log_prob(language_actor(policy.model), rows))
    kl = KLDivergenceTransform("k3", **keys)(rows)["kl"].squeeze(-1)
    torch.testing.assert_close(loss(last).loss_distill, (kl / rows["agent_mask"].sum(-1)).mean(), atol=1e-5, rtol=1e-5)


@pytest.fixture(scope="module")
def games():
    """Steps of four games of each of three words, their rows, and the words' numbers."""
    env, group = WordleEnv(WORDS, batch_size=[12], seed=0), torch.arange(3).repeat_interleave(4)
    start = env.reset(hidden_word=group).set("group", group)
    options = {"auto_reset": False, "break_when_any_done": False, "break_when_all_done": True}
    steps = env.rollout(6, RandomWordPlayer(WORDS, seed=1), tensordict=start, **options)
    steps["group"] = group[:, None].expand(steps.shape).clone()
    return steps, data.rows_from_rollout(steps, unfinished="drop"), group


def test_advantages_of_groups_are_torchrls(games):
    """Of rows, of the steps that rows give, and of an environment's steps, whose advantages are carried to rows."""
    steps, rows, group = games
    returns = data.row_returns(rows)
    expected = group_advantages(returns, group)
    assert expected.abs().max() > 0.5
    flat = rows.clone().update({"group": group, "return": returns[:, None], "ended": torch.ones(12, 1).bool()})
    found = MCAdvantage(4, "group", "return", done_key="ended").inv(flat)["advantage"]
    torch.testing.assert_close(found.squeeze(-1), expected)
    chat = data.chat_from_rows(rows)
    ends = chat["next", "done"].squeeze(-1)
    chat["group"] = group[torch.cat([torch.zeros(1), ends[:-1]]).cumsum(0).long()]
    advantage = MCAdvantage(4, "group", trajectory_return="sum")
    torch.testing.assert_close(advantage.inv(chat)["advantage"][ends].squeeze(-1).double(), expected)
    count = (steps["next", "done"].squeeze(-1).int().argmax(-1) + 1).tolist()
    played = [advantage.inv(game[:length]) for game, length in zip(steps, count, strict=True)]
    played = torch.cat([group for group in played if group is not None])
    carried = data.rows_from_rollout(played, unfinished="drop", carry=["advantage"])
    assert torch.equal(carried["tokens"], rows["tokens"])
    torch.testing.assert_close(carried["advantage"].double(), expected[:, None] * rows["agent_mask"])
    with pytest.raises(KeyError, match=r"for those of the steps themselves write carry=\['advantage'\]"):
        data.rows_from_rollout(played, unfinished="drop", keep=["advantage"])


def test_rows_of_an_llm_collector():
    env = WordleEnv(WORDS, batch_size=[4], seed=0)
    options = {"dialog_turns_per_batch": 12, "total_dialog_turns": 12}
    collector = LLMCollector(env, policy=RandomWordPlayer(WORDS, seed=0), yield_completed_trajectories=True, **options)
    rows = data.rows_from_rollout(next(iter(collector)), unfinished="drop")
    assert rows["terminated"].all()
    assert len(rows) > 3
    steps = next(iter(LLMCollector(env, policy=RandomWordPlayer(WORDS, seed=0), **options)))
    with pytest.raises(KeyError, match=r"collect with yield_completed_trajectories=True and write rows_from_rollout"):
        data.EpisodeRows()(steps)
    chats = LLMCollector(GameChatEnv(Count, seed=3, tokenizer=letters()), policy=wrapper(letters()), **options)
    assert len(data.rows_from_chat(next(iter(chats)))) > 3


def test_conversations_where_rows_are_read(tmp_path):
    source = letters()
    env, policy = GameChatEnv(Count, seed=3, tokenizer=source), wrapper(source)
    tokenizer = ChatTokenizer(source, RowFormat.from_chat_template(source))
    actor = language_actor(policy.model)
    utterances = UtteranceActor(actor, tokenizer.control, 6)
    steps = env.rollout(2, policy)
    history = History.from_chats([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    rows_of = "This is a conversation of TorchRL's LLM stack: rows_from_chat makes rows of its steps"
    give = r"give .*messages_from_history\(history\)"
    for use, match in (
        (lambda: env.rollout(1, utterances), "wrappers alone act in a ChatEnv"),
        (lambda: play_games(env, policy, games=1), rows_of),
        (lambda: BCLoss(actor)(steps), rows_of),
        (lambda: data.rows_from_rollout(steps, unfinished="drop"), rows_of),
        (lambda: KLConstrainedTransform(utterances)(steps), rows_of),
        (lambda: from_messages(history, tokenizer), give),
        (lambda: data.dataset_from_records([{"messages": history}], tmp_path / "data", tokenizer, 50), give),
    ):
        with pytest.raises((KeyError, ValueError), match=match):
            use()
