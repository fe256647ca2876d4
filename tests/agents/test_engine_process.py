"""A local engine in a process of its own draws what one in this process draws, and follows mapped weights."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_requests import request as asked_of

from turngym.agents.executor.engine_process import EngineProcess, mapped_model, share_parameters, skeleton
from turngym.agents.local_engine.engine import LocalEngine
from turngym.agents.local_engine.model import EngineError
from turngym.core import child_process
from turngym.core.protocols import GenerateRequest
from turngym.trainers.models import tiny_qwen3


def request(name: str, *ids: int, count: int = 12) -> GenerateRequest:
    return asked_of(name, ids, (1, sum(ids)), max_new_tokens=count, temperature=1.0)


def model(seed: int = 0) -> Any:
    return tiny_qwen3(32, width=16, layers=1, heads=2, max_length=256, seed=seed)


LEAVES = """if True:
    import sys
    from turngym.agents.executor.engine_process import EngineProcess
    from turngym.agents.executor.processes import LocalWorkers
    from turngym.trainers.models import tiny_qwen3
    engine, workers = EngineProcess(tiny_qwen3(32, width=16, layers=1, heads=2)), LocalWorkers(1)
    handle = workers.share(b"payload")
    workers.call(0, "no method", handle)  # read all the same
    workers.wait(60.0)
    print(engine._path, handle, sep="\\n", flush=True)
    sys.stdin.read()
"""
"""Says which files two kinds of children read, and waits."""


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineProcess]:
    one = EngineProcess(model(), threads=1, max_batch=4)
    yield one
    one.close()


REQUESTS = [request("a", 3, 4, 5), request("b", 6), request("c", 7, 8)]


def test_it_draws_the_same_and_says_so_while_it_draws(engine: EngineProcess) -> None:
    here = LocalEngine(engine.model, max_batch=4)
    said: list[list[tuple[int, float]]] = [[], [], []]
    watches: list[Any] = [lambda *pair, row=row: bool(said[row].append(pair)) or True for row in range(3)]
    found = engine.stream(REQUESTS, watches)
    for one, same, heard in zip(found, here.generate(REQUESTS), said, strict=True):
        assert one.ids.tolist() == same.ids.tolist() == [token for token, _ in heard]
        np.testing.assert_allclose(one.logprobs, same.logprobs, atol=1e-6)
    assert engine.max_length == here.max_length == 256


def test_a_row_that_is_wanted_no_more_ends(engine: EngineProcess) -> None:
    (long,) = engine.stream([request("d", 1, count=240)], [lambda token, logprob: False])
    assert long.finish == "aborted"
    assert 1 <= len(long.ids) < 240
    engine.release("d")
    assert len(engine.generate([request("e", 1, count=4)])[0].ids) == 4  # a late word does not disturb the next


def test_new_values_in_the_mapped_memory_are_new_weights(engine: EngineProcess) -> None:
    other = model(seed=1)
    with torch.no_grad():
        for mine, theirs in zip(engine.model.parameters(), other.parameters(), strict=True):
            mine.copy_(theirs)
    engine.weights_changed(5)
    found = engine.generate(REQUESTS)
    assert {one.policy_version for one in found} == {5}
    for one, same in zip(found, LocalEngine(other).generate(REQUESTS), strict=True):
        assert one.ids.tolist() == same.ids.tolist()
        np.testing.assert_allclose(one.logprobs, same.logprobs, atol=1e-6)


def test_what_the_engine_refuses_is_raised_here(engine: EngineProcess) -> None:
    with pytest.raises(EngineError, match=r"prompt_ids spans 99\.\.99; the model knows ids 0\.\.31"):
        engine.generate([request("x", 99)])
    assert len(engine.generate([request("y", 1)])) == 1


@pytest.mark.long
def test_a_process_that_dies_is_started_again_with_the_weights_of_now(engine: EngineProcess) -> None:
    engine.weights_changed(9)
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGKILL)
    with pytest.raises(EngineError, match="was ended by SIGKILL; ask again"):
        engine.generate(REQUESTS)
    assert engine.pid is None
    engine.release("a")
    engine.weights_changed(10)
    found = engine.generate(REQUESTS)
    assert {one.policy_version for one in found} == {10}
    assert found[0].ids.tolist() == LocalEngine(engine.model).generate(REQUESTS)[0].ids.tolist()
    assert engine.starts == 2


@pytest.mark.nightly
def test_a_process_that_was_stopped_is_started_again(engine: EngineProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "STANDS", 1.0)
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGSTOP)
    with pytest.raises(EngineError, match="stood still and was ended; ask again"):
        engine.generate(REQUESTS)
    assert len(engine.generate(REQUESTS)) == 3


def test_closing_ends_the_process_and_gives_the_memory_back(engine: EngineProcess) -> None:
    pid, path = engine.pid, engine._path
    assert path.exists()
    engine.close()
    engine.close()
    assert not path.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(pid or 0, 0)


@pytest.mark.long
def test_what_a_killed_process_leaves_is_removed() -> None:
    """Weights lie in memory, payloads in a temporary folder; the processes that map or read them remove them."""
    pipe, words = subprocess.PIPE, [sys.executable, "-c", LEAVES]
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True) as parent:
        assert parent.stdout is not None
        left = [Path(parent.stdout.readline().strip()) for _ in range(2)]
        assert all(path.is_file() for path in left)
        parent.kill()
    end = time.monotonic() + 60
    while any(path.exists() for path in left) and time.monotonic() < end:
        time.sleep(0.05)
    assert not [path for path in left if path.exists()]


def test_a_skeleton_is_small_and_its_tied_head_stays_tied() -> None:
    source = tiny_qwen3(4096, width=64, layers=1)
    before = copy.deepcopy(source.state_dict())
    path = share_parameters(source)
    try:
        payload = skeleton(source)
        assert len(payload) < 300_000 < path.stat().st_size
        twin = mapped_model(payload, path)
        assert twin.lm_head.weight is twin.model.embed_tokens.weight
        assert all(torch.equal(value, before[name]) for name, value in twin.state_dict().items())
        with torch.no_grad():
            source.model.embed_tokens.weight[5, 7] = 42.0
        assert twin.lm_head.weight[5, 7].item() == 42.0
    finally:
        Path(path).unlink()


def test_a_model_on_an_accelerator_is_refused() -> None:
    elsewhere = torch.nn.Linear(1, 1, device="meta")
    with pytest.raises(EngineError, match="the model is on meta"):
        EngineProcess(elsewhere)
