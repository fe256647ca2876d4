"""`turngym serve retrieval` as a process: its ready line, signals, and what it says when it cannot start."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from turngym.retrieval.core import RetrieverUnavailable
from turngym.retrieval.http_retriever import HttpRetriever
from turngym.scripts.main import main

COMMAND = [sys.executable, "-m", "turngym.scripts", "serve", "retrieval", "--port", "0", "--index"]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    rows = [("a", "Hamlet", "A play by William Shakespeare."), ("b", "Faust", "A play by Goethe, a poet.")]
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"id": i, "contents": f'"{t}"\n{x}'}) + "\n" for i, t, x in rows))
    return path


@pytest.fixture
def server(corpus: Path) -> Iterator[subprocess.Popen[str]]:
    # without a further process, which takes seconds to start; test_server_process.py is about those
    command = [*COMMAND, f"bm25:{corpus}", "--processes", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_it_serves_until_a_signal(server: subprocess.Popen[str], number: signal.Signals) -> None:
    assert server.stdout is not None
    ready = server.stdout.readline()
    assert ready.startswith("ready: http://127.0.0.1:")
    assert ", 2 passages, fingerprint bm25:" in ready
    retriever = HttpRetriever(ready.split()[1].rstrip(","))
    assert [hit.passage.title for hit in retriever.search(["who is the poet Goethe"], 1)[0]] == ["Faust"]
    assert ready.strip().endswith(retriever.fingerprint)
    with urllib.request.urlopen(retriever.url.replace("/retrieve", "/stats"), timeout=10) as reply:
        assert json.load(reply)["queries"] == 1
    server.send_signal(number)
    assert server.wait(60) == 0
    assert server.stdout.read() == "stopped; everything accepted was answered\n"
    retriever.close()


def test_a_server_that_is_killed_is_not_an_empty_result(server: subprocess.Popen[str]) -> None:
    assert server.stdout is not None
    url = server.stdout.readline().split()[1].rstrip(",")
    retriever = HttpRetriever(url, backoff=0.01, breaker_failures=2)
    assert len(retriever.search(["Hamlet"], 1)[0]) == 1
    server.kill()
    server.wait(10)
    began = time.monotonic()
    for says in ("3 attempts", "3 attempts", "not asked: it failed 2 times in a row"):
        with pytest.raises(RetrieverUnavailable, match=says):
            retriever.search(["Faust"], 1)
    assert time.monotonic() - began < 30
    assert len(retriever.search(["Hamlet"], 1)[0]) == 1  # what was had is kept
    retriever.close()


def test_it_orders_hits_again(corpus: Path) -> None:
    command = [*COMMAND, f"bm25:{corpus}", "--processes", "0", "--rerank", "coverage", "--rerank-depth", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        ready = process.stdout.readline()
        assert ", 2 passages, fingerprint rerank:coverage:constant=10:gain=0.1:depth=2[bm25:" in ready
        retriever = HttpRetriever(ready.split()[1].rstrip(","))
        first, second = retriever.search(["a play by the poet Goethe"], 2)[0]
        assert (first.passage.title, second.passage.title) == ("Faust", "Hamlet")
        assert 1 / 11 < first.score <= 1 / 11 + 0.1  # the reranker's score, not BM25's
        process.kill()


def test_what_cannot_be_served_is_said(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "retrieval", "--index", str(corpus.parent / "nowhere")]) == 2
    assert "nowhere" in capsys.readouterr().err
    assert main(["serve", "retrieval", "--index", f"bm25:{corpus}", "--processes", "0", "--rerank", "bert"]) == 2
    assert "no reranker 'bert'" in capsys.readouterr().err
    assert main(["serve", "retrieval", "--index", f"bm25:{corpus}", "--topk", "900"]) == 2
    assert "topk is 900; valid: at most 100, max_topk" in capsys.readouterr().err
