"""Rollouts on a Ray cluster: two nodes on this machine, one of which is lost in mid-run."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # read when Ray is imported; a test cluster has no tokens
ray = pytest.importorskip("ray", reason="ray is not installed (pip install 'turngym[ray]')")

from alfworld_jobs import EXPERT, SPEC, jobs, untimed  # noqa: E402

from turngym.agents.executor.errors import ExecutorError  # noqa: E402
from turngym.agents.executor.parallel import ParallelRollout  # noqa: E402
from turngym.agents.executor.ray_cluster import RayWorkers  # noqa: E402
from turngym.agents.playing.rollout import rollout  # noqa: E402
from turngym.core.episode import Episode  # noqa: E402
from turngym.core.errors import TaskError  # noqa: E402
from turngym.core.plugins import MissingExtra  # noqa: E402

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
    made = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    try:
        made.second = made.add_node(**node)
        ray.init(address=made.address, logging_level="ERROR", log_to_driver=False)
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


def test_a_lost_node_loses_only_its_unfinished_episodes(cluster: Any) -> None:
    expected = untimed(rollout(jobs(60), SPEC, EXPERT))
    run = ParallelRollout(RayWorkers(2))
    seen: list[Episode] = []
    lost: list[bool] = []

    def lose_the_second_node(episode: Episode) -> None:
        seen.append(episode)
        if not lost and all(run.playing):
            cluster.remove_node(cluster.second, allow_graceful=False)
            lost.append(True)

    deadline = time.monotonic() + 120
    try:
        # a slow actor may miss a whole run, and one whose node is gone may finish another: the run that loses it counts
        while not run.deaths and time.monotonic() < deadline:
            seen.clear()
            assert untimed(run(jobs(60), SPEC, EXPERT, slots=4, on_episode=lose_the_second_node)) == expected
            assert len(seen) == 60
        assert untimed(run(jobs(60), SPEC, EXPERT, slots=4)) == expected
    finally:
        run.close()
    assert lost
    # on a busy machine Ray may call the other actor unavailable for a while, and it is replaced as well
    assert run.deaths
    assert all("was lost" in death for death in run.deaths)
    assert ray.is_initialized()


def test_exceptions_keep_their_type(cluster: Any) -> None:
    run = ParallelRollout(RayWorkers(1))
    with pytest.raises(TaskError, match="the data differ") as caught:
        run([replace(jobs(1)[0], sha256="0" * 64)], SPEC, EXPERT)
    assert "in a worker:\nTraceback" in caught.value.__notes__[0]


def test_what_makes_no_sense(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ExecutorError, match="0 workers"):
        RayWorkers(0)
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(MissingExtra, match=r"pip install 'turngym\[ray\]'"):
        RayWorkers(1)
