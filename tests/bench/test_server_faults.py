"""The bench of malformed requests: what it sends, and that it sees what goes wrong."""

from __future__ import annotations

import numpy as np
import pytest
from malformed_requests import KINDS, Route, malformed
from server_faults import ServerRow, Usage, run_server_faults, server_table

from turngym.core.errors import TurngymError

ROUTES = (Route(method="POST", path="/x", body={"a": "b", "c": 1}), Route(method="GET", path="/y", form=True))


@pytest.mark.parametrize("kind", KINDS)
def test_requests_come_from_the_seed(kind: str) -> None:
    drawn = [
        [malformed(kind, ROUTES, "localhost", rng) for _ in range(20)]
        for rng in (np.random.default_rng(seed) for seed in (1, 1, 2))
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    assert all(drawn[0])


@pytest.mark.long
def test_a_server_answers_all_of_them() -> None:
    (row,) = run_server_faults(60, 0, only=["webshop"])
    assert row.notes == []
    assert (row.tries, row.failures) == (60, 0)
    assert row.outcomes["4xx"] > 10
    header, lines = server_table([row])
    assert dict(zip(header, lines[0], strict=True))["requests"] == "60"
    with pytest.raises(TurngymError, match="no server 'shop'; valid: proxy, retrieval"):
        next(run_server_faults(1, 0, only=["shop"]))


def test_what_a_failure_is() -> None:
    before = Usage(rss=100.0, threads=8, files=10)
    assert before.leaks(Usage(rss=125.0, threads=10, files=14)) == ""
    assert (
        before.leaks(Usage(rss=127.0, threads=11, files=15)) == "8 -> 11 threads, 10 -> 15 descriptors, 100 -> 127 MB"
    )
    row = ServerRow(what="x")
    for outcome in ("2xx", "4xx", "5xx", "closed", "no answer", "traceback", "leak"):
        row.count(outcome, "why")
    assert (row.tries, row.failures) == (5, 4)
    assert row.notes == [f"x: {what}: why" for what in ("5xx", "no answer", "traceback", "leak")]
