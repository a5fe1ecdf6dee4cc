"""The policy of a language task: generates one utterance for each row, and its distribution."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModuleBase, dispatch
from torch import Tensor, nn
from torch.distributions import Distribution, constraints

from torchrl_lang import schema
from torchrl_lang._checks import Count, checked, have_shapes, no_tokenizer
from torchrl_lang._random_stream import RandomStream
from torchrl_lang.modules.decoding.decoder import Decoder, Method
from torchrl_lang.modules.decoding.guidance import ValueGuidance
from torchrl_lang.modules.decoding.next_token import NextTokenDistribution, StopStrings
from torchrl_lang.modules.decoding.prefix_cache import PrefixCache
from torchrl_lang.modules.features import RowFeatures
from torchrl_lang.modules.frozen.kept_states import KeptStates
from torchrl_lang.modules.head_values import STATE_VALUE
from torchrl_lang.modules.hugging_face import is_stochastic
from torchrl_lang.modules.row_scoring import DecisionBatch, RowScorer
from torchrl_lang.schema import ACTION, ATTENTION_MASK, DONE, TOKEN_LOG_PROB, TOKENS, ControlTokens, entry


class UtteranceDistribution(Distribution):
    """Utterances of up to ``K`` tokens, int64 ``[*B, K]``, as continuations of rows.

    ``log_prob`` reads row and utterance in one pass, without a cache and with gradients. It equals the log-probability
    from decoding, except that decoding uses evaluation mode and this the model's current mode, so dropout in training
    mode makes them differ. Impossible utterances (with a forbidden or filtered token, or without an end) have ``-inf``;
    tokens after the end are ignored.

    Everything is computed when it is asked for, with the tensors that were the model's weights at construction (unless
    the model is sharded): TorchRL's losses replace a policy's weights, such as those of ``delay_actor=True``, only
    during ``get_dist``.

    Args:
        decoder: generates the utterances.
        tokens: int64 ``[*B, T]``, right-padded.
        attention_mask: bool ``[*B, T]``.
        features: of the rows, flattened, for models that read some.
        mode: ``"greedy"`` or ``"beam"``: the search for the most likely utterance.
    """

    arg_constraints: dict[str, Any] = {}
    support = constraints.independent(constraints.nonnegative_integer, 1)
    has_rsample = False

    def __init__(
        self,
        decoder: Decoder,
        tokens: Tensor,
        attention_mask: Tensor,
        *,
        features: RowFeatures | None = None,
        mode: Method = "greedy",
    ) -> None:
        super().__init__(tokens.shape[:-1], torch.Size([decoder.action_length]), validate_args=False)
        self.decoder, self._mode, self._features = decoder, mode, features
        self.tokens, self.attention_mask = tokens, attention_mask
        self._weights = [] if decoder.sharded else _tensors(decoder)

    def token_log_prob(self, action: Tensor) -> Tensor:
        """Log-probability of each token, int64 ``[*S, *B, K] -> [*S, *B, K]``, where ``S`` are sample dimensions.

        Zero after the end, ``-inf`` if impossible. The last slot of an utterance without an end is impossible.
        """
        return self._read(action, entropy=False)[0]

    def _read(self, action: Tensor, *, entropy: bool) -> list[Tensor]:
        """Log-probability of each token and, if asked for, the entropy of the distribution at its place."""
        shape = (*self.batch_shape, *self.event_shape)
        samples = action.shape[: max(action.ndim - len(shape), 0)]
        have_shapes((ACTION, action, (*samples, *shape)))
        if not action.numel():
            return [torch.zeros(action.shape, device=action.device)] * (1 + entropy)
        flat = action.reshape(-1, action.shape[-1])
        tokens = self.tokens.expand(*samples, *self.tokens.shape).reshape(flat.shape[0], -1).long()
        length = self.attention_mask.sum(-1).expand(*samples, *self.batch_shape).flatten()
        features = self._features
        if features is not None and samples:
            row = torch.arange(self.batch_shape.numel(), device=flat.device)
            features = features.select(row.repeat(samples.numel()))
        prompt = self.decoder.prompt(tokens, length, features)
        is_end = flat == self.decoder.control.end_of_action
        active = (is_end.cumsum(-1) - is_end.long()) == 0  # up to and including the first end
        if self.decoder.stop is not None:  # utterances that stop have padding instead
            active &= (flat == self.decoder.control.pad).cumsum(-1) == 0
        place = length[:, None] + torch.arange(flat.shape[-1], device=flat.device)
        tokens = torch.cat([prompt.tokens, torch.zeros_like(flat)], -1).scatter(-1, place, flat)
        position = torch.arange(tokens.shape[-1], device=flat.device)
        rows = TensorDict(
            tokens=tokens,
            attention_mask=position < (length + active.sum(-1))[:, None],
            agent_mask=torch.zeros_like(tokens, dtype=torch.bool).scatter(-1, place, active),
            batch_size=tokens.shape[:1],
        )
        if features is not None:
            rows.update(features.entries())
        scorer, batch = RowScorer(self.decoder), DecisionBatch.read(rows)
        with _with_weights(self._weights):
            states = scorer.states(batch)
            found = [scorer.log_prob(batch, states), *([scorer.entropy(batch, states)] if entropy else [])]
        return [batch.at_tokens(values).gather(-1, place).reshape(action.shape) for values in found]

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-probability of each utterance, int64 ``[*S, *B, K] -> [*S, *B]``, for any sample dimensions ``S``."""
        return self.token_log_prob(value).sum(-1)

    def entropy(self) -> Tensor:
        """Unbiased estimate of the entropy in nats, ``[*B]``, with an unbiased gradient, from one new utterance a row.

        With ``y`` drawn from the actor's generator and ``H_k`` the exact entropy of token ``k`` given those before it::

            H(pi) = E_y sum_k H_k,    grad H(pi) = E_y sum_k (grad H_k + grad log pi(y_k) sum_{j > k} H_j)

        The second term, whose value is zero, is how a token changes which distributions follow. (A sampled ``-log
        pi(y)`` estimates the same value, but its gradient is zero in expectation.) Each call decodes an utterance for
        each row: where that is too slow, pass ``entropy_bonus=False`` to the loss.
        """
        log_prob, entropy = self._read(self.sample(), entropy=True)
        after = (entropy.sum(-1, keepdim=True) - entropy.cumsum(-1)).detach()
        # Rounding may make a sampled token impossible to the pass over the row.
        log_prob = log_prob.masked_fill(log_prob.isneginf(), 0.0)
        return (entropy + (log_prob - log_prob.detach()) * after).sum(-1)

    def sample(self, sample_shape: torch.Size | list[int] | tuple[int, ...] = ()) -> Tensor:
        """Sample utterances, ``[*sample_shape, *B, K]``, token by token from the actor's generator."""
        shape = torch.Size(sample_shape)
        options: Any = {"method": "sample", "candidates": shape.numel(), "features": self._features}
        with _with_weights(self._weights):
            drawn = self.decoder.generate(self.tokens, self.attention_mask, **options)
        action = drawn.action.reshape(*self.batch_shape, shape.numel(), *self.event_shape)
        return action.movedim(-2, 0).reshape(*shape, *self.batch_shape, *self.event_shape)

    @property
    def mode(self) -> Tensor:
        """The utterance that greedy or beam decoding finds, ``[*B, K]``, not always the most likely one."""
        options: Any = {"method": self._mode, "features": self._features}
        with _with_weights(self._weights):
            found = self.decoder.generate(self.tokens, self.attention_mask, **options)
        return found.action.reshape(*self.batch_shape, *self.event_shape)

    deterministic_sample = mode  # the name by which TorchRL asks for it


def _tensors(module: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    """Every parameter of a module and its submodules with its place.

    ``TensorDict.to_module`` puts tensors that are no parameters where parameters were, as attributes.
    """
    places = ((part, {**part._parameters, **vars(part)}) for part in module.modules())
    return [(part, name, value) for part, found in places for name, value in found.items() if isinstance(value, Tensor)]


@contextmanager
def _with_weights(places: Sequence[tuple[nn.Module, str, Tensor]]) -> Iterator[None]:
    """Put tensors back where :func:`_tensors` found them, inside a ``with`` block."""
    changed = [(vars(part), name, value) for part, name, value in places if getattr(part, name, None) is not value]
    before = [own.get(name) for own, name, _ in changed]
    for own, name, value in changed:
        own[name] = value  # is found before parameters and buffers
    try:
        yield
    finally:
        for (own, name, _), earlier in zip(changed, before, strict=True):
            del own[name]
            if earlier is not None:
                own[name] = earlier


class UtteranceActor(TensorDictModuleBase):
    """Generates one utterance for each row: a policy for ``env.rollout`` and TorchRL's collectors.

    Reads ``tokens`` and ``attention_mask`` ``[*B, T]`` and writes ``action`` int64 ``[*B, K]``, ``action_log_prob``
    float ``[*B]`` and ``token_log_prob`` float ``[*B, K]``, the log-probability under the distribution that was sampled
    from, zero on padding. Nothing of the size of the vocabulary is written. Every utterance ends: the last slot is the
    end-of-action token with probability one, unless ``stop`` ended the utterance. Rows that are done, if the tensordict
    has ``done``, get an empty utterance. Over a model that reads the features of rows, see
    :func:`~torchrl_lang.modules.with_features`, it also reads ``features`` and, where it is there, ``features_mask``.

    With a model that ``fully_shard`` has sharded, each call gathers the weights once and frees them afterwards: all
    processes must call the actor equally often, with any number of rows and tokens.

    Decoding uses no gradients and evaluation mode, and restores the training flags. With TorchRL's
    ``set_exploration_type(ExplorationType.DETERMINISTIC)`` ``"sample"`` and ``"best_of"`` decode greedily.

    Args:
        actor: trunk, head and distribution, see :func:`~torchrl_lang.modules.language_actor`. Any actor with these keys
            works, but only a :class:`~torchrl_lang.modules.Trunk` decodes with a cache.
        control: ids of the control tokens and number of all ids, ``tokenizer.control``.
        action_length: ``K``, the environment's ``action_length``.
        guidance: values that are added to the logits.
        value: also write ``state_value``, see below, with this head over the actor's states: a
            :class:`~torchrl_lang.modules.ValueHead`, or a TensorDictModule that writes ``state_value`` ``[N, 1]``. For
            ``"sample"`` and ``"greedy"``.
        method: ``"sample"``, ``"greedy"``, ``"beam"`` or ``"best_of"`` (samples, ranked). With ``"best_of"`` the
            log-probabilities are those of sampling, without the choice.
        temperature: of the language model's logits; like the filters ``top_k``, ``top_p`` and ``min_p`` it does not
            change the value term.
        top_k: number of tokens to keep.
        top_p: probability to keep.
        min_p: least probability to keep, relative to that of the most likely token: keeps guidance to tokens that the
            data support.
        beams: beam width.
        candidates: number of samples of ``"best_of"``.
        advantage_weight: weight of the summed advantages in the ranking of ``"best_of"``.
        end_value_weight: weight in that ranking of ``min_k Q_k`` of the end of the action: the learned value of the
            whole utterance. Costs a step of decoding for utterances of full length.
        log_prob_weight: weight of the summed log-probabilities in that ranking.
        forbidden: ids that must not be generated; default all control tokens except the end of the action.
        vocab_size: number of ids that may be generated; default all of the tokenizer's, ``control.vocab_size``, because
            a model often has more embeddings.
        seed: seed of the actor's random generator; default from the operating system. A copy or pickle continues with
            the same numbers if a seed was given, so several workers would sample the same; without a seed each copy
            takes a new one.
        generator: the generator itself, instead of ``seed``; copies continue with the same numbers.
        diagnostics: also write ``behavior_log_prob`` (under the language model alone, at temperature 1) and
            ``token_entropy``, both ``[*B, K]``.
        stop: texts after which an utterance stops without an end-of-action token; the environment writes it. For
            ``"sample"`` and ``"greedy"``.
        cached: False reads the whole row for each token, with the same utterances, but slower. Models that cannot read
            rows incrementally do the same, with a warning that gives the reason.
        prefix_cache: keep keys and values from call to call, so that a turn costs only its new tokens; see below.

    With ``prefix_cache`` the actor caches the rows of its last call, including its utterances. It compares the tokens
    of each row with the cached ones at that place of the batch and reads from the first difference: a row that
    continues costs its new tokens, one that was reset is read from its beginning, and so is one whose features have
    changed. A batch of
    another size and any change of the trunks' weights, device, PEFT adapters or autocast (see
    :class:`~torchrl_lang.modules.decoding.prefix_cache.WeightSnapshot`) clear the cache, so the utterances equal
    those of an actor without it, up to rounding. After other changes of a model, such as a new hook that alters a
    layer's output, call :meth:`forget`. For each trunk the cache takes ``2 * layers * key-value width * (P + T + K)``
    numbers per row, until the next batch of another size or :meth:`forget`, and up to 50 MB of working memory for
    GPT-2. Copies and pickles of the actor have an empty cache, and ``state_dict`` does not contain it. Trunks that
    cannot read rows incrementally, and ``cached=False``, do not use it.

    With ``value`` the actor writes ``state_value`` float32 ``[*B, K]``, V of the state in which each token was
    generated: zero on padding, NaN in a forced last slot, whose state is never computed;
    ``PPOLoss.estimate(reuse_values=True)`` replaces NaN by the value that makes its TD error zero. The utterances do
    not change. ``rows_from_rollout(..., carry=["token_log_prob", "state_value"])`` copies the values to rows.

    TorchRL's own losses (``ClipPPOLoss``, ``KLPENPPOLoss`` with ``delay_actor=True``, ``A2CLoss``, ``ReinforceLoss``)
    train the actor on steps of a rollout, an utterance an action, with
    :func:`~torchrl_lang.modules.row_value_module` as their critic. For them it has the members of a
    ``ProbabilisticTensorDictModule``: :meth:`get_dist`, :meth:`log_prob`, ``log_prob_keys``, ``dist_sample_keys``.

    Raises:
        TypeError: ``actor`` has the wrong type.
        ValueError: options contradict each other, a number is not an integer of at least 1, an id is outside the
            model's vocabulary, or a value head does not
            match; on calls, a row is empty, or row and utterance exceed the model's positions.
        KeyError: a trunk does not write what a value head reads; on calls, ``tokens`` or ``attention_mask`` is missing.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_lang.text import CharTokenizer
        >>> from torchrl_lang.modules import UtteranceActor, causal_lm, language_actor
        >>> tokenizer = CharTokenizer.from_alphabet("abc")
        >>> lm = causal_lm(vocab_size=tokenizer.vocab_size, layers=1, width=8, heads=2, max_length=16)
        >>> policy = UtteranceActor(language_actor(lm), tokenizer.control, 4, seed=0)
        >>> rows = TensorDict(tokens=torch.full((2, 6), tokenizer.control.begin_action),
        ...                   attention_mask=torch.arange(6).expand(2, 6) < 1, batch_size=[2])
        >>> out = policy(rows)
        >>> out["action"].shape, out["action_log_prob"].shape
        (torch.Size([2, 4]), torch.Size([2]))
        >>> again = policy.get_dist(rows).log_prob(out["action"])
        >>> torch.testing.assert_close(again, out["action_log_prob"])
    """

    tokenizer = no_tokenizer

    @checked
    def __init__(
        self,
        actor: ProbabilisticTensorDictSequential,
        control: ControlTokens,
        action_length: Count,
        *,
        guidance: ValueGuidance | None = None,
        value: nn.Module | None = None,
        method: Method = "sample",
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        beams: Count = 4,
        candidates: Count = 4,
        advantage_weight: float = 0.0,
        end_value_weight: float = 0.0,
        log_prob_weight: float = 1.0,
        forbidden: Sequence[int] | None = None,
        vocab_size: int | None = None,
        seed: int | None = None,
        generator: torch.Generator | None = None,
        diagnostics: bool = False,
        stop: StopStrings | None = None,
        cached: bool = True,
        prefix_cache: bool = True,
    ) -> None:
        super().__init__()
        if method in ("beam", "best_of") and (value is not None or stop is not None):
            raise ValueError(f"value= and stop= are for method='sample' and 'greedy' only, got method={method!r}.")
        rule = NextTokenDistribution(
            control.forbidden_in_action() if forbidden is None else forbidden,
            vocab_size=control.vocab_size if vocab_size is None else vocab_size,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            guidance=guidance,
        )
        self.method = method
        self._prefix_cache = PrefixCache() if prefix_cache else None
        self.decoder = Decoder(
            actor,
            rule,
            control,
            RandomStream(seed, generator=generator),
            value=value,
            stop=stop,
            action_length=action_length,
            beams=beams,
            candidates=candidates,
            advantage_weight=advantage_weight,
            end_value_weight=end_value_weight,
            log_prob_weight=log_prob_weight,
            diagnostics=diagnostics,
            cached=cached,
        )
        features = [schema.FEATURES, schema.FEATURES_MASK] if self.decoder.reads_features else []
        self.in_keys = [TOKENS, ATTENTION_MASK, *features]
        self._per_token = [ACTION, TOKEN_LOG_PROB]
        self._per_token += [schema.BEHAVIOR_LOG_PROB, schema.TOKEN_ENTROPY] if diagnostics else []
        self._per_token += [] if value is None else [STATE_VALUE]
        self.out_keys = [ACTION, schema.ACTION_LOG_PROB, *self._per_token[1:]]
        self.dist_sample_keys, self.log_prob_keys = [ACTION], [schema.ACTION_LOG_PROB]
        self.log_prob_key = schema.ACTION_LOG_PROB

    @dispatch(auto_batch_size=False)
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write an utterance for every row into ``tensordict``."""
        tokens, attention_mask = entry(tensordict, TOKENS), entry(tensordict, ATTENTION_MASK)
        method = self.method
        if method in ("sample", "best_of") and not is_stochastic():
            method = "greedy"
        features = self.decoder.features(type(self).__name__, tensordict, tokens.shape[:-1])
        options = {"done": tensordict.get(DONE, None), "features": features, "prefix_cache": self._prefix_cache}
        found = self.decoder.generate(tokens, attention_mask, method=method, **options)
        return found.write(tensordict, self._per_token)

    def forget(self) -> None:
        """Free the cached keys and values, and kept states; the next call reads its rows from the beginning."""
        if self._prefix_cache is not None:
            self._prefix_cache.clear()

    def keeping_states(self) -> AbstractContextManager[None]:
        """Keep the states below the first trained layer that calls in this block compute, for training on their rows.

        :func:`~torchrl_lang.modules.with_frozen_states` takes them, in this process, instead of reading these rows
        again. They are kept until the next block or :meth:`forget`, up to a gigabyte of ``H`` numbers for each token,
        and used while the lower layers and the autocast stay as they are. They equal what a pass over whole rows gives,
        up to rounding. A model without frozen layers (see :func:`~torchrl_lang.modules.train_top_layers`), without a
        ``prefix_cache`` or that decodes by code of its own, as GPT-2 does, keeps none.
        """
        return nullcontext() if self._prefix_cache is None else self._prefix_cache.keeping()

    def kept_states(self) -> KeptStates | None:
        """Return what was kept in :meth:`keeping_states`, if anything was."""
        return None if self._prefix_cache is None else self._prefix_cache.kept

    def get_dist(self, tensordict: TensorDictBase, *_: Any, **__: Any) -> UtteranceDistribution:
        """The distribution over utterances at each row, with ``log_prob(action)`` and ``entropy()``, each ``[*B]``.

        The entropy is an unbiased estimate with an unbiased gradient, from one utterance that it decodes for each row.
        """
        mode: Method = "beam" if self.method == "beam" else "greedy"
        tokens, attention_mask = entry(tensordict, TOKENS), entry(tensordict, ATTENTION_MASK)
        features = self.decoder.features(type(self).__name__, tensordict, tokens.shape[:-1])
        return UtteranceDistribution(self.decoder, tokens, attention_mask, features=features, mode=mode)

    def build_dist_from_params(self, tensordict: TensorDictBase) -> UtteranceDistribution:
        """Raise NotImplementedError: the parameters of this distribution are the model's weights, never in the data."""
        raise NotImplementedError(
            f"The data hold no parameters of a {type(self).__name__}'s distribution, which are the model's weights: "
            "build the loss with delay_actor=True, which keeps those of the earlier policy."
        )

    def log_prob(self, tensordict: TensorDictBase, *, dist: Distribution | None = None) -> Tensor:
        """Log-probability of the ``action`` in the tensordict, ``[*B]``, with gradients; by default under its rows."""
        dist = self.get_dist(tensordict) if dist is None else dist
        return dist.log_prob(entry(tensordict, ACTION))
