"""Train a model on learning histories: algorithm distillation, or expert distillation with ``--source expert``."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_lang.algorithm_distillation import ADLoss, evaluate_in_context
from torchrl_lang.modules.hugging_face import eval_mode
from torchrl_lang.recipes.algorithm_distillation.formats import FORMATS, LanguageFormat, RLFormat
from torchrl_lang.recipes.algorithm_distillation.histories import TaskFamily, digest_of, history_windows, recording_of
from torchrl_lang.recipes.algorithm_distillation.options import AD, LAST_EPISODES
from torchrl_lang.recipes.models import loss_options
from torchrl_lang.recipes.options import plain
from torchrl_lang.recipes.runs import open_run, train_and_evaluate


def main(options: AD) -> float:
    """Train; returns the best mean return of the last episodes on validation tasks.

    The run's folder contains ``config.json``, ``log.csv``, ``checkpoints`` and, at the end, ``model``. The same command
    continues a run that was killed, and ends with the same numbers.
    """
    family = TaskFamily(options)
    torch.manual_seed(options.seed)
    length = options.context_episodes * family.episode_length
    format = FORMATS[options.format].new(options, family)
    format.model.to(options.torch_device())
    loss = format.loss(**loss_options(options, ADLoss)) if isinstance(format, RLFormat) else format.loss()
    described, recording = family.describe(), recording_of(options)
    fixed = {"family": described, "history_digest": digest_of(options)}
    with open_run(options, free=("history",), fixed=fixed) as checkpoints:
        windows = history_windows(options, length=length, batch_size=options.batch_size, seed=options.seed)
        source = options.source_name() if recording is None else recording.source
        trained_on = {"family": described, "source": source, "options": plain(options)}
        return train_and_evaluate(
            options,
            checkpoints,
            loss,
            lambda: format.batch(windows.sample()),
            lambda: (_evaluate(options, family, format), {}),
            lambda folder: format.save(folder, trained_on),
            windows=windows,
        )


def _evaluate(options: AD, family: TaskFamily, format: RLFormat | LanguageFormat) -> dict[str, float]:
    """The mean return of the last episodes and of the first one on validation tasks."""
    env = family.env(family.split.validation, options.eval_streams)
    with eval_mode(format.model):
        policy = format.policy(options.temperature)
        returns: Tensor = evaluate_in_context(env, policy, options.episodes, seed=options.seed)
    return {"return": float(returns[..., -LAST_EPISODES:].mean()), "first_return": float(returns[..., 0].mean())}
