"""The ILQL paper's upvote model: an encoder with a head that predicts whether a comment is upvoted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from torchrl_lang._checks import at_least_one
from torchrl_lang._files import (
    Fields,
    FileError,
    FolderFormat,
    check_loaded_weights,
    check_model_config,
    one_line,
    read_tensors,
)
from torchrl_lang.envs.reddit.rewards.encoding import encoded_batches, readable_tokens
from torchrl_lang.envs.reddit.rewards.probability import ProbabilityReward

__all__ = ["UpvoteModel", "UpvoteNetwork"]

_HEAD, _REMEDY = "head.safetensors", "train and save the model again"
_NEEDS = (_HEAD, "encoder/config.json", "encoder/model.safetensors", "tokenizer/tokenizer_config.json")
_FORMAT = FolderFormat("upvote_model.json", _NEEDS, remedy=_REMEDY, version=1)


class UpvoteNetwork(nn.Module):
    """Pooled output of an encoder, then ``Linear(d, 2 d)``, ReLU, ``Linear(2 d, 1)``.

    Args:
        encoder: a Hugging Face encoder with a pooler.
        freeze: leave the encoder's weights as they are, and keep it in evaluation mode.

    Raises:
        ValueError: on calls, the encoder has no pooler.

    Examples:
        >>> import torch
        >>> from transformers import BertConfig, BertModel
        >>> from torchrl_lang.envs.reddit.rewards import UpvoteNetwork
        >>> sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        >>> network = UpvoteNetwork(BertModel(BertConfig(vocab_size=20, **sizes)))
        >>> network({"input_ids": torch.ones(3, 4, dtype=torch.int64)}).shape
        torch.Size([3])
    """

    def __init__(self, encoder: Any, *, freeze: bool = False) -> None:
        super().__init__()
        self.encoder, self.freeze = encoder.requires_grad_(not freeze), freeze
        width = encoder.config.hidden_size
        self.head = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, 1))

    def forward(self, batch: Any) -> Tensor:
        """Logits of being upvoted, ``[n]``, for a batch with ``input_ids`` and ``attention_mask`` ``[n, L]``."""
        pooled = getattr(self.encoder(**batch), "pooler_output", None)
        if pooled is None:
            raise ValueError(f"{type(self.encoder).__name__} has no pooler: use an encoder such as RoBERTa or BERT.")
        return self.head(pooled).squeeze(-1)

    def train(self, mode: bool = True) -> UpvoteNetwork:
        """Set the mode of training; a frozen encoder stays without dropout."""
        super().train(mode)
        self.encoder.train(mode and not self.freeze)
        return self


class UpvoteModel(ProbabilityReward):
    """1 for a comment that is probably upvoted, else 0, by a trained :class:`UpvoteNetwork`.

    (The ILQL paper's description has 1 and -1, its code 1 and 0.) Train it with :func:`train_upvote_model`.

    Args:
        network: the network.
        tokenizer: of its encoder.
        threshold: see :class:`ProbabilityReward`.
        max_length: tokens of a comment that are read, at most; fewer if the encoder reads fewer.
        batch_size: comments at a time.

    Examples:
        >>> from torchrl_lang.envs.reddit.rewards import UpvoteModel
        >>> UpvoteModel.load("runs/upvotes")(["well done"])  # doctest: +SKIP
        tensor([1.])
    """

    def __init__(
        self,
        network: UpvoteNetwork,
        tokenizer: Any,
        *,
        threshold: float | None = 0.5,
        max_length: int = 256,
        batch_size: int = 32,
    ) -> None:
        super().__init__(threshold)
        at_least_one("max_length", max_length)
        at_least_one("batch_size", batch_size)
        self.network, self.tokenizer = network.eval(), tokenizer
        self.max_length = min(max_length, readable_tokens(network.encoder, tokenizer))
        self.batch_size = batch_size

    @torch.no_grad()
    def _probabilities(self, texts: list[str]) -> Tensor:
        device = next(self.network.parameters()).device
        batches = encoded_batches(self.tokenizer, texts, self.batch_size, self.max_length)
        return torch.cat([self.network(batch.to(device)).sigmoid().float().cpu() for batch in batches])

    def save(self, folder: str | Path) -> None:
        """Save weights as safetensors and the rest as JSON into a new folder, atomically.

        Raises:
            FileExistsError: the folder exists and is not empty.
        """
        config = {"threshold": self.threshold, "max_length": self.max_length, "freeze": self.network.freeze}
        with _FORMAT.write(folder, config) as target:
            self.network.encoder.save_pretrained(target / "encoder")
            self.tokenizer.save_pretrained(target / "tokenizer")
            save_file({key: value.cpu() for key, value in self.network.head.state_dict().items()}, target / _HEAD)

    @classmethod
    def load(cls, folder: str | Path, *, batch_size: int = 32) -> UpvoteModel:
        """Load what :meth:`save` saved, on the CPU.

        Raises:
            FileError: a file is missing, damaged or does not fit the others, or asks for code from elsewhere.
            ValueError: the batch size is out of range.
        """
        from transformers import AutoModel, AutoTokenizer  # their import takes a second

        at_least_one("batch_size", batch_size)
        folder, config = Path(folder), _FORMAT.read(folder)
        check_model_config(Fields.read(folder / "encoder" / "config.json", remedy=_REMEDY))
        head = read_tensors(folder / _HEAD, remedy=_REMEDY)
        threshold = config.take("threshold", float, None)
        try:
            encoder, info = AutoModel.from_pretrained(
                str(folder / "encoder"),
                trust_remote_code=False,
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # so that they are among the loading info
            )
            check_loaded_weights(folder / "encoder", encoder, info, remedy=_REMEDY)
            tokenizer = AutoTokenizer.from_pretrained(
                str(folder / "tokenizer"), trust_remote_code=False, local_files_only=True
            )
            network = UpvoteNetwork(encoder, freeze=config.take("freeze", bool))
            network.head.load_state_dict(head)
            return cls(
                network,
                tokenizer,
                threshold=threshold,
                max_length=config.at_least("max_length", 1),
                batch_size=batch_size,
            )
        except Exception as error:  # damaged files raise any kind of exception
            raise FileError(folder, f"holds no upvote model ({one_line(error)})", _REMEDY) from error
