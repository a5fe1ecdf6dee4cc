"""A collector whose games are played by workers on the nodes of a Ray cluster (extra ``ray``).

Plain actors, because TorchRL 0.14's ``RayCollector`` ends its iteration with the first worker that dies, sends weights
in a group of processes that a new worker cannot join, and at each update waits until the workers have played their
batches.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torchrl.collectors import Collector
from torchrl.envs import EnvBase
from torchrl.envs.llm.transforms import PolicyVersion

from torchrl_lang._files import one_line
from torchrl_lang.data import EpisodeRows
from torchrl_lang.recipes.command_line import describe

_DEATHS = 3
"""Of workers in the same place, one after the other without finishing their turns, after which collecting fails."""


class RayWorkers:
    """Yields the rows of finished games, those of one worker's next turns at a time, from whichever is ready first.

    Each worker plays its own games in a process on any node, and begins its next turns as soon as the last ones were
    fetched, with the weights of the last :meth:`update_policy_weights_`; these are one object in Ray's store. Rows are
    sent off in the turn in which their game ends: a worker that dies costs the games that it has not finished. Another
    one takes its place.

    Args:
        make_env: makes the games of a worker, given ``seed=`` and ``device=``.
        policy: to play with; each worker has a copy.
        rows: makes rows of steps; ``policy_version`` in them is the number of updates before a token was sampled.
        games: of each worker.
        turns: of its games in one item of the iterator.
        workers: number of workers, each on one CPU.
        seed: of the first worker's games; each worker that is started has the next one.
        device: of the rows.
        address: of the cluster's head; default the variable ``RAY_ADDRESS``, without it a cluster on this machine that
            is shut down with the collector. A program that is connected already stays so.
        gpus: of each worker, a fraction for those that share one; without, they play on the CPU.

    Raises:
        ConnectionError: there is no cluster at the address.
        ValueError: the cluster has fewer CPUs or GPUs than the workers need.
        ChildProcessError: on iteration, a game or the policy has failed on a worker, or workers die again and again.
    """

    def __init__(
        self,
        make_env: Callable[..., EnvBase],
        policy: TensorDictModuleBase,
        *,
        rows: EpisodeRows,
        games: int,
        turns: int,
        workers: int,
        seed: int,
        device: torch.device,
        address: str | None = None,
        gpus: float = 0.0,
    ) -> None:
        import ray

        self._ray, self._policy, self._seed, self._device = ray, policy, seed, device
        self._connected = not ray.is_initialized() and _connect(address, workers)
        self._playing: dict[Any, _Place] = {}
        try:
            _check_resources(workers, gpus)
            self._start = ray.remote(num_cpus=1, num_gpus=gpus)(_Worker).remote
            make_env = partial(make_env, device=torch.device("cuda" if gpus else "cpu"))
            self._parts = (make_env, ray.put(deepcopy(policy).cpu()), rows, games, turns)
            self._updates = -1
            self.update_policy_weights_()
            for _ in range(workers):
                self._play(_Place(self._new_worker()))
        except BaseException:
            self.shutdown()
            raise

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> TensorDict:
        """Rows ``[N]``; ``N`` may be 0."""
        from ray.exceptions import RayError, RayTaskError

        while True:
            [turns], _ = self._ray.wait(list(self._playing), num_returns=1)
            place = self._playing[turns]
            try:
                place.rows.append(self._ray.get(next(turns)).to(self._device))
            except StopIteration:
                rows, place.rows, place.deaths = place.rows, [], 0
                self._play(self._playing.pop(turns))
                return torch.cat(rows)
            except RayTaskError as error:
                raise error.cause from None
            except RayError as error:
                self._replace(self._playing.pop(turns), _reason(error))

    def update_policy_weights_(self) -> None:
        """Let workers play their next turns with the policy's current weights; frozen ones are not sent again."""
        self._updates += 1
        self._weights = self._ray.put(_changing(self._policy))

    def shutdown(self, timeout: float | None = None) -> None:
        """End the workers, and the cluster if it was started here."""
        for place in self._playing.values():
            self._ray.kill(place.worker)
        self._playing = {}
        if self._connected:
            self._connected = False
            self._ray.shutdown()

    def _new_worker(self) -> Any:
        self._seed += 1
        return self._start(*self._parts, self._seed - 1)

    def _play(self, place: _Place) -> None:
        self._playing[place.worker.play.remote(self._weights, self._updates)] = place

    def _replace(self, place: _Place, reason: str) -> None:
        place.deaths += 1
        if place.deaths == _DEATHS:
            then = "The run was ended; the same command resumes from the last checkpoint."
            raise ChildProcessError(f"A Ray worker has died {_DEATHS} times in a row: {reason}. {then}")
        warnings.warn(f"A Ray worker has died and is replaced: {reason}.", stacklevel=3)
        place.worker = self._new_worker()
        self._play(place)


@dataclass
class _Place:
    """A worker or its successors, and rows of games that have ended in turns that have not."""

    worker: Any
    rows: list[TensorDict] = field(default_factory=list)
    deaths: int = 0


class _Worker:
    """Plays games in a process of the cluster, with weights that it is given. (A Ray actor.)"""

    def __init__(
        self,
        make_env: Callable[..., EnvBase],
        policy: TensorDictModuleBase,
        rows: EpisodeRows,
        games: int,
        turns: int,
        seed: int,
    ) -> None:
        self._make_env, self._policy, self._rows = make_env, policy, rows
        self._games, self._turns, self._seed = games, turns, seed
        self._version = PolicyVersion()
        self._steps: Iterator[Any] | None = None

    def play(self, weights: Mapping[str, Tensor], version: int) -> Iterator[TensorDict]:
        """Play some turns, and yield after each the rows of the games that it has ended."""
        try:
            if self._steps is None:  # not in the constructor, whose errors Ray reports as the death of the worker
                self._steps = self._begin()
            self._policy.load_state_dict(weights, strict=False)
            self._version.version = version
            for _ in range(self._turns):
                yield self._rows(next(self._steps)).cpu()
        except Exception as error:  # as text, because the other process may not know the class
            place = traceback.extract_tb(error.__traceback__)[-1]
            bug = f"{type(error).__name__}: {one_line(error, 400)} ({place.filename}, line {place.lineno})"
            raise ChildProcessError(f"A game on a Ray worker has failed: {describe(error) or bug}") from None

    def _begin(self) -> Iterator[Any]:
        env = self._make_env(seed=self._seed)
        collector = Collector(
            env,
            self._policy.to(env.device),
            frames_per_batch=self._games,
            total_frames=-1,
            track_policy_version=self._version,
            auto_register_policy_transforms=False,
        )
        return iter(collector)


def _reason(error: Exception) -> str:
    """Why a worker has died: the end of Ray's message, after lines that identify the worker."""
    return str(error).strip().rpartition("\n")[2][:200].rstrip(".")


def _changing(policy: nn.Module) -> dict[str, Tensor]:
    """The trainable weights and the buffers, on the CPU."""
    state = policy.state_dict(keep_vars=True)
    return {
        name: value.detach().cpu()
        for name, value in state.items()
        if value.requires_grad or not isinstance(value, nn.Parameter)
    }


def _connect(address: str | None, workers: int) -> bool:
    """Connect this process to a cluster, or to a new one on this machine; quietly, without dashboard and statistics."""
    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    address = address or os.environ.get("RAY_ADDRESS")
    if address not in (None, "auto", "local"):
        _check_reachable(address)
    new: dict[str, Any] = {"address": "local", "num_cpus": workers, "include_dashboard": False}
    is_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)  # Ray would end the process without a checkpoint
    try:
        ray.init(**(new if address is None else {"address": address}), log_to_driver=False, logging_level=logging.ERROR)
    finally:
        if is_main:
            signal.signal(signal.SIGTERM, handler)
    return True


def _check_reachable(address: str) -> None:
    """Raise ConnectionError if no server listens there; Ray would try for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, port), timeout=10).close()
    except OSError as error:
        given = "give HOST:PORT of its head, as `ray start --head` prints it, without ray://, or auto"
        raise ConnectionError(f"There is no Ray cluster at {address} ({error}): {given}.") from error


def _check_resources(workers: int, gpus: float) -> None:
    """Raise ValueError if the workers could never be started."""
    import ray

    found = ray.cluster_resources()
    for kind, needed in (("CPU", workers), ("GPU", workers * gpus)):
        if needed > found.get(kind, 0):
            there = f"the Ray cluster has {found.get(kind, 0):g} {kind}s"
            raise ValueError(f"--workers {workers} need {needed:g} {kind}s, but {there}: give fewer workers.")
