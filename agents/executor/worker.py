"""What runs in a worker process: environments, copies of engines, and a rollout that takes new jobs as it plays."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turngym.agents.agent import Agent
from turngym.agents.episode_runner import Job
from turngym.agents.executor.serialization import unpack
from turngym.agents.rollout import MakeEnv, Rollout
from turngym.envs.episode import Episode

HEARTBEAT = 2.0
"""Seconds after which a worker answers although no episode has finished, so that it is not taken for hung."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSpec:
    """Everything a worker needs to play, but for the jobs."""

    make_env: MakeEnv
    agent: Agent
    slots: int
    max_turns: int | None
    system: str | None
    meta: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """An engine to make (`full_engine`) or weights to put into it, in the order in which payloads are sent along."""

    engine: int
    """The executor's number of the engine."""
    full_engine: bool
    version: int


class Worker:
    """Plays jobs for a scheduler in another process. Methods are called one at a time with picklable arguments."""

    def __init__(self) -> None:
        self._engines: dict[int, Any] = {}
        self._rollout: Rollout | None = None
        self._waiting: deque[tuple[int, Job]] = deque()
        self._spare_env: tuple[MakeEnv, Any] | None = None
        """An environment that stays open between runs: what all of a process share (a shop, an index) is built once."""

    def begin(self, spec: bytes, engine_numbers: Sequence[int], loads: Sequence[Load], *payloads: bytes) -> None:
        """Start a run; an unfinished one is abandoned. Engine i of `spec` is the one numbered `engine_numbers[i]`."""
        self.end()
        for load, payload in zip(loads, payloads, strict=True):
            self._load_engine(load, payload)
        content: RolloutSpec = unpack(
            spec, {place: self._engines[engine] for place, engine in enumerate(engine_numbers)}
        )
        self._keep_env_open(content.make_env)
        self._rollout = Rollout(
            content.make_env,
            content.agent,
            slots=content.slots,
            max_turns=content.max_turns,
            system=content.system,
            meta=dict(content.meta),
        )

    def _keep_env_open(self, make_env: MakeEnv) -> None:
        if self._spare_env is None or self._spare_env[0] != make_env:
            # the new one before the former is closed: what the two share then stays built
            former, self._spare_env = self._spare_env, (make_env, make_env())
            if former is not None:
                former[1].close()

    def _load_engine(self, load: Load, payload: bytes) -> None:
        # late: needs torch, which workers without a local engine do without
        from turngym.agents.local_engine.replica import load_weights, unpack_engine

        if load.full_engine:
            self._engines[load.engine] = unpack_engine(payload)
        else:
            load_weights(self._engines[load.engine], payload, load.version)

    def advance(self, jobs: Sequence[tuple[int, Job]]) -> list[tuple[int, Episode]]:
        """Take on `jobs` and play until something ends: numbers and episodes. Empty after HEARTBEAT seconds without."""
        assert self._rollout is not None, "begin comes first"
        self._waiting.extend(jobs)
        start = time.monotonic()
        while self._waiting or self._rollout.playing:
            done = self._rollout.advance(self._waiting)
            if done or time.monotonic() - start > HEARTBEAT:
                return done
        return []

    def end(self) -> None:
        """Abandon running episodes and close the environments."""
        self._waiting.clear()
        if self._rollout is not None:
            self._rollout.abandon()
            self._rollout = None

    def close(self) -> None:
        """Abandon everything: the process ends."""
        self.end()
        if self._spare_env is not None:
            self._spare_env[1].close()
            self._spare_env = None
