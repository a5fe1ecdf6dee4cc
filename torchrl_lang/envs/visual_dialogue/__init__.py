"""Visual dialogue: questions about an image, asked of models in process or behind HTTP (the extra ``visdial``)."""

from torchrl_lang.envs.visual_dialogue.client import RemoteModels
from torchrl_lang.envs.visual_dialogue.dialogue import Dialogue, DialogueModels, Round
from torchrl_lang.envs.visual_dialogue.protocol import ServerLimits
from torchrl_lang.envs.visual_dialogue.reward_cache import RewardCaches, compute_reward_caches
from torchrl_lang.envs.visual_dialogue.server import DialogueServer
from torchrl_lang.envs.visual_dialogue.steps import AnsweredQuestions, Measure, answer_and_score, last_round_rewards

__all__ = [
    "AnsweredQuestions",
    "Dialogue",
    "DialogueModels",
    "DialogueServer",
    "Measure",
    "RemoteModels",
    "RewardCaches",
    "Round",
    "ServerLimits",
    "answer_and_score",
    "compute_reward_caches",
    "last_round_rewards",
]
