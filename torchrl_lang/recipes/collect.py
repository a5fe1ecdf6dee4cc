"""Collect games of the current policy with a TorchRL collector, as rows."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from copy import deepcopy
from multiprocessing import resource_tracker, util
from multiprocessing.synchronize import SemLock
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torchrl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from torchrl.envs import EnvBase
from torchrl.weight_update import SharedMemWeightSyncScheme

from torchrl_lang.data import EpisodeRows
from torchrl_lang.modules.head_values import STATE_VALUE
from torchrl_lang.recipes.ray_collector import RayWorkers
from torchrl_lang.recipes.tasks.base import Task
from torchrl_lang.schema import AGENT_MASK, TOKEN_LOG_PROB, TRAIN_MASK

C = TypeVar("C")
_GIVE_UP = 10.0
"""Seconds to wait for an interrupted start to end."""


def start_workers(make: Callable[[], C]) -> C:
    """Make a collector, which starts its worker processes by ``spawn`` and returns when all of them are ready.

    - Workers start with SIGINT and SIGTERM blocked: Ctrl-C reaches all processes of the group, and a worker that dies
      while it sends a message blocks the others. The parent process ends them instead.
    - An interrupt or an error during the start kills the workers started so far.
    - The names of their semaphores are removed from shared memory once all workers have opened them, so the memory is
      freed with the last process that uses it, however the processes end.
    """
    resource_tracker.ensure_running()  # otherwise the first worker starts it, which unblocks the signals
    names = set(util._finalizer_registry)  # type: ignore[attr-defined]
    others = set(multiprocessing.active_children())
    made: Future[tuple[C, int]] = Future()
    # In a separate thread, because workers inherit its blocked signals; this thread still receives them.
    thread = threading.Thread(target=_make, args=(make, made), daemon=True)
    thread.start()
    try:
        collector, threads = made.result()
    except BaseException:
        _abort(thread, made, others)
        raise
    _forget_names(names)
    torch.set_num_threads(threads)  # TorchRL reserves cores for the workers; the setting is per thread
    return collector


def _make(make: Callable[[], C], made: Future[tuple[C, int]]) -> None:
    if hasattr(signal, "pthread_sigmask"):  # not on Windows
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        made.set_result((make(), torch.get_num_threads()))
    except BaseException as error:
        made.set_exception(error)


def _abort(thread: threading.Thread, made: Future[tuple[Any, int]], others: set[Any]) -> None:
    """Kill the workers that have been started, and those started until the thread ends."""
    until = time.monotonic() + _GIVE_UP
    while thread.is_alive() and time.monotonic() < until:
        for process in set(multiprocessing.active_children()) - others:
            process.kill()
        thread.join(0.1)
    if made.done() and made.exception() is None:
        made.result()[0].shutdown(timeout=1.0)


def end_with_parent(parent: int) -> None:
    """End this process, even if it hangs, soon after its parent has ended. (Workers' ``init_fn``.)"""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def end_scheme(scheme: SharedMemWeightSyncScheme) -> None:
    """Shut down a scheme that TorchRL 0.14's collectors leave open; otherwise the interpreter never exits."""
    for name in ("_weight_init_queues", "_instruction_queues", "_ack_queues"):
        for queue in getattr(scheme, name, {}).values():
            queue.cancel_join_thread()  # messages to dead workers are never read
    scheme.shutdown()


def _forget_names(before: set[Any]) -> None:
    """Remove the names of semaphores made since ``before``; all workers have opened them."""
    registry = util._finalizer_registry  # type: ignore[attr-defined]
    for key in [key for key in registry if key not in before]:
        finalizer = registry.get(key)
        if finalizer is not None and finalizer._callback is SemLock._cleanup:  # type: ignore[attr-defined]
            finalizer()


VERSION = "policy_version"
_GRACE = 5.0
"""Seconds after which a dead worker interrupts this process, if the collector has not noticed by then."""
_LAST_RESORT = 30.0
"""Seconds after which this process exits if it still waits for what a dead worker has locked."""
_SHUTDOWN = 4.0
"""Seconds until workers that do not end by themselves are killed."""
_PATIENCE = 200
"""Batches without a game to learn from, after which collecting fails."""

_DIED = "A worker that played games has died. The run was ended; the same command resumes from the last checkpoint."


class CollectedGames(NamedTuple):
    """Rows of finished games, and how old the weights were that played them."""

    rows: TensorDict
    """``[N]``, with ``token_log_prob`` and ``state_value`` as the policy wrote them while acting."""
    staleness: float
    """Mean number of weight updates since a token was sampled."""
    dropped: int
    """Number of games dropped because they were too old."""


class Games:
    """Plays games with the current weights and returns whole rows.

    ``"single"`` plays in this process. ``"sync"`` plays in worker processes while this process waits. ``"async"``
    workers play while this process learns, with weights that are some updates old; each row has its staleness.
    ``"ray"`` does so on the nodes of a cluster, where a worker that dies is replaced, see
    :class:`~torchrl_lang.recipes.ray_collector.RayWorkers`.

    Args:
        task: makes the environments.
        policy: writes ``action``, ``token_log_prob`` and ``state_value``, and ``train_mask`` if some tokens are not
            to be learned from. In a single process it is the very policy that is trained.
        kind: of the collector.
        workers: number of processes for ``"sync"``, ``"async"`` and ``"ray"``.
        games: played in parallel, in all processes together.
        turns: of each game in one call of :meth:`play`.
        seed: of the games. A single process repeats its games; workers sample other actions each time.
        device: of environments and policy.
        env_options: further options of :meth:`Task.env` that the policy needs.
        max_staleness: games with an older token, in weight updates, are dropped.
        cluster: ``address`` and ``gpus`` of ``"ray"``.
    """

    def __init__(
        self,
        task: Task,
        policy: TensorDictModuleBase,
        *,
        kind: Literal["single", "sync", "async", "ray"],
        workers: int,
        games: int,
        turns: int,
        seed: int,
        device: torch.device,
        env_options: Mapping[str, Any] = MappingProxyType({}),
        max_staleness: int | None = None,
        cluster: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.kind, self.seed, self.max_staleness = kind, seed, max_staleness
        self.step: int | None = None
        """The step of the last :meth:`restart`."""
        self._policy = policy
        self._written: list[tuple[int, TensorDictBase]] = []
        self._updates = 0
        written = [key for key in (TOKEN_LOG_PROB, STATE_VALUE, TRAIN_MASK) if key in policy.out_keys]
        self._rows = EpisodeRows({key: key for key in written} | {VERSION: ("next", VERSION)})
        common: dict[str, Any] = {"total_frames": -1, "track_policy_version": True}
        common["auto_register_policy_transforms"] = False
        self.env: EnvBase | None = None
        """The environment, in a single process."""
        if kind == "single":
            self._policy = self._repeating = _RepeatingPolicy(policy)
            self.env = task.env(games, seed=seed, device=device, **env_options)
            self._make = functools.partial(Collector, self.env, frames_per_batch=games * turns, **common)
            self._batches = 1
        elif kind == "ray":
            make = functools.partial(task.env, games // workers, **env_options)
            shared: dict[str, Any] = {"games": games // workers, "turns": turns, "workers": workers, "seed": seed + 1}
            self._make = functools.partial(RayWorkers, make, rows=self._rows, device=device, **shared, **cluster)
            self._batches = workers
        else:
            share = games // workers
            make = functools.partial(task.env, share, device=device, **env_options)
            makers = [functools.partial(make, seed=seed + 1 + k) for k in range(workers)]
            multi = MultiSyncCollector if kind == "sync" else _AsyncCollector
            frames = share * turns * (workers if kind == "sync" else 1)
            self._make = functools.partial(multi, makers, frames_per_batch=frames, **common)
            self._batches = 1 if kind == "sync" else workers  # the same number of games for both kinds
        self._collector: Any = None
        self._closed = threading.Event()
        self._over = False
        self._scheme: SharedMemWeightSyncScheme | None = None
        self._steps: Iterator[TensorDictBase] = iter(())

    def play(self, *, to_end: bool = False) -> CollectedGames:
        """Continue the games until some have ended.

        Args:
            to_end: in a single process, continue after the usual turns until every game that began in them has ended,
                then start all games afresh. Games that began later are dropped, whatever their length, so neither long
                nor short games are preferred. Workers ignore it.
        """
        dropped, to_end = 0, to_end and self.kind == "single"
        for _ in range(_PATIENCE):
            every = self._ended(to_end=to_end)
            age = self._updates - every.pop(VERSION)
            agent = every.get(AGENT_MASK)
            fresh = torch.ones(len(every), dtype=torch.bool, device=age.device)
            if self.max_staleness is not None:
                fresh = torch.where(agent, age, 0).amax(-1) <= self.max_staleness
            dropped += int((~fresh).sum())
            if to_end:
                self._begin_anew()
            if fresh.any():
                staleness = float(age[agent].float().mean()) if agent.any() else 0.0
                return CollectedGames(every[fresh], staleness, dropped)
        raise ValueError(f"In {_PATIENCE} batches no game that is recent enough has ended: raise max_staleness.")

    def weights_changed(self) -> None:
        """Send the current weights to the workers. If a worker has died, this process is interrupted soon after."""
        if self._collector is None:
            return  # the next collector starts with them
        self._updates += 1
        if self.kind == "single":
            self._collector.increment_version()  # it plays with the policy itself
        elif self.kind == "ray":
            self._collector.update_policy_weights_()  # it has the policy
        else:
            self._collector.update_policy_weights_(TensorDict.from_module(self._policy).data)

    def restart(self, step: int) -> None:
        """Start new games that depend on ``step`` only, so that a run resumed from here plays the same games.

        Running games are dropped: call :meth:`play` with ``to_end`` before. Workers continue their games, because
        their order could not be repeated anyway.
        """
        self.step = step
        if self.env is not None:
            self._begin_anew()
            self.env.set_seed(self.seed + step)

    def state_dict(self) -> dict[str, Any]:
        """In a single process, what the policy has written since :meth:`restart`, and after which weight updates.

        The environments' replies follow from it. Games of workers are not stored.
        """
        batches = [{"updates": updates, "written": batch.to_dict()} for updates, batch in self._written]
        return {"step": self.step, "updates": self._updates, "batches": batches}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Repeat the games of a state without calling the policy; closed games stay closed."""
        if self._over:
            return
        self.restart(state_dict["step"])
        if self.env is None:
            return
        for batch in state_dict["batches"]:
            while self._updates < batch["updates"]:
                self.weights_changed()
            if self._collector is None:
                self._open()
            written = TensorDict(batch["written"], device=self.env.device).auto_batch_size_(2)
            self._repeating.written = iter(written.unbind(1))
            self._next_rows()
        while self._updates < state_dict["updates"]:
            self.weights_changed()

    def close(self) -> None:
        """Close workers and environments."""
        self._over = True
        self._shut_down()
        if self.env is not None:
            self.env.close(raise_if_closed=False)

    def check_workers(self) -> None:
        """Raise ChildProcessError if a worker has died."""
        if _has_dead_worker(self._collector):
            raise ChildProcessError(_DIED)

    def _ended(self, *, to_end: bool) -> TensorDict:
        """Rows of the games that end in the usual turns, or of all that began in them."""
        found = [self._next_rows() for _ in range(self._batches)]
        while to_end and self._rows.waiting:
            found.append(self._next_rows(only_waiting=True))
        every: Any = torch.cat(found)  # typed as a tensor by torch
        return every

    def _open(self) -> None:
        if self.kind in ("single", "ray"):
            self._collector = self._make(policy=self._policy)
        else:
            self._scheme = SharedMemWeightSyncScheme()
            make = functools.partial(
                self._make,
                # Workers share the memory of their policy; with a copy they never see half of an optimizer step.
                policy=deepcopy(self._policy),
                weight_sync_schemes={"policy": self._scheme},
                init_fn=functools.partial(end_with_parent, os.getpid()),
            )
            try:
                self._collector = start_workers(make)
            except RuntimeError as error:
                if isinstance(error.__cause__, EOFError):  # the worker died without a message
                    raise ChildProcessError(_DIED) from error
                raise
            self._closed = threading.Event()
            threading.Thread(target=self._watch, args=(self._collector, self._closed), daemon=True).start()
        self._steps = iter(self._collector)

    def _watch(self, collector: Any, closed: threading.Event) -> None:
        """Interrupt this process if a worker has died: it might wait forever for an answer or for a lock.

        Closing the collector might wait for that lock, too; then the process exits. Checkpoints are always whole.
        """
        while not closed.wait(0.5):
            if not _has_dead_worker(collector):
                continue
            if closed.wait(_GRACE):  # the collector mostly notices by itself
                return
            if collector is self._collector:
                os.kill(os.getpid(), signal.SIGINT)
            if not closed.wait(_LAST_RESORT):
                print(f"torchrl_lang: {_DIED}", file=sys.stderr, flush=True)
                os._exit(2)  # its workers end with it
            return

    def _next_rows(self, *, only_waiting: bool = False) -> TensorDict:
        if self._collector is None:
            self._open()
        try:
            steps = next(self._steps)
            if self.kind == "ray":
                return steps  # rows already
            if self.env is not None:
                self._written.append((self._updates, steps.select(*self._policy.out_keys).clone()))
            return self._rows(steps, only_waiting=only_waiting)
        except (RuntimeError, ValueError):
            # A worker that was killed may leave half a batch; and TorchRL closes workers that have not yet ended.
            self.check_workers()
            raise

    def _begin_anew(self) -> None:
        self._shut_down(close_env=False)
        self._rows.forget()
        self._written = []
        self._updates = 0  # a collector counts from its own beginning

    def _shut_down(self, **options: Any) -> None:
        collector, self._collector = self._collector, None
        scheme, self._scheme = self._scheme, None
        self._steps = iter(())
        try:
            if collector is not None:
                # Workers may be killed: they leave no files and no shared memory.
                collector.shutdown(**(options if self.env is not None else {"timeout": _SHUTDOWN}))
        finally:
            if scheme is not None:
                end_scheme(scheme)
            self._closed.set()


class _AsyncCollector(MultiAsyncCollector):
    """With room for a batch of each worker.

    TorchRL 0.14 has room for one: a worker that finds it taken for a second drops its batch and plays the next one, so
    while this process learns for longer, games lose turns.
    """

    @property
    def _queue_len(self) -> int:
        return self.num_workers


def _has_dead_worker(collector: Any) -> bool:
    # TorchRL closes the handles of workers that it has ended, and these cannot be asked.
    return any(worker._closed or not worker.is_alive() for worker in getattr(collector, "procs", ()))


class _RepeatingPolicy(TensorDictModuleBase):
    """A policy, or instead what it wrote before, while there is some of that left."""

    def __init__(self, policy: TensorDictModuleBase) -> None:
        super().__init__()
        self.policy, self.in_keys, self.out_keys = policy, policy.in_keys, policy.out_keys
        self.written: Iterator[TensorDictBase] = iter(())

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """See the policy."""
        written = next(self.written, None)
        return self.policy(tensordict) if written is None else tensordict.update(written)


class AutocastPolicy(TensorDictModuleBase):
    """A policy that computes under autocast, also in the workers of a collector."""

    def __init__(self, policy: TensorDictModuleBase) -> None:
        super().__init__()
        self.policy, self.in_keys, self.out_keys = policy, policy.in_keys, policy.out_keys

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """See the policy."""
        device = next(self.policy.parameters()).device.type
        with torch.autocast(device, dtype=torch.bfloat16):
            return self.policy(tensordict)
