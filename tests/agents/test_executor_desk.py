"""Parallel rollouts over workers that live in this process and die on command: every fault at an exact moment."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
from alfworld_jobs import EXPERT, SPEC, jobs, untimed

from turngym.agents.executor.errors import ExecutorError
from turngym.agents.executor.parallel import ParallelRollout
from turngym.agents.executor.processes import LocalWorkers, Worker, WorkerAnswer
from turngym.agents.playing.env_maker import EnvSpec
from turngym.agents.playing.rollout import Job, rollout
from turngym.agents.playing.scripted import ExpertAgent
from turngym.core.episode import Episode, Status
from turngym.core.errors import TaskError


class ThreadlessWorkers:
    """Calls are carried out when their answer is waited for; `fate(worker, method, args)` may end the worker instead.

    Everything crosses as a pickle, as it does between processes.
    """

    def __init__(self, count: int, fate: Callable[[int, str, tuple[Any, ...]], str] = lambda *call: "") -> None:
        self.count = count
        self.fate = fate
        self.alive: dict[int, Worker] = {}
        self.asked: dict[int, tuple[str, tuple[Any, ...]]] = {}
        self.shared: dict[int, bytes] = {}
        self.closed = 0
        self.calls: list[tuple[int, str]] = []

    def call(self, worker: int, method: str, *args: Any) -> None:
        assert worker not in self.asked
        self.alive.setdefault(worker, Worker())
        self.asked[worker] = (method, args)
        self.calls.append((worker, method))

    def wait(self, timeout: float) -> list[WorkerAnswer]:
        if not self.asked:
            return []
        worker = max(self.asked)  # the one that was asked last is never starved: all are asked again in turn
        method, args = self.asked.pop(worker)
        died = self.fate(worker, method, args)
        if died == "never":
            self.asked[worker] = (method, args)
            return []
        if died:
            self.stop(worker)
            return [WorkerAnswer(worker=worker, died=died)]
        plain = pickle.loads(pickle.dumps([self.shared[arg] if isinstance(arg, int) else arg for arg in args]))
        try:
            value = pickle.loads(pickle.dumps(getattr(self.alive[worker], method)(*plain)))
        except Exception as error:
            return [WorkerAnswer(worker=worker, error=error)]
        return [WorkerAnswer(worker=worker, value=value)]

    def share(self, payload: bytes) -> int:
        self.shared[len(self.shared)] = payload
        return len(self.shared) - 1

    def free(self, handle: int) -> None:
        self.shared[handle] = b"forgotten"

    def stop(self, worker: int) -> None:
        self.alive.pop(worker, None)
        self.asked.pop(worker, None)

    def close(self) -> None:
        self.closed += 1
        for worker in list(self.alive):
            self.stop(worker)


MADE: list[Any] = []


@dataclass(frozen=True)
class Counted:
    """Environments that are counted; picklable, and equal when it arrives."""

    spec: EnvSpec

    def __call__(self) -> Any:
        MADE.append(self.spec())
        return MADE[-1]


@cache
def expected() -> list[Episode]:
    return untimed(rollout(jobs(), SPEC, EXPERT, meta={"step": 1}))


def play(
    workers: Any, asked: list[Job] | None = None, *, retries: int = 2, patience: float = 600.0, **more: Any
) -> Any:
    run = ParallelRollout(workers, retries=retries, patience=patience)
    return run, untimed(run(jobs() if asked is None else asked, SPEC, EXPERT, meta={"step": 1}, **more))


@pytest.mark.parametrize(("count", "slots"), [(1, 64), (2, 3), (3, 64), (16, 16)])
def test_same_episodes_for_any_number_of_workers_and_slots(count: int, slots: int) -> None:
    seen: list[Episode] = []
    workers = ThreadlessWorkers(count)
    _, episodes = play(workers, slots=slots, on_episode=seen.append)
    assert episodes == expected()
    assert sorted(e.task.task_id for e in seen) == sorted(job.task_id for job in jobs())
    assert len(workers.alive) == min(count, len(jobs()))


def test_depth_cap_and_empty_list() -> None:
    _, episodes = play(ThreadlessWorkers(2), max_turns=1)
    assert {episode.depth for episode in episodes} == {1}
    assert play(ThreadlessWorkers(2), [])[1] == []


def test_a_worker_keeps_an_environment_open_between_runs() -> None:
    """One slot: each run makes one environment, and the first run one more, which stays."""
    MADE.clear()
    run = ParallelRollout(ThreadlessWorkers(1))
    for _ in range(3):
        run(jobs()[:2], Counted(SPEC), ExpertAgent(), slots=1)
    assert len(MADE) == 1 + 3


def test_a_dead_worker_loses_only_its_unfinished_episodes() -> None:
    deaths: Iterator[str] = iter(["", "", "", "", "fell over", "", "", "fell over again"])
    handed: list[int] = []

    def fate(worker: int, method: str, args: tuple[Any, ...]) -> str:
        if method != "advance":
            return ""
        handed.extend(number for number, _ in args[0])
        return next(deaths, "")

    seen: list[Episode] = []
    run, episodes = play(ThreadlessWorkers(2, fate), slots=4, on_episode=seen.append)
    assert episodes == expected()
    assert run.deaths == ["fell over", "fell over again"]
    assert len(seen) == len(jobs())
    assert len(jobs()) < len(handed) <= len(jobs()) + 2 * 2  # two deaths, two slots each: nothing else was played again


def test_an_episode_that_kills_its_worker_fails_alone() -> None:
    poison = 3
    batches: list[list[int]] = []

    def fate(worker: int, method: str, args: tuple[Any, ...]) -> str:
        batch = [number for number, _ in args[0]] if method == "advance" else []
        if poison in batch:
            batches.append(batch)
        return "out of memory" if poison in batch else ""

    run, episodes = play(ThreadlessWorkers(2, fate), slots=8)
    failed = episodes[poison]
    assert (failed.status, failed.task.task_id, failed.sample) == (Status.ERROR_ENGINE, jobs()[poison].task_id, 0)
    assert failed.meta == {"agent": "expert", "step": 1, "error": failed.meta["error"]}
    assert failed.meta["error"] == "lost 3 times with its worker; last: out of memory"
    assert failed.task.env_id == "turngym/ALFWorld-v0"
    assert [e for n, e in enumerate(episodes) if n != poison] == [e for n, e in enumerate(expected()) if n != poison]
    assert len(run.deaths) == 3
    assert len(batches[0]) > 1
    assert batches[2] == [poison]


def test_without_retries_what_was_being_played_fails() -> None:
    deaths = iter(["power"])
    fate = lambda worker, method, args: next(deaths, "") if method == "advance" else ""  # noqa: E731
    _, episodes = play(ThreadlessWorkers(1, fate), jobs()[:4], retries=0, slots=2)
    assert [episode.status for episode in episodes[:2]] == [Status.ERROR_ENGINE] * 2
    assert not any(episode.status.is_error for episode in episodes[2:])


def test_workers_that_never_start_are_an_error() -> None:
    workers = ThreadlessWorkers(2, lambda worker, method, args: "killed")
    with pytest.raises(ExecutorError, match="die before they are ready, 5 in a row: killed"):
        play(workers)
    assert workers.closed == 1
    silent = ThreadlessWorkers(2, lambda worker, method, args: "never")
    with pytest.raises(ExecutorError, match="worker 0 gave no answer for 1e-09 s"):
        play(silent, patience=1e-9)


def test_a_stuck_worker_is_ended_and_its_episodes_played_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("turngym.agents.executor.parallel.time.monotonic", lambda: clock[0])
    stuck = [True]

    def fate(worker: int, method: str, args: tuple[Any, ...]) -> str:
        if method == "advance" and worker == 0 and stuck[0]:
            stuck[0] = False
            clock[0] += 100.0
            return "never"
        return ""

    run, episodes = play(ThreadlessWorkers(1, fate), patience=60.0)
    assert episodes == expected()
    assert run.deaths == ["worker 0 gave no answer for 60 s"]


def test_exceptions_propagate_after_what_finished_was_kept() -> None:
    seen: list[Episode] = []
    workers = ThreadlessWorkers(1)
    wrong = [*jobs()[:2], replace(jobs()[2], sha256="0" * 64)]
    with pytest.raises(TaskError, match="is asked for; the data differ"):
        play(workers, wrong, slots=1, on_episode=seen.append)
    assert len(seen) == 2
    assert workers.closed == 1


def test_an_interrupted_run_has_handed_on_what_finished_and_can_be_called_again() -> None:
    seen: list[Episode] = []

    def keep(episode: Episode) -> None:
        seen.append(episode)
        if len(seen) == 3:
            raise KeyboardInterrupt

    workers = ThreadlessWorkers(2)
    run = ParallelRollout(workers)
    with pytest.raises(KeyboardInterrupt):
        run(jobs(), SPEC, EXPERT, slots=2, on_episode=keep, meta={"step": 1})
    assert len(seen) >= 3
    assert workers.closed == 1
    assert untimed(run(jobs(), SPEC, EXPERT, meta={"step": 1})) == expected()
    run.cancel()
    with pytest.raises(ExecutorError, match="cancelled"):
        run(jobs(), SPEC, ExpertAgent())


def test_an_engine_on_servers_is_not_asked_before_its_time() -> None:
    """To ask it how workers reach it sends it the weights, which a resumed run has not read yet."""

    class OnServers:
        def for_workers(self) -> Any:
            raise AssertionError("the servers were given weights")

    play = ParallelRollout(LocalWorkers(1))
    play.prepare(OnServers())
    play.close()


def test_what_cannot_be_sent_is_named() -> None:
    lock = threading.Lock()
    with pytest.raises(ExecutorError, match=r"'_thread\.lock' object.*EnvSpec"):
        ParallelRollout(ThreadlessWorkers(1))(jobs(), lambda: lock, ExpertAgent())
    with pytest.raises(ExecutorError, match="retries is -1"):
        ParallelRollout(ThreadlessWorkers(1), retries=-1)
    with pytest.raises(ExecutorError, match="slots is 0"):
        ParallelRollout(ThreadlessWorkers(1))(jobs(), lambda: None, ExpertAgent(), slots=0)


class Owing(ThreadlessWorkers):
    """Worker 0 answers nothing until `late`, and then first with an error."""

    late: bool | None = None

    def wait(self, timeout: float) -> list[WorkerAnswer]:
        if self.late:
            self.late = False
            self.asked.pop(0)
            return [WorkerAnswer(worker=0, error=TaskError("of the run before"))]
        return super().wait(timeout)


def test_an_error_that_was_owed_to_the_run_before_is_not_the_next_ones() -> None:
    workers = Owing(2, lambda worker, *call: "never" if worker == 0 and workers.late is None else "")
    run = ParallelRollout(workers)
    assert untimed(run(jobs(), SPEC, EXPERT, meta={"step": 1})) == expected()
    assert workers.asked[0][0] == "begin"
    workers.late = True
    assert untimed(run(jobs(), SPEC, EXPERT, meta={"step": 1})) == expected()
    assert workers.late is False
    assert workers.closed == 0


def test_fixed_shares_are_the_same_every_time_also_after_a_death() -> None:
    """Which episodes are decoded together follows from the jobs alone."""
    handed: list[tuple[int, list[int]]] = []
    died: list[int] = []
    shares = {0: [0, 3, 6, 9], 1: [1, 4, 7], 2: [2, 5, 8]}

    def fate(worker: int, method: str, args: tuple[Any, ...]) -> str:
        if method == "advance" and args[0]:
            handed.append((worker, [number for number, _ in args[0]]))
        elif method == "advance" and worker == 1 and not died:
            died.append(worker)
            return "killed"
        return ""

    run = ParallelRollout(ThreadlessWorkers(3, fate), fixed_shares=True)
    for slots in (3, 64):  # fewer slots than jobs: a share is handed over at once all the same
        del handed[:]
        assert untimed(run(jobs(), SPEC, EXPERT, slots=slots, meta={"step": 1})) == expected()
        assert dict(reversed(handed)) == shares  # what each was handed first
        assert sorted(worker for worker, _ in handed) == ([0, 1, 1, 2] if slots == 3 else [0, 1, 2])
    assert run.deaths == ["killed"]
