"""Serve the models of visual dialogue over HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torchrl_lang.envs.visual_dialogue import Dialogue, DialogueServer
from torchrl_lang.envs.visual_dialogue.model_queue import Questioner
from torchrl_lang.envs.visual_dialogue.prepare import local_models
from torchrl_lang.envs.visual_dialogue.protocol import RequestError
from torchrl_lang.modules.save import FEATURES_HEAD
from torchrl_lang.recipes.load_run import load_run
from torchrl_lang.recipes.tasks.visual_dialogue import ServeVisualDialogue

__all__ = ["ServeVisualDialogue", "main", "run_questioner"]


def main(options: ServeVisualDialogue) -> None:
    """Serve until SIGTERM or SIGINT."""
    models = local_models(options.models, options.features, options.split)
    server = DialogueServer(
        models,
        None if options.questioner is None else run_questioner(options.questioner),
        name=options.models.resolve().name,
        host=options.host,
        port=options.port,
        items=options.items,
        queue=options.queue,
    )
    server.run(lambda url: print(f"serving {options.models} on {url}, until Ctrl-C", flush=True))


def run_questioner(folder: Path) -> Questioner:
    """Asks as a finished run does, by greedy decoding."""
    run = load_run(folder)
    if FEATURES_HEAD in run.model.heads:
        raise ValueError(
            f"The run in {folder} reads image features, which requests for questions do not have: give one that was "
            "trained on data of `generate visual_dialogue --no-image`."
        )

    def ask(dialogues: Sequence[Dialogue]) -> list[str]:
        try:
            return run.replies([each.texts for each in dialogues])
        except ValueError as error:  # of a character that its tokenizer does not know, or a full row
            message = "is too long for the questioner, or has a character that it cannot read"
            raise RequestError(422, message, "history") from error

    return ask
