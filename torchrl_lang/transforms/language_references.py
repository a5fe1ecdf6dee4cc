"""References of texts: utterances, whole rows and TorchRL's conversations; and the reference that an object becomes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torchrl.data import Composite, TensorSpec, Unbounded
from torchrl.envs import EnvBase

from torchrl_lang._checks import is_wrapper
from torchrl_lang.data.chat import rows_of_responses
from torchrl_lang.modules import LanguageActor, UtteranceActor, language_actor
from torchrl_lang.modules.frozen.frozen_copy import CurrentPolicy, FrozenActor, HeldActor, frozen_copy
from torchrl_lang.modules.row_scoring import RowScorer, row_log_prob
from torchrl_lang.schema import AGENT_MASK, ATTENTION_MASK, DONE, REWARD, TOKENS, find_entry, missing_entry
from torchrl_lang.transforms.base import ActionKeys
from torchrl_lang.transforms.references import ActorReference, ColumnReference, FunctionReference, Reference

_TOKENS = ("tokens", "full")
_ATTENTION = ("masks", "all_attention_mask")
_ASSISTANT = ("masks", "all_assistant_mask")
_GENERATED = "For steps that a wrapper generated pass that wrapper (generate=True), or ResponseReference(wrapper)."
_RESPONSE_LOG_PROB = "response_log_prob"
"""The policy's log-probability of a response; TorchRL has no such entry, so the policy computes it."""


class UtteranceReference(ActorReference):
    """An :class:`~torchrl_lang.modules.UtteranceActor` as reference of single turns.

    Log-probabilities are those of acting, with the actor's temperature, filters, forbidden tokens and forced end, so
    they compare with the ``token_log_prob`` of acting. It takes one pass over transcript and utterance a turn; for
    whole episodes :class:`RowReference` scores all turns in one pass.

    The log-probability is float ``[*B, K]``, zero after the end of an utterance and on rows that are done.

    Args:
        frozen: the actor, see :func:`~torchrl_lang.transforms.frozen_copy`.
    """

    def __init__(self, frozen: HeldActor) -> None:
        super().__init__(frozen)
        self.action_keys = ActionKeys.utterance()

    def log_prob(self, tensordict: TensorDictBase, carry: TensorDictBase) -> Tensor:
        """See :class:`Reference`."""
        advice = "It is the turn to score. For whole rows pass RowReference(frozen_copy(actor)) as the reference."
        action = find_entry(type(self).__name__, self.action_keys.action[0], advice, tensordict)
        done: Any = tensordict.get(DONE, None)
        alive = torch.ones_like(action[..., 0], dtype=torch.bool) if done is None else ~done.squeeze(-1)
        if not alive.any():
            return torch.zeros(action.shape, device=action.device)
        with self.frozen.eval_mode():
            found = self._dist(self.inputs(tensordict)[alive]).token_log_prob(action[alive])
        return found.new_zeros(action.shape).index_put((alive,), found)

    distribution = Reference.distribution  # the exact divergence would be a sum over all utterances

    def log_prob_spec(self, env: EnvBase, specs: Composite) -> TensorSpec:
        """See :class:`Reference`."""
        advice = "An UtteranceActor acts in language environments; in a ChatEnv pass the wrapper that generates."
        action = find_entry(type(self).__name__, self.action_keys.action[0], advice, env.full_action_spec)
        return Unbounded(action.shape, device=env.device)


class RowReference(Reference):
    """Scores the agent's tokens of whole rows: one pass of the trunk, the head at decisions only.

    For batches of rows, in a replay buffer or as ``postproc`` after a conversion to rows. A language actor gives the
    plain distribution over all tokens at temperature 1. An :class:`~torchrl_lang.modules.UtteranceActor` gives the one
    that it acts by, with its temperature, filters, forbidden tokens and forced end, which compares with the
    ``token_log_prob`` of acting.

    The log-probability is float ``[*B, T]``, at the tokens that the agent wrote, zero on all others.

    Args:
        frozen: the actor, see :func:`~torchrl_lang.transforms.frozen_copy`.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_lang.modules import causal_lm, language_actor
        >>> from torchrl_lang.transforms import RowReference, frozen_copy
        >>> lm = causal_lm(vocab_size=12, layers=1, width=16, heads=2, max_length=8)
        >>> rows = TensorDict(
        ...     tokens=torch.tensor([[4, 1, 2, 9, 0]]),
        ...     attention_mask=torch.tensor([[True, True, True, True, False]]),
        ...     agent_mask=torch.tensor([[False, True, True, False, False]]),
        ...     batch_size=[1],
        ... )
        >>> RowReference(frozen_copy(language_actor(lm))).log_prob(rows, rows) < 0
        tensor([[False,  True,  True, False, False]])
    """

    frozen: HeldActor

    def __init__(self, frozen: HeldActor) -> None:
        self.frozen = frozen
        self.scorer = RowScorer(frozen.actor)
        self.action_keys = ActionKeys.row()
        self.in_keys = [*frozen.actor.in_keys, AGENT_MASK]

    def log_prob(self, tensordict: TensorDictBase, carry: TensorDictBase) -> Tensor:
        """See :class:`Reference`."""
        with self.frozen.eval_mode():
            return row_log_prob(self.frozen.actor, tensordict)

    def log_prob_spec(self, env: EnvBase, specs: Composite) -> TensorSpec:
        """See :class:`Reference`; not for the steps of an environment."""
        raise ValueError(f"{type(self).__name__} scores whole rows; in an environment pass an UtteranceActor.")


class WrapperReference(Reference):
    """The model of a ``TransformersWrapper``, on TorchRL's layout of conversations.

    It reads ``("tokens", "full")``, ``("masks", "all_attention_mask")`` and, with ``assistant_only``,
    ``("masks", "all_assistant_mask")``, each dense and padded on either side. The log-probability is float ``[*B, T]``
    as TorchRL's ``("log_probs", "full")`` is, zero on padding, on the first token and on tokens that are not scored.
    The wrapper itself is not called: its model runs as a :func:`~torchrl_lang.modules.language_actor`, with logits at
    the scored tokens only.

    For the rows of this library pass ``RowReference(frozen_copy(language_actor(wrapper.model)))``; for an engine that
    is no ``nn.Module`` (vLLM, SGLang) a :class:`FunctionReference` that calls the wrapper.

    Args:
        wrapper: one of TorchRL's wrappers, of which the model is frozen; or a :class:`FrozenActor` of a language actor,
            e.g. ``adapters_off(language_actor(wrapper.model))``.
        assistant_only: score the tokens of ``("masks", "all_assistant_mask")`` only.

    Raises:
        TypeError: the wrapper's model is no module.
        KeyError: on calls, an entry is missing.
        ValueError: on calls, the data are no conversations padded to one length.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from tokenizers import Tokenizer, models
        >>> from torchrl.modules.llm import TransformersWrapper
        >>> from torchrl_lang.modules import causal_lm
        >>> from torchrl_lang.transforms import ReferenceModelLogProbTransform
        >>> from transformers import PreTrainedTokenizerFast
        >>> words = Tokenizer(models.WordLevel({"<pad>": 0, "a": 1, "b": 2}, unk_token="<pad>"))
        >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>")
        >>> lm = causal_lm("qwen2", vocab_size=3, layers=1, width=8, heads=2, max_length=8)
        >>> wrapper = TransformersWrapper(lm, tokenizer=tokenizer, input_mode="tokens", generate=False)
        >>> tokens, mask = torch.tensor([[0, 1, 2, 1]]), torch.tensor([[False, True, True, True]])
        >>> masks = {"all_attention_mask": mask, "all_assistant_mask": torch.tensor([[False, False, True, True]])}
        >>> data = TensorDict(tokens={"full": tokens}, masks=masks, batch_size=[1])
        >>> ReferenceModelLogProbTransform(wrapper)(data)["ref_log_probs", "full"] < 0
        tensor([[False, False,  True,  True]])
    """

    frozen: HeldActor

    def __init__(self, wrapper: Any, *, assistant_only: bool = True) -> None:
        self.frozen = _held(wrapper)
        self.mask = _ASSISTANT if assistant_only else _ATTENTION
        kept = _ASSISTANT if assistant_only else None
        self.action_keys = ActionKeys(
            (_TOKENS,), (("log_probs", "full"),), REWARD, ("ref_log_probs", "full"), mask=kept
        )
        self.in_keys = [_TOKENS, _ATTENTION, self.mask]

    def log_prob(self, tensordict: TensorDictBase, carry: TensorDictBase) -> Tensor:
        """See :class:`Reference`."""
        name, advice = type(self).__name__, "It is part of TorchRL's layout of scored conversations. "
        advice += _GENERATED
        try:
            tokens, attention, scored = (find_entry(name, key, advice, tensordict) for key in self.in_keys)
        except (RuntimeError, ValueError) as error:  # a lazy stack without a common shape; "tokens" is a tensor
            what = "These are no conversations of one length: make them with pad_output=True. "
            raise ValueError(what + _GENERATED) from error
        order = (~attention.bool()).long().argsort(dim=-1, stable=True)  # [*B, T], moves padding behind the tokens
        entries = {TOKENS: tokens, ATTENTION_MASK: attention.bool(), AGENT_MASK: scored.bool() & attention.bool()}
        rows = TensorDict({key: value.gather(-1, order) for key, value in entries.items()}, tokens.shape[:-1])
        with self.frozen.eval_mode():
            log_prob = row_log_prob(self.frozen.actor, rows)
        return torch.zeros_like(log_prob).scatter(-1, order, log_prob)

    def log_prob_spec(self, env: EnvBase, specs: Composite) -> TensorSpec:
        """See :class:`Reference`; not for the steps of an environment."""
        raise ValueError(f"{type(self).__name__} scores whole conversations. {_GENERATED}")


class ResponseReference(Reference):
    """The model of a ``TransformersWrapper``, on the responses in the steps of TorchRL's ``ChatEnv``.

    It reads ``("tokens", "prompt")`` and ``("tokens", "response")`` as a wrapper with ``generate=True`` and
    ``pad_output=False`` writes them. The log-probability is float ``[*B, 1]``, of the whole response, at temperature 1
    over the whole vocabulary. That of the policy is computed in the same way, ``KLConstrainedTransform(wrapper,
    policy=wrapper)``, because those that a ``TransformersWrapper`` writes are 0 for the first token of each response.
    Those of an engine are summed: ``log_prob_key=("log_probs", "response")``. For penalties token by token make rows of
    the steps, :func:`~torchrl_lang.data.rows_from_chat`. With several conversations the wrapper's ``generate_kwargs``
    need a ``"pad_token_id"``: without, transformers fills responses that end first with end tokens, which count here.

    Args:
        wrapper: one of TorchRL's wrappers, of which the model is frozen; or a :class:`FrozenActor` of a language actor.

    Raises:
        TypeError: the wrapper's model is no module.
        ValueError: on calls, the tokens are padded, or a response is empty.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_lang.modules import causal_lm, language_actor
        >>> from torchrl_lang.transforms import frozen_copy
        >>> from torchrl_lang.transforms.language_references import ResponseReference
        >>> actor = language_actor(causal_lm(vocab_size=3, layers=1, width=8, heads=2, max_length=8))
        >>> tokens = {"prompt": torch.tensor([[0, 1], [1, 1]]), "response": torch.tensor([[2], [0]])}
        >>> steps = TensorDict(tokens=tokens, batch_size=[2])
        >>> ResponseReference(frozen_copy(actor)).log_prob(steps, steps).shape
        torch.Size([2, 1])
    """

    frozen: HeldActor

    def __init__(self, wrapper: Any) -> None:
        self.frozen = _held(wrapper)
        self.action_keys = ActionKeys((), (_RESPONSE_LOG_PROB,), REWARD)
        self.in_keys = [("tokens", "prompt"), ("tokens", "response")]

    def log_prob(self, tensordict: TensorDictBase, carry: TensorDictBase) -> Tensor:
        """See :class:`Reference`."""
        for key in self.in_keys:
            if key not in tensordict.keys(True):
                advice = "A wrapper that generates writes it. Scored conversations need WrapperReference(wrapper), "
                raise missing_entry(type(self).__name__, [key], tensordict, advice + "rows a RowReference.")
        with self.frozen.eval_mode():
            log_prob = row_log_prob(self.frozen.actor, rows_of_responses(tensordict))
        return log_prob.sum(-1).reshape(*tensordict.batch_size, 1)

    def log_prob_spec(self, env: EnvBase, specs: Composite) -> TensorSpec:
        """See :class:`Reference`."""
        return Unbounded((*env.batch_size, 1), device=env.device)


def _held(wrapper: Any) -> HeldActor:
    """The frozen model of a wrapper."""
    if isinstance(wrapper, HeldActor):
        return wrapper
    if not is_wrapper(wrapper) or not isinstance(wrapper.model, nn.Module):
        raise TypeError("It takes a wrapper of an nn.Module; for other engines pass a FunctionReference.")
    return frozen_copy(language_actor(wrapper.model))


def as_reference(
    reference: Any,
    *,
    in_keys: Sequence[NestedKey] | None = None,
    action_key: NestedKey | Sequence[NestedKey] | None = None,
) -> Reference:
    """Convert an actor, a key or a function to a reference.

    ======================================================  ==========================================================
    given                                                    becomes
    ======================================================  ==========================================================
    a :class:`Reference`                                     itself
    an actor with ``get_dist``                               a frozen copy, scored by the kind of actor:
    ... an :class:`~torchrl_lang.modules.UtteranceActor`     :class:`UtteranceReference`, an utterance a step; for whole
                                                             rows pass ``RowReference(frozen_copy(actor))``
    ... a :class:`~torchrl_lang.modules.LanguageActor`       :class:`RowReference`, whole rows at temperature 1 over the
                                                             whole vocabulary, which is not how an utterance actor acts
    ... any other, whatever entries it reads                 :class:`ActorReference`, one action a step
    a :class:`FrozenActor`                                   the same, with what it shares
    a language-model wrapper of TorchRL                      :class:`ResponseReference` if it generates, else
                                                             :class:`WrapperReference`
    a key (string or tuple)                                  :class:`ColumnReference`
    a function of the tensordict                             :class:`FunctionReference`
    ======================================================  ==========================================================

    Args:
        reference: one of these.
        in_keys: the entries that an actor of one action a step or a function reads, default all that it declares.
        action_key: the key of the action, default as the actor writes it.

    Raises:
        TypeError: it is none of these, or an actor without a distribution, such as TorchRL's ``Actor``.
        ValueError: the actor is recurrent and its state cannot be carried, see :class:`ActorReference`; or ``in_keys``
            or ``action_key`` stand beside something that has its own: a language model, a column, a
            :class:`Reference`.
    """
    if is_wrapper(reference):
        reference = (ResponseReference if reference.generate else WrapperReference)(reference)
    elif isinstance(reference, (str, tuple)):
        reference = ColumnReference(reference)
    if isinstance(reference, TensorDictModuleBase) and hasattr(reference, "get_dist"):
        reference = frozen_copy(reference)
    if isinstance(reference, FrozenActor):
        kind = _kind_of(reference)
        if kind is ActorReference:
            return ActorReference(reference, in_keys=in_keys, action_key=action_key)
        reference = kind(reference)
    if isinstance(reference, Reference):
        if in_keys is not None or action_key is not None:
            raise ValueError(f"in_keys and action_key are for actors: a {type(reference).__name__} has its own.")
        return reference
    if callable(reference) and not isinstance(reference, (nn.Module, type)):
        action_keys = None if action_key is None else ActionKeys.of_action(action_key)
        return FunctionReference(reference, in_keys=in_keys or (), action_keys=action_keys)
    expected = "an actor with get_dist, a FrozenActor, a function of the tensordict, a key or a Reference"
    raise TypeError(f"A reference is {expected}, got {reference!r:.80}.")


def as_policy(policy: Any, *, rows: bool = False) -> Reference:
    """The actor that trains, run without a copy whenever a divergence needs it.

    Args:
        policy: the actor; or a :class:`Reference` of a ``CurrentPolicy``.
        rows: score whole rows.
    """
    if is_wrapper(policy):
        return (ResponseReference if policy.generate else WrapperReference)(CurrentPolicy(language_actor(policy.model)))
    if isinstance(policy, TensorDictModuleBase) and hasattr(policy, "get_dist"):
        policy = CurrentPolicy(policy)
    if isinstance(policy, CurrentPolicy):
        return (RowReference if rows else _kind_of(policy))(policy)
    if not (isinstance(policy, Reference) and isinstance(policy.frozen, CurrentPolicy)):
        raise TypeError(f"policy= is the actor that trains, with get_dist(tensordict); got {type(policy).__name__}.")
    return policy


def _kind_of(held: HeldActor) -> Callable[[HeldActor], Reference]:
    """How an actor is scored, by its class."""
    if isinstance(held.actor, UtteranceActor):
        return UtteranceReference
    return RowReference if isinstance(held.actor, LanguageActor) else ActorReference
