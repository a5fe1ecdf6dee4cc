"""Any Hugging Face text classification model as a reward."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from torchrl_lang._checks import at_least_one, finite, one_of
from torchrl_lang._files import Fields, check_loaded_weights, check_model_config, one_line
from torchrl_lang.envs.reddit.rewards.encoding import encoded_batches, readable_tokens

__all__ = ["ClassifierReward"]


class ClassifierReward:
    """The value of a text's label, by a text classification model.

    A model with one output gives the probability of its one label; a model of regression gives the number itself.

    Args:
        model: name of the model on the Hugging Face hub, or its folder; weights are read from safetensors only.
        values: maps each label of the model to a number, such as ``{"toxic": -1.0, "neutral": 0.0}``.
        output: "expected" weights the values with the probabilities of the labels; "likeliest" takes the value of the
            label with the highest one. The probabilities of a multi-label model are those of each label alone, so that
            only "expected" has a meaning, as for a model with one output or of regression.
        max_length: tokens of a text that are read, at most; fewer if the model reads fewer.
        batch_size: texts at a time.
        local_files_only: download nothing.
        device: where to run the model.

    Raises:
        OSError: there is no such model, or it cannot be read.
        FileError: its files lack some of its weights, as those of a model that is no classifier do.
        ValueError: the labels of ``values`` are not those of the model, or an option does not fit.

    Examples:
        >>> from torchrl_lang.envs.reddit.rewards import ClassifierReward
        >>> ClassifierReward("unitary/toxic-bert", {"toxic": -1.0})  # doctest: +SKIP
    """

    def __init__(
        self,
        model: str | Path,
        values: Mapping[str, float],
        *,
        output: Literal["expected", "likeliest"] = "expected",
        max_length: int = 256,
        batch_size: int = 32,
        local_files_only: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        one_of("output", output, ("expected", "likeliest"))
        at_least_one("max_length", max_length)
        at_least_one("batch_size", batch_size)
        self.output, self.batch_size, self.device = output, batch_size, device
        self._model, self._tokenizer = _load(str(model), local_files_only)
        self._model.to(device).eval()
        self.max_length = min(max_length, readable_tokens(self._model, self._tokenizer))
        labels, kind = self._model.config.id2label, self._model.config.problem_type
        self._exclusive = len(labels) > 1 and kind not in ("multi_label_classification", "regression")
        self._numbers = kind == "regression"
        if not self._exclusive and output == "likeliest":
            raise ValueError(f"{model} does not choose one label for a text: use output='expected'.")
        if set(labels) != set(range(len(labels))):
            raise ValueError(f"{model} numbers its labels {sorted(labels)}, expected 0 to {len(labels) - 1}.")
        if set(values) != set(labels.values()):
            raise ValueError(f"{model} has the labels {sorted(labels.values())}, got values of {sorted(values)}.")
        for label, value in values.items():
            finite(f"values[{label!r}]", value, low=None)
        self._values = torch.tensor([values[labels[place]] for place in range(len(labels))], dtype=torch.float32)

    @torch.no_grad()
    def __call__(self, texts: list[str]) -> Tensor:
        """The rewards of texts, float32 ``[N]``."""
        parts = [torch.zeros(0)]
        for batch in encoded_batches(self._tokenizer, texts, self.batch_size, self.max_length):
            logits = self._model(**batch.to(self.device)).logits.float().cpu()  # [n, labels]
            if self.output == "likeliest":
                parts.append(self._values[logits.argmax(-1)])
            else:
                parts.append(self._weights(logits) @ self._values)
        return torch.cat(parts)

    def _weights(self, logits: Tensor) -> Tensor:
        if self._numbers:
            return logits
        return logits.softmax(-1) if self._exclusive else logits.sigmoid()


def _load(name: str, local_files_only: bool) -> tuple[Any, Any]:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer  # their import takes a second

    try:
        if Path(name).is_dir():
            check_model_config(Fields.read(Path(name) / "config.json", remedy="save the model again"))
        model, info = AutoModelForSequenceClassification.from_pretrained(
            name,
            trust_remote_code=False,
            use_safetensors=True,
            local_files_only=local_files_only,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that they are among the loading info
        )
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False, local_files_only=local_files_only)
    except Exception as error:  # damaged files raise any kind of exception
        raise OSError(f"There is no readable text classification model in {name!r} ({one_line(error)}).") from error
    check_loaded_weights(name, model, info, remedy="give a trained text classification model", others=True)
    if tokenizer.pad_token is None:  # as of GPT-2; padding is masked, so that any token serves
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    if model.config.pad_token_id is None:  # where a decoder's head finds the end of a text
        model.config.pad_token_id = tokenizer.pad_token_id
    return model, tokenizer
