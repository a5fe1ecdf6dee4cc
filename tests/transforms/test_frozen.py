from __future__ import annotations

import copy
import hashlib
import pickle
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from multiprocessing.reduction import ForkingPickler

import peft
import pytest
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import nn
from torch.distributions import Normal

from tests.modules.toys import CONTROL, rows, tiny_lm
from torchrl_lang.modules import Trunk, UtteranceActor, causal_lm, language_actor
from torchrl_lang.modules.frozen.frozen_copy import CurrentPolicy, adapters_off, fingerprint, frozen_copy
from torchrl_lang.modules.frozen.lower_layers import train_top_layers


def small_actor(*, dropout=0.0, seed=0):
    """A Gaussian policy of three observations, with a persistent and a derived buffer."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(dropout), nn.Linear(4, 1))
    net.register_buffer("derived", torch.ones(2), persistent=False)
    return ProbabilisticTensorDictSequential(
        TensorDictModule(net, in_keys=["observation"], out_keys=["loc"]),
        TensorDictModule(lambda loc: torch.ones_like(loc), in_keys=["loc"], out_keys=["scale"]),
        ProbabilisticTensorDictModule(in_keys=["loc", "scale"], out_keys=["action"], distribution_class=Normal),
    )


def observed(n=5, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return TensorDict(observation=torch.randn(n, 3, generator=generator), batch_size=[n])


def dist_of(frozen, batch):
    with frozen.eval_mode():
        return frozen.actor.get_dist(batch.clone())


def train(actor, batch, steps=3):
    """Real optimizer steps over everything that trains."""
    optimizer = torch.optim.Adam([p for p in actor.parameters() if p.requires_grad], lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        actor.get_dist(batch.clone()).logits.square().mean().backward()
        optimizer.step()


def lora(kind="gpt2", **options):
    lm = tiny_lm(kind)
    options |= {"target_modules": ["c_attn"] if kind == "gpt2" else ["q_proj", "v_proj"]}
    config = peft.LoraConfig(r=2, init_lora_weights=False, fan_in_fan_out=kind == "gpt2", **options)
    return peft.get_peft_model(copy.deepcopy(lm), config), lm


def test_the_fingerprint_is_that_of_its_definition():
    """blake2b over "('w', 'torch.int8', (2,))\\n" and the two bytes."""
    digest = hashlib.blake2b(b"('w', 'torch.int8', (2,))\n\x01\xff", digest_size=32).digest()
    found = fingerprint([("w", torch.tensor([1, -1], dtype=torch.int8))])
    assert found.dtype == torch.uint8
    assert found.shape == (32,)
    assert bytes(found.tolist()) == digest


def test_one_weight_makes_the_difference():
    actor = small_actor()
    first = frozen_copy(actor).fingerprint
    assert torch.equal(frozen_copy(actor).fingerprint, first)
    net = actor[0].module
    net.derived.add_(1)  # follows from the configuration: no part of it
    assert torch.equal(frozen_copy(actor).fingerprint, first)
    net[1].running_mean[0] += 1e-6
    second = frozen_copy(actor).fingerprint
    assert not torch.equal(second, first)
    with torch.no_grad():
        net[3].bias[0] += 1e-6
    assert not torch.equal(frozen_copy(actor).fingerprint, second)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("layers", [1, 2])
def test_a_reference_stays_while_the_policy_trains(share, layers):
    actor, batch = language_actor(tiny_lm("llama")), rows()
    train_top_layers(actor, layers)
    before = actor.get_dist(batch.clone()).logits.detach()
    reference = frozen_copy(actor, share=share)
    train(actor, batch)
    reference.check_unchanged()
    assert torch.equal(dist_of(reference, batch).logits, before)
    assert (actor.get_dist(batch.clone()).logits - before).abs().max() > 0.1


def test_the_reference_evaluates_whatever_the_policy_does():
    actor, batch = small_actor(dropout=0.5).train(), observed(64)
    actor.get_dist(batch)  # batch norm has seen something
    reference = frozen_copy(actor)
    expected = copy.deepcopy(actor).eval().get_dist(batch).loc
    flags = [m.training for m in actor.modules()]
    assert all(flags)
    for _ in range(2):
        actor.get_dist(batch)  # moves the policy's running statistics
        torch.testing.assert_close(dist_of(reference, batch).loc, expected)
    assert [m.training for m in actor.modules()] == flags


def test_converting_makes_another_reference():
    """Its fingerprint is that of the same weights converted before."""
    actor, batch = small_actor(), observed()
    plain = frozen_copy(actor).fingerprint
    reference = frozen_copy(actor)
    reference.apply_to_owned(lambda t: t.clone())
    assert torch.equal(reference.fingerprint, plain)
    before = dist_of(reference, batch).loc
    reference.apply_to_owned(lambda t: t.to(torch.float64) if t.is_floating_point() else t)
    found = dist_of(reference, batch.double()).loc
    assert found.dtype == torch.float64
    torch.testing.assert_close(found.float(), before)
    assert not torch.equal(reference.fingerprint, plain)
    assert torch.equal(reference.fingerprint, frozen_copy(copy.deepcopy(actor).double()).fingerprint)
    assert actor[0].module[0].weight.dtype == torch.float32
    assert reference.actor[0].module[1].num_batches_tracked.dtype == torch.int64


def test_a_changed_shared_weight_is_found():
    actor = small_actor()
    net = actor[0].module
    net[0].requires_grad_(False)
    reference = frozen_copy(actor)
    actor.load_state_dict(copy.deepcopy(actor.state_dict()))  # counters move, weights do not
    reference.check_unchanged()
    reference.check_unchanged()
    with torch.no_grad():
        net[3].weight.add_(1)  # the policy's own
    reference.check_unchanged()
    net[0].weight.requires_grad_(True)
    with pytest.raises(RuntimeError, match="set to train"):
        reference.check_unchanged()
    net[0].weight.requires_grad_(False)
    reference.check_unchanged()
    with torch.no_grad():
        net[0].weight.add_(1)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="were modified; use frozen_copy"):
            reference.check_unchanged()


def test_a_state_that_does_not_fit_changes_nothing():
    actor = small_actor()
    actor[0].module[0].requires_grad_(False)
    reference = frozen_copy(actor)
    good = {name: tensor.clone() for name, tensor in reference.state().items()}
    reference.load_state(good)
    missing = {name: tensor for name, tensor in good.items() if not name.endswith("3.bias")}
    name = "module.0.module.3.weight"
    changed = {**good, name: good[name] + 1, "module.0.module.0.bias": good["module.0.module.0.bias"] + 1}
    for state, where in ((missing, "3.bias"), ({**good, name: good[name].T}, "3.weight"), (changed, "0.bias")):
        with pytest.raises(ValueError, match=rf"it differs at \['module.0.module.{where}'\]"):
            reference.load_state(state)
    assert all(torch.equal(good[name], tensor) for name, tensor in reference.state().items())


COPIES = {
    "pickle": lambda reference: pickle.loads(pickle.dumps(reference)),  # noqa: S301
    "deepcopy": copy.deepcopy,
    "torch": lambda reference: pickle.loads(ForkingPickler.dumps(reference)),  # noqa: S301
}


@pytest.mark.parametrize("how", COPIES)
def test_it_travels(how):
    actor, batch = language_actor(tiny_lm("gpt2")), rows()
    train_top_layers(actor, 1)
    actor.load_state_dict(actor.state_dict())  # counters that are not zero
    reference = frozen_copy(actor)
    arrived = COPIES[how](reference)
    arrived.check_unchanged()
    assert torch.equal(arrived.fingerprint, reference.fingerprint)
    assert torch.equal(dist_of(arrived, batch).logits, dist_of(reference, batch).logits)
    if how != "torch":  # there the weights travel as shared memory
        with torch.no_grad():
            actor[0].module.model.wte.weight.add_(1)
        arrived.check_unchanged()
        with pytest.raises(RuntimeError, match="reference changed"):
            copy.deepcopy(reference)


def test_it_compiles_in_one_graph():
    actor, batch = small_actor(), observed()
    actor[0].module[0].requires_grad_(False)
    reference = frozen_copy(actor)

    def step(observation):
        reference.check_unchanged()
        with reference.eval_mode():
            dist = reference.actor.get_dist(TensorDict(observation=observation, batch_size=[5]))
        return dist.log_prob(torch.zeros(5, 1)) + observation.sum()

    x = batch["observation"].requires_grad_()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(compiled, step(x))
    compiled.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 5.0))  # nothing came through the reference


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_without_adapters_it_is_the_base_model(kind):
    model, lm = lora(kind)
    actor, batch = language_actor(model), rows()
    base = language_actor(lm).get_dist(batch.clone()).logits.detach()
    reference = adapters_off(actor)
    assert reference.actor is actor
    tuned, real = actor.get_dist(batch.clone()).logits, batch["attention_mask"]
    assert (tuned - base).abs().max() > 1e-3
    peft_logits = model(batch["tokens"], attention_mask=torch.ones_like(batch["tokens"])).logits
    torch.testing.assert_close(tuned[real], peft_logits.log_softmax(-1)[real], atol=1e-5, rtol=1e-5)
    assert torch.equal(dist_of(reference, batch).logits, base)
    train(actor, batch)
    reference.check_unchanged()
    assert torch.equal(dist_of(reference, batch).logits, base)
    assert torch.equal(adapters_off(actor).fingerprint, reference.fingerprint)
    assert not any("lora" in name for name in reference.state())


def adapter_state(model):
    layers = [m for m in model.modules() if isinstance(m, BaseTunerLayer)]
    return (
        [(layer.disable_adapters, layer.active_adapters, sorted(vars(layer))) for layer in layers],
        [(name, p.requires_grad) for name, p in model.named_parameters()],
        [m.training for m in model.modules()],
    )


@pytest.mark.parametrize("failing", [True, False])
@pytest.mark.parametrize("enabled", [True, False])
def test_the_adapters_are_found_as_they_were_left(failing, enabled):
    model, _ = lora("llama", lora_dropout=0.5)
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    actor, batch = language_actor(model).train(), rows()
    first = model.base_model.model.model.layers[0].eval()
    next(p for name, p in model.named_parameters() if "lora_A.default" in name).requires_grad_(False)
    if not enabled:
        first.self_attn.q_proj.enable_adapters(False)
    reference, before = adapters_off(actor), adapter_state(model)
    expected = dist_of(reference, batch).logits
    assert adapter_state(model) == before
    outcome = pytest.raises(KeyError, match="on purpose") if failing else nullcontext()
    with outcome, reference.eval_mode(), reference.eval_mode():
        assert not any(m.training for m in actor.modules())
        assert torch.equal(actor.get_dist(batch.clone()).logits, expected)
        if failing:
            raise KeyError("on purpose")
    assert adapter_state(model) == before
    reference.check_unchanged()


def test_what_cannot_be_switched_off_is_refused():
    with pytest.raises(ValueError, match="no PEFT adapters"):
        adapters_off(language_actor(tiny_lm()))
    drifting, _ = lora("gpt2", bias="all")
    with pytest.raises(ValueError, match=r"weights other than the adapters' train, \['module.0.*bias"):
        adapters_off(language_actor(drifting))
    model, _ = lora()
    actor = language_actor(model)
    reference = adapters_off(actor)
    model.merge_adapter()
    with pytest.raises(ValueError, match="unmerge_adapter"):
        adapters_off(actor)
    with pytest.raises(ValueError, match="share=False"):
        frozen_copy(actor)
    merged, batch = frozen_copy(actor, share=False), rows()
    torch.testing.assert_close(dist_of(merged, batch).logits, actor.get_dist(batch.clone()).logits)
    with pytest.raises(ValueError, match="unmerge_adapter"), reference.eval_mode():
        pass
    model.unmerge_adapter()
    with reference.eval_mode():
        pass


@pytest.mark.parametrize("make", [frozen_copy, adapters_off])
@pytest.mark.parametrize("merge", ["merge_adapter", "merge_and_unload"])
def test_adapters_that_are_merged_into_shared_weights_are_noticed(make, merge):
    model, _ = lora()
    reference = make(language_actor(model))
    before = [weight.clone() for weight in reference.state().values()]
    reference.check_unchanged()
    getattr(model, merge)()
    assert not all(map(torch.equal, before, reference.state().values()))
    with pytest.raises(RuntimeError, match=r"adapters are merged.*unmerge_adapter\(\).*share=False"):
        reference.check_unchanged()


@pytest.mark.parametrize("make", [adapters_off, CurrentPolicy])
def test_another_thread_may_not_switch_the_policy(make):
    """A prefetching replay buffer would do it while the policy runs in the training loop."""
    model, _ = lora("llama")
    actor = language_actor(model).train()
    reference, copied, before = make(actor), frozen_copy(actor), adapter_state(model)

    def training(reference):
        with reference.eval_mode():
            return any(m.training for m in reference.actor.modules())

    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(RuntimeError, match=r"another thread.*prefetch"):
            pool.submit(training, reference).result()
        assert not pool.submit(training, copied).result()
    assert adapter_state(model) == before
    assert not training(reference)


def lm_of(kind, layers=3, **config):
    return causal_lm(kind, vocab_size=13, layers=layers, width=16, heads=2, max_length=20, **config)


def trains(module):
    return {p for p in module.parameters() if p.requires_grad}


@pytest.mark.parametrize(
    ("kind", "layers", "config"),
    [("gpt2", 1, {}), ("gpt2", 2, {"tie_word_embeddings": False}), ("llama", 3, {}), ("qwen2", 1, {})],
)
def test_exactly_the_top_trains(kind, layers, config):
    lm = lm_of(kind, **config)
    blocks = list(lm.base_model.h if kind == "gpt2" else lm.base_model.layers)
    top = nn.ModuleList([*blocks[3 - layers :], lm.base_model.ln_f if kind == "gpt2" else lm.base_model.norm])
    expected = set(top.parameters())
    if not lm.config.tie_word_embeddings:
        expected.add(lm.get_output_embeddings().weight)
    count = train_top_layers(UtteranceActor(language_actor(lm), CONTROL, 4, vocab_size=12), layers)
    assert trains(lm) == expected
    assert count == sum(p.numel() for p in expected)


def bytes_kept(actor):
    """Bytes that autograd keeps of one pass over some rows; weights, which are there anyway, do not count."""
    batch, kept = rows(n=4, longest=20), {}
    weights = {p.untyped_storage().data_ptr() for p in actor.parameters()}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = actor.get_dist(batch).logits
    del out
    return sum(kept.values())


def test_a_frozen_trunk_keeps_nothing():
    kept = []
    for layers in (1, 4):
        actor = language_actor(Trunk(lm_of("llama", layers)), head=torch.nn.Linear(16, 13))
        actor[0].requires_grad_(False)
        kept.append(bytes_kept(actor))
    assert kept[0] == kept[1] > 0  # the head's own: nothing that grows with the number of blocks


def test_checkpointing_keeps_one_state_a_block():
    plain, checkpointed = (language_actor(lm_of("llama", 4)).train() for _ in range(2))
    checkpointed[0].module.gradient_checkpointing()
    assert bytes_kept(checkpointed) < 0.4 * bytes_kept(plain)
