"""The base class of language tasks: a batched TorchRL environment whose observation is the transcript."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Required, Unpack

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import Unbounded

from torchrl_lang import schema
from torchrl_lang._checks import Count, check_options, checked, refuse_wrapper
from torchrl_lang.envs import row_state
from torchrl_lang.envs.reset_inputs import count_turns, merge_keywords, rows_to_continue, shortest_opening
from torchrl_lang.envs.row_state import GrowingRows, Reply, Rows, Utterance, Writes
from torchrl_lang.envs.seeded_env import EnvOptions, SeededEnv, row_specs, token_ids
from torchrl_lang.functional.random import random_index
from torchrl_lang.text.tokenizers import Tokenizer

__all__ = ["LanguageEnv", "LanguageOptions", "Reply", "TaskState"]

TaskState = dict[str, Tensor]
"""The state of a task beside the transcript: named tensors, each ``[N, ...]``."""


class EpisodeOptions(EnvOptions, total=False):
    """Options that every language environment takes: also the number of episodes that begin alike."""

    group_size: int | None


class LanguageOptions(EpisodeOptions, total=False):
    """Options of :class:`LanguageEnv` that its subclasses pass on."""

    row_length: Required[int]
    action_length: Required[int]
    max_turns: int | None


class LanguageEnv(SeededEnv):
    """A batch of language tasks. Abstract: tasks implement :meth:`_open`, :meth:`_reply` and maybe :meth:`_restore`.

    An episode is a growing row of tokens (see :mod:`torchrl_lang.schema`); an action is one utterance of at most
    ``action_length`` tokens, including its end-of-action token. If an utterance has no such token, the environment adds
    it, with ``agent_mask`` False there. An id outside the vocabulary is treated as padding: it ends the utterance.

    A row is truncated after ``max_turns`` turns, or when it has no room for another utterance. Stepping a row that is
    done changes nothing: it keeps its row and flags, and its reward is zero. The same holds for a row that a
    ``"_step"`` mask excludes (TorchRL's way to step only some rows).

    The seed alone determines the episodes: the ``k``-th row to be reset plays episode ``k`` of the seed, whatever the
    batch size. Without a seed the environment takes one from the operating system. It never uses global random
    generators (but TorchRL's ``rand_action`` does). ``set_seed`` affects later resets, not the current episodes. A copy
    (``deepcopy``, or in another process) of an environment with a seed continues as the original would; a copy of one
    without a seed takes a new seed.

    ``reset`` begins new episodes. With ``set_state=True`` it continues from the rows in its tensordict instead, or from
    rows passed by keyword, ``reset(set_state=True, **rows.select(*ROW_KEYS))``. Rows that this environment could not
    have written (with holes, left padding or another order of tokens) are errors.

    A task may accept names in ``reset``, such as Wordle's hidden word, as an entry of the tensordict or by keyword,
    ``reset(hidden_word=...)``. Use keywords if the environment is wrapped: ``TransformedEnv`` and ``ParallelEnv``
    remove such entries from the tensordict, but pass keywords on. ``SerialEnv`` and ``ParallelEnv`` pass the same
    keywords to each environment, or separate ones from ``reset(list_of_kwargs=[{...}, ...])``.

    Args:
        tokenizer: the task's tokenizer.
        row_length: ``T``, the width of a row in tokens.
        action_length: ``K``, the width of an action in tokens.
        max_turns: number of turns after which a row is truncated; no limit by default.
        group_size: as many episodes, one after the other, begin alike, for advantages of groups
            (:class:`~torchrl_lang.transforms.RowAdvantage`). Observations, and rows made of them, then have an entry
            ``group`` int64 ``[*B]``, the number of the start, which differs between environments of different seeds.
            Starts that ``reset`` is given are to be repeated in the same way, which is checked.
        batch_size: number of parallel rows, as a torch size.
        seed: seed of the episodes.
        device: device of the tensors.
    """

    _supports_set_state = True
    _reset_entries: tuple[str, ...] = ()
    """Names that ``reset`` accepts, each int64 ``[*B]``; the task reads them with :meth:`_named`."""
    _new_observations: tuple[str, ...] = ()
    """Entries that :meth:`_task_observation` returns in new memory at each call, so that they need no copy."""
    _spared_state: tuple[str, ...] = ()
    """Entries of the task's state that :meth:`_reply` does not change in rows that are not live."""
    _number_of_starts: int | None = None
    """The first of the ``_reset_entries`` lies below it; None: it may be any number."""
    starts: Callable[[Tensor], Tensor] | None = None
    """Chooses what groups begin with where ``reset`` is given nothing: from their numbers to values of the first entry
    that ``reset`` accepts, int64 ``[G]`` both. It needs a ``group_size``; None: uniform draws."""

    @checked
    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        row_length: int,
        action_length: Count,
        max_turns: Count | None = None,
        group_size: Count | None = None,
        **options: Unpack[EnvOptions],
    ) -> None:
        super().__init__(**options)
        least = shortest_opening(tokenizer) + action_length + 1
        check_options(row_length=(row_length, least))
        self.tokenizer, self.row_length = tokenizer, row_length
        self.action_length, self.max_turns, self.group_size = action_length, max_turns, group_size
        self._rows: GrowingRows | None
        self._task: TaskState
        self._turns: Tensor
        self._group: Tensor
        self._make_specs()

    # -- methods of a task -----------------------------------------------------------------------------------------

    @abstractmethod
    def _open(self, episode: Tensor, fresh: Tensor, options: TensorDictBase | None) -> tuple[Tensor, Tensor, TaskState]:
        """Begin episodes.

        Args:
            episode: int64 ``[N]``, the number of each row's episode, or of its group: the index of its random draws.
            fresh: bool ``[N]``, the rows that begin an episode; results for other rows are ignored.
            options: the flattened (``[N]``) tensordict passed to ``reset``, or None.

        Returns:
            The environment's opening tokens, int64 ``[N, R]``, their number, int64 ``[N]`` (zero if the agent takes the
            first turn), and the task's state. Plain text without control tokens; with a
            :class:`~torchrl_lang.text.ChatTokenizer` everything up to the first utterance, by
            ``tokenizer.encode_opening``.
        """

    @abstractmethod
    def _reply(self, utterance: Utterance, task: TaskState, live: Tensor) -> tuple[Reply, TaskState]:
        """Reply to a batch of utterances.

        Rows that are not ``live`` (bool ``[N]``) have ended; results for them are ignored.
        """

    def _restore(self, rows: Rows, task: TaskState, fresh: Tensor, options: TensorDictBase | None) -> TaskState:
        """The task's state after the given transcripts. ``task`` is the result of :meth:`_open` for new episodes.

        The default returns ``task``, which is correct if the state does not depend on the turns.
        """
        return task

    def _task_observation(self, task: TaskState) -> Mapping[str, Tensor]:
        """Further observations, ``[N, ...]``, declared in :meth:`_task_observation_spec`.

        Features of a row are such, ``features`` and ``features_mask``, see
        :func:`~torchrl_lang.envs.seeded_env.feature_specs`.
        """
        return {}

    def _task_observation_spec(self) -> dict[str, Any]:
        """Specs of further observations, each of shape ``[*B, ...]``."""
        return {}

    # -- TorchRL ---------------------------------------------------------------------------------------------------

    def _make_specs(self) -> None:
        batch, device, vocabulary = self.batch_size, self.device, self.tokenizer.vocab_size
        rows = row_specs(vocabulary, batch, self.row_length, device)
        action = token_ids(vocabulary, batch, self.action_length, device=device)
        if self.group_size is not None:
            rows[schema.GROUP] = Unbounded(shape=batch, dtype=torch.int64, device=device)
        self._set_specs({**rows, **self._task_observation_spec()}, action)

    def _input_td_has_state(self, tensordict: TensorDictBase | None) -> bool:
        """Rows in a reset tensordict are a state only with ``set_state=True``."""
        return False

    def rollout(self, max_steps: int, policy: Any = None, *args: Any, **options: Any) -> TensorDictBase:
        """See :meth:`~torchrl.envs.EnvBase.rollout`; a TypeError for one of TorchRL's wrappers without an actor."""
        refuse_wrapper(policy)
        return super().rollout(max_steps, policy, *args, **options)

    # -- a step, in order ----------------------------------------------------------------------------------------------

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        rows = self._begun()
        shape = (*self.batch_size, self.action_length)
        action = row_state.read_action(f"{type(self).__name__}.step()", tensordict, shape)
        writes, reward = self._plan_turn(action.reshape(self._n, self.action_length), self._rows_to_step(tensordict))
        rows.write_(writes)
        return self._observe().set(schema.REWARD, reward.reshape(*self.batch_size, 1))

    def _plan_turn(self, action: Tensor, live: Tensor) -> tuple[Writes, Tensor]:
        """Compute a turn of the ``live`` rows: what to write into them, and the rewards, float32 ``[N]``."""
        control = self.tokenizer.control
        # Ids outside the vocabulary become padding: an error would synchronize with the device at every step.
        action = torch.where((action >= 0) & (action < self.tokenizer.vocab_size), action, control.pad)
        utterance = row_state.read_utterance(action, control)
        reply, task = self._reply(utterance, self._task, live)
        writes, overflow = self._begun().plan_turn(utterance, reply, live)
        turns = self._turns + 1
        # A row also ends if there is no room for another utterance and an end-of-action token of the environment.
        full = overflow | (writes.length + self.action_length + 1 > self.row_length)
        if self.max_turns is not None:
            full = full | (turns >= self.max_turns)
        cut = overflow if reply.truncated is None else overflow | reply.truncated
        self._truncated = torch.where(live, full & ~reply.terminated | cut, self._truncated)
        self._terminated = torch.where(live, reply.terminated, self._terminated)
        old, spared, where = self._task, self._spared_state, row_state.where_rows
        self._task = {key: value if key in spared else where(live, value, old[key]) for key, value in task.items()}
        self._turns = torch.where(live, turns, self._turns)
        return writes, torch.where(live, reply.reward, 0.0)

    def _observe(self, *, copy: bool = True, only: Sequence[Any] | None = None) -> TensorDict:
        """The observation, copied; without ``copy`` in the environment's own memory, and only the entries ``only``."""
        rows = self._begun().rows
        terminated, truncated = self._terminated, self._truncated
        own = {schema.TOKENS: rows.tokens, schema.AGENT_MASK: rows.agent_mask, schema.TOKEN_REWARD: rows.token_reward}
        own |= {schema.TERMINATED: terminated[:, None], schema.TRUNCATED: truncated[:, None]}
        if only is None or not {*only} <= {*own, schema.ATTENTION_MASK, schema.DONE}:
            own |= {} if self.group_size is None else {schema.GROUP: self._group}
            own |= self._task_observation(self._task)
        uncopied = self._new_observations if copy else own
        out = {key: value if key in uncopied else value.clone() for key, value in own.items()}
        if only is None or schema.ATTENTION_MASK in only:
            out[schema.ATTENTION_MASK] = rows.attention_mask
        out[schema.DONE] = (terminated | truncated)[:, None]
        shaped = {key: value.reshape(*self.batch_size, *value.shape[1:]) for key, value in out.items()}
        return TensorDict(shaped, batch_size=self.batch_size, device=self.device)

    # -- a reset, in order ---------------------------------------------------------------------------------------------

    def _reset(self, tensordict: TensorDictBase | None = None, set_state: bool = False, **extra: Any) -> TensorDictBase:
        refuse_wrapper(getattr(self.collector, "policy", None))  # before it reads the first rows
        tensordict = merge_keywords(self, self._reset_entries, tensordict, extra, set_state=set_state)
        options = None if tensordict is None else tensordict.reshape(self._n)
        fresh = self._rows_to_reset(options)
        given = rows_to_continue(self, options, fresh) if set_state and options is not None else None
        masked = options is not None and options.get("_reset", None) is not None
        self._begin_rows(fresh, options, given, partial=self._rows is not None and masked)
        return self._observe()

    def _named(self, options: TensorDictBase | None, key: str) -> Tensor | None:
        """The entry of ``reset`` under one of the :attr:`_reset_entries`, int64 ``[N]``, or None."""
        value = None if options is None else options.get(key, None)
        return None if value is None else value.reshape(-1)

    def _current(self, key: str) -> Tensor:
        """An entry of the task's state, ``[*B]``, a copy."""
        self._begun()
        return self._task[key].reshape(self.batch_size).clone()

    def _begin_rows(self, fresh: Tensor, options: TensorDictBase | None, given: Rows | None, *, partial: bool) -> None:
        """Begin episodes in the ``fresh`` rows, bool ``[N]``, which are all rows unless ``partial``."""
        episode = self._number_episodes(fresh)
        number = episode // (self.group_size or 1)
        if self.group_size is not None:
            self._check_alike(episode, fresh, options, given)
            group = random_index(self._key, -1 - number, 2**62)  # other draws have the counters from 0 on
            self._group = torch.where(fresh, group, self._group) if partial else group
            options = self._with_starts(group, fresh, options)
        opening, length, task = self._open(number, fresh, options)
        if given is None:
            rows = row_state.first_rows(opening, length, self.tokenizer.control, self.row_length, self.action_length)
            turns = torch.zeros_like(number)
        else:
            rows, task = given, self._restore(given, task, fresh, options)
            turns = count_turns(rows, self.tokenizer.control)
        if partial:
            self._begun().replace_(fresh, rows)
            self._task = {key: row_state.where_rows(fresh, value, self._task[key]) for key, value in task.items()}
            self._terminated, self._truncated = self._terminated & ~fresh, self._truncated & ~fresh
            self._turns = torch.where(fresh, turns, self._turns)
        else:
            self._rows = GrowingRows(rows, self.row_length, self.tokenizer.control)
            self._task = {key: value.clone() for key, value in task.items()}
            self._terminated, self._truncated = torch.zeros_like(fresh), torch.zeros_like(fresh)
            self._turns = turns

    def _check_alike(self, episode: Tensor, fresh: Tensor, options: TensorDictBase | None, given: Rows | None) -> None:
        """Raise ValueError if ``reset`` was given other starts for episodes of the same group."""
        named = [self._named(options, key) for key in self._reset_entries]
        starts = [value[:, None] for value in named if value is not None] + ([] if given is None else [given.tokens])
        if not starts or not fresh.any():
            return
        size: Any = self.group_size
        start, number = torch.cat(starts, -1)[fresh], episode[fresh]
        differ = (start[1:] != start[:-1]).any(-1) & (number[1:] // size == number[:-1] // size)
        if differ.any() or number[0] % size:
            repeat = f"repeat each start {size} times in a row, from a group's first episode on (set_seed begins there)"
            raise ValueError(f"The episodes of a group begin alike, but reset got different starts: {repeat}.")

    def _with_starts(self, group: Tensor, fresh: Tensor, options: TensorDictBase | None) -> TensorDictBase | None:
        """The tensordict of ``reset`` with the starts that :attr:`starts` chooses."""
        if self.starts is None or self._named(options, self._reset_entries[0]) is not None:
            return options
        start = torch.zeros_like(group).masked_scatter(fresh, self.starts(group[fresh]))
        options = TensorDict(batch_size=[self._n], device=self.device) if options is None else options.copy()
        return options.set(self._reset_entries[0], start)

    def possible_starts(self, most: int) -> Tensor:
        """At most ``most`` values of the first entry that ``reset`` accepts, int64 ``[S]``; none if it accepts none."""
        number = most if self._number_of_starts is None else min(most, self._number_of_starts)
        return torch.arange(number if self._reset_entries else 0, device=self.device)

    def maybe_reset(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Reset the rows that are done, as TorchRL does, without its merge: a reset returns the other rows as well."""
        if not self.any_done(tensordict):
            return tensordict
        fresh = tensordict.get("_reset")
        out = self._reset(TensorDict({"_reset": fresh}, batch_size=self.batch_size, device=self.device))
        tensordict.pop("_reset")
        others = tensordict.exclude(*out.keys())
        if not (others.is_empty() or fresh.all()):
            # As in TorchRL: entries of others are set to zero, unless all rows are reset.
            go_on = ~fresh.reshape(self.batch_size)
            tensordict.update(others.where(go_on, other=others.empty(), pad=0))
        return tensordict.update(out)
