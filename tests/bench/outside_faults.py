"""Servers and environments that misbehave, and whether those who use them end in time with an error of their own."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Iterator

import hostile_env
from hostile_env import FAILING
from hostile_server import CALLS, MISCHIEF, hostile_server
from tally import Tally

from turngym.agents.executor.worker_count import InProcess, LocalProcesses
from turngym.agents.executor.workers import open_workers
from turngym.agents.playing.env_maker import env_maker
from turngym.agents.playing.rollout import Job
from turngym.agents.playing.scripted import ExpertAgent
from turngym.core.http_client import LoopThread

SECONDS = 0.5
"""The limit on each request and each step."""
LATE = 10.0
"""Seconds over the limit that a busy machine may take."""
MEMORY = 160
"""MiB that an answer may take: twice the largest limit, and some."""


def hostile_answers(times: int) -> Iterator[Tally]:
    """Asks a server of each kind of mischief `times` times by each client."""
    loop = LoopThread("faults")
    for name, ask in CALLS.items():
        tally = Tally(what=f"hostile server: {name}", bad=("raised", "taken", "late", "memory", "redirected"))
        for mischief in MISCHIEF:
            for _ in range(times):
                tally.count(*_asked(ask, mischief, loop))
        yield tally
    loop.close()


def _asked(ask: object, mischief: str, loop: LoopThread) -> tuple[str, str]:
    with hostile_server(mischief) as hostile:
        tracemalloc.start()
        began = time.monotonic()
        try:
            said = ask(hostile.url, loop, SECONDS)  # type: ignore[operator]
        except Exception as error:  # that is what is looked for
            return "raised", f"{mischief}: {type(error).__name__}: {error}"
        finally:
            peak = tracemalloc.get_traced_memory()[1] >> 20
            tracemalloc.stop()
        took = time.monotonic() - began
        if hostile.elsewhere:
            return "redirected", mischief
        if took > SECONDS + LATE:
            return "late", f"{mischief}: {took:.1f} s"
        if peak > MEMORY:
            return "memory", f"{mischief}: {peak} MiB"
    return ("ended", "") if said else ("taken", mischief)


def hostile_environments(times: int) -> Iterator[Tally]:
    """Plays an environment of each kind of mischief `times` times, in this process and in a worker."""
    make = env_maker("hostile_env:tests/Hostile-v0", channel="text")
    jobs = [Job(task_id=name, sample=sample) for name in FAILING for sample in range(times)]
    for players in (InProcess(step_timeout=SECONDS), LocalProcesses(processes=1, step_timeout=SECONDS)):
        tally = Tally(what=f"hostile environment: {type(players).__name__}", bad=("raised", "recorded", "late"))
        hostile_env.HANGING.clear()
        began = time.monotonic()
        try:
            with open_workers(players) as play:
                episodes = play(jobs, make, ExpertAgent())
        except Exception as error:  # that is what is looked for
            tally.count("raised", f"{type(error).__name__}: {error}", times=len(jobs))
        else:
            for job, episode in zip(jobs, episodes, strict=True):
                tally.count("error episode" if episode.status.is_error else "recorded", job.task_id)
        # a worker takes seconds to start
        if time.monotonic() - began > 4 * SECONDS + LATE + 20.0:
            tally.count("late", f"{time.monotonic() - began:.1f} s")
        hostile_env.HANGING.set()
        yield tally
