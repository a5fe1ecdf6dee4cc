"""Whole agents on disk act as they did, in a process that knows nothing of their training."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests import processes
from tests.data.chat_templates import EXACT, tokenizer_of
from tests.modules import toys
from tests.modules.toys import CONTROL, TOKENIZER, heads, tiny_lm
from tests.sealed import reseal
from torchrl_lang._files import FileError
from torchrl_lang.modules import (
    QValueHead,
    TiedQValueHead,
    Trunk,
    UtteranceActor,
    UtteranceQValueHead,
    UtteranceValueGuidance,
    ValueGuidance,
    ValueHead,
    causal_lm,
    language_actor,
    load_agent,
    load_language_model,
    push_agent,
    save_agent,
    save_language_model,
)
from torchrl_lang.modules.decoding.guidance import LikelihoodGuidance
from torchrl_lang.text import ChatTokenizer, RowFormat


def rows(tokenizer, texts):
    ids = [tokenizer.encode_opening(text) for text in texts]
    width = max(map(len, ids))
    tokens = torch.tensor([row + [tokenizer.control.pad] * (width - len(row)) for row in ids])
    mask = torch.arange(width) < torch.tensor([len(row) for row in ids])[:, None]
    return TensorDict(tokens=tokens, attention_mask=mask, batch_size=[len(ids)])


LOAD = """
import sys, torch
from torchrl_lang.modules import load_agent
agent = load_agent(sys.argv[1], seed=3)
given = torch.load(sys.argv[2], weights_only=True)
from tensordict import TensorDict
out = agent.policy(TensorDict(given, batch_size=[len(given["tokens"])]))
print(out["action"].tolist(), [round(x, 4) for x in out["action_log_prob"].tolist()], agent.tokenizer.vocab_size)
"""


@pytest.mark.slow
def test_another_process_acts_alike(tmp_path):
    source = tokenizer_of(EXACT["chatml"])
    tokenizer = ChatTokenizer(source, RowFormat.from_chat_template(source, system="Play."))
    torch.manual_seed(0)
    lm = causal_lm("qwen2", vocab_size=tokenizer.vocab_size, layers=1, width=16, heads=2, max_length=200)
    qvalue, value = heads(vocab_size=tokenizer.vocab_size)
    guidance = ValueGuidance(qvalue, value, beta=8.0, clip=3.0)
    options = {"guidance": guidance, "temperature": 0.7, "top_k": 20, "seed": 3}
    policy = UtteranceActor(language_actor(lm), tokenizer.control, 6, **options)
    results = [{"policy": "ours", "return": -1.5}, {"policy": "BC", "return": -2.0}]
    described = {"task": {"name": "talk"}, "data": "ten games", "results": results, "command": "train x"}
    folder = save_agent(tmp_path / "agent", policy, tokenizer, **described)
    card = (folder / "README.md").read_text()
    for text in ("Agent for talk", "| ours | -1.5 |", "| BC | -2.0 |", "ten games", "train x"):
        assert text in card
    chat, read = [{"role": "user", "content": "hi"}], AutoTokenizer.from_pretrained(folder)
    assert read.apply_chat_template(chat, tokenize=False) == source.apply_chat_template(chat, tokenize=False)
    again = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(again.get_input_embeddings().weight, lm.get_input_embeddings().weight)
    given = rows(tokenizer, ["hi", "a longer text"])
    torch.save(given.to_dict(), tmp_path / "rows.pt")
    script = tmp_path / "act.py"
    script.write_text(LOAD)
    done = processes.run(script, tmp_path / "agent", tmp_path / "rows.pt", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    out = policy(given)
    expected = out["action"].tolist(), [round(x, 4) for x in out["action_log_prob"].tolist()]
    assert done.stdout.strip().endswith(f"{expected[0]} {expected[1]} {tokenizer.vocab_size}")


def saved(tmp_path, action_length=4, **options):
    qvalue, value = heads()
    guidance = ValueGuidance(qvalue, value, beta=0.5, weighting="sign", clip=1.0, value_min=-2.0, include_logits=False)
    policy = UtteranceActor(language_actor(tiny_lm()), CONTROL, action_length, guidance=guidance, **options)
    return policy, save_agent(tmp_path / "agent", policy, TOKENIZER, task={"name": "letters", "words": 3})


def test_every_option_comes_back(tmp_path):
    options = {"candidates": 3, "advantage_weight": 0.5, "log_prob_weight": 0.25, "beams": 2, "action_length": 4}
    filters = {"temperature": 0.5, "top_k": 4, "top_p": 0.9, "min_p": 0.01, "vocab_size": 9}
    values = {"beta": 0.5, "weighting": "sign", "clip": 1.0, "value_min": -2.0, "include_logits": False}
    _, folder = saved(tmp_path, method="best_of", forbidden=(0, 8), **options, **filters)
    assert load_language_model(folder).heads.keys() == {"qvalue", "value"}
    agent = load_agent(folder)
    found = agent.policy.decoder
    for owner, given in ((found, options), (found.rule, filters), (found.rule.guidance, values)):
        assert {name: getattr(owner, name) for name in given} == given
    assert agent.policy.method == "best_of"
    assert found.rule.forbidden.tolist() == [0, 8]
    assert agent.task == {"name": "letters", "words": 3}
    assert agent.tokenizer.config() == TOKENIZER.config()


def values_of_their_own(head):
    """A guidance over another model than the actor's."""
    lm = tiny_lm("llama" if head in ("mlp", "likelihood") else "gpt2", seed=5)
    if head == "likelihood":
        return LikelihoodGuidance(language_actor(lm), beta=8.0, ratio=True)
    if head == "utterance":
        return UtteranceValueGuidance(UtteranceQValueHead(16), value_trunk=Trunk(lm))
    qvalue, value = heads()
    if head == "deep":
        qvalue, value = QValueHead(16, TOKENIZER.vocab_size, kind="deep"), ValueHead(16, kind="deep")
    if head == "output":
        lm = causal_lm("llama", vocab_size=TOKENIZER.vocab_size, layers=1, width=16, heads=2, max_length=40)
        qvalue = TiedQValueHead(16, lm.get_output_embeddings())
    with torch.no_grad():
        qvalue.out_weight.normal_()  # heads begin near zero
    return ValueGuidance(qvalue, value, beta=2.0, clip=1.5, value_trunk=Trunk(lm))


class Normed(nn.Module):
    """A head of a user's: action values without an axis of heads, a state value, or one of an utterance."""

    def __init__(self, out=TOKENIZER.vocab_size):
        super().__init__()
        self.norm, self.out = nn.BatchNorm1d(16), nn.Linear(16, out)

    def forward(self, hidden):
        return self.out(self.norm(hidden.flatten(0, -2))).unflatten(0, hidden.shape[:-1])


def guided(kind):
    """A guidance with heads of other classes than the library's, and the modules that loading fills."""
    value = Normed(1)
    if kind == "given utterance":
        return UtteranceValueGuidance(Normed(1)), {"qvalue": Normed(1)}
    if kind == "given on a trunk":
        q, options = TensorDictModule(Normed(), ["hidden"], ["action_value"]), {"value_trunk": Trunk(tiny_lm(seed=5))}
        return ValueGuidance(q, value, beta=2.0, clip=1.5, **options), {"qvalue": Normed(), "value": Normed(1)}
    if kind == "given":
        return ValueGuidance(Normed(), heads()[1], beta=2.0, clip=1.5), {"qvalue": Normed()}
    return (None if kind == "value" else values_of_their_own(kind)), {}


OWN, GIVEN = ("mlp", "deep", "output", "utterance", "likelihood"), ("given", "given on a trunk", "given utterance")


@pytest.mark.parametrize("kind", [*OWN, *GIVEN, "value"])
def test_values_come_back(tmp_path, kind):
    """On a trunk of their own, in modules that are given, or those of a head while acting."""
    guidance, given = guided(kind)
    ranked = {"method": "best_of", "end_value_weight": 1.0, "candidates": 3} if "utterance" in kind else {}
    value = ValueHead(16) if kind == "value" else None
    policy = UtteranceActor(language_actor(tiny_lm()), CONTROL, 4, guidance=guidance, seed=3, value=value, **ranked)
    folder = save_agent(tmp_path / "agent", policy.eval(), TOKENIZER)
    assert ("heads={" in (folder / "README.md").read_text()) == bool(given)
    agent = load_agent(folder, seed=3, heads=given or None)
    rows = toys.rows(n=3).select("tokens", "attention_mask")
    found, expected = agent.policy(rows.clone()), policy(rows.clone())
    assert torch.equal(found["action"], expected["action"])
    for key in ("token_log_prob", *(["state_value"] if value else [])):
        torch.testing.assert_close(found[key], expected[key], equal_nan=True)
    loaded = agent.policy.decoder.rule.guidance
    assert type(loaded) is type(guidance)
    for name, module in given.items():
        saved = getattr(guidance, name)
        saved = saved.module if isinstance(saved, TensorDictModule) else saved
        assert all(torch.equal(module.state_dict()[key], value) for key, value in saved.state_dict().items())
    if guidance is not None and guidance.value_trunk is not None:
        ours, theirs = (one.value_trunk.module.model.state_dict() for one in (guidance, loaded))
        assert all(torch.equal(theirs[name], weight) for name, weight in ours.items())
    again = save_agent(tmp_path / "again", agent.policy, TOKENIZER)  # a loaded agent can be saved, too
    assert (again / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_heads_that_are_not_given_are_named(tmp_path):
    policy = UtteranceActor(language_actor(tiny_lm()), CONTROL, 4, guidance=guided("given")[0])
    folder = save_agent(tmp_path / "agent", policy, TOKENIZER)
    for given, error, message in (
        (None, ValueError, r"heads \{'qvalue': 'Normed'\} of classes that are not .* got heads=\[\]"),
        ({"qvalue": Normed(), "other": Normed()}, ValueError, "no other"),
        ({"qvalue": Normed(3)}, FileError, "qvalue.out.weight .* give heads= modules of the shapes that were saved"),
    ):
        with pytest.raises(error, match=message):
            load_agent(folder, heads=given)


def test_what_is_no_agent_is_refused(tmp_path):
    def save(name, guidance):
        actor = language_actor(tiny_lm())
        return save_agent(tmp_path / name, UtteranceActor(actor, CONTROL, 4, guidance=guidance), TOKENIZER)

    own = ValueGuidance(heads()[0], beta=1.0, value_trunk=TensorDictModule(nn.Identity(), ["tokens"], ["hidden"]))
    with pytest.raises(ValueError, match="own trunk is a TensorDictModule: only a Trunk"):
        save("agent", own)
    assert not (tmp_path / "agent").exists()
    save_language_model(tmp_path / "model", tiny_lm(), tokenizer=TOKENIZER.config())
    with pytest.raises(FileError, match="describes no agent"):
        load_agent(tmp_path / "model")
    with pytest.raises(FileNotFoundError, match="There is no model in"):
        load_agent(tmp_path / "nothing")
    folder = save("other", values_of_their_own("likelihood"))
    changes = {"NoneType": {"value_lm": False}, "None": {"tokenizer": None}, "own": {"tokenizer": {"kind": "own"}}}
    for message, change in changes.items():
        reseal(folder / "torchrl_lang.json", lambda content, change=change: content.update(change))
        with pytest.raises(FileError, match=f"an agent that cannot be built .*{message}"):
            load_agent(folder)


def test_an_upload_is_checked_and_private(tmp_path, monkeypatch):
    calls = []

    class Api:
        def __init__(self, **options):
            calls.append(options)

        def create_repo(self, *given, **options):
            calls.append((given, options))

        def upload_folder(self, **options):
            calls.append(options)
            return "https://hub/me/agent/commit/1"

    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    _, folder = saved(tmp_path)
    assert push_agent(folder, "me/agent", token="hf_secret").endswith("/me/agent/commit/1")
    assert calls[:2] == [{"token": "hf_secret"}, (("me/agent",), {"private": True, "exist_ok": True})]
    assert (calls[2]["repo_id"], calls[2]["folder_path"]) == ("me/agent", str(folder))
    (folder / "heads.safetensors").write_bytes(b"")
    with pytest.raises(FileError, match=r"heads\.safetensors"):
        push_agent(folder, "me/agent")
    assert len(calls) == 3
