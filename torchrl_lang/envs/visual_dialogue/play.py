"""A player that asks the questions of a dataset at random, and metrics of played dialogues."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from torchrl_lang._random_stream import RandomStream
from torchrl_lang.envs.visual_dialogue.dialogue import Round
from torchrl_lang.envs.visual_dialogue.files import ROUNDS
from torchrl_lang.envs.visual_dialogue.rewards import STOP, Penalty, is_yes_no
from torchrl_lang.schema import ACTION, AGENT_MASK, TOKENS
from torchrl_lang.text.chat_tokenizer import encode_action
from torchrl_lang.text.rows import from_row
from torchrl_lang.text.tokenizers import Tokenizer


class QuestionPlayer(TensorDictModuleBase):
    """Asks random questions of a dataset, each as often as it occurs there.

    Args:
        questions: of all rounds of a dataset.
        tokenizer: encodes them.
        action_length: ``K``, tokens of an action, its end included.
        repeat: whether a question may be asked twice in a dialogue.
        seed: seed of its random generator.

    Raises:
        ValueError: there are fewer than ten different questions; on calls, a question does not fit an action.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_lang.text import CharTokenizer
        >>> from torchrl_lang.envs.visual_dialogue import QuestionPlayer
        >>> player = QuestionPlayer("abcdefghij", CharTokenizer.from_alphabet("abcdefghij"), 2, seed=0)
        >>> td = TensorDict(tokens=torch.tensor([[10, 0, 11]]), agent_mask=torch.tensor([[False, True, True]]))
        >>> player(td)["action"].shape
        torch.Size([1, 2])
    """

    in_keys = [TOKENS, AGENT_MASK]
    out_keys = [ACTION]

    def __init__(
        self,
        questions: Sequence[str],
        tokenizer: Tokenizer,
        action_length: int,
        *,
        repeat: bool = False,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        different = len({tuple(encode_action(tokenizer, question)) for question in set(questions)})
        if different < ROUNDS:
            raise ValueError(f"QuestionPlayer needs at least {ROUNDS} different questions, got {different}.")
        self.questions, self.tokenizer, self.action_length = questions, tokenizer, action_length
        self.repeat, self.stream = repeat, RandomStream(seed)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write ``action``, int64 ``[*B, K]``."""
        tokens, end = tensordict.get(TOKENS), self.tokenizer.control.end_of_action
        rows, masks = (tensordict.get(key).reshape(-1, tokens.shape[-1]).tolist() for key in (TOKENS, AGENT_MASK))
        asked = [set() if self.repeat else _utterances(row, mask, end) for row, mask in zip(rows, masks, strict=True)]
        asked = [each if len(each) < ROUNDS else set() for each in asked]  # it has ended, so its action is ignored
        drawn = [self._encoded(number) for number in self._draw(len(asked))]
        # At most nine of at least ten different questions were asked.
        while again := [row for row, one in enumerate(drawn) if one in asked[row]]:
            for row, number in zip(again, self._draw(len(again)), strict=True):
                drawn[row] = self._encoded(number)
        pad = self.tokenizer.control.pad
        action = torch.tensor([[*one, *[pad] * (self.action_length - len(one))] for one in drawn])
        return tensordict.set(ACTION, action.reshape(*tokens.shape[:-1], self.action_length).to(tokens.device))

    def _draw(self, many: int) -> list[int]:
        return self.stream.below(torch.full((many,), len(self.questions))).tolist()

    def _encoded(self, number: int) -> tuple[int, ...]:
        """The tokens of a question and its end."""
        question = self.questions[number]
        ids = (*encode_action(self.tokenizer, question), self.tokenizer.control.end_of_action)
        if len(ids) > self.action_length:
            raise ValueError(f"{question!r} has {len(ids)} tokens with its end, action_length={self.action_length}.")
        return ids


def _utterances(tokens: Sequence[int], agent: Sequence[bool], end: int) -> set[tuple[int, ...]]:
    """Utterances of the agent in a row, each with its end, which the environment may have written."""
    found, current = set[tuple[int, ...]](), list[int]()
    for token, by_agent in zip(tokens, agent, strict=True):
        if by_agent and token != end:
            current.append(token)
        elif by_agent or current:
            found.add((*current, end))
            current = []
    return found


def played_rounds(rows: TensorDictBase, tokenizer: Tokenizer) -> list[list[Round]]:
    """The questions and replies of each row; an utterance with ``<stop>`` that got no reply is no round.

    Args:
        rows: the entries of a row, ``[N, T]``, such as ``records.rows``; rows of a chat template need ``terminated``.
        tokenizer: of the rows.

    Examples:
        >>> from torchrl_lang.text import CharTokenizer, Episode, Turn, to_rows
        >>> from torchrl_lang.envs.visual_dialogue import played_rounds
        >>> tokenizer = CharTokenizer.from_alphabet("abcdefghijklmnopqrstuvwxyz ?<>")
        >>> turns = [Turn("a dog"), Turn("is it red?", 0.25), Turn("no"), Turn("<stop>", 0.0)]
        >>> played_rounds(to_rows([Episode(turns, terminated=True)], tokenizer, 40), tokenizer)
        [[Round(question='is it red?', answer='no')]]
    """
    found: list[list[Round]] = []
    for row in rows:
        turns = from_row(row, tokenizer).turns
        replies = [None if turn.by_agent else turn.text for turn in turns[1:]] + [None]
        asked = [(turn.text, reply) for turn, reply in zip(turns, replies, strict=True) if turn.by_agent]
        found.append([Round(text, reply or "") for text, reply in asked if reply is not None or STOP not in text])
    return found


def yes_no_rate(rounds: Sequence[Sequence[Round]], penalty: Penalty, *, substrings: bool = False) -> Tensor:
    """The share of the rounds of each dialogue whose reply is a yes-or-no answer, float32 ``[N]``; 0 without rounds.

    Args:
        rounds: of each dialogue, see :func:`played_rounds`.
        penalty: which replies count, see :func:`is_yes_no`.
        substrings: see there.

    Examples:
        >>> from torchrl_lang.envs.visual_dialogue.dialogue import Round
        >>> from torchrl_lang.envs.visual_dialogue.play import yes_no_rate
        >>> asked = [Round("is it red?", "no"), Round("how many?", "two")]
        >>> yes_no_rate([asked, asked[1:], []], "hard")
        tensor([0.5000, 0.0000, 0.0000])
    """
    counts = [sum(is_yes_no(each.answer, penalty, substrings=substrings) for each in some) for some in rounds]
    totals = torch.tensor([max(1, len(some)) for some in rounds], dtype=torch.float32)
    return torch.tensor(counts, dtype=torch.float32) / totals
