"""Reinforcement learning on language with TorchRL.

Language tasks are TorchRL environments over token ids, ILQL and its relatives are loss modules, and both meet only
through the keys of :mod:`torchrl_lang.schema`. Import what you need from the subpackage that is named after its kind:
``torchrl_lang.envs``, ``torchrl_lang.objectives``, ``torchrl_lang.modules``, ``torchrl_lang.data``.
"""

__version__ = "0.1.0"
