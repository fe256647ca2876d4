"""The bench of the retrieval server on a few hundred passages: both servers start, answer alike and are measured."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import bench_retrieval as bench
import pytest
from bench_retrieval import OURS, PEERS, Tally, distinct_queries
from bench_server import Server, cpu_seconds


@pytest.mark.long
def test_the_load_test_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "figures.json"
    options = {"passages": 300, "dim": 16, "clients": 4, "seconds": 0.3, "rounds": 1, "json": out}
    bench.main([text for name, value in options.items() for text in (f"--{name}", str(value))])
    shown = capsys.readouterr().out
    assert "both found the same passages in" in shown
    assert "0 errors" in shown
    figures = json.loads(out.read_text())
    for clients in (1, 4):
        for side in (*PEERS, OURS):
            assert figures[f"load/{clients}/{side}"]["rate"] > 0
            assert 0 < figures[f"load/{clients}/{side}"]["cpu_ms"] < 1000
            assert figures[f"load/{clients}/{side}"]["errors"] == 0
    best = max(PEERS, key=lambda peer: figures[f"load/4/{peer}"]["rate"])
    assert figures["load/peer"] == best
    assert figures["load/ratio"] == figures[f"load/4/{OURS}"]["rate"] / figures[f"load/4/{best}"]["rate"]


def test_no_query_comes_twice() -> None:
    queries = distinct_queries(3, 5000)
    assert len(set(queries)) == len(queries) > 4990
    assert queries == distinct_queries(3, 5000) != distinct_queries(4, 5000)


def test_a_tally_adds_up() -> None:
    tally = Tally(seconds=1.0, latencies=[0.001, 0.002])
    assert math.isnan(Tally().milliseconds(50))
    tally.add(Tally(seconds=3.0, latencies=[0.003, 0.004], errors=["x"]))
    assert (tally.rate, tally.milliseconds(0), tally.milliseconds(100), tally.errors) == (1.0, 1.0, 4.0, ["x"])


@pytest.mark.long
def test_cpu_time_is_that_of_a_process_and_its_children() -> None:
    burn = "sum(range(30_000_000))"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', '{burn}']); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as started:
        assert started.stdin is not None
        assert started.stdout is not None
        started.stdout.readline()
        assert cpu_seconds(started.pid) > 0.1
        started.stdin.close()
    assert math.isnan(cpu_seconds(started.pid))


CHILD = "x = bytes([1]) * (80 << 20); print(len(x), flush=True); input()"
PARENT = f"""if True:
    import subprocess, sys, threading
    pipe, words = subprocess.PIPE, [sys.executable, "-c", {CHILD!r}]
    start = lambda: subprocess.Popen(words, stdin=pipe, stdout=pipe).stdout.readline()
    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    print("ready: http://x", flush=True)
    input()
"""


def test_memory_is_that_of_all_processes() -> None:
    server = Server(["-c", PARENT])
    assert 80 < server.megabytes < 200
    server.end()
    assert server.megabytes == 0
