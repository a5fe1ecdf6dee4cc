"""The schema of a row, which stores one episode of text, and the names of its entries.

An episode is a row of tokens to which the environment and the agent append in turn, right-padded to a fixed width
``T``. Environment observations, training samples and actor inputs use the same entries:

==================  ======================  ====================================================================
key                 dtype, shape            meaning
==================  ======================  ====================================================================
``tokens``          int64 ``[*B, T]``       token ids, right-padded (int32 on disk)
``attention_mask``  bool ``[*B, T]``        True on real tokens
``agent_mask``      bool ``[*B, T]``        True on the agent's tokens, including its end-of-action token
``token_reward``    float32 ``[*B, T]``     reward for writing that token
``action``          int64 ``[*B, K]``       the agent's next utterance, right-padded
==================  ======================  ====================================================================

A row may have features that are no tokens, such as those of an image, the same during the whole episode: ``features``
float ``[*B, P, F]`` and ``features_mask`` bool ``[*B, P]``, True on real features (all are real without it). A model
may read them before the tokens; positions, masks and rewards of the row are those of its tokens.

``reward``, ``done``, ``terminated`` and ``truncated`` are TorchRL's entries, ``[*B, 1]``, one per turn. ``terminated``
means that the task ended, ``truncated`` that a limit ended the episode.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase, is_tensor_collection
from torch import Tensor, nn

TOKENS = "tokens"
ATTENTION_MASK = "attention_mask"
AGENT_MASK = "agent_mask"
TOKEN_REWARD = "token_reward"
ACTION = "action"
ACTION_LOG_PROB = "action_log_prob"
TOKEN_LOG_PROB = "token_log_prob"
BEHAVIOR_LOG_PROB = "behavior_log_prob"
"""float ``[*B, K]``: log-probability of each token of an action under the behaviour policy."""
TOKEN_ENTROPY = "token_entropy"
"""float ``[*B, K]``: entropy of the distribution from which each token of an action was sampled."""
TRAIN_MASK = "train_mask"
"""bool ``[*B, K]`` for an action, ``[*B, T]`` for a row: False on agent tokens excluded from training."""
ENGINE_LOG_PROB = "engine_log_prob"
"""float ``[*B, T]``: log-probability of each agent token that an inference engine reported, beside the trainer's."""
CONTINUED = "continued"
"""bool ``[*B, 1]``: the row continues a game, see :class:`~torchrl_lang.envs.LongGameEnv`."""
GROUP = "group"
"""int64 ``[*B]``: number of the start of an episode, equal for episodes that began alike."""
IS_EXAMPLE = "is_example"
"""bool ``[*B, 1]``: the turn was taken by an example policy, not by the trained policy."""
STATE_POSITION = "state_position"
"""int64 ``[*B, U]``: positions of a row's states, in which the agent was to act; its utterances', then the last."""
STATE_MASK = "state_mask"
"""bool ``[*B, U]``: True for the states that a row has."""
UTTERANCE_FEATURE = "utterance_feature"
"""float32 ``[*B, U, H]``: features of a state and the utterance that was written there."""
CANDIDATE_FEATURE = "candidate_feature"
"""float32 ``[*B, U, C, H]``: features of a state and utterances that a language model could write there."""
CANDIDATE_LOG_PROB = "candidate_log_prob"
"""float32 ``[*B, U, C]``: log-probabilities of these utterances."""
CANDIDATE_MASK = "candidate_mask"
"""bool ``[*B, U]``: True for the states that have candidates."""
DRAWN = "drawn"
"""bool ``[*B, 1]``: the row ends with an utterance that the policy drew in the state of a game and never played."""
FEATURES = "features"
"""float ``[*B, P, F]``: features of a row that are no tokens, such as those of an image."""
FEATURES_MASK = "features_mask"
"""bool ``[*B, P]``: True on real features."""
FROZEN_STATES = "frozen_states"
"""Of rows ``[*B]``: the states ``[*B, W, H]`` that enter the first trained layer of a model, see
:func:`~torchrl_lang.modules.with_frozen_states`; as a tensordict, for the model alone to read."""
OBSERVATION = "observation"
"""The agent's observation in environments without tokens, ``[*B, ...]``."""
REWARD = "reward"
RAW_REWARD = "raw_reward"
"""float: the reward before a divergence penalty was subtracted, with the shape of the reward."""
TARGET_RETURN = "target_return"
"""float ``[*B, 1]``: the return of the whole episode that a policy is asked for."""
PRIVILEGED = "privileged"
"""int64 ``[*B, F]``: privileged information, such as a hidden word, as tokens; only critics read it."""
PRIVILEGED_MASK = "privileged_mask"
"""bool ``[*B, F]``: True on real privileged tokens; absent where all are real."""
DONE = "done"
TERMINATED = "terminated"
TRUNCATED = "truncated"
EPISODE = "episode"
"""int64 ``[*B]``: number of a step's episode in its learning history, from 0."""
EPISODE_STEP = "episode_step"
"""int64 ``[*B]``: number of a step in its episode, from 0."""
ACTION_PARAMETERS = "action_parameters"
"""float ``[*B, P]``: the parameters of a distribution of actions, such as logits."""
PREDICTED_REWARD = "predicted_reward"
"""float ``[*B, 1]``: a model's prediction of the reward of a step's action."""
PREDICTED_OBSERVATION = "predicted_observation"
"""float ``[*B, F]``: its prediction of the next observation; for integers, logits of the components side by side."""
PREDICTED_LOG_PROB = "predicted_log_prob"
"""float ``[*B]``: its prediction of the log-probability of the action under the policy that took it."""

ROW_KEYS = (TOKENS, ATTENTION_MASK, AGENT_MASK, TOKEN_REWARD)
"""The entries of a row, in the order of function arguments and files."""

_OF_ROWS = (TERMINATED, TRUNCATED, DRAWN)
_MASKS = {ATTENTION_MASK, AGENT_MASK, TRAIN_MASK, STATE_MASK, CANDIDATE_MASK, FEATURES_MASK, *_OF_ROWS}


@dataclass(frozen=True)
class ControlTokens:
    """Ids of the tokens that structure a row. No text of the environment or the agent may contain them.

    A row begins with ``begin_state`` if the environment takes the first turn and with ``begin_action`` if the agent
    does. ``end_of_state`` ends a turn of the environment, ``end_of_action`` a turn of the agent (it is part of the
    action), ``end_of_dialogue`` a row whose task has terminated, and ``pad`` fills the rest. ``tokenizer.control`` sets
    ``vocab_size`` to the number of the tokenizer's ids, because a model may have more embeddings.

    Rows of a chat template (:class:`~torchrl_lang.text.ChatTokenizer`) have only ``pad`` and ``end_of_action``: the
    template's strings take the place of the other four, which are -1.

    Args:
        pad, end_of_action, end_of_state, begin_state, begin_action, end_of_dialogue: the ids.
        vocab_size: number of the tokenizer's ids.
        forbidden: further ids that an utterance may not contain.

    Raises:
        ValueError: two ids are the same, one is not below ``vocab_size``, or only some of the last four are given.

    Examples:
        >>> from torchrl_lang.schema import ControlTokens
        >>> control = ControlTokens(pad=0, end_of_action=1, end_of_state=2, begin_state=3, begin_action=4,
        ...                         end_of_dialogue=5)
        >>> sorted(control.ids())
        [0, 1, 2, 3, 4, 5]
        >>> ControlTokens(pad=0, end_of_action=1, forbidden=(7,)).forbidden_in_action()
        (0, 7)
    """

    pad: int
    end_of_action: int
    end_of_state: int = -1
    begin_state: int = -1
    begin_action: int = -1
    end_of_dialogue: int = -1
    vocab_size: int | None = None
    forbidden: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        ids = self.ids()
        every, kinds = (*ids, *self.forbidden), "six control tokens (or pad and end_of_action, of a chat template)"
        if len(ids) not in (2, 6) or len(set(ids)) != len(ids):
            raise ValueError(f"The {kinds} need different ids, got {self}.")
        if min(every) < 0 or (self.vocab_size is not None and max(every) >= self.vocab_size):
            raise ValueError(f"The ids of control tokens lie in [0, vocab_size), got {self}.")

    @property
    def marks_turns(self) -> bool:
        """Whether each turn has control tokens around it; False if the strings of a chat template separate turns."""
        return self.end_of_state >= 0

    def ids(self) -> tuple[int, ...]:
        """The ids of the control tokens, in the order of the fields."""
        return tuple(token for token in astuple(self)[:6] if token != -1)

    def forbidden_in_action(self) -> tuple[int, ...]:
        """Ids that an utterance of the agent may not contain: all but ``end_of_action``."""
        return (*(token for token in self.ids() if token != self.end_of_action), *self.forbidden)


def refuse_steps(tensordict: TensorDictBase, tokens_key: NestedKey = TOKENS) -> None:
    """Raise ValueError if ``tensordict`` holds steps of a rollout instead of rows."""
    if ("next", tokens_key) in tensordict.keys(True):
        raise ValueError("These are steps of a rollout, not rows: convert them with data.rows_from_rollout.")


def check_row(tensordict: TensorDictBase, *, vocab_size: int | None = None) -> None:
    """Raise an error unless ``tensordict`` holds well-formed rows.

    The check reads values and so synchronizes with the device: call it where data enters, not in a training step.

    Args:
        tensordict: has the entries of a row, each ``[*B, T]``, on one device. ``terminated``, ``truncated`` and the
            dtypes and shapes of ``features`` and ``features_mask`` are checked if present.
        vocab_size: if given, every real token must lie in ``[0, vocab_size)``.

    Raises:
        KeyError: an entry is missing.
        TypeError: an entry has the wrong dtype.
        ValueError: shapes differ, padding is not on the right, an agent's token or a reward lies on padding or on a
            token that the agent did not write, a row opens with an agent's token, a reward is not finite, or a token id
            is out of range.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_lang.schema import check_row
        >>> row = TensorDict(
        ...     tokens=torch.tensor([[7, 3, 9, 0]]),
        ...     attention_mask=torch.tensor([[True, True, True, False]]),
        ...     agent_mask=torch.tensor([[False, True, True, False]]),
        ...     token_reward=torch.tensor([[0.0, 0.0, -1.0, 0.0]]),
        ...     batch_size=[1],
        ... )
        >>> check_row(row, vocab_size=10)
        >>> row["agent_mask"][0, 3] = True
        >>> check_row(row)
        Traceback (most recent call last):
            ...
        ValueError: Row 0 has an agent's token on padding at position 3: agent_mask must lie within attention_mask.
    """
    entries = {key: entry(tensordict, key) for key in ROW_KEYS}
    ends = {key: tensordict.get(key) for key in (TERMINATED, TRUNCATED) if key in tensordict.keys()}
    for key, value in (entries | ends).items():
        check_entry(key, value, entries[TOKENS].shape, floats=(torch.float32,))
    if (features := tensordict.get(FEATURES, None)) is not None:
        check_row_features(features, tensordict.get(FEATURES_MASK, None), entries[TOKENS].shape[:-1])
    check_values(*entries.values(), vocab_size=vocab_size)


def check_entry(name: str, value: Tensor, shape: torch.Size, *, floats: Sequence[torch.dtype] = ()) -> None:
    """Raise an error unless an entry has its dtype and the shape that goes with tokens of ``shape``, ``[*B, T]``.

    Args:
        name: its key in this module; numbers are floats of any dtype, or of ``floats``.
        value: the entry.
        shape: ``[*B, T]``; ``terminated``, ``truncated`` and ``drawn`` have ``[*B, 1]``.
        floats: the dtypes that a float may have; all by default.

    Raises:
        TypeError: another dtype.
        ValueError: another shape.
    """
    allowed = (torch.int64, torch.int32) if name == TOKENS else (torch.bool,) if name in _MASKS else floats
    if value.dtype not in allowed and (allowed or not value.is_floating_point()):
        expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed) or "a float"
        raise TypeError(f"{name} must be {expected}, got {value.dtype}: convert it with .to(...).")
    expected_shape = (*shape[:-1], 1) if name in _OF_ROWS else tuple(shape)
    if tuple(value.shape) != expected_shape:
        raise ValueError(f"{name} must have shape {expected_shape} to go with the rows, got {tuple(value.shape)}.")


def check_row_features(features: Tensor, mask: Tensor | None, batch: torch.Size) -> None:
    """Raise an error unless these are features of rows of shape ``batch``; values are not checked.

    Args:
        features: float ``[*B, P, F]``.
        mask: bool ``[*B, P]``, or None.
        batch: ``[*B]``.

    Raises:
        TypeError: an entry has the wrong dtype.
        ValueError: the shapes do not go together.

    Examples:
        >>> import torch
        >>> from torchrl_lang.schema import check_row_features
        >>> check_row_features(torch.zeros(2, 3, 5), torch.ones(2, 3, dtype=torch.bool), torch.Size([2]))
        >>> check_row_features(torch.zeros(2, 5), None, torch.Size([2]))
        Traceback (most recent call last):
            ...
        ValueError: 'features' must be [*B, P, F], P features of each row, got (2, 5) for rows of shape (2,).
    """
    check_entry(FEATURES, features, features.shape)
    if features.ndim != len(batch) + 2 or features.shape[:-2] != batch or not features.shape[-2]:
        found = f"got {tuple(features.shape)} for rows of shape {tuple(batch)}"
        raise ValueError(f"'{FEATURES}' must be [*B, P, F], P features of each row, {found}.")
    if mask is not None:
        check_entry(FEATURES_MASK, mask, features.shape[:-1])


def check_values(
    tokens: Tensor,
    attention_mask: Tensor,
    agent_mask: Tensor,
    token_reward: Tensor | None = None,
    *,
    vocab_size: int | None = None,
    counted: Tensor | None = None,
) -> Tensor:
    """Raise ValueError unless the values of a row's entries are valid; dtypes and shapes are not checked.

    Synchronizes with the device once. The error names the first row and position that break a rule, with rows numbered
    as in a batch flattened to ``[B, T]``.

    Args:
        tokens: int ``[*B, T]``.
        attention_mask: bool ``[*B, T]``.
        agent_mask: bool ``[*B, T]``.
        token_reward: float ``[*B, T]``; None to check no rewards.
        vocab_size: upper limit of the ids of real tokens, exclusive; None for no limit.
        counted: bool ``[*B]``, the rows to check; None for all.

    Returns:
        The tokens, see :func:`refuse`.
    """
    rules = _rules(tokens, attention_mask, agent_mask, token_reward, vocab_size)
    if counted is not None:
        rules = [(broken & counted.reshape(-1, 1), message) for broken, message in rules]
    return refuse(tokens, rules, tokens)


def _rules(
    tokens: Tensor, attention_mask: Tensor, agent_mask: Tensor, token_reward: Tensor | None, vocab_size: int | None
) -> list[tuple[Tensor, str]]:
    """Where rows of ``[B, T]`` break each of the rules of the schema, and what such a row has."""
    shape = (-1, tokens.shape[-1])
    attention, action, number = (x.reshape(shape) for x in (attention_mask, agent_mask, tokens))
    out_of_range = number < 0 if vocab_size is None else (number < 0) | (number >= vocab_size)
    limits = "ids are at least 0" if vocab_size is None else f"ids lie in [0, {vocab_size})"
    right_of_padding = nn.functional.pad(attention[:, 1:] & ~attention[:, :-1], (1, 0))
    at = "at position {position}"
    rules = [
        (right_of_padding, f"a real token right of padding {at}: rows have padding on the right and no holes"),
        (action & ~attention, f"an agent's token on padding {at}: agent_mask must lie within attention_mask"),
        (action[:, :1], "an agent's token at position 0: a loss needs a token before it, such as a control token"),
        (attention & out_of_range, f"a token id out of range {at}: {limits}"),
    ]
    if token_reward is not None:
        reward = token_reward.reshape(shape)
        rules += [
            ((reward != 0) & ~action, f"a reward on a token that the agent did not write {at}"),
            (~reward.isfinite(), f"a reward that is not finite {at}: one such value makes losses NaN"),
        ]
    return rules


# Texts are one line to the operator: torch.compile repeats it in comments of its code for GPUs.
_SEPARATOR = " | "


def refuse(value: Tensor, rules: Sequence[tuple[Tensor, str]], tokens: Tensor) -> Tensor:
    """Raise ValueError if rows break a rule, after one synchronization with the device for all of them.

    Args:
        value: a tensor that is returned as it is. Under ``torch.compile``, where the check is one operator that does
            not interrupt the graph, the caller must read on from what is returned: an unused result is not computed.
        rules: where a rule is broken, bool ``[*B, T]``, and what the first such row has. The text may contain
            ``{position}`` and ``{token}``.
        tokens: int ``[*B, T]``.

    Returns:
        ``value``, a copy of it under ``torch.compile``.

    Examples:
        >>> import torch
        >>> from torchrl_lang.schema import refuse
        >>> tokens = torch.tensor([[4, 5, 6], [7, 8, 9]])
        >>> _ = refuse(tokens, [(tokens > 9, "a large token")], tokens)
        >>> refuse(tokens, [(tokens > 7, "the token {token} at position {position}: write small ones")], tokens)
        Traceback (most recent call last):
            ...
        ValueError: Row 1 has the token 8 at position 1: write small ones.
    """
    if not rules:
        return value
    broken, texts = [broken for broken, _ in rules], [text for _, text in rules]
    if torch.compiler.is_compiling():
        return torch.ops.torchrl_lang.refuse(value, broken, _SEPARATOR.join(texts), tokens)
    _raise_if_broken(broken, texts, tokens)
    return value


def _raise_if_broken(broken: list[Tensor], texts: list[str], tokens: Tensor) -> None:
    found = torch.stack([rule.any() for rule in broken]).tolist()  # the only synchronization with the device
    for is_broken, rule, text in zip(found, broken, texts, strict=True):
        if is_broken:
            row, position = rule.reshape(-1, rule.shape[-1]).nonzero()[0].tolist()
            token = int(tokens.reshape(-1, tokens.shape[-1])[row, position])
            raise ValueError(f"Row {row} has {text.format(position=position, token=token)}.")


@torch.library.custom_op(
    "torchrl_lang::refuse",
    mutates_args=(),
    schema="(Tensor value, Tensor[] broken, str texts, Tensor tokens) -> Tensor",
)
def _compiled_refuse(value: Tensor, broken: list[Tensor], texts: str, tokens: Tensor) -> Tensor:
    _raise_if_broken(broken, texts.split(_SEPARATOR), tokens)
    return value.clone()


@_compiled_refuse.register_fake
def _(value: Tensor, broken: list[Tensor], texts: str, tokens: Tensor) -> Tensor:
    return torch.empty_like(value)


def entry(tensordict: TensorDictBase, key: NestedKey) -> Tensor:
    """Return the entry ``key`` of a row.

    Raises:
        KeyError: the entry is missing.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_lang.schema import TOKENS, entry
        >>> entry(TensorDict(input_ids=torch.zeros(2, 3)), TOKENS)
        Traceback (most recent call last):
            ...
        KeyError: "A row needs 'tokens', found only ['input_ids']. Rename or add the entry."
    """
    return find_entry("A row", key, "Rename or add the entry.", tensordict)


def find_entry(reader: str, key: NestedKey, advice: str, *sources: Any) -> Any:
    """The entry ``key`` of the first of some tensordicts or specs that has it; if none has it, a KeyError."""
    for source in sources:
        value = source.get(key, None)
        if value is not None:
            return value
    present = sources[0] if isinstance(sources[0], TensorDictBase) else sources[0].keys(True, True)
    raise missing_entry(reader, [key], present, advice)


def missing_entry(
    reader: str, missing: Iterable[NestedKey], present: TensorDictBase | Iterable[NestedKey], advice: str
) -> KeyError:
    """Build the error for missing entries; it names who reads them, the entries that exist and what to do.

    Args:
        reader: what needs the entries, such as ``"ILQLLoss"``.
        missing: the keys that were not found.
        present: the tensordict, or the keys that it has.
        advice: what the user can do, as whole sentences; where a row is read from a conversation of TorchRL, that.

    Examples:
        >>> from torchrl_lang.schema import missing_entry
        >>> missing_entry("The actor", ["tokens"], ["obs", "reward"], "Rename the entry.").args[0]
        "The actor needs 'tokens', found only ['obs', 'reward']. Rename the entry."
    """
    missing, found = list(missing), present
    if isinstance(present, TensorDictBase):
        found = present.keys(True, True)
        is_chat = "history" in present.keys() or is_tensor_collection(present.get(TOKENS, None))
        if is_chat and not {ACTION, *ROW_KEYS}.isdisjoint(missing):
            advice = "This is a conversation of TorchRL's LLM stack: rows_from_chat makes rows of its steps, and its "
            advice += "wrappers alone act in a ChatEnv."
    return KeyError(f"{reader} needs {', '.join(map(repr, missing))}, found only {sorted(found, key=str)}. {advice}")
