"""Episodes from records of dialogues: turns, messages, prompts with completions, preferences."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torchrl_lang._files import shorten
from torchrl_lang._files.readers import unique_keys
from torchrl_lang.text.episodes import Episode, Turn
from torchrl_lang.text.json_checks import check_keys, read_flag, read_number, show
from torchrl_lang.text.messages import from_messages
from torchrl_lang.text.template_strings import Message
from torchrl_lang.text.tokenizers import Tokenizer

__all__ = ["DialogueReader", "RewardOfMessages", "parse_dialogue"]

RewardOfMessages = Callable[[list[Message]], float | Sequence[float]]
"""Maps the messages of a conversation to its reward, or to one reward for each message of the assistant."""

_BY_AGENT = {"user": False, "environment": False, "assistant": True, "agent": True}
_FLAGS = ("terminated", "truncated")


@dataclass(frozen=True, kw_only=True)
class DialogueReader:
    """Reads records of dialogues as episodes.

    A record is a mapping, such as a line of a JSONL file or a row of a Hugging Face dataset, with one of

    - ``turns``: objects with ``role`` ("user" or "environment", "assistant" or "agent"), ``text`` and, for the agent,
      ``reward`` (default 0);
    - ``messages``: see :func:`~torchrl_lang.text.from_messages`;
    - ``prompt`` and ``completion``, as TRL has them: two texts, or two lists of messages;
    - ``chosen`` and ``rejected``, with or without a ``prompt``: two episodes.

    ``truncated`` means that a limit ended the dialogue (default false), ``terminated`` that the task ended (default:
    true unless truncated).

    Args:
        reward: where rewards come from, beside those of single turns and messages. By default the record's ``reward``,
            if it has one; or the name of another entry, or a function of the messages. A number is added to the agent's
            last turn, and so is a truth value of a named entry, as 0 or 1; a list, beside messages or a completion, has
            one number for each turn of the agent.
        preference_rewards: rewards of chosen and rejected completions.
        ignore: entries of the record to ignore; any other unknown entry is an error.

    Examples:
        >>> from torchrl_lang.data import DialogueReader
        >>> read = DialogueReader(reward="score")
        >>> read({"prompt": "2 + 2", "completion": "4", "score": 1})
        [Episode(turns=(Turn(text='2 + 2', ...), Turn(text='4', reward=1.0, ...)), terminated=True, ...)]
        >>> chosen, rejected = read({"prompt": "2 + 2", "chosen": "4", "rejected": "5"})
        >>> chosen.total_reward, rejected.total_reward
        (1.0, 0.0)
    """

    reward: str | RewardOfMessages | None = None
    preference_rewards: tuple[float, float] = (1.0, 0.0)
    ignore: Sequence[str] = ()

    def __call__(self, record: Any, tokenizer: Tokenizer | None = None) -> list[Episode]:
        """The episodes of a record.

        Args:
            record: a mapping as above.
            tokenizer: that of the rows; needed for calls of tools.

        Raises:
            ValueError: the record is malformed; the message gives the reason.
        """
        forms = {
            "turns": ("turns",),
            "messages": ("messages",),
            "completion": ("prompt", "completion"),
            "chosen": ("prompt", "chosen", "rejected"),
        }
        name = self.reward if isinstance(self.reward, str) else "reward"
        if not isinstance(record, Mapping):
            raise ValueError(f"a dialogue must be a JSON object, got {show(record)}")
        form = next((form for form in forms if record.get(form) is not None), None)
        if form is None:
            raise ValueError(f"a dialogue must have one of the entries {list(forms)}, got {show(record)}")
        if form != "turns":
            record = {key: value for key, value in record.items() if value is not None}  # tables fill gaps with None
        rewards = () if form == "chosen" else (name,)  # preferences have rewards of their own
        check_keys(record, (*forms[form], *rewards, *_FLAGS, *self.ignore), "the dialogue")
        truncated = read_flag(record, "truncated", default=False)
        ends = {"terminated": read_flag(record, "terminated", default=not truncated), "truncated": truncated}
        if form == "turns":
            return [self._rewarded(Episode(_turns(record["turns"]), **ends), record, name, None)]
        if form == "messages":
            return [self._episode(_messages(record, "messages"), record, name, tokenizer, ends)]
        prompt = _messages(record, "prompt", role="user") if "prompt" in record else []
        if form == "completion":
            messages = [*prompt, *_messages(record, "completion", role="assistant")]
            return [self._episode(messages, record, name, tokenizer, ends)]
        both = [[*prompt, *_messages(record, key, role="assistant")] for key in ("chosen", "rejected")]
        episodes = [from_messages(messages, tokenizer, **ends) for messages in both]
        return [_add_reward(e, r) for e, r in zip(episodes, self.preference_rewards, strict=True)]

    def _episode(
        self,
        messages: list[Message],
        record: Mapping[str, Any],
        name: str,
        tokenizer: Tokenizer | None,
        ends: Mapping[str, bool],
    ) -> Episode:
        return self._rewarded(from_messages(messages, tokenizer, **ends), record, name, messages)

    def _rewarded(
        self, episode: Episode, record: Mapping[str, Any], name: str, messages: list[Message] | None
    ) -> Episode:
        if callable(self.reward):
            if messages is None:
                raise ValueError("a reward function needs messages, but this dialogue has turns: give their rewards")
            reward: Any = self.reward(messages)
        elif isinstance(self.reward, str) and name not in record:
            raise ValueError(f"the dialogue has no entry {name!r} for its reward, it has {shorten(sorted(record))}")
        elif name not in record:
            return episode
        else:
            reward = record[name]
        if isinstance(self.reward, str) and isinstance(reward, bool):  # as TRL labels a completion
            reward = float(reward)
        return _add_reward(episode, reward, may_be_list=messages is not None)


def parse_dialogue(line: str, *, ignore: Sequence[str] = ()) -> Episode:
    """Read one line of JSON as an episode; see :class:`DialogueReader`.

    Args:
        line: one JSON object with ``turns``, ``messages``, or ``prompt`` and ``completion``.
        ignore: keys of the object to ignore; any other unknown key is an error.

    Raises:
        ValueError: the line is malformed; the message gives the reason.

    Examples:
        >>> from torchrl_lang.data import parse_dialogue
        >>> line = '{"turns": [{"role": "user", "text": "hi"}, {"role": "assistant", "text": "yo"}], "reward": 2}'
        >>> parse_dialogue(line)
        Episode(turns=(Turn(text='hi', ...), Turn(text='yo', reward=2.0, ...)), terminated=True, ...)
    """
    episodes = DialogueReader(ignore=ignore)(parse_object(line))
    if len(episodes) > 1:
        raise ValueError("the line has a chosen and a rejected dialogue, expected one: use DialogueReader")
    return episodes[0]


def parse_object(line: str) -> Any:
    """A line of JSON, without keys that occur twice."""
    return json.loads(line, object_pairs_hook=unique_keys)


def _turns(turns: Any) -> list[Turn]:
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"'turns' must be a list of at least one turn, got {show(turns)}")
    return [_turn(turn, f"turn {index}") for index, turn in enumerate(turns, start=1)]


def _turn(turn: Any, where: str) -> Turn:
    check_keys(turn, ("role", "text", "reward"), where)
    role, text = turn.get("role"), turn.get("text")
    if not isinstance(role, str) or role not in _BY_AGENT:
        raise ValueError(f"{where}: 'role' must be one of {list(_BY_AGENT)}, got {show(role)}")
    if not isinstance(text, str):
        raise ValueError(f"{where}: 'text' must be a string, got {show(text)}")
    if _BY_AGENT[role]:
        return Turn(text, reward=read_number(turn.get("reward", 0), f"{where}: 'reward'"))
    if "reward" in turn:
        raise ValueError(f"{where}: only turns of the agent may have a reward, this one has the role {role!r}")
    return Turn(text)


def _messages(record: Mapping[str, Any], key: str, *, role: str | None = None) -> list[Message]:
    """An entry as messages; a text is one message of ``role``."""
    value = record.get(key)
    if role is not None and isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, list) or not value:
        expected = "a list of at least one message" + (" or a text" if role else "")
        raise ValueError(f"'{key}' must be {expected}, got {show(value)}")
    return value


def _add_reward(episode: Episode, reward: Any, *, may_be_list: bool = False) -> Episode:
    """Add one reward to the agent's last turn, or one to each of its turns."""
    turns = list(episode.turns)
    mine = [index for index, turn in enumerate(turns) if turn.by_agent]
    if may_be_list and isinstance(reward, Sequence) and not isinstance(reward, str):
        if len(reward) != len(mine):
            raise ValueError(f"there are {len(reward)} rewards for {len(mine)} turns of the agent: give one for each")
        earned = [read_number(value, "a reward") for value in reward]
    else:
        total = read_number(reward, "'reward'")
        if total and not mine:
            raise ValueError("'reward' is added to the agent's last turn, but there is no turn of the agent")
        earned = [0.0] * (len(mine) - 1) + [total] * bool(mine)
    for index, value in zip(mine, earned, strict=True):
        turns[index] = replace(turns[index], reward=(turns[index].reward or 0.0) + value)
    return replace(episode, turns=turns)
