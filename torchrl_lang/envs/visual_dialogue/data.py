"""Visual dialogues with the features of their images and the rewards of their rounds: scenes, episodes, rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from tensordict import TensorDict

from torchrl_lang._files import FileError
from torchrl_lang.data.generate import EpisodeSampler
from torchrl_lang.envs.visual_dialogue import files
from torchrl_lang.envs.visual_dialogue.dialogue import Measure
from torchrl_lang.envs.visual_dialogue.files import ROUNDS, Scene
from torchrl_lang.envs.visual_dialogue.rewards import STOP, DialogueRewards
from torchrl_lang.schema import FEATURES, FEATURES_MASK
from torchrl_lang.text.episodes import Episode, Turn
from torchrl_lang.text.rows import to_rows
from torchrl_lang.text.tokenizers import Tokenizer


def scenes_of(scene: Scene, rewards: DialogueRewards) -> Iterator[Scene]:
    """The scenes of a dialogue of ten rounds: one, or in mode "agent_stops" eleven.

    In mode "env_stops" the dialogue is cut after its first last round. In mode "agent_stops" the agent stops after 0,
    1, ..., 9 rounds, and does not need to after ten. In mode "10_stop" the dialogue stays as it is.
    """
    if rewards.mode == "agent_stops":
        yield from (scene.first(rounds, stopped=rounds < ROUNDS) for rounds in range(ROUNDS + 1))
    else:
        yield ended_scene(scene, rewards)


def ended_scene(scene: Scene, rewards: DialogueRewards) -> Scene:
    """A dialogue of any length up to its end; in mode "agent_stops" a shorter one than ten rounds ends with a stop."""
    rounds = len(scene.dialogue.rounds)
    if rewards.mode == "agent_stops":
        return scene._replace(stopped=rounds < ROUNDS)
    ends = (end for end in range(1, rounds + 1) if rewards.is_last(scene.initial, scene.progress[:end]))
    return scene.first(next(ends, rounds))


def scene_episode(scene: Scene, rewards: DialogueRewards) -> Episode:
    """The turns of a scene: caption and replies of the environment, questions and a stop of the agent, with rewards.

    The episode has terminated, also after ten rounds: that is the task's end, not a limit of the environment.
    """
    rewards, rounds = rewards.of_dataset, scene.dialogue.rounds
    turns = [Turn(scene.dialogue.caption)]
    for number, (each, value) in enumerate(zip(rounds, scene.progress, strict=True), start=1):
        last = number == len(rounds) and not scene.stopped
        turns += [Turn(each.question, rewards.question(value, each.answer, last=last)), Turn(each.answer)]
    if scene.stopped:
        turns.append(Turn(STOP, 0.0))
    return Episode(turns, terminated=True)


class VisualDialogues:
    """The dialogues of a split, the features of their images, and the rewards of their rounds.

    Dialogue ``i`` is about image ``i`` of the features.

    Args:
        dialogues: the file of dialogues, see :func:`read_dialogues`.
        features: the file of image features, see :class:`ImageFeatures`.
        split: "train", "val" or "test": the features ``images_<split>`` of an HDF5 file.
        rewards: a cache of rewards, see :func:`read_reward_cache`; scenes need it.
        additional: a file of further scenes, see :func:`read_additional_scenes`.

    Raises:
        FileError: a file is missing, damaged or does not fit the others; the message names file, item and field.

    Examples:
        >>> import tempfile
        >>> from torchrl_lang.envs.visual_dialogue import VisualDialogues, generate_visual_dialogues
        >>> with tempfile.TemporaryDirectory() as home:
        ...     generate_visual_dialogues(home, {"val": 5}, feature_size=64, npy=True)
        ...     data = VisualDialogues.in_folder(home, "val")
        ...     len(data), data.features.rows([4]).shape
        (5, torch.Size([1, 64]))
    """

    def __init__(
        self,
        dialogues: str | Path,
        features: str | Path,
        split: str,
        *,
        rewards: str | Path | None = None,
        additional: str | Path | None = None,
    ) -> None:
        self.dialogues, self.image_ids = files.read_dialogues(dialogues)
        self.features = files.ImageFeatures(features, split)
        if len(self.features) != len(self.dialogues):
            found = f"holds {len(self.features)} images, but {dialogues} holds {len(self.dialogues)} dialogues"
            raise FileError(features, found, "give the features of the same split, in the same order")
        self.rewards = None if rewards is None else files.read_reward_cache(rewards, len(self.dialogues))
        self.additional = [] if additional is None else files.read_additional_scenes(additional, len(self.features))
        self._additional_path = additional

    def __len__(self) -> int:
        """Number of dialogues, without additional scenes."""
        return len(self.dialogues)

    @classmethod
    def in_folder(cls, folder: str | Path, split: str, *, rewards: Measure | None = None) -> VisualDialogues:
        """The data of a split in a folder of files with the names of the real ones, with rewards of a measure."""
        found = files.SplitFiles.in_folder(folder, split)
        cache = {None: None, "rank": found.rank_rewards, "distance": found.distance_rewards}[rewards]
        return cls(found.dialogues, found.features, split, rewards=cache)

    def scenes(self, rewards: DialogueRewards) -> list[Scene]:
        """The dialogues cut where they end, in order, then the additional scenes; see :func:`scenes_of`.

        Raises:
            ValueError: there is no cache of rewards.
            FileError: an additional scene does not end.
        """
        scenes = [scene for number in range(len(self)) for scene in scenes_of(self.scene(number), rewards)]
        for number, scene in enumerate(self.additional):
            ended = ended_scene(scene, rewards)
            if not (ended.stopped or rewards.is_last(ended.initial, ended.progress)):
                found = f"has an item {number} that does not end within its rounds in mode {rewards.mode!r}"
                raise FileError(str(self._additional_path), found, "leave it out, or use another mode or cutoff")
            scenes.append(ended)
        return scenes

    def scene(self, number: int) -> Scene:
        """A dialogue with all its rounds and their rewards.

        Raises:
            ValueError: there is no cache of rewards.
        """
        if self.rewards is None:
            raise ValueError("Scenes need a cache of rewards, for instance train_rank_reward_cache1.json.")
        return Scene(self.dialogues[number], number, self.rewards[number])

    def episodes(self, rewards: DialogueRewards) -> list[Episode]:
        """The scenes as episodes with rewards, see :func:`scene_episode`."""
        return [scene_episode(scene, rewards) for scene in self.scenes(rewards)]


class SceneRows(EpisodeSampler):
    """Makes the rows of dialogues: one for each, in mode "agent_stops" eleven; see :func:`scenes_of`.

    Game ``i`` is dialogue ``i``, whatever the seed.

    Args:
        data: with a cache of rewards.
        tokenizer: the tokenizer of the rows.
        row_length: ``T``.
        rewards: ends and rewards of the dialogues.
        image: add ``features`` float32 ``[N, 1, F]``, the feature of the image, and ``features_mask`` bool ``[N, 1]``.

    Raises:
        ValueError: there is no cache of rewards; on calls, a dialogue does not fit a row or cannot be encoded.

    Examples:
        >>> import json, pathlib, tempfile
        >>> from torchrl_lang.text import word_tokenizer
        >>> from torchrl_lang.envs.visual_dialogue import DialogueRewards, VisualDialogues, generate_visual_dialogues
        >>> from torchrl_lang.envs.visual_dialogue.data import SceneRows
        >>> with tempfile.TemporaryDirectory() as home:
        ...     generate_visual_dialogues(home, {"train": 5}, feature_size=64, npy=True)
        ...     cache = pathlib.Path(home, "train_rank_reward_cache1.json")
        ...     _ = cache.write_text(json.dumps([[0.5, 0.125, 0.125] + [0] * 8] * 5))
        ...     data = VisualDialogues.in_folder(home, "train", rewards="rank")
        ...     rows = SceneRows(data, word_tokenizer([]), 400, rewards=DialogueRewards())(range(3), seed=0)
        >>> rows["features"].shape, rows["token_reward"].sum(-1)
        (torch.Size([3, 1, 64]), tensor([-1., -1., -1.]))
    """

    def __init__(
        self,
        data: VisualDialogues,
        tokenizer: Tokenizer,
        row_length: int,
        *,
        rewards: DialogueRewards,
        image: bool = True,
    ) -> None:
        super().__init__(tokenizer, row_length)
        self.data, self.rewards, self.image = data, rewards, image

    def __call__(self, numbers: range, seed: int) -> TensorDict:
        """See ``EpisodeSampler.__call__``."""
        scenes = [scene for number in numbers for scene in scenes_of(self.data.scene(number), self.rewards)]
        rows = to_rows([scene_episode(scene, self.rewards) for scene in scenes], self.tokenizer, self.row_length)
        if self.image:
            rows[FEATURES] = self.data.features.rows([scene.image for scene in scenes])[:, None]
            rows[FEATURES_MASK] = torch.ones(len(scenes), 1, dtype=torch.bool)
        return rows
