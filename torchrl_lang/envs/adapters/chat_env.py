"""Text games as chat environments of TorchRL's LLM stack."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torchrl.data import Composite, Unbounded
from torchrl.data.llm import History
from torchrl.envs.llm import ChatEnv
from torchrl.modules.llm.policies import ChatHistory

from torchrl_lang._checks import Count, checked
from torchrl_lang.envs.game_turn import GamePlace, TextGame, ToolText
from torchrl_lang.envs.seeded_env import SeededEpisodes
from torchrl_lang.functional.random import random_index
from torchrl_lang.schema import DONE, TERMINATED, TRUNCATED


class GameChatEnv(SeededEpisodes, ChatEnv):
    """A text game as TorchRL's ``ChatEnv``, for its wrappers of language models in history mode.

    The opening of the game is the first message of the user; each response of the policy is a turn of the game, and the
    game's reply is the next message of the user (of the tool, if it is a
    :class:`~torchrl_lang.envs.game_turn.ToolText`). Beside what a ``ChatEnv`` has, steps have ``reward`` float32
    ``[*B, 1]`` and ``done``, ``terminated``, ``truncated`` bool ``[*B, 1]``. ``reset`` needs no tensordict; it begins
    the games of ``game_seed`` int64 ``[*B]``, an entry of its tensordict or a keyword, and otherwise those that
    :class:`~torchrl_lang.envs.TextGameEnv` begins with this ``seed``. A copy of an environment with a seed continues as
    the original would; a copy of one without a seed takes a new seed. :func:`~torchrl_lang.data.rows_from_chat` makes
    rows of its steps. All steps have their ``game_seed``, the group of TorchRL's ``MCAdvantage``; with a ``group_size``
    as many games, one after the other, have the same.

    TorchRL's wrappers stack conversations of equally many messages only. So with several games the environment is reset
    as a whole, and ``rollout`` stops where the first game ends; with one game it goes from game to game.

    With several games give the wrapper's ``generate_kwargs`` a ``"pad_token_id"`` (``tokenizer.pad_token_id``): without
    one transformers fills the responses that end first with the end token, and what was filled in counts as written by
    the policy, in losses and divergences. With ``tokenizer`` such a response raises an error.

    Args:
        make_game: makes a game, a :class:`~torchrl_lang.envs.TextGame`; called once per conversation of the batch.
        read: maps the text of a response to what the game gets, as in ``TextGameEnv``.
        batch_size: number of conversations, ``(n,)``.
        group_size: as many games begin alike.
        seed: seed of the games.
        **options: ``system_prompt``, ``tokenizer``, ``template_kwargs``, roles and ``device`` of ``ChatEnv``.

    Raises:
        TypeError: ``make_game`` makes no games, or a game returns values of wrong types.
        ValueError: ``batch_size`` is not ``(n,)``; on steps, a response continues behind its end token.
        RuntimeError: some of several games are reset or stepped without the others.

    Examples:
        >>> from torchrl.data.llm import History
        >>> from torchrl.modules.llm.policies import ChatHistory
        >>> from torchrl_lang.envs import GameChatEnv
        >>> from torchrl_lang.envs.adapters.tools import QuestionGame
        >>> env = GameChatEnv(lambda: QuestionGame([("2 + 2 =", "4")]), seed=0)
        >>> td = env.reset()
        >>> full = History.from_chats([[{"role": "user", "content": "2 + 2 ="}, {"role": "assistant", "content": "4"}]])
        >>> step = env.step(td.set("history", ChatHistory(prompt=full[:, :1], full=full)))["next"]
        >>> step["reward"], step["terminated"]
        (tensor([[1.]]), tensor([[True]]))
    """

    @checked
    def __init__(
        self,
        make_game: Callable[[], TextGame],
        *,
        read: Callable[[str], str] | None = None,
        batch_size: tuple[int] = (1,),
        group_size: Count = 1,
        seed: int | None = None,
        **options: Any,
    ) -> None:
        if not callable(make_game):
            advice = "pass what makes one, such as its class"
            raise TypeError(f"make_game must be callable, got a {type(make_game).__name__}: {advice}.")
        super().__init__(input_mode="history", batch_size=batch_size, **options)
        batch, device = self.batch_size, self.device
        if len(batch) != 1:
            raise ValueError(f"batch_size must be (n,), a number of conversations, got {tuple(batch)}.")
        self.read, self.group_size, self._games = read, group_size, [make_game() for _ in range(batch.numel())]
        for game in self._games:
            if not isinstance(game, TextGame):
                advice = "a game has reset(seed) and step(text), see torchrl_lang.envs.TextGame"
                raise TypeError(f"make_game made a {type(game).__name__} without reset and step: {advice}.")
        self._places: list[GamePlace] = []
        self._set_outcome_specs()
        seeds = Unbounded(shape=batch, dtype=torch.int64, device=device)
        self.full_state_spec = Composite(game_seed=seeds, shape=batch, device=device)
        self.generator = torch.Generator()
        self._set_seed(seed)

    def _reset(self, tensordict: TensorDictBase | None, **kwargs: Any) -> TensorDictBase:
        mask: Any = None if tensordict is None else tensordict.get("_reset", None)
        if mask is not None and not mask.all():
            raise self._alone("reset")
        seeds: Any = kwargs.pop("game_seed", None)
        if seeds is None and tensordict is not None:
            seeds = tensordict.get("game_seed", None)
        if seeds is None:
            every = torch.ones(self.batch_size, dtype=torch.bool, device=self.device)
            seeds = random_index(self._key, self._number_episodes(every) // self.group_size, 2**31)
        self._places = [GamePlace(row, seed, 0) for row, seed in enumerate(seeds.tolist())]
        played = zip(self._games, self._places, strict=True)
        texts = [place.read_opening(game.reset(place.seed)) for game, place in played]
        start = TensorDict({self.data_key: texts}, batch_size=self.batch_size, device=self.device)
        return super()._reset(start).set("game_seed", seeds)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        if tensordict.batch_size != self.batch_size:
            raise self._alone("stepped")
        end = None if self.tokenizer is None else self.tokenizer.eos_token_id
        if end is not None and end != self.tokenizer.pad_token_id:
            for row, step in enumerate(tensordict.unbind(0)):
                response: Any = step.get(("tokens", "response"), None)
                if response is not None and response[-2:].tolist() == [end, end]:
                    advice = 'put "pad_token_id": tokenizer.pad_token_id into the wrapper\'s generate_kwargs'
                    raise ValueError(f"Response {row} continues behind its end, with more end tokens: {advice}.")
        return lazy_stack([self._play(row, history) for row, history in enumerate(tensordict.get("history").unbind(0))])

    def _play(self, row: int, history: ChatHistory) -> TensorDict:
        """A turn of one game."""
        place = self._places[row] = self._places[row]._replace(turn=self._places[row].turn + 1)
        prompt = history.prompt
        # A template's own system prompt moves what the wrapper parses as the response: it begins with the prompt's end.
        found = [m for m in history.full[len(prompt) :].unbind(0) if m.role == "assistant"]
        answer = found[-1] if found else History(role="assistant", content="")
        turn = place.read_turn(
            self._games[row].step(answer.content if self.read is None else self.read(answer.content))
        )
        done = turn.terminated or turn.truncated
        prompt = prompt.append(answer, inplace=False)
        if turn.text or not done:
            role = "tool" if isinstance(turn.text, ToolText) else self.user_role
            prompt = prompt.append(History(role=role, content=turn.text), inplace=False)
        ends = {DONE: [done], TERMINATED: [turn.terminated], TRUNCATED: [turn.truncated]}
        return TensorDict(history=ChatHistory(prompt=prompt), reward=[turn.reward], **ends, device=self.device)

    def _alone(self, what: str) -> RuntimeError:
        advice = "use batch_size=(1,), or stop where the first game ends (break_when_any_done=True)"
        unequal = "TorchRL's wrappers do not take conversations of unequal lengths"
        return RuntimeError(f"{unequal}, but only some of the games were {what}: {advice}.")
