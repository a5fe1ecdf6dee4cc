"""The policy of the language format: its rows are those of training, and its cache changes nothing."""

import pytest
import torch
from tensordict import TensorDict
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_lang.algorithm_distillation import PromptedPolicy, language
from torchrl_lang.algorithm_distillation.language.template import parse_steps
from torchrl_lang.envs.grids import DarkRoomEnv
from torchrl_lang.modules import causal_lm, language_actor

CELLS, REWARDS = language.Quantizer(range(3)), language.Quantizer([0, 1])
MOVES = language.Quantizer(range(5), ["stay", "north", "south", "west", "east"])
CONTEXT = 80


def actor_of(tokenizer, max_length=CONTEXT):
    torch.manual_seed(0)
    sizes = {"layers": 2, "width": 16, "heads": 2, "max_length": max_length}
    return language_actor(causal_lm(vocab_size=tokenizer.vocab_size, initializer_range=0.5, **sizes))


def policy_of(kind, context=CONTEXT, seed=3, **options):
    template = language.StepTemplate(kind, [CELLS, CELLS], MOVES, REWARDS)
    tokenizer = language.template_tokenizer(template)
    actor = actor_of(tokenizer, max(context, CONTEXT))
    return language.LanguageHistoryPolicy(actor, template, tokenizer, context, seed=seed, **options)


def play(policy, steps, streams=6):
    """Act in rooms whose episodes end at different steps; what happened in each stream."""
    env = DarkRoomEnv(
        3, task=torch.arange(streams), batch_size=[streams], reward="once", episode_length=7, start="random", seed=1
    )
    policy.begin(streams)
    state, happened = env.reset(), [[] for _ in range(streams)]
    for _ in range(steps):
        state["action"] = policy.act(state["observation"])
        state, following = env.step_and_maybe_reset(state)
        after = state["next"]
        policy.observe(*(after[key].squeeze(-1) for key in ("reward", "done", "terminated")))
        for stream, step in enumerate(happened):
            seen = {key: state[key][stream].tolist() for key in ("observation", "action")}
            step.append(seen | {key: after[key][stream].item() for key in ("reward", "done", "terminated")})
        state = following
    return happened


@pytest.mark.parametrize("kind", ["spelled", "sparse"])
def test_a_row_is_the_text_of_the_last_whole_episodes(kind):
    policy = policy_of(kind)
    happened = play(PromptedPolicy(policy, TensorDict(batch_size=[4, 0])), 30, streams=4)  # an empty prompt
    longest = policy._longest
    for stream, steps in enumerate(happened):
        found = parse_steps(policy.text(stream), policy.template)
        assert 0 < len(found) < 30, "episodes have left"
        kept = steps[len(steps) - len(found) :]
        assert steps[len(steps) - len(found) - 1]["done"], "it begins with an episode"
        for key in ("observation", "action"):
            assert found[key].tolist() == [step[key] for step in kept]
        for key in ("reward", "done", "terminated"):
            assert found[key].squeeze(-1).tolist() == [step[key] for step in kept]
        # The episode that left last would not have had room when the running one was at its longest.
        ends = [place for place in range(len(steps) - len(found) - 1) if steps[place]["done"]]
        begin = ends[-1] + 1 if ends else 0
        assert 1 + longest * (len(steps) - begin) > CONTEXT
        row = language.StepRows(policy.template, policy.tokenizer)(found[None])["tokens"][0]
        tokens, length = policy._row(policy._context)
        assert tokens[stream, : length[stream]].tolist() == row[: length[stream]].tolist()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "steps"), [("compact", None), ("sparse", 16)])
def test_the_cache_changes_nothing_when_episodes_leave(kind, steps):
    seen = {}
    for cached in (True, False):
        policy = policy_of(kind, cached=cached, steps=steps)
        logits = seen.setdefault(cached, [])
        sample = policy._sample
        policy._sample = lambda values, words, sample=sample, logits=logits: (
            logits.append(values[:, words]),
            sample(values, words),
        )[1]
        seen[cached, "steps"] = play(policy, 30, streams=3)
        assert sum(step["done"] for step in seen[cached, "steps"][0]) > 3
    torch.testing.assert_close(torch.stack(seen[True]), torch.stack(seen[False]), atol=1e-4, rtol=1e-4)
    assert seen[True, "steps"] == seen[False, "steps"]


def test_actions_have_the_probabilities_of_their_words():
    policy = policy_of("compact", temperature=0.5)
    policy.begin(4000)
    actions = policy.act(torch.tensor([[1, 2]]).expand(4000, 2))
    row = torch.tensor([policy.tokenizer.encode(" 1 2")])
    tokens = torch.cat([torch.tensor([[policy.tokenizer.control.begin_state]]), row], -1)
    words = [policy.tokenizer.encode(f" {word}")[0] for word in MOVES.words]
    logits = policy.actor.module[0].module.model(tokens).last_hidden_state[0, -1]
    logits = policy.actor.module[1].module(logits)[words]
    expected = torch.softmax(logits / 0.5, -1)
    share = torch.bincount(actions, minlength=5) / 4000
    assert ((share - expected).abs() < 4 * (expected * (1 - expected) / 4000).sqrt() + 1e-3).all()
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        policy.begin(3)
        assert policy.act(torch.tensor([[1, 2]] * 3)).tolist() == [int(expected.argmax())] * 3
    assert policy.text(2) == f" 1 2 {MOVES.words[expected.argmax()]}"  # a step that is running


def test_actions_of_several_numbers():
    actions = [language.Quantizer([-1.0, 1.0], ["less", "more"]), language.Quantizer(range(2))]
    template = language.StepTemplate("spelled", CELLS, actions, REWARDS)
    tokenizer = language.template_tokenizer(template)
    actor, played = actor_of(tokenizer), []
    for cached in (True, False):
        policy = language.LanguageHistoryPolicy(actor, template, tokenizer, 40, seed=0, cached=cached)
        policy.begin(50)
        for step in range(8):
            played.append(policy.act((torch.arange(50) + step) % 3))
            policy.observe(torch.zeros(50), torch.ones(50, dtype=torch.bool))
        assert torch.equal(parse_steps(policy.text(7), template)["action"][-1], played[-1][7])
    assert torch.equal(torch.stack(played[:8]), torch.stack(played[8:]))
    assert played[0].shape == (50, 2)
    assert set(played[0][:, 0].tolist()) == {-1.0, 1.0}
    assert set(played[0][:, 1].tolist()) == {0, 1}


def test_an_episode_longer_than_the_context_raises():
    policy = policy_of("compact", context=16)  # four steps of four tokens, but for the first token of a row
    policy.begin(1)
    for _ in range(3):
        policy.act(torch.zeros(1, 2))
        policy.observe(torch.zeros(1), torch.zeros(1, dtype=torch.bool))
    with pytest.raises(ValueError, match="episode of stream 0 leaves no room"):
        policy.act(torch.zeros(1, 2))
