"""Models of Hugging Face that classify texts, as rewards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from torchrl_lang._checks import Count, checked
from torchrl_lang._files import check_loaded_weights, check_model_config, file_errors, read_json


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
        FileError: there is no such model, it cannot be read, or its files lack some of its weights, as those of a model
            that is no classifier do.
        ValueError: the labels of ``values`` are not those of the model, or an option does not fit.

    Examples:
        >>> from torchrl_lang.envs.reddit import ClassifierReward
        >>> ClassifierReward("unitary/toxic-bert", {"toxic": -1.0})  # doctest: +SKIP
    """

    @checked
    def __init__(
        self,
        model: str | Path,
        values: Mapping[str, float],
        *,
        output: Literal["expected", "likeliest"] = "expected",
        max_length: Count = 256,
        batch_size: Count = 32,
        local_files_only: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        from transformers import AutoModelForSequenceClassification  # its import takes a second

        remedy = "give a trained text classification model"
        kind, where = AutoModelForSequenceClassification, str(model)
        self._model, self._tokenizer = pretrained(kind, where, where, remedy, others=True, local=local_files_only)
        self._model.to(device).eval()
        self.output, self.batch_size, self.device = output, batch_size, device
        self.max_length = min(max_length, readable_tokens(self._model, self._tokenizer))
        labels, kind = self._model.config.id2label, self._model.config.problem_type
        self._exclusive = len(labels) > 1 and kind not in ("multi_label_classification", "regression")
        self._numbers = kind == "regression"
        if not self._exclusive and output == "likeliest":
            raise ValueError(f"{model} does not choose one label for a text: use output='expected'.")
        if set(labels) != set(range(len(labels))) or set(values) != set(labels.values()):
            raise ValueError(f"{model} has the labels {labels}, from 0 on, got values of {sorted(values)}.")
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
                known = logits if self._numbers else logits.softmax(-1) if self._exclusive else logits.sigmoid()
                parts.append(known @ self._values)
        return torch.cat(parts)


def pretrained(
    kind: Any, model: str | Path, tokenizer: str | Path, remedy: str, *, others: bool = False, local: bool
) -> tuple[Any, Any]:
    """A Hugging Face model and its tokenizer, with all weights from safetensors and without code from elsewhere."""
    from transformers import AutoTokenizer  # its import takes a second

    if Path(model).is_dir():
        path = Path(model) / "config.json"
        check_model_config(read_json(path, remedy=remedy), path, remedy=remedy)
    with file_errors(model, "holds no readable model", remedy, Exception):  # of damaged files, of any kind
        # sizes that do not match are ignored, so that they are among the loading info
        more = {"local_files_only": local, "output_loading_info": True, "ignore_mismatched_sizes": True}
        network, info = kind.from_pretrained(str(model), trust_remote_code=False, use_safetensors=True, **more)
        words = AutoTokenizer.from_pretrained(str(tokenizer), trust_remote_code=False, local_files_only=local)
    check_loaded_weights(model, network, info, remedy=remedy, others=others)
    if words.pad_token is None:  # as of GPT-2; padding is masked, so that any token serves
        words.pad_token = words.eos_token or words.convert_ids_to_tokens(0)
    if network.config.pad_token_id is None:  # where a decoder's head finds the end of a text
        network.config.pad_token_id = words.pad_token_id
    return network, words


def encoded_batches(tokenizer: Any, texts: Sequence[str], batch_size: int, max_length: int) -> Iterator[Any]:
    """The texts in order, tokenized in batches, padded to the longest of each, and cut at ``max_length`` tokens.

    A text without tokens, such as ``""`` for a tokenizer that adds no special ones, is read as one padding token.
    """
    for first in range(0, len(texts), batch_size):
        part = [text.encode("utf-8", "replace").decode() for text in texts[first : first + batch_size]]  # surrogates
        batch = tokenizer(part, padding=True, truncation=True, max_length=max_length, return_tensors="pt")
        if not batch["input_ids"].numel():
            token = torch.full((len(part), 1), tokenizer.pad_token_id)
            batch = type(batch)({"input_ids": token, "attention_mask": torch.zeros_like(token)})
        mask = batch["attention_mask"]
        mask[:, 0] |= ~mask.any(-1)  # attention over nothing is undefined
        yield batch


def readable_tokens(model: Any, tokenizer: Any) -> int:
    """The tokens of the longest text that a model reads; its tokenizer need not know."""
    known: int = tokenizer.model_max_length
    positions = getattr(model.config, "max_position_embeddings", None) or 0
    if positions < 1 or not getattr(model.config, "position_biased_input", True):  # XLNet; DeBERTa
        return known  # its positions are relative
    table = getattr(getattr(model.base_model, "embeddings", None), "position_embeddings", None)
    padding = getattr(table, "padding_idx", None)  # RoBERTa counts positions from the one after that of padding
    return min(known, positions - (0 if padding is None else padding + 1))
