"""Several processes that play ahead: shares by the right weights, met in order, and servers that nobody pulls away."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from thread_ranks import in_ranks

from turngym.core.rollout_request import RolloutRequest
from turngym.trainers.algorithm import DepthPlan
from turngym.trainers.distributed import SharedSource
from turngym.trainers.ranks import DistributedError
from turngym.trainers.rollout_order import AsyncRollout, Planned, WeightSnapshot

EPISODES, STEPS = 5, 6


def planned(step: int) -> Planned:
    request = RolloutRequest(step=step, episodes=EPISODES, group=1, max_turns=3, temperature=1.0)
    return Planned(plan=DepthPlan(cap=3), request=request)


class Process:
    """One process of a run: its student learns by counting steps, its copy plays with what it was given."""

    def __init__(self, ranks: Any, servers: Servers | None, staleness: int, slow: float = 0.0) -> None:
        self.ranks, self.weights, self.put, self.slow = ranks, torch.zeros(1), torch.zeros(1), slow
        student = SimpleNamespace(state_dict=lambda: {"w": self.weights})
        copy = SimpleNamespace(load_state_dict=lambda weights: self.put.copy_(weights["w"]))
        self.versions: list[int] = []
        snapshot = WeightSnapshot(student, copy, self.versions.append)
        self.servers = None if servers is None else servers.of(self)
        self.order = AsyncRollout(staleness=staleness, last=STEPS, snapshot=snapshot, ranks=ranks, servers=self.servers)
        self.source = SharedSource(source=self.play, ranks=ranks, model=None, servers=self.servers)

    def play(self, request: RolloutRequest) -> Any:
        if self.servers is not None:
            self.servers.shared.begins(request.step)
        time.sleep(self.slow * (request.step % 2))
        # on servers the version is that of the servers, else of the copy in this process
        version = int(self.put) if self.servers is None else self.servers.shared.version
        found = [(request.step, place, version) for place in request.own(range(request.episodes))]
        if self.servers is not None:
            self.servers.shared.ends(request.step)
        return found

    def run(self) -> list[Any]:
        learned = []
        for step in range(1, STEPS + 1):
            now, episodes = self.order(step, planned, self.source)
            assert now.request.step == step
            learned.append(episodes)
            self.weights += 1  # in place, as an optimizer does
            self.order.learned(step)
        self.order.close()
        return learned


class Servers:
    """Servers that several processes share; they may get other weights only while nobody plays."""

    def __init__(self) -> None:
        self.version, self.playing, self.broken, self.lock = -1, 0, [], threading.Lock()
        self.published: list[int] = []

    def of(self, process: Any) -> Any:
        return SimpleNamespace(
            shared=self,
            publish_now=lambda: self.publish(process.versions[-1]),
            adopt=lambda name, version: process.versions.append(version),
        )

    def publish(self, version: int) -> tuple[str, int]:
        with self.lock:
            self.broken += [f"version {version} while {self.playing} play"] * bool(self.playing)
            self.version = version
            self.published.append(version)
        return f"weights {version}", version

    def begins(self, step: int) -> None:
        with self.lock:
            self.playing += 1

    def ends(self, step: int) -> None:
        with self.lock:
            self.playing -= 1


@pytest.mark.parametrize("staleness", [1, 2])
@pytest.mark.parametrize("served", [False, True])
def test_every_share_is_played_by_the_student_of_so_many_steps_before(staleness: int, served: bool) -> None:
    servers = Servers() if served else None

    def work(ranks: Any) -> list[Any]:
        # one process is slower at odd steps
        return Process(ranks, servers, staleness, slow=0.03 * ranks.rank).run()

    found = in_ranks(3, work)
    assert found[0] == found[1] == found[2]
    versions = [max(0, step - 1 - staleness) for step in range(1, STEPS + 1)]
    assert found[0] == [
        [(step, place, version) for place in range(EPISODES)]
        for step, version in zip(range(1, STEPS + 1), versions, strict=True)
    ]
    if servers is not None:
        assert servers.broken == []
        assert servers.published == versions


def test_playing_overlaps_with_learning() -> None:
    """While a step is learned the next batch is under way, also where servers are shared."""
    seen: list[int] = []

    def work(ranks: Any) -> None:
        servers = Servers()
        process = Process(ranks, servers, 1, slow=0.2)
        for step in (1, 2):
            process.order(step, planned, process.source)
            time.sleep(0.05)
            if step == 2:
                seen.append(servers.playing)  # batch 3 sleeps
            process.order.learned(step)
        process.order.close()

    in_ranks(1, work)
    assert seen == [1]


def test_a_share_that_fails_ends_all_where_they_meet() -> None:
    def work(ranks: Any) -> None:
        process = Process(ranks, None, 1)
        inner = process.play

        def play(request: RolloutRequest) -> Any:
            if ranks.rank == 1 and request.step == 3:
                raise ValueError("the environment is gone")
            return inner(request)

        process.source = replace(process.source, source=play)
        try:
            process.run()
        finally:
            process.order.close()

    zero, one = in_ranks(2, work)
    assert isinstance(one, ValueError)
    assert isinstance(zero, DistributedError)
    assert "process 1 of 2 failed, so all stop: ValueError: the environment is gone" in str(zero)
