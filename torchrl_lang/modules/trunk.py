"""The trunk: a Hugging Face causal language model as a function from rows of tokens to hidden states."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torch._C._functorch import is_batchedtensor, is_functorch_wrapped_tensor
from torch._subclasses import FakeTensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from torchrl_lang.modules.features import FeatureEmbedding, RowFeatures, behind
from torchrl_lang.modules.frozen.frozen_states import carried, frozen_blocks, lower_part, states_name, upper_part
from torchrl_lang.modules.hugging_face import (
    applies_dropout,
    cache_obstacle,
    check_causal,
    depends_on_length,
    eval_mode,
    hidden_size,
    positions,
    trunk_obstacle,
)
from torchrl_lang.modules.row_groups import SharedPrefix, equal_groups, shared_prefix
from torchrl_lang.modules.row_groups import length_groups as best_groups
from torchrl_lang.modules.sharding import refuse_untied, run_through, whole_weight
from torchrl_lang.schema import ATTENTION_MASK, FEATURES, FEATURES_MASK, FROZEN_STATES, TOKENS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from torchrl_lang.modules.returns import ReturnEmbedding

HIDDEN = "hidden"


class Trunk(nn.Module):
    """A Hugging Face causal language model without its head.

    Rows are padded on the right and attention is causal, so a real token never attends to padding. The model therefore
    needs no attention mask and runs on the fast causal kernel; its states on padding are never used.

    The model may be sharded over processes: apply :func:`torch.distributed.fsdp.fully_shard` to its blocks and then to
    the language model, before or after building the trunk. Every process then makes the same number of forward passes.
    Value heads are not part of the language model, so average their gradients yourself, and those of the embeddings of
    returns and features.

    Args:
        lm: a causal language model (its head is not used) or the headless model, with or without PEFT adapters. It is
            not copied.
        length_groups: run the rows of a batch in groups of similar length, each trimmed to its longest row, to compute
            less on padding; the states are the same. ``"auto"`` finds the cheapest groups, see
            :func:`~torchrl_lang.modules.row_groups.length_groups`; a number makes that many of equal size; 1 runs
            all rows together. Groups need an attention mask, and synchronize with the device to read the lengths. Under
            ``torch.compile`` of a caller ``"auto"`` is 1; any number is for a sharded model and under ``torch.vmap``.
        share_prefixes: where it saves enough, read tokens once that several rows begin with, such as instructions, see
            :func:`~torchrl_lang.modules.row_groups.shared_prefix`; states and gradients are the same. Off for models
            that cannot read rows in chunks or apply dropout, that are sharded or compiled, for rows with
            features, with gradient checkpointing, and where rotary positions depend on the length of the rows.

    Raises:
        TypeError: ``lm`` is not a Hugging Face model.
        ValueError: the model is not causal (checked by a forward pass, if it can run where it is) or has PEFT
            prompts; on calls, rows are longer than the model's positions.

    Examples:
        >>> import torch
        >>> from torchrl_lang.modules import Trunk, causal_lm
        >>> trunk = Trunk(causal_lm(vocab_size=11, layers=1, width=8, heads=2, max_length=16))
        >>> tokens = torch.randint(11, (3, 5))
        >>> trunk(tokens, torch.ones(3, 5, dtype=torch.bool)).shape
        torch.Size([3, 5, 8])
    """

    def __init__(
        self, lm: PreTrainedModel, *, length_groups: int | Literal["auto"] = "auto", share_prefixes: bool = True
    ) -> None:
        from transformers import PreTrainedModel  # a local import, because it takes a second

        super().__init__()
        model = unwrapped(lm)
        if not isinstance(model, PreTrainedModel):
            raise TypeError(f"A trunk needs a Hugging Face model, got {type(lm).__name__}: use load_causal_lm().")
        if (obstacle := trunk_obstacle(model)) is not None:
            raise ValueError(f"{type(model).__name__} {obstacle}: give a causal language model of text alone.")
        self.model = model.base_model
        self.returns: ReturnEmbedding | None
        self.register_module("returns", None)  # see condition_on_returns
        self.features: FeatureEmbedding | None
        self.register_module("features", None)  # see with_features
        # A tuple, so that its modules are not registered.
        self._owners: tuple[Any, ...] = (lm, model, self.model)
        check_causal(self.model)
        self.length_groups = length_groups
        self.share_prefixes = share_prefixes and not depends_on_length(self.model.config)
        self._compile_options: dict[str, Any] | None = None
        self._compiled: dict[tuple[bool, ...], Callable[..., Tensor]] = {}  # by mode

    @property
    def width(self) -> int:
        """``H``, the width of a hidden state."""
        return hidden_size(self.model.config)

    @property
    def vocab_size(self) -> int:
        """``V``, the number of the model's embeddings."""
        return int(self.model.get_input_embeddings().weight.shape[0])

    @property
    def max_length(self) -> int | None:
        """Number of positions of the model, ``None`` if unlimited."""
        return positions(self.model.config)

    @property
    def sharded_root(self) -> nn.Module | None:
        """The language model, if :func:`torch.distributed.fsdp.fully_shard` has sharded its weights; else None."""
        found: Any = (owner for owner in self._owners if isinstance(owner, FSDPModule))
        return next(found, None)

    @property
    def cache_obstacle(self) -> str | None:
        """Why rows cannot be read incrementally with a cache, in words; None if they can."""
        return cache_obstacle(self.model)

    @property
    def compiled(self) -> bool:
        """Whether :meth:`compile` was called."""
        return self._compile_options is not None

    def gradient_checkpointing(self, enabled: bool = True) -> Trunk:
        """Recompute each layer in the backward pass instead of storing its activations; effective in training mode."""
        named = hasattr(self.model, "activation_checkpointing_enable")  # the newer name of the same in transformers
        name = f"{'activation' if named else 'gradient'}_checkpointing_{'enable' if enabled else 'disable'}"
        getattr(self.model, name)(*([{"use_reentrant": False}] if enabled else []))
        return self

    def compile(self, **options: Any) -> Trunk:  # type: ignore[override]
        """Compile the model with :func:`torch.compile`; replaces ``torch.nn.Module.compile``.

        Whole rows and decoding steps of one token per row then run compiled, for all numbers and lengths of rows;
        prompts and replies that are added to a cache do not. Each is compiled at its first call, which takes from
        seconds to minutes, and again for each mode: with and without gradients, training and evaluation, autocast,
        inference mode, and for a single row or token. Weights are not moved; copies and pickles of the trunk are
        compiled again.

        On a CPU decoding with GPT-2 does not need it: its steps use faster code than the model's own.

        Args:
            **options: options of :func:`torch.compile`; ``dynamic=True`` by default. ``backend="eager"`` needs no
                compiler.
        """
        self._compile_options, self._compiled = {"dynamic": True} | options, {}
        return self

    def forward(
        self,
        tokens: Tensor,
        attention_mask: Tensor | None = None,
        features: Tensor | None = None,
        features_mask: Tensor | None = None,
        frozen: TensorDictBase | None = None,
    ) -> Tensor:
        """Hidden state of every token.

        Args:
            tokens: int64 ``[*B, T]``, right-padded; with an embedding of returns also ids that carry returns, see
                :class:`~torchrl_lang.modules.ReturnEmbedding`.
            attention_mask: bool ``[*B, T]``; used only for ``length_groups``.
            features: float ``[*B, P, F]``, features that are read before the tokens, for a trunk with a
                :class:`~torchrl_lang.modules.FeatureEmbedding`; others take none.
            features_mask: bool ``[*B, P]``, True on real features; default all.
            frozen: what :meth:`frozen_states` gave for these rows. It is read instead of the tokens if this trunk has
                the same lower layers, unchanged; otherwise it is ignored.

        Returns:
            float ``[*B, T, H]``, the state after the final norm, which the language-model head reads.
        """
        read = self._row_features(tokens, features, features_mask)
        flat = tokens.reshape(-1, tokens.shape[-1])
        length = None if attention_mask is None else attention_mask.reshape(flat.shape).sum(-1)
        begin = None if frozen is None or read is not None else self._begin(flat, length, frozen)
        source, part = (flat, None) if begin is None else begin
        states = self._of_batch(flat, length, source, read, part)
        return states.reshape(*tokens.shape, self.width)

    @property
    def frozen_layers(self) -> int:
        """Number of the lowest layers whose output never changes, so that rows can carry :meth:`frozen_states`.

        0 for sharded and compiled models, for those that read returns or features, and where rotary positions depend on
        the length of the rows.
        """
        return frozen_blocks(self.model) if self._splits else 0

    @property
    def _splits(self) -> bool:
        plain = self.sharded_root is None and not self.compiled and self.returns is None and self.features is None
        return plain and not depends_on_length(self.model.config)

    @torch.no_grad()
    def frozen_states(self, tokens: Tensor, attention_mask: Tensor) -> TensorDict:
        """The states of rows that enter the first trained layer, without dropout, for :meth:`forward`.

        Args:
            tokens: int64 ``[*B, T]``, right-padded.
            attention_mask: bool ``[*B, T]``.

        Returns:
            ``[*B]``, with one entry, whose name stands for the weights: ``states``, float ``[*B, T, H]``, any numbers
            on padding, and ``tokens``, int64 ``[*B, T]``, plus one, 0 on padding: rows of zeros have no states.

        Examples:
            >>> import torch
            >>> from torchrl_lang.modules import Trunk, causal_lm, train_top_layers
            >>> trunk = Trunk(causal_lm("llama", vocab_size=11, layers=3, width=8, heads=2, max_length=16))
            >>> _ = train_top_layers(trunk, 1)
            >>> tokens, mask = torch.randint(11, (3, 5)), torch.ones(3, 5, dtype=torch.bool)
            >>> frozen = trunk.frozen_states(tokens, mask)
            >>> torch.testing.assert_close(trunk(tokens, mask, frozen=frozen), trunk(tokens, mask))
        """
        flat, blocks = tokens.reshape(-1, tokens.shape[-1]), self.frozen_layers
        with eval_mode(self.model):
            length = attention_mask.reshape(flat.shape).sum(-1)
            states = self._of_batch(flat, length, flat, part=lower_part(self.model, blocks))
        shaped = states.reshape(*tokens.shape, self.width)
        return carried(str(states_name(self.model, blocks)), shaped, tokens, attention_mask)

    def _begin(
        self, tokens: Tensor, length: Tensor | None, frozen: TensorDictBase
    ) -> tuple[Tensor, PreTrainedModel] | None:
        """States ``[N, T, H]`` of these tokens and the model that reads on from them; None if they are of others."""
        if torch.compiler.is_compiling() or self._in_step(tokens) or not self._splits:
            return None
        names = [str(key) for key in frozen.keys()]
        if len(names) != 1:  # of several weights, as in a storage, which fills what a row did not have
            return None
        name, blocks = names[0], int(names[0].partition("_")[0])
        if name != states_name(self.model, blocks) or applies_dropout(self.model.modules()):
            return None
        width = tokens.shape[-1]
        own = frozen.get((name, TOKENS)).flatten(0, -2)[:, :width]
        states = frozen.get((name, "states")).flatten(0, -3)[:, :width]
        missing = width - own.shape[1]  # columns of padding
        other = nn.functional.pad(own, (0, missing)) != tokens + 1
        if length is not None:
            other &= torch.arange(width, device=tokens.device) < length[:, None]
        if bool(other.any()):
            return None
        return nn.functional.pad(states, (0, 0, 0, missing)), upper_part(self.model, blocks)

    def room(self, features: int) -> int | None:
        """Number of tokens that fit beside a number of ``features`` of a row, which may be 0; None if unlimited."""
        taken = features if self.features is not None and self.features.positions else 0
        return None if self.max_length is None else self.max_length - taken

    def position_ids(self, slots: Tensor, count: Tensor) -> Tensor | None:
        """The positions of places, int64 ``[N, q]``, in rows with ``count`` features; None if these are the places."""
        if self.features is None or self.features.positions:
            return None
        last = None if self.max_length is None else self.max_length - 1  # padding may lie behind
        return (slots - count[:, None]).clamp(0, last)

    def _row_features(self, tokens: Tensor, features: Tensor | None, mask: Tensor | None) -> RowFeatures | None:
        if self.features is not None and features is None:
            raise KeyError(f"This trunk reads features: a row needs '{FEATURES}', float [*B, P, F], beside its tokens.")
        if self.features is None and features is not None:
            raise ValueError("This trunk reads no features: use with_features(actor, FeatureEmbedding(...)).")
        read = None if features is None else RowFeatures.of(features, mask, tokens.shape[:-1])
        places = 0 if read is None else read.places
        if (room := self.room(places)) is not None and tokens.shape[-1] > room:
            rows = f"Rows of {tokens.shape[-1]} tokens" + (f" beside {places} features" if places else "")
            needed = tokens.shape[-1] + (self.max_length or 0) - room
            remedy = f"a model with max_length={needed}, or row_length={room} (on_overflow='truncate' cuts dialogues)"
            raise ValueError(f"{rows} exceed the model's {self.max_length} positions: give {remedy}.")
        return read

    def _of_batch(
        self,
        tokens: Tensor,
        length: Tensor | None,
        source: Tensor,
        features: RowFeatures | None = None,
        part: PreTrainedModel | None = None,
    ) -> Tensor:
        """States of rows ``[N, T]``, read as ``source``, tokens or states ``[N, T, H]``, by a part of the model."""
        found = self._shared(tokens, length) if features is None else None
        if found is None:
            return self._grouped(source, length, lambda x, rows: self._of_rows(x, features, rows, part))
        from torchrl_lang.modules.decoding.cache import PrefixKeys  # transformers

        keys, cut, group = PrefixKeys(found.width), found.width, found.group
        front = self.states(source[found.first, :cut], part=part, past_key_values=keys, use_cache=True)
        rest = self._grouped(
            source[:, cut:],
            None if length is None else (length - cut).clamp_min(0),
            lambda x, rows: keys.follow(self, x, group if rows is None else group[rows], part=part),
        )
        return torch.cat([front.index_select(0, group), rest], 1)

    def _of_rows(
        self, tokens: Tensor, features: RowFeatures | None, rows: Tensor | None, part: PreTrainedModel | None
    ) -> Tensor:
        """States of the tokens of whole rows ``[N, T]``, which are these ``rows`` of those with ``features``."""
        if features is None:
            return self.states(tokens, part=part, use_cache=False)
        features = features if rows is None else features.select(rows)
        options: dict[str, Any] = {}
        place = torch.arange(features.places + tokens.shape[-1], device=tokens.device)
        if (positions := self.position_ids(place, features.number)) is not None:
            # Without a mask transformers would take repeated positions for the beginnings of further rows.
            options = {"position_ids": positions, "attention_mask": torch.ones_like(positions, dtype=torch.bool)}
        states = self.states(tokens, features=features, use_cache=False, **options)
        return behind(states, features.number, tokens.shape[-1])

    def _grouped(
        self, tokens: Tensor, length: Tensor | None, read: Callable[[Tensor, Tensor | None], Tensor]
    ) -> Tensor:
        """States ``[N, T, H]`` group by group, zero on padding outside the groups' widths.

        ``read`` computes those of tokens ``[M, w]`` of the given rows, int64 ``[M]``, or of all.
        """
        together = torch.compiler.is_compiling() if self.length_groups == "auto" else False
        whole = together or self._in_step(tokens)
        groups = 1 if whole else self.length_groups
        if length is None or groups == 1 or tokens.shape[0] < 2:
            return read(tokens, None)
        found = best_groups(length) if groups == "auto" else equal_groups(length, groups)

        def padded(states: Tensor) -> Tensor:
            return nn.functional.pad(states, (0, 0, 0, tokens.shape[1] - states.shape[1]))

        if len(found) == 1:  # all rows, in their order
            return padded(read(tokens[:, : found[0][1]], None))
        parts = [padded(read(tokens[rows, :longest], rows)) for rows, longest in found]
        return torch.cat(parts).index_select(0, torch.cat([rows for rows, _ in found]).argsort())

    def _in_step(self, tokens: Tensor) -> bool:
        """Whether the number of passes must not depend on the tokens.

        Each process has its own rows, but all must make the same number of forward passes of a sharded model.
        """
        return self.sharded_root is not None or is_batchedtensor(tokens)

    def _shared(self, tokens: Tensor, length: Tensor | None) -> SharedPrefix | None:
        """Find what rows ``[N, T]`` begin with in common, if it is to be read once."""
        if not self.share_prefixes or self.compiled or torch.compiler.is_compiling() or self._in_step(tokens):
            return None
        if is_functorch_wrapped_tensor(tokens) or isinstance(tokens, FakeTensor) or tokens.is_meta:
            return None  # the rows cannot be looked at
        if self.cache_obstacle is not None or (found := shared_prefix(tokens, length)) is None:
            return None
        modules = list(self.model.modules())
        recomputes = any(module.training and getattr(module, "gradient_checkpointing", False) for module in modules)
        return None if recomputes or applies_dropout(modules) else found

    def states(self, tokens: Tensor, **kwargs: Any) -> Tensor:
        """Run the model on int64 ``[N, q]`` with any of its options, such as a cache and explicit positions.

        Tokens may be embedded already, float ``[N, q, H]``. With ``features`` these are read in front of the tokens. A
        ``part`` of the model runs instead of it.

        Returns:
            ``hidden`` ``[N, q, H]``; with features also of these.
        """
        step = "past_key_values" in kwargs
        # Prompts that are added to a cache, the first token of rows included, are not compiled.
        if self._compile_options is None or (step and (tokens.shape[1] != 1 or kwargs.get("position_ids") is None)):
            return self._run(tokens, **kwargs)
        autocast = torch.is_autocast_enabled(tokens.device.type)
        mode = (step, self.model.training, torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast)
        if mode not in self._compiled:
            self._compiled[mode] = torch.compile(_of_this_mode(self._run), **self._compile_options)
        return self._compiled[mode](tokens, **kwargs)

    def _run(self, tokens: Tensor, **kwargs: Any) -> Tensor:
        root = self.sharded_root
        if root is None:
            return self._pass(tokens, **kwargs)
        if root is self.model and self._owners[0] is not root:
            refuse_untied(root)
        return run_through(root, self._pass, tokens, **kwargs)

    def _pass(
        self, tokens: Tensor, features: RowFeatures | None = None, part: PreTrainedModel | None = None, **kwargs: Any
    ) -> Tensor:
        # Look up embeddings here, because some models warn and synchronize if ids contain padding without a mask.
        embedded = tokens if tokens.is_floating_point() else self.embed(tokens, features)
        model = self.model if part is None else part
        return model(inputs_embeds=embedded, **kwargs).last_hidden_state

    def embed(
        self, tokens: Tensor, features: RowFeatures | None = None, embedding: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """Embeddings ``[N, T, H]`` of tokens and the returns that they carry; behind those of features, if given."""
        if embedding is None:
            module = self.model.get_input_embeddings()
            if isinstance(module.weight, DTensor) and not isinstance(module, FSDPModule):
                whole_weight(module)  # raises
            embedding = module
        embedded = embedding(tokens) if self.returns is None else self.returns.embed(tokens, embedding, self.vocab_size)
        if features is None or self.features is None:
            return embedded
        return self.features.embed(features, embedded, getattr(self.model, "wpe", None))

    def __getstate__(self) -> dict[str, Any]:
        # The language model around this one is not copied, so a copy has no owner but itself.
        return dict(super().__getstate__()) | {"_owners": (), "_compiled": {}}


def unwrapped(lm: Any) -> Any:
    """The Hugging Face model inside a PEFT model, which computes with its adapters; other models are not changed.

    Raises:
        ValueError: the adapters are learnt prompts, which are not inside the model.
    """
    if not hasattr(lm, "get_base_model"):
        return lm
    if getattr(getattr(lm, "active_peft_config", None), "is_prompt_learning", False):
        raise ValueError("Learnt prompts are not part of the model's layers: use adapters such as LoRA.")
    return lm.get_base_model()


def trunk_of(module: nn.Module | None) -> Trunk | None:
    """The trunk that a module of tensordicts wraps; None if it wraps something else."""
    trunk = getattr(module, "module", None)
    return trunk if isinstance(trunk, Trunk) else None


def first_trunk(module: nn.Module) -> Trunk | None:
    """The first trunk of an actor or of a loss with one: an actor's own."""
    return next((child for child in module.modules() if isinstance(child, Trunk)), None)


def trunk_module(trunk: Trunk) -> TensorDictModule:
    """The trunk as a module of tensordicts: ``tokens``, ``attention_mask`` -> ``hidden``.

    It reads ``features`` and ``features_mask``, too, if the trunk has a
    :class:`~torchrl_lang.modules.FeatureEmbedding`.

    Examples:
        >>> from torchrl_lang.modules import Trunk, causal_lm
        >>> from torchrl_lang.modules.trunk import trunk_module
        >>> module = trunk_module(Trunk(causal_lm(vocab_size=11, layers=1, width=8, heads=2, max_length=16)))
        >>> module.in_keys, module.out_keys
        (['tokens', 'attention_mask'], ['hidden'])
    """
    in_keys = [TOKENS, ATTENTION_MASK, *([] if trunk.features is None else [FEATURES, FEATURES_MASK])]
    return _TrunkModule(trunk, in_keys=in_keys, out_keys=[HIDDEN])


class _TrunkModule(TensorDictModule):
    """Hands the trunk the states that rows carry. They are no ``in_keys``, which a caller would have to give."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], TensorDictBase) and FROZEN_STATES in args[0].keys():
            kwargs["frozen"] = args[0].get(FROZEN_STATES)
        return super().forward(*args, **kwargs)


def _of_this_mode(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function that runs another one, with a code object of its own.

    Dynamo caches compiled code per code object, a few of each, and ignores hooks: each model and mode needs its own.
    """

    def compiled(tokens: Tensor, **kwargs: Any) -> Tensor:
        return run(tokens, **kwargs)

    compiled.__code__ = compiled.__code__.replace()
    return compiled
