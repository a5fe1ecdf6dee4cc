"""Language models as TorchRL actors, in parts that a loss can run separately."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import torch
from tensordict import NestedKey, TensorDict
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
)
from torch import nn
from torch.distributions import Categorical

from torchrl_lang._checks import no_tokenizer, refuse_wrapper
from torchrl_lang.modules.fast_linear import FastLinear
from torchrl_lang.modules.features import FeatureEmbedding
from torchrl_lang.modules.hugging_face import head_obstacle, language_head
from torchrl_lang.modules.trunk import HIDDEN, Trunk, first_trunk, trunk_module, unwrapped
from torchrl_lang.schema import ATTENTION_MASK, FEATURES, FEATURES_MASK, TOKENS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LOGITS = "logits"
NEXT_TOKEN = "next_token"


class LanguageActor(ProbabilisticTensorDictSequential):
    """A sequence of modules whose distribution is that of the next token at every position of a row, ``[*B, T]``.

    Made by :func:`language_actor`. A trunk of your own (``tokens``, ``attention_mask`` -> ``logits`` ``[*B, T, V]``)
    and a :class:`~tensordict.nn.ProbabilisticTensorDictModule` make one, too; its distribution must be the softmax of
    ``logits``, such as :class:`~torch.distributions.Categorical`. Losses take any
    :class:`~tensordict.nn.ProbabilisticTensorDictSequential` of such parts; a KL penalty scores whole rows for this
    class only.

    Examples:
        >>> import torch
        >>> from tensordict.nn import ProbabilisticTensorDictModule, TensorDictModule
        >>> from torchrl_lang.modules import LanguageActor
        >>> from torchrl_lang.transforms import KLConstrainedTransform
        >>> bigrams = TensorDictModule(torch.nn.Embedding(5, 5), in_keys=["tokens"], out_keys=["logits"])
        >>> sample = ProbabilisticTensorDictModule(in_keys=["logits"], out_keys=["next_token"],
        ...                                        distribution_class=torch.distributions.Categorical)
        >>> KLConstrainedTransform(LanguageActor(bigrams, sample)).out_keys
        ['token_reward', 'raw_reward', 'ref_log_prob', 'kl']
    """

    tokenizer = no_tokenizer


def language_actor(
    lm: PreTrainedModel | Trunk,
    *,
    head: nn.Module | None = None,
    length_groups: int | Literal["auto"] = "auto",
    compile: bool = False,
    out_key: str = NEXT_TOKEN,
) -> LanguageActor:
    """A causal language model as a :class:`LanguageActor` in three parts: trunk, language-model head, distribution.

    ``get_dist`` on a batch of rows is a :class:`~torch.distributions.Categorical` with batch shape ``[*B, T]``, the
    distribution of the *next* token at each position. The sample is therefore called ``next_token`` ``[*B, T]``, not
    ``action``; to generate whole utterances in a rollout use an
    :class:`~torchrl_lang.modules.UtteranceActor`. The parts share the model's weights, and tied embeddings
    stay tied.

    Args:
        lm: a causal language model, with or without PEFT adapters, or a :class:`Trunk` together with ``head``.
        head: maps ``hidden [*N, H]`` to ``logits [*N, V]``; default the language model's own head.
        length_groups: see :class:`Trunk`.
        compile: compile the trunk, see :meth:`Trunk.compile`. Useful on GPUs; on a CPU GPT-2 is as fast without.
        out_key: name of the sample; its log-prob is ``<out_key>_log_prob``.

    Raises:
        TypeError: ``lm`` is not a Hugging Face model.
        ValueError: options of the trunk are given with a trunk; there is no head or it has the wrong width; or the
            model changes its logits in another way than by scaling and capping them.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_lang.modules import causal_lm, language_actor
        >>> actor = language_actor(causal_lm(vocab_size=11, layers=1, width=8, heads=2, max_length=16))
        >>> rows = TensorDict(tokens=torch.zeros(2, 5, dtype=torch.int64),
        ...                   attention_mask=torch.ones(2, 5, dtype=torch.bool), batch_size=[2])
        >>> actor.get_dist(rows).logits.shape
        torch.Size([2, 5, 11])
    """
    refuse_wrapper(lm)
    if isinstance(lm, Trunk) and (length_groups != "auto" or compile):
        raise ValueError("Give options of the trunk to Trunk(...) itself; compile it with trunk.compile().")
    trunk = lm if isinstance(lm, Trunk) else Trunk(lm, length_groups=length_groups)
    if compile:
        trunk.compile()
    if head is None:
        head = None if isinstance(lm, Trunk) else language_head(unwrapped(lm))
        if (obstacle := head_obstacle(unwrapped(lm), head)) is not None:
            raise ValueError(f"{type(lm).__name__} needs its own head: {obstacle}. Pass head=, hidden -> logits.")
    layer = TensorDictModule(head, in_keys=[HIDDEN], out_keys=[LOGITS])
    options = {"distribution_class": Categorical, "return_log_prob": True, "log_prob_key": f"{out_key}_log_prob"}
    prob = ProbabilisticTensorDictModule(in_keys=[LOGITS], out_keys=[out_key], **options)
    return LanguageActor(trunk_module(trunk), layer, prob)


class ActorParts(NamedTuple):
    """The parts of a language actor."""

    trunk: TensorDictModuleBase
    """Writes ``hidden`` ``[*B, T, H]``, or ``logits`` ``[*B, T, V]`` if there is no separate head."""
    head: TensorDictModuleBase | None
    """``hidden [*N, H] -> logits [*N, V]``, or ``None`` if the trunk writes the logits."""
    prob: ProbabilisticTensorDictModule
    """The distribution over ``logits``."""


def split_actor(actor: ProbabilisticTensorDictSequential, hidden: NestedKey = HIDDEN) -> ActorParts:
    """Find the trunk, head and distribution of an actor by its keys, without copying weights.

    The trunk is everything up to the module that writes ``hidden``, the head everything between it and the
    distribution. If no module writes ``hidden``, there is no head and the trunk writes ``logits``. The distribution may
    read its ``logits`` by another key (``in_keys={"logits": key}``); the parts write them as ``logits``.

    Raises:
        TypeError: ``actor`` is not a :class:`~tensordict.nn.ProbabilisticTensorDictSequential`.
        ValueError: no module writes ``logits``, no distribution reads them, or it is not their softmax.

    Examples:
        >>> from torchrl_lang.modules import causal_lm, language_actor
        >>> from torchrl_lang.modules.actor import split_actor
        >>> parts = split_actor(language_actor(causal_lm(vocab_size=5, layers=1, width=8, heads=2, max_length=8)))
        >>> parts.trunk.out_keys, parts.head.out_keys
        (['hidden'], ['logits'])
    """
    refuse_wrapper(actor)
    if not isinstance(actor, ProbabilisticTensorDictSequential):
        raise TypeError(f"An actor is built with language_actor(), got {type(actor).__name__}.")
    modules = list(actor.module)
    prob = next((m for m in modules if isinstance(m, ProbabilisticTensorDictModule) and LOGITS in m.dist_keys), None)
    key = LOGITS if prob is None else dict(zip(prob.dist_keys, prob.in_keys, strict=True))[LOGITS]
    before = [] if prob is None else modules[: modules.index(prob)]
    if prob is None or not any(key in module.out_keys for module in before):
        keys = [(list(m.in_keys), list(m.out_keys)) for m in modules]
        raise ValueError(f"An actor needs a module that writes 'logits' and a distribution of them, got {keys}.")
    if difference := _not_softmax(prob, key):
        what = f"Losses and decoding take the softmax of an actor's logits, but {difference}"
        raise ValueError(f"{what}: mask or scale them by a module before the distribution, or by an UtteranceActor.")
    border = next((i for i, module in enumerate(before) if hidden in module.out_keys), len(before) - 1) + 1
    if key != LOGITS:
        before = [_renamed(module, key) for module in before]
    head = before[border:]
    return ActorParts(joined(before[:border]), joined(head) if head else None, prob)


def _not_softmax(prob: ProbabilisticTensorDictModule, key: NestedKey) -> str:
    """In which way the distribution differs from the softmax of the logits, on an example; empty if it does not."""
    kind: Any = prob.distribution_class
    name = getattr(kind, "__name__", kind)
    if len(prob.in_keys) > 1:
        return f"{name} reads {prob.in_keys}"
    if kind is Categorical and not prob.distribution_kwargs:
        return ""
    logits = torch.tensor([[0.0, 1.0, -2.0, 0.5]])
    own = getattr(prob.get_dist(TensorDict({key: logits}, batch_size=[1])), "logits", logits)
    same = torch.allclose(own.log_softmax(-1), logits.log_softmax(-1), atol=1e-5)
    return "" if same else f"{name} changes them"


def _renamed(module: TensorDictModuleBase, key: NestedKey) -> TensorDictModuleBase:
    """A module that writes as ``logits`` what ``module`` writes as ``key``; the same where it does not."""
    if key not in module.out_keys:
        return module
    if type(module) is TensorDictModule:  # so that a linear head is still seen as one
        keys = [LOGITS if own == key else own for own in module.out_keys]
        return TensorDictModule(module.module, in_keys=module.in_keys, out_keys=keys)
    return TensorDictSequential(module, TensorDictModule(nn.Identity(), in_keys=[key], out_keys=[LOGITS]))


def linear_layer(head: TensorDictModuleBase | None) -> nn.Linear | None:
    """The linear layer that is all of a head; None if there is more to it, adapters and hooks included."""
    if head is None or type(head) is not TensorDictModule or len(head.in_keys) != 1:
        return None
    module: Any = head.module
    if type(module) not in (nn.Linear, FastLinear):
        return None
    return None if module._forward_hooks or module._forward_pre_hooks else module


def vocabulary_size(parts: ActorParts) -> int | None:
    """``V`` of an actor whose head is a linear layer, with or without adapters; otherwise ``None``."""
    return getattr(getattr(parts.head, "module", None), "out_features", None)


def joined(modules: list[TensorDictModuleBase]) -> TensorDictModuleBase:
    """One module that runs these in turn."""
    return modules[0] if len(modules) == 1 else TensorDictSequential(*modules)


Actor = TypeVar("Actor", bound=nn.Module)


def with_features(actor: Actor, embedding: FeatureEmbedding | None) -> Actor:
    """Let the trunk of an actor read the features of rows, in place; the language model itself does not change.

    The modules then read ``features`` float ``[*B, P, F]`` and, where it is there, ``features_mask`` bool ``[*B, P]``,
    beside ``tokens`` and ``attention_mask``. Do this before building a loss. The embedding becomes a part of the trunk,
    so losses train it and the decoding cache notices when it changes. :func:`~torchrl_lang.modules.save_agent` saves
    it with the policy. :func:`~torchrl_lang.modules.save_language_model` writes the language model as without it: pass
    the embedding as the head ``features``, and attach it again after loading, ``with_features(language_actor(saved.lm),
    saved.heads["features"])``.

    Args:
        actor: a language actor or an :class:`~torchrl_lang.modules.UtteranceActor` over a
            :class:`~torchrl_lang.modules.Trunk`; or a trunk of values, a :class:`Trunk` or a module over one, also a
            :class:`~torchrl_lang.modules.PrivilegedTrunk`.
        embedding: moved to the model's device; None removes an embedding.

    Returns:
        The actor.

    Raises:
        ValueError: the actor has no such trunk, or ``positions=False`` is asked of a model with neither learned nor
            rotary positions.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_lang.modules import FeatureEmbedding, causal_lm, language_actor, with_features
        >>> lm = causal_lm(vocab_size=11, layers=1, width=8, heads=2, max_length=16)
        >>> actor = with_features(language_actor(lm), FeatureEmbedding(5, 8))
        >>> actor.in_keys
        ['tokens', 'attention_mask', 'features', 'features_mask']
        >>> rows = TensorDict(tokens=torch.zeros(2, 6, dtype=torch.int64), attention_mask=torch.ones(2, 6).bool(),
        ...                   features=torch.randn(2, 3, 5), batch_size=[2])
        >>> actor.get_dist(rows).logits.shape
        torch.Size([2, 6, 11])
    """
    trunk = first_trunk(actor)
    if trunk is None:
        raise ValueError("Only the Trunk of a Hugging Face model reads features: use language_actor().")
    if embedding is not None and not embedding.positions:
        learned = isinstance(getattr(trunk.model, "wpe", None), nn.Embedding)
        if not learned and not any(name.endswith("rotary_emb") for name, _ in trunk.model.named_modules()):
            raise ValueError(f"positions=False needs learned or rotary ones: {type(trunk.model).__name__} has none.")
    trunk.features = None if embedding is None else embedding.to(trunk.model.get_input_embeddings().weight.device)
    for module in actor.modules():
        if isinstance(module, TensorDictModuleBase) and TOKENS in module.in_keys:
            keys = [key for key in module.in_keys if key not in (FEATURES, FEATURES_MASK)]
            if any(isinstance(part, Trunk) and part.features is not None for part in module.modules()):
                place = keys.index(ATTENTION_MASK) + 1
                keys[place:place] = [FEATURES, FEATURES_MASK]
            module.in_keys = keys
    return actor
