"""`turngym serve policy` with a real server (SGLang, vLLM) on this machine's CPU, as people start it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from turngym.agents.server_process import installed
from turngym.agents.servers.server_connection import ServerError
from turngym.agents.servers.weights import free_port

PYTHON = os.environ.get("TURNGYM_SGLANG_PYTHON", sys.executable)
VLLM = os.environ.get("TURNGYM_VLLM_PYTHON", sys.executable)
"""The Pythons that have them."""
START = 540.0
"""Seconds that the server may take on a machine that is busy; 30 to 90 are usual."""


def require(engine: str) -> str:
    """The Python that has the server; skips the test with the reason where none has."""
    python = VLLM if engine == "vllm" else PYTHON
    try:
        installed(python, engine)
    except ServerError as error:
        pytest.skip(str(error))
    return python


@contextmanager
def served_policy(folder: Path, place: Path, *options: str, engine: str = "sglang") -> Iterator[str]:
    """The address of a server that plays the model in `folder` with one thread; its output is `place / "log"`."""
    python = require(engine)
    port, log, said = free_port("127.0.0.1"), place / "log", place / "out"
    words = [sys.executable, "-m", "turngym.scripts", "serve", "policy", str(folder), "--device", "cpu"]
    words += ["--port", str(port), "--threads", "1", "--wait", str(START), "--log", str(log)]
    words += ["--engine", engine, "--python", python, *options]
    words += ["--cache-tokens", "16384"] if engine == "sglang" else []
    with said.open("w+") as out, subprocess.Popen(words, stdout=out, stderr=out) as child:
        try:
            end = time.monotonic() + START
            while "ready: " not in said.read_text():
                assert child.poll() is None, said.read_text()
                assert time.monotonic() < end, log.read_text()[-3000:]
                time.sleep(0.3)
            yield f"http://127.0.0.1:{port}"
        finally:
            child.send_signal(signal.SIGTERM)
            child.wait(60)
    assert "stopping" in said.read_text()
