"""Twenty questions and guess my city of LMRL-Gym (arXiv 2311.18232) answered by a program; the exact optima."""

from torchrl_lang.envs.questions.game import MyopicPlayer, Questions
from torchrl_lang.envs.questions.optimum import BestQuestions
from torchrl_lang.envs.questions.table import QuestionTable

__all__ = ["BestQuestions", "MyopicPlayer", "QuestionTable", "Questions"]
