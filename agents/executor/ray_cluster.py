"""Workers as actors of a Ray cluster, on one machine or many."""

from __future__ import annotations

import os
import pickle
from typing import Any

import numpy as np

from turngym.agents.executor.errors import ExecutorError, picklable
from turngym.agents.executor.processes import Worker, WorkerAnswer
from turngym.core.plugins import need
from turngym.core.redaction import excerpt


class RayWorkers:
    """`count` actors, spread over the nodes; every node needs turngym and the data installed.

    Without an `address` `$RAY_ADDRESS` counts, else Ray is started on this machine. An existing connection of this
    process to Ray is used as it is, whatever `address` says, and left open. An actor for which no node has `cpus` and
    `gpus` waits until one has, while the others play. If a node is lost, the calls of its actors are answered with the
    cause of death.

    Raises MissingExtra if Ray is not installed, ExecutorError if there is no cluster at `address`.
    """

    def __init__(self, count: int, *, address: str | None = None, cpus: float = 1.0, gpus: float = 0.0) -> None:
        if count < 1:
            raise ExecutorError(f"{count} workers: at least 1 must play")
        ray = self._ray = need("ray", "a Ray worker", "ray")
        self.count = count
        self._ours = not ray.is_initialized()
        if self._ours:
            start: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
            if address is None and not os.environ.get("RAY_ADDRESS"):
                # with fewer processors than the workers claim, some actors would wait forever
                claimed = int(np.ceil(cpus * count))
                start |= {"num_cpus": max(os.cpu_count() or 1, claimed), "include_dashboard": False}
            try:
                ray.init(address=address, **start)
            except (ConnectionError, RuntimeError, ValueError) as error:
                where = f"the Ray cluster at {address!r}" if address else "Ray"
                raise ExecutorError(f"cannot connect to {where}: {str(error).strip().splitlines()[0]}") from error
        resources = {"num_cpus": cpus, "num_gpus": gpus}
        # no restarts by Ray: a restarted actor has lost its engines, so the scheduler must learn of the death
        self._actor_class = self._ray.remote(max_restarts=0, scheduling_strategy="SPREAD", **resources)(Actor)
        self._actors: dict[int, Any] = {}
        self._pending: dict[int, Any] = {}

    def call(self, worker: int, method: str, *args: Any) -> None:
        assert worker not in self._pending, f"worker {worker} has not answered yet"
        if worker not in self._actors:
            self._actors[worker] = self._actor_class.remote()
        self._pending[worker] = self._actors[worker].call.remote(method, *args)

    def wait(self, timeout: float) -> list[WorkerAnswer]:
        if not self._pending:
            return []
        calls = {call: worker for worker, call in self._pending.items()}
        ready, _ = self._ray.wait(list(calls), num_returns=1, timeout=timeout)
        # take all other calls that have been answered by now, too
        if ready:
            ready, _ = self._ray.wait(list(calls), num_returns=len(calls), timeout=0)
        return [self._answer(calls[call], call) for call in ready]

    def share(self, payload: bytes) -> Any:
        # Ray hands out arrays as views of its store, bytes as a copy for every worker
        return self._ray.put(np.frombuffer(payload, np.uint8))

    def free(self, handle: Any) -> None:
        """Does nothing: Ray frees objects that are no longer referenced."""

    def stop(self, worker: int) -> None:
        self._pending.pop(worker, None)
        actor = self._actors.pop(worker, None)
        if actor is not None:
            self._ray.kill(actor)

    def close(self) -> None:
        for worker in list(self._actors):
            self.stop(worker)
        if self._ours and self._ray.is_initialized():
            self._ray.shutdown()

    def _answer(self, worker: int, call: Any) -> WorkerAnswer:
        del self._pending[worker]
        try:
            good, value = pickle.loads(self._ray.get(call))
        except self._ray.exceptions.RayError as error:
            self.stop(worker)
            cause = " ".join(str(error).split())
            return WorkerAnswer(worker=worker, died=f"Ray actor {worker} was lost: {excerpt(cause, 300)}")
        return WorkerAnswer(worker=worker, value=value) if good else WorkerAnswer(worker=worker, error=value)


class Actor:
    """A `Worker` whose answers are pickled here, so that their arrays do not stay in Ray's object store."""

    def __init__(self) -> None:
        self._worker = Worker()

    def call(self, method: str, *args: Any) -> bytes:
        try:
            answer: tuple[bool, Any] = (True, getattr(self._worker, method)(*args))
        except Exception as error:
            answer = (False, picklable(error))
        return pickle.dumps(answer)
