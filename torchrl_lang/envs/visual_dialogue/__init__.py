"""Questions about an image that a guesser has to find: the visual dialogue task (ILQL, arXiv 2206.11871, section 6)."""

from torchrl_lang.envs.visual_dialogue.client import RemoteModels
from torchrl_lang.envs.visual_dialogue.dataset import VisualDialogues
from torchrl_lang.envs.visual_dialogue.dialogue import Dialogue, DialogueModels, Round
from torchrl_lang.envs.visual_dialogue.env import VisualDialogueEnv
from torchrl_lang.envs.visual_dialogue.features import ImageFeatures
from torchrl_lang.envs.visual_dialogue.files import (
    SceneRecord,
    SplitFiles,
    read_additional_scenes,
    read_dialogues,
    read_reward_cache,
)
from torchrl_lang.envs.visual_dialogue.makers import generate_visual_dialogues
from torchrl_lang.envs.visual_dialogue.metrics import percentiles_by_round, played_rounds, yes_no_rate
from torchrl_lang.envs.visual_dialogue.models import (
    DialogueTraining,
    LocalDialogueModels,
    SavedDialogueModels,
    load_dialogue_models,
    save_dialogue_models,
    train_dialogue_models,
)
from torchrl_lang.envs.visual_dialogue.players import QuestionPlayer
from torchrl_lang.envs.visual_dialogue.reward_cache import RewardCaches, compute_reward_caches, write_reward_caches
from torchrl_lang.envs.visual_dialogue.rewards import STOP, CutoffRule, DialogueRewards, PercentileCutoff
from torchrl_lang.envs.visual_dialogue.scene_rows import SceneRows
from torchrl_lang.envs.visual_dialogue.scenes import Scene, scene_episode, scenes_of, whole_scene
from torchrl_lang.envs.visual_dialogue.server import DialogueServer
from torchrl_lang.envs.visual_dialogue.steps import AnsweredQuestions, Measure, answer_and_score, last_round_rewards
from torchrl_lang.envs.visual_dialogue.yes_no import is_yes_no

__all__ = [
    "AnsweredQuestions",
    "CutoffRule",
    "Dialogue",
    "DialogueModels",
    "DialogueRewards",
    "DialogueServer",
    "DialogueTraining",
    "ImageFeatures",
    "LocalDialogueModels",
    "Measure",
    "PercentileCutoff",
    "QuestionPlayer",
    "RemoteModels",
    "RewardCaches",
    "Round",
    "STOP",
    "SavedDialogueModels",
    "Scene",
    "SceneRecord",
    "SceneRows",
    "SplitFiles",
    "VisualDialogueEnv",
    "VisualDialogues",
    "answer_and_score",
    "compute_reward_caches",
    "generate_visual_dialogues",
    "is_yes_no",
    "last_round_rewards",
    "load_dialogue_models",
    "percentiles_by_round",
    "played_rounds",
    "read_additional_scenes",
    "read_dialogues",
    "read_reward_cache",
    "save_dialogue_models",
    "scene_episode",
    "scenes_of",
    "train_dialogue_models",
    "whole_scene",
    "write_reward_caches",
    "yes_no_rate",
]
