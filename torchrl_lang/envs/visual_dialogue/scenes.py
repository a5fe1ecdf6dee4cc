"""Scenes: the dialogues of a dataset, cut where they end, and as episodes with rewards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torchrl_lang.envs.visual_dialogue.dialogue import Dialogue
from torchrl_lang.envs.visual_dialogue.files import ROUNDS, SceneRecord
from torchrl_lang.envs.visual_dialogue.rewards import STOP, DialogueRewards
from torchrl_lang.text.episodes import Episode, Turn

__all__ = ["Scene", "scene_episode", "scenes_of", "whole_scene"]


class Scene(NamedTuple):
    """A dialogue that ends where its environment, or its agent, ended it.

    Examples:
        >>> from torchrl_lang.envs.visual_dialogue import Dialogue, Scene
        >>> Scene(Dialogue("a dog"), image=3, initial=0.75, progress=(), stopped=True).stopped
        True
    """

    dialogue: Dialogue
    image: int
    """Row of its image in the features."""
    initial: float
    """Percentile or distance after the caption."""
    progress: tuple[float, ...]
    """Its change in each round."""
    stopped: bool
    """Whether the agent wrote ``<stop>`` after the last round."""


def scenes_of(record: SceneRecord, rewards: DialogueRewards) -> Iterator[Scene]:
    """The scenes of a dialogue of ten rounds: one, or in mode "agent_stops" eleven.

    In mode "env_stops" the dialogue is cut after its first last round. In mode "agent_stops" the agent stops after 0,
    1, ..., 9 rounds, and does not need to after ten. In mode "10_stop" the dialogue stays as it is.

    Examples:
        >>> from torchrl_lang.envs.visual_dialogue import Dialogue, DialogueRewards, Round, SceneRecord, scenes_of
        >>> ten = Dialogue("a dog", (Round("is it red?", "no"),) * 10)
        >>> record = SceneRecord(ten, image=3, rewards=(0.6, 0.125, 0.1, *[0.0] * 8))
        >>> [len(scene.dialogue.rounds) for scene in scenes_of(record, DialogueRewards())]
        [2]
        >>> [(len(scene.progress), scene.stopped) for scene in scenes_of(record, DialogueRewards("agent_stops"))][-2:]
        [(9, True), (10, False)]
    """
    if rewards.mode == "agent_stops":
        yield from (_cut(record, rounds, stopped=rounds < ROUNDS) for rounds in range(ROUNDS + 1))
    else:
        yield whole_scene(record, rewards)


def whole_scene(record: SceneRecord, rewards: DialogueRewards) -> Scene:
    """One scene of a dialogue of any length; in mode "agent_stops" a shorter one than ten rounds ends with a stop.

    Raises:
        ValueError: the dialogue does not end within its rounds.

    Examples:
        >>> from torchrl_lang.envs.visual_dialogue import Dialogue, DialogueRewards, SceneRecord, whole_scene
        >>> whole_scene(SceneRecord(Dialogue("a dog"), image=3, rewards=(0.6,)), DialogueRewards("agent_stops")).stopped
        True
    """
    rounds = len(record.dialogue.rounds)
    if rewards.mode == "agent_stops":
        return _cut(record, rounds, stopped=rounds < ROUNDS)
    initial, *progress = record.rewards
    for end in range(1, rounds + 1):
        if rewards.is_last(initial, progress[:end]):
            return _cut(record, end, stopped=False)
    raise ValueError(f"it does not end within its {rounds} rounds in mode {rewards.mode!r}")


def scene_episode(scene: Scene, rewards: DialogueRewards) -> Episode:
    """The turns of a scene: caption and replies of the environment, questions and a stop of the agent, with rewards.

    The episode has terminated, also after ten rounds: that is the task's end, not a limit of the environment.

    Examples:
        >>> from torchrl_lang.envs.visual_dialogue import Dialogue, DialogueRewards, Round, Scene, scene_episode
        >>> dialogue = Dialogue("a dog", (Round("is it red?", "no"), Round("what colour is it?", "white")))
        >>> scene = Scene(dialogue, image=3, initial=0.6, progress=(0.125, 0.1), stopped=False)
        >>> [(turn.text, turn.reward) for turn in scene_episode(scene, DialogueRewards(penalty="hard")).turns]
        [('a dog', None), ('is it red?', -3.0), ('no', None), ('what colour is it?', 0.0), ('white', None)]
    """
    rewards, rounds = rewards.of_dataset, scene.dialogue.rounds
    turns = [Turn(scene.dialogue.caption)]
    for number, (each, value) in enumerate(zip(rounds, scene.progress, strict=True), start=1):
        last = number == len(rounds) and not scene.stopped
        turns += [Turn(each.question, rewards.question(value, each.answer, last=last)), Turn(each.answer)]
    if scene.stopped:
        turns.append(Turn(STOP, 0.0))
    return Episode(turns, terminated=True)


def _cut(record: SceneRecord, rounds: int, *, stopped: bool) -> Scene:
    dialogue = record.dialogue.first(rounds)
    return Scene(dialogue, record.image, record.rewards[0], tuple(record.rewards[1 : rounds + 1]), stopped)
