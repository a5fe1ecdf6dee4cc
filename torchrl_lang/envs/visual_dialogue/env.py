"""Visual dialogues as a batched language environment: the agent asks, models answer and guess the image."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Unpack

import torch
from torch import Tensor
from torchrl.data import Unbounded

from torchrl_lang._checks import checked
from torchrl_lang.envs.game_turn import GamePlace
from torchrl_lang.envs.language_env import TaskState
from torchrl_lang.envs.text_game import UNREADABLE, GameOptions, TextGameEnv
from torchrl_lang.envs.visual_dialogue.data import VisualDialogues
from torchrl_lang.envs.visual_dialogue.dialogue import Dialogue, DialogueModels, Measure, answer_and_score, measured
from torchrl_lang.envs.visual_dialogue.files import ROUNDS
from torchrl_lang.envs.visual_dialogue.rewards import STOP, DialogueRewards
from torchrl_lang.text.tokenizers import Tokenizer

PROGRESS = "progress"
"""float32 ``[*B, 11]``: the initial percentile or distance and its change in each round so far, then zeros."""

LONGEST_QUESTION = 1000
"""Characters of a question that the models get; a server rejects far longer ones."""


@dataclass
class _Play:
    """The dialogue of a row so far."""

    dialogue: Dialogue
    image: Tensor  # float32 [F]
    initial: float
    gains: list[float] = field(default_factory=list)
    """Results of :func:`answer_and_score` for each round."""


class VisualDialogueEnv(TextGameEnv):
    r"""Questions about an image that only its caption describes (ILQL, arXiv 2206.11871, section 6.3).

    The opening is the caption, an utterance is a question, and the reply is the answer of the models. The rules of
    :class:`DialogueRewards` end episodes and reward questions; every such end is ``terminated``, that after ten rounds,
    too. The ``game_seed`` of an episode is the number of its dialogue in ``data``, from which caption and image come;
    by default it is drawn uniformly. Replaying the questions of ``data.episodes(rewards)`` gives their rows, if the
    models give the answers and values of ``data``; but in mode "env_stops" and for ``<stop>`` only the environment
    scales and shifts rewards.

    A step asks the models once for all rows that play, :class:`RemoteModels` in one request. A reset asks once for
    the initial values, which decide when a dialogue ends. They are never taken from the cache of rewards in ``data``:
    values of other models would not go together with the changes that these models report.

    The tensordict has these entries beside the row:

    =================  ======================  =========================================================================
    key                dtype, shape            meaning
    =================  ======================  =========================================================================
    ``progress``       float32 ``[*B, 11]``    the initial percentile (or distance) and its change in each round so far,
                                               zeros after; ``progress.cumsum(-1)`` is the percentile by round
    ``features``       float32 ``[*B, 1, F]``  feature of the image (``image=True``)
    ``features_mask``  bool ``[*B, 1]``        True (``image=True``)
    =================  ======================  =========================================================================

    Nothing that the agent writes is an error. The models get ``"\N{REPLACEMENT CHARACTER}"``, an unknown word, instead
    of a question that is blank or cannot be decoded, the same in place of half a surrogate pair, and the first 1000
    characters of a longer question. Rows keep what the agent wrote. An error of the models, such as the
    ``ConnectionError`` of a client without its server, is raised as it is, and the next call must be a full reset.

    Args:
        data: captions and images.
        models: that answer and guess, in process or behind HTTP; with the same number of features as ``data``.
        rewards: ends and rewards of dialogues, default ``DialogueRewards()``.
        measure: what ``progress`` holds and rewards compare: the ``"rank"`` of the true image, a percentile, or the
            ``"distance"`` of the guess.
        image: whether the agent sees the image.
        order: ``"random"`` draws dialogues from the environment's seed, ``"cycle"`` plays them in turn.
        ``tokenizer``, ``**options``: as in :class:`~torchrl_lang.envs.TextGameEnv`. In mode "agent_stops" the tokenizer
            must be able to encode ``<stop>``.

    Raises:
        ValueError: models and data have different features, or a percentile is to end dialogues with
            ``measure="distance"``; on ``reset``, there is no such dialogue.

    Examples:
        >>> import tempfile, torch
        >>> from torchrl_lang.text import CharTokenizer
        >>> from torchrl_lang.envs.visual_dialogue import VisualDialogueEnv, VisualDialogues, generate_visual_dialogues
        >>> class Models:
        ...     feature_size = 64
        ...     def answers(self, dialogues, questions, features):
        ...         return ["no" if question == "bird?" else "two" for question in questions]
        ...     def percentiles(self, dialogues, features):
        ...         return torch.tensor([0.5 + 0.125 * len(dialogue.rounds) for dialogue in dialogues])
        >>> home = tempfile.TemporaryDirectory()
        >>> generate_visual_dialogues(home.name, {"val": 5}, feature_size=64, npy=True)
        >>> data = VisualDialogues.in_folder(home.name, "val")
        >>> tokenizer = CharTokenizer.from_alphabet("abcdefghijklmnopqrstuvwxyz ?'")
        >>> env = VisualDialogueEnv(data, Models(), tokenizer, row_length=100, action_length=8)
        >>> td = env.reset(game_seed=torch.tensor([3]))
        >>> def ask(td, question):
        ...     ids = [*tokenizer.encode(question), tokenizer.control.end_of_action]
        ...     pads = [tokenizer.control.pad] * (8 - len(ids))
        ...     return env.step(td.set("action", torch.tensor([ids + pads])))["next"]
        >>> td = ask(td, "bird?")
        >>> td["reward"].item(), td["terminated"].item()
        (-1.0, False)
        >>> td = ask(td, "number?")  # (0.125 + 0.125) / (1 - 0.5) has reached the fraction 0.5
        >>> td["reward"].item(), td["terminated"].item(), td["progress"][0, :4].tolist()
        (0.0, True, [0.5, 0.125, 0.125, 0.0])
        >>> tokenizer.decode(td["tokens"][0][td["attention_mask"][0]]).removeprefix(f"<s>{data.dialogues[3].caption}")
        '</s>bird?</a>no</s>number?</a>two</s></eod>'
        >>> home.cleanup()
    """

    @checked
    def __init__(
        self,
        data: VisualDialogues,
        models: DialogueModels,
        tokenizer: Tokenizer,
        *,
        rewards: DialogueRewards | None = None,
        measure: Measure = "rank",
        image: bool = True,
        order: Literal["random", "cycle"] = "random",
        **options: Unpack[GameOptions],
    ) -> None:
        self.data, self.models, self.measure, self.order = data, models, measure, order
        self.rewards = DialogueRewards() if rewards is None else rewards
        size = data.features.feature_size
        if models.feature_size != size:
            given = f"The models take images of {models.feature_size} features, but {data.features.path} has {size}"
            raise ValueError(f"{given}: give the features that the models were trained on.")
        if measure == "distance" and self.rewards.ends_by_percentile:
            raise ValueError("measure='distance' has no percentile to end at: give a cutoff, or another mode.")
        self._plays: dict[int, _Play] = {}
        self._number_of_starts = len(data)
        no_game: Any = lambda: None  # noqa: E731  # the models play all rows at once
        super().__init__(no_game, tokenizer, features=(1, size) if image else None, **options)

    def _draw_seeds(self, episode: Tensor) -> Tensor:
        return episode % len(self.data) if self.order == "cycle" else super()._draw_seeds(episode)

    def _begin_all(self, places: Mapping[int, GamePlace]) -> Iterable[tuple[int, Any]]:
        if not places:
            return
        scenes = [place.seed for place in places.values()]
        dialogues = [Dialogue(self.data.dialogues[scene].caption) for scene in scenes]
        images = self.data.features.rows(scenes)
        initial = measured(self.models, dialogues, images, self.measure)
        for row, *begun in zip(places, dialogues, images, initial, strict=True):
            self._plays[row] = _Play(*begun)
            yield row, self._plays[row].dialogue.caption

    def _play_all(self, uttered: Mapping[int, list[int]], places: Mapping[int, GamePlace]) -> Iterable[tuple[int, Any]]:
        texts = {row: self._read(ids) for row, ids in uttered.items()}
        stops = [row for row, text in texts.items() if self.rewards.mode == "agent_stops" and STOP in text]
        yield from ((row, ("", self.rewards.stop, True)) for row in stops)
        asked = {row: _question(text) for row, text in texts.items() if row not in stops}
        if not asked:
            return
        plays = [self._plays[row] for row in asked]
        dialogues, images = [play.dialogue for play in plays], torch.stack([play.image for play in plays])
        replies = answer_and_score(self.models, dialogues, list(asked.values()), images, measure=self.measure)
        for (row, question), play, answer, gain in zip(asked.items(), plays, *replies, strict=True):
            play.dialogue = play.dialogue.then(question, answer)
            play.gains.append(gain)
            last = self.rewards.is_last(play.initial, play.gains)
            yield row, (answer, self.rewards.question(gain, answer, last=last), last)

    # -- entries beside the rows ---------------------------------------------------------------------------------------

    def _features(self, place: GamePlace) -> Tensor:
        return self._plays[place.row].image[None]

    def _standing(self) -> TaskState:
        sign = 1 if self.measure == "rank" else -1  # a round gains what the distance loses
        progress = torch.zeros(self._n, 1 + ROUNDS)
        for row, play in self._plays.items():
            changes = [play.initial, *(sign * gain for gain in play.gains)]
            progress[row, : len(changes)] = torch.tensor(changes)
        return {PROGRESS: progress.to(self.device)}

    def _task_observation(self, task: TaskState) -> Mapping[str, Tensor]:
        return {**super()._task_observation(task), PROGRESS: task[PROGRESS]}

    def _task_observation_spec(self) -> dict[str, Any]:
        progress = Unbounded(shape=(*self.batch_size, 1 + ROUNDS), dtype=torch.float32, device=self.device)
        return {**super()._task_observation_spec(), PROGRESS: progress}


def _question(text: str) -> str:
    """Text of an utterance for the models: not blank, not too long, without halves of surrogate pairs."""
    text = text[:LONGEST_QUESTION].encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text if text.strip() else UNREADABLE
