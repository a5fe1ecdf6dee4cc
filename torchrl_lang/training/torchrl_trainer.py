"""Rows in TorchRL's ``Trainer``: a collector over a dataset, and a hook that converts collected steps to rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tensordict import TensorDictBase
from torchrl.data import ReplayBuffer
from torchrl.trainers import Trainer, TrainerHookBase

from torchrl_lang.data import EpisodeRows, row_buffer


class OfflineCollector:
    """Passes batches of a replay buffer to a ``Trainer`` as if from a collector, to train on a dataset.

    A frame is a row: the trainer stops after ``total_frames`` rows. The state is that of the buffer's sampler, so a
    loaded trainer continues with the same batches.

    Args:
        buffer: a replay buffer such as :func:`~torchrl_lang.data.row_buffer`; it is sampled endlessly.

    Examples:
        >>> from torchrl.trainers import Trainer
        >>> from torchrl_lang.data import row_buffer
        >>> from torchrl_lang.text import CharTokenizer, Episode, Turn, to_rows
        >>> from torchrl_lang.modules import causal_lm, language_actor
        >>> from torchrl_lang.objectives import BCLoss
        >>> from torchrl_lang.training import OfflineCollector, adamw
        >>> tokenizer = CharTokenizer.from_alphabet("abc")
        >>> rows = to_rows([Episode([Turn(n * "a", 1.0)], True) for n in (1, 5, 2, 5)], tokenizer, row_length=12)
        >>> loss = BCLoss(language_actor(causal_lm(vocab_size=9, layers=1, width=16, heads=2, max_length=12)))
        >>> trainer = Trainer(collector=OfflineCollector(row_buffer(rows, 2)), total_frames=6, frame_skip=1,
        ...                   optim_steps_per_batch=1, loss_module=loss, optimizer=adamw(loss, 1e-3),
        ...                   progress_bar=False)
        >>> trainer.train()
        >>> trainer.collected_frames
        6
    """

    init_random_frames = 0

    def __init__(self, buffer: ReplayBuffer) -> None:
        self.buffer = buffer

    def __iter__(self) -> Iterator[TensorDictBase]:
        while True:
            yield self.buffer.sample()

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Returns the seed and does nothing: the order of the rows is the buffer's."""
        return seed

    def update_policy_weights_(self, *_: Any, **__: Any) -> None:
        """Does nothing, because there are no workers with policies."""

    def state_dict(self) -> dict[str, Any]:
        """The state of the buffer's sampler."""
        return dict(self.buffer.sampler.state_dict())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from a saved state."""
        self.buffer.sampler.load_state_dict(dict(state_dict))

    def shutdown(self, *_: Any, **__: Any) -> None:
        """Does nothing, because there are no workers."""


class EpisodeRowsHook(TrainerHookBase):
    """Trains on rows of the episodes that end in the batches of a ``Trainer``'s collector.

    ``collected_frames`` still counts the collector's turns, whatever the number of rows. Rows are made once per batch
    of steps; each epoch uses them once, in batches. Batches in which no episode ends are skipped.

    Args:
        rows_of: converts steps to rows, with the entries that the loss needs.
        batch_size: rows per training batch.
        process: function of new rows, for instance ``loss.estimate`` or one that adjusts rewards.
        seed: seed of the order of the rows.

    Examples:
        >>> from torchrl.collectors import Collector
        >>> from torchrl.trainers import Trainer
        >>> from torchrl_lang.data import EpisodeRows
        >>> from torchrl_lang.envs.games import CorridorEnv
        >>> from torchrl_lang.modules import UtteranceActor, ValueHead, causal_lm, language_actor, value_module
        >>> from torchrl_lang.objectives import PPOLoss
        >>> from torchrl_lang.training import EpisodeRowsHook, adamw
        >>> env = CorridorEnv(length=3, batch_size=[4], seed=0)
        >>> lm = causal_lm(vocab_size=env.tokenizer.vocab_size, layers=1, width=16, heads=2, max_length=48)
        >>> policy = UtteranceActor(language_actor(lm), env.tokenizer.control, env.action_length, seed=0)
        >>> loss = PPOLoss(policy, value_module(ValueHead(16)))
        >>> trainer = Trainer(collector=Collector(env, policy, frames_per_batch=32, total_frames=64), total_frames=64,
        ...                   frame_skip=1, optim_steps_per_batch=None, num_epochs=2, loss_module=loss,
        ...                   optimizer=adamw(loss, 1e-3), progress_bar=False)
        >>> rows_of = EpisodeRows(carry=["token_log_prob"])
        >>> EpisodeRowsHook(rows_of, batch_size=8, process=loss.estimate).register(trainer)
        >>> trainer.train()
        >>> trainer.collected_frames
        64
    """

    def __init__(
        self,
        rows_of: EpisodeRows,
        batch_size: int,
        *,
        process: Callable[[TensorDictBase], TensorDictBase] | None = None,
        seed: int = 0,
    ) -> None:
        self.rows_of, self.batch_size, self.process, self.seed = rows_of, batch_size, process, seed
        self._steps: TensorDictBase | None = None
        self._buffer: ReplayBuffer | None = None
        self._batches: Iterator[TensorDictBase] = iter(())
        self._made = 0

    def begin_epoch(self, steps: TensorDictBase) -> TensorDictBase:
        """Called before each epoch: makes the rows of a new batch of steps, once, and a new order."""
        if steps is not self._steps:
            self._steps = steps
            rows: TensorDictBase = self.rows_of(steps)
            if len(rows) and self.process is not None:
                rows = self.process(rows)
            self._buffer = row_buffer(rows, self.batch_size, seed=self.seed + self._made) if len(rows) else None
            self._made += 1
        self._batches = iter(()) if self._buffer is None else iter(self._buffer)
        return steps

    def next_batch(self, _: TensorDictBase) -> TensorDictBase:
        """The next batch of rows; StopIteration ends the epoch."""
        return next(self._batches)

    def register(self, trainer: Trainer, name: str = "episode_rows") -> None:
        """Add the hook to a trainer."""
        trainer.register_op("pre_epoch", self.begin_epoch)
        trainer.register_op("process_optim_batch", self.next_batch)
        trainer.register_module(name, self)

    def state_dict(self) -> dict[str, Any]:
        """The number of batches that were converted to rows, which seeds the order of the next ones."""
        return {"made": self._made}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from a saved state; unfinished episodes are lost with their collector."""
        self._made = int(state_dict["made"])
        self.rows_of.forget()
