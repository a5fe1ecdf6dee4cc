"""Text games that are longer than a row: they continue in further rows, which repeat the opening and the last turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_lang._checks import check_options
from torchrl_lang.envs.game_turn import GamePlace, GameTurn, TextGame
from torchrl_lang.envs.language_env import Reply, TaskState
from torchrl_lang.envs.row_state import Rows, Utterance, complete_opening, complete_reply, where_rows
from torchrl_lang.envs.seeded_env import flags
from torchrl_lang.envs.text_game import TextGameEnv
from torchrl_lang.functional.decisions import begins_utterance, utterance_ends
from torchrl_lang.schema import CONTINUED
from torchrl_lang.text.chat_tokenizer import ChatTokenizer
from torchrl_lang.text.tokenizers import Tokenizer


class _Layout(NamedTuple):
    """Where the parts of a row begin."""

    head: int
    """Number of tokens of the game's opening."""
    starts: list[int]
    """First token of each utterance, those that another row repeats among them."""


class LongGameEnv(TextGameEnv):
    """A batch of plain-Python games that need not fit a row: a sliding window over their transcripts.

    When a row is full it is ``truncated``, as in any environment, and is a complete training row with its bootstrap
    state. But the next reset of that row alone, which collectors and rollouts do by themselves, continues the same game
    in a new row: the game's opening, then as many of the last turns as fit into ``window`` tokens. In this beginning
    the agent's earlier utterances belong to the environment (``agent_mask`` is False), so no action is in two training
    rows. Observations have a further entry ``continued`` ``[*B, 1]``: True in rows that continue a game.

    With a chat template that changes earlier messages, such as one that drops the thoughts of earlier turns, each turn
    has a row of its own: it is ``truncated`` after the reply, and the next one begins with the whole dialogue as the
    template writes it then. Its bootstrap state is the reply after the utterance as the agent wrote it.

    A reset without a ``_reset`` mask, or with game seeds, begins new games. ``max_turns`` and returns are those of a
    row, not of a game; :func:`~torchrl_lang.evaluation.play_games` adds those of a game's rows. Rows that continue a
    game cannot be restored with ``set_state=True``, and begin unlike others: there is no ``group_size``.

    Args:
        window: number of tokens of the opening and the last turns that a new row begins with; default half of
            ``row_length``. If the opening and the last turn are longer, they are kept whole.
        make_game, tokenizer, row_length, action_length: as in :class:`~torchrl_lang.envs.TextGameEnv`. A reply that
            does not fit the rest of its row is not lost: the row has its beginning, and the next row all of it.
        **options: further options of :class:`~torchrl_lang.envs.TextGameEnv`.

    Raises:
        ValueError: ``window`` leaves no room for an utterance, or there is a ``group_size``.

    Examples:
        >>> from torchrl_lang.text import CharTokenizer
        >>> from torchrl_lang.envs import LongGameEnv
        >>> class Count:
        ...     def reset(self, seed):
        ...         self.turn = 0
        ...         return "a"
        ...     def step(self, text):
        ...         self.turn += 1
        ...         return "b" * self.turn, 1.0, False
        >>> tokenizer = CharTokenizer.from_alphabet("abc")
        >>> env = LongGameEnv(Count, tokenizer, row_length=24, action_length=3, window=12)
        >>> def play(td):
        ...     return td.set("action", env.action_spec.zero() + tokenizer.control.end_of_action)
        >>> rollout = env.rollout(5, play, break_when_any_done=False)
        >>> rollout["continued"].flatten().tolist()
        [False, False, False, False, True]
        >>> tokenizer.decode(rollout["tokens"][0, 4, :12])
        '<s>a</s></a>bbbb</s><|pad|><|pad|><|pad|>'
    """

    _may_rewrite = True

    def __init__(
        self,
        make_game: Callable[[], TextGame],
        tokenizer: Tokenizer,
        *,
        row_length: int,
        action_length: int,
        window: int | None = None,
        **options: Any,
    ) -> None:
        check_options(group_size=(options.get("group_size"), (None,)))
        self.window = row_length // 2 if window is None else window
        self._longest = row_length - action_length - 2  # the end of the action, and of the state
        name = "window, which leaves room for an utterance,"
        check_options(**{name: (self.window, f"[1, {self._longest}]")})
        self._layouts: dict[int, _Layout] = {}
        self._windows: dict[int, tuple[list[int], _Layout]] = {}
        self._rewrites = isinstance(tokenizer, ChatTokenizer) and bool(tokenizer.row_format.rewrites)
        self._dialogues: dict[int, list[dict[str, str]]] = {}
        super().__init__(make_game, tokenizer, row_length=row_length, action_length=action_length, **options)

    def _task_observation_spec(self) -> dict[str, Any]:
        return {**super()._task_observation_spec(), CONTINUED: flags(self.batch_size, 1, self.device)}

    def _task_observation(self, task: TaskState) -> Mapping[str, Tensor]:
        return {**super()._task_observation(task), CONTINUED: task["continued"][:, None]}

    @property
    def continues(self) -> Tensor:
        """Whether the next reset of a row alone continues its game, bool ``[*B]``."""
        rows = torch.arange(self.batch_size.numel()).apply_(lambda row: row in self._windows).bool()
        return rows.reshape(self.batch_size).to(self.device)

    def _open(self, episode: Tensor, fresh: Tensor, options: TensorDictBase | None) -> tuple[Tensor, Tensor, TaskState]:
        is_new = options is None or "_reset" not in options.keys() or self._named(options, "game_seed") is not None
        rows = fresh.nonzero().flatten().tolist()
        waiting = [] if is_new else [row for row in rows if row in self._windows]
        continued = torch.zeros_like(fresh)
        continued[waiting] = True
        tokens, length, task = super()._open(episode, fresh & ~continued, options)
        texts = [ids[:n] for ids, n in zip(tokens.tolist(), length.tolist(), strict=True)]
        for row in rows:
            ids, layout = self._windows.pop(row, ([], _Layout(0, [])))
            if row in waiting:
                texts[row], self._layouts[row] = ids, layout
            else:
                self._layouts[row] = _Layout(len(complete_opening(texts[row], self.tokenizer.control)), [])
        same = {"game_seed", *self._spared_state} & task.keys() if waiting else ()
        kept = {key: where_rows(continued, self._task[key], task[key]) for key in same}
        return *self._pad(texts), {**task, **kept, "continued": continued}

    def _restore(self, rows: Rows, task: TaskState, fresh: Tensor, options: TensorDictBase | None) -> TaskState:
        end = self.tokenizer.control.end_of_action
        ends = utterance_ends(rows.tokens, rows.attention_mask, rows.agent_mask, end)
        begins = begins_utterance(rows.agent_mask, ends)
        for row in fresh.nonzero().flatten().tolist():
            self._layouts[row].starts.extend(begins[row].nonzero().flatten().tolist())
        return super()._restore(rows, task, fresh, options)

    def _reply(self, utterance: Utterance, task: TaskState, live: Tensor) -> tuple[Reply, TaskState]:
        rows, kept = self._begun().rows, task["continued"]
        before, tokens = rows.length.tolist(), rows.tokens
        reply, task = super()._reply(utterance, task, live)
        control, action_length = self.tokenizer.control, self.action_length
        replies = zip(reply.tokens.tolist(), reply.length.tolist(), strict=True)
        ended = reply.terminated if reply.truncated is None else reply.terminated | reply.truncated
        for row, (ids, length) in enumerate(replies):
            if not live[row] or ended[row]:
                continue
            said = utterance.tokens[row, : utterance.length[row]].tolist()
            if self._rewrites:
                self._rewrite(row, said)
                continue
            self._layouts[row].starts.append(before[row])
            whole = [*said, control.end_of_action, *complete_reply(ids[:length], False, control)]
            if before[row] + len(whole) + action_length + 1 > self.row_length:
                self._slide(row, [*tokens[row, : before[row]].tolist(), *whole])
        if self._rewrites:
            reply = reply._replace(truncated=reply.truncated | live & ~reply.terminated)  # type: ignore[operator]
        return reply, {**task, "continued": kept}

    def _rewrite(self, row: int, said: list[int]) -> None:
        """Keep the dialogue with the last turn, as the chat template writes it, for the next row."""
        dialogue, tokenizer = self._dialogues[row], cast(ChatTokenizer, self.tokenizer)
        dialogue.insert(-1, {"role": "assistant", "content": self._decode(said)})
        ids = tokenizer.encode_prompt(dialogue)
        self._keep(row, ids, _Layout(len(ids), []))

    def _slide(self, row: int, ids: list[int]) -> None:
        """Keep the opening and the last turns of a full row, int ``[L]``, for the next one."""
        head, starts = self._layouts[row]
        first = next((s for s in starts if head + len(ids) - s <= self.window), starts[-1])
        layout = _Layout(head, [start - first + head for start in starts if start >= first])
        self._keep(row, [*ids[:head], *ids[first:]], layout)

    def _keep(self, row: int, window: list[int], layout: _Layout) -> None:
        """Begin the next row so, if there is room for an utterance."""
        control = self.tokenizer.control
        if control.marks_turns:  # rows add these themselves
            window = window[1 : -1 if window[-1] == control.end_of_state else None]
        length, room = len(window) + 2 * control.marks_turns, self.row_length - self.action_length - 1
        if length > room:
            seed, turn = int(self._task["game_seed"][row]), int(self._turns[row]) + 1
            found = f"has an opening and a turn of {length} tokens together, of which {room} fit"
            self._lose(GamePlace(row, seed, turn), found, f"give row_length={self.row_length + length} or more")
            return
        self._windows[row] = window, layout

    def _fit_opening(self, text: str, place: GamePlace) -> tuple[list[int], bool]:
        self._dialogues[place.row] = [{"role": "user", "content": text}]
        return super()._fit_opening(text, place)

    def _fit_reply(self, turn: GameTurn, place: GamePlace, room: int) -> tuple[list[int], bool]:
        if self._rewrites:
            self._dialogues[place.row].append({"role": self._role(turn), "content": turn.text})
        return super()._fit_reply(turn, place, self.row_length)  # the next row has what this one has no room for
