"""What a saved folder is to others: transformers alone reads it, and writing it loses nothing."""

from __future__ import annotations

import json
import random

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import nn
from torch.distributions import Categorical

from tests.modules.featured_rows import F, feature_rows
from tests.modules.toys import CONTROL, TOKENIZER, WIDTH, heads, tiny_lm
from tests.processes import run
from tests.text.test_hf_tokenizer import byte_level
from torchrl_lang import modules
from torchrl_lang.objectives import ILQLLoss
from torchrl_lang.text import CharTokenizer, HFTokenizer

ALONE = """
import json, sys
import huggingface_hub.constants
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.auto import configuration_auto, modeling_auto, tokenization_auto
huggingface_hub.constants.HF_HUB_OFFLINE = True  # the variable is read at the import
for name in list(sys.modules):
    if name.split(".")[0] in ("torchrl_lang", "torchrl", "tests"):
        sys.modules[name] = None  # who imports it now fails
for known in (configuration_auto.CONFIG_MAPPING, modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING):
    assert not known._extra_content  # nobody has told transformers of classes of their own
assert not tokenization_auto.TOKENIZER_MAPPING._extra_content
found = []
for folder, texts, prompt in json.loads(sys.argv[1]):
    tokenizer, lm = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    ids = [tokenizer(text)["input_ids"] for text in texts]
    import torch
    written = lm.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)[0, len(prompt):]
    decoded = [tokenizer.decode(each) for each in ids]
    found.append([ids, decoded, written.tolist(), tokenizer.decode(written), len(tokenizer)])
print("FOUND" + json.dumps(found))
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Two models with tokenizers of two kinds, and the texts that they can read."""
    home, letters = tmp_path_factory.mktemp("saved"), CharTokenizer.from_alphabet([*"abcdef </>s", "ab", "</g>"])
    generator = random.Random(0)
    pieces = ["a", "b", "ab", "</g>", "</s>", "<s>", "</a>", "<a>", " ", "fed"]
    texts = ["".join(generator.choices(pieces, k=generator.randint(0, 9))) for _ in range(60)]
    made = []
    for kind, tokenizer, more in (
        ("gpt2", letters, []),
        ("llama", HFTokenizer(byte_level(eos_token="<|end|>")), ["héllo, 日本 </s>", "<|end|>"]),
    ):
        lm = tiny_lm(kind, vocab_size=tokenizer.vocab_size)
        folder = modules.save_language_model(home / kind, lm, {"value": heads()[1]}, tokenizer=tokenizer.config())
        made.append((folder, tokenizer, texts + more, lm))
    return made


@pytest.mark.slow
def test_transformers_alone_reads_text_and_generates(saved, tmp_path):
    prompts = [tokenizer.encode("ab") for _, tokenizer, _, _ in saved]
    tasks = [[str(folder), texts, prompt] for (folder, _, texts, _), prompt in zip(saved, prompts, strict=True)]
    done = run("-c", ALONE, json.dumps(tasks), cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.split("FOUND")[-1])
    for (_, tokenizer, texts, lm), prompt, (ids, decoded, written, text, size) in zip(
        saved, prompts, found, strict=True
    ):
        assert ids == [tokenizer.encode(each) for each in texts]
        assert decoded == texts
        assert size == tokenizer.vocab_size
        assert text == tokenizer.decode(written)
        assert written == greedy(lm, tokenizer, prompt)


def greedy(lm, tokenizer, prompt):
    """The first eight tokens that our own decoding writes; it closes an utterance of nine with the ninth."""
    tokens = torch.full((1, len(prompt) + 9), tokenizer.control.pad)
    tokens[0, : len(prompt)] = torch.tensor(prompt)
    mask = torch.arange(len(prompt) + 9) < len(prompt)
    options = {"method": "greedy", "vocab_size": tokenizer.vocab_size}
    actor = modules.UtteranceActor(modules.language_actor(lm), tokenizer.control, 9, **options)
    action = actor(TensorDict(tokens=tokens, attention_mask=mask[None], batch_size=[1]))["action"][0].tolist()
    end = tokenizer.control.end_of_action
    return action[: action.index(end) + 1][:8]


def test_a_saved_model_is_replaced_whole_and_a_link_stays_a_link(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "model").symlink_to("disk")
    folder = tmp_path / "model"
    modules.save_language_model(folder, tiny_lm("llama"), {"value": heads()[1]}, tokenizer=TOKENIZER.config())
    modules.save_language_model(folder, tiny_lm("gpt2"))
    assert (tmp_path / "model").is_symlink()
    assert modules.load_language_model(tmp_path / "disk").lm.config.model_type == "gpt2"
    assert not (tmp_path / "disk" / "tokenizer.json").exists()


def test_what_cannot_be_saved(tmp_path):
    trunk = TensorDictModule(nn.Embedding(5, 5), in_keys=["tokens"], out_keys=["logits"])
    prob = ProbabilisticTensorDictModule(in_keys=["logits"], out_keys=["action"], distribution_class=Categorical)
    with pytest.raises(ValueError, match="Only an actor of a Trunk"):
        modules.save_language_model(tmp_path, ProbabilisticTensorDictSequential(trunk, prob))
    head = modules.ValueHead(WIDTH)
    TensorDict.from_module(head).data.to_module(head, preserve_module_state=False)  # plain tensors, no parameters
    with pytest.raises(ValueError, match="'target'] have no weights"):
        modules.save_language_model(tmp_path / "model", tiny_lm(), {"target": head})
    for broken in ("model", "head"):
        lm, value = tiny_lm(), heads()[1]
        with torch.no_grad():
            (lm.transformer.ln_f.bias if broken == "model" else value.out_bias).fill_(float("nan"))
        with pytest.raises(ValueError, match=r"not finite.*not saved"):
            modules.save_language_model(tmp_path / "model", lm, {"value": value})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("normalize", [False, True])
def test_a_losss_target_network_is_saved_with_the_weights_of_now(tmp_path, normalize):
    lm = modules.causal_lm(vocab_size=11, layers=1, width=8, heads=2, max_length=16)
    q = modules.QValueHead(8, 11, normalize=normalize)
    loss = ILQLLoss(modules.language_actor(lm), modules.qvalue_module(q), modules.value_module(modules.ValueHead(8)))
    target = loss.target_qvalue_network().module
    loss.target_qvalue_network_params.data.apply_(lambda weight: weight.add_(1.0))
    assert not any(parameter.requires_grad for parameter in target.parameters())
    saved = modules.load_language_model(modules.save_language_model(tmp_path, lm, {"target": target})).heads["target"]
    expected = loss.target_qvalue_network_params.get("module")
    assert all(torch.equal(value, expected[name]) for name, value in saved.state_dict().items())
    with loss.target_qvalue_network_params.get("module").data.to_module(q):
        assert torch.equal(saved(states := 50 * torch.randn(3, 8)), q(states))


@pytest.mark.parametrize("sees", ["both", "values", "actor"])
def test_a_saved_agent_reads_features_as_before(tmp_path, sees):
    actor, trunk = modules.language_actor(tiny_lm()), modules.Trunk(tiny_lm(seed=5))
    if sees != "values":
        modules.with_features(actor, modules.FeatureEmbedding(F, WIDTH, positions=False))
    if sees != "actor":
        modules.with_features(trunk, modules.FeatureEmbedding(F, WIDTH, hidden=3))
    guidance = modules.ValueGuidance(*heads(), beta=3.0, value_trunk=trunk)
    policy = modules.UtteranceActor(actor, CONTROL, 4, method="greedy", guidance=guidance)
    agent = modules.load_agent(modules.save_agent(tmp_path / "agent", policy, TOKENIZER))
    loaded = agent.policy.decoder
    assert (loaded.actor[0].module.features is None) == (sees == "values")
    assert (loaded.value_trunk.module.features is None) == (sees == "actor")
    batch = feature_rows(n=7)
    batch["features"] = batch["features"].float()
    found, expected = agent.policy(batch.clone()), policy(batch.clone())
    assert torch.equal(found["action"], expected["action"])
    torch.testing.assert_close(found["action_log_prob"], expected["action_log_prob"])
    batch["features"] += 1.0
    assert not torch.allclose(agent.policy.get_dist(batch).log_prob(found["action"]), found["action_log_prob"])
