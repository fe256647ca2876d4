"""Turns are answered while the student learns: by a copy, by a process, by servers; each by the weights it names."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import proxy_run
import pytest
import torch
from late import late
from sglang_model import ModelServer

from turngym.agents.models import load_model
from turngym.agents.proxy.turn_records import TurnRecord, read_records
from turngym.core.errors import SettingsError
from turngym.trainers.live.run import build
from turngym.trainers.scorer import LocalScorer


class SlowUpdate:
    """Holds every update when the student's weights have changed and nobody was told: computing in Python meanwhile."""

    def __init__(self) -> None:
        self.entered, self.go = threading.Event(), threading.Event()
        self.spins = 0

    def around(self, running: Any) -> None:
        told = running.training.updated

        def slowly(step: int) -> None:
            self.entered.set()
            while not self.go.wait(0.002):
                self.spins += sum(range(20_000)) > 0  # holds the GIL, as an optimizer's loop does
            told(step)

        running.training.trainer.on_update = slowly


@pytest.fixture
def start() -> Iterator[Callable[..., Any]]:
    with ExitStack() as held:

        def make(config: Any, update: SlowUpdate) -> Any:
            held.callback(update.go.set)
            one = proxy_run.Running(config, before=update.around)
            held.callback(one.stop_if_running)
            return one

        yield make


@pytest.mark.parametrize("kind", late(["copy", "process", "servers"], "copy"))
def test_turns_during_an_update_have_the_old_weights_and_those_after_it_the_new(
    start: Any, tmp_path: Path, kind: str
) -> None:
    with ExitStack() as held:
        more: dict[str, Any] = {"serve_from": "auto" if kind == "servers" else kind}
        if kind == "servers":
            server = held.enter_context(ModelServer(folder=proxy_run.STUDENT))
            more["policy_server"] = server.url
        update = SlowUpdate()
        served = start(proxy_run.options(tmp_path, **more), update)
        held.callback(served.stop_if_running)
        held.callback(update.go.set)
        proxy_run.play(served.ask, sessions=2, turns=4)
        assert update.entered.wait(60)
        messages: list[Any] = []
        for turn in range(4):
            messages.append({"role": "user", "content": f"You are in the middle of a room. {turn}"})
            messages.append(served.ask(messages, "during"))
        assert not update.go.is_set()  # the update was under way all the time
        assert served.health()["serving"]["version"] == 0
        new = [value.clone() for value in served.training.trainer.model.parameters()]
        update.go.set()
        served.until_step(1)
        messages.append({"role": "user", "content": "And now?"})
        served.ask(messages, "during", session_done=True)
        assert served.health()["serving"]["version"] == 1
        assert served.health()["serving"]["from"] == kind
        served.stop()
    records = [one for one in read_records(tmp_path) if one["kind"] == "turn"]
    turns = [TurnRecord.from_json(one) for one in records if one["session"] == records[-1]["session"]]
    assert [turn.version for turn in turns] == [0, 0, 0, 0, 1]
    student, learned = load_model(proxy_run.STUDENT), load_model(proxy_run.STUDENT)
    with torch.no_grad():
        for mine, theirs in zip(learned.parameters(), new, strict=True):
            mine.copy_(theirs)
    for turn, model, other in [(turns[3], student, learned), (turns[4], learned, student)]:
        assert gap(turns, turn, model) < 1e-4
        assert gap(turns, turn, other) > 1e-3


def gap(turns: list[TurnRecord], turn: TurnRecord, model: Any) -> float:
    """Largest difference between the log-probabilities of a recorded answer and those that `model` gives it."""
    row = np.concatenate([part for one in turns[: turns.index(turn) + 1] for part in (one.prompt_ids, one.ids)])
    places = np.arange(len(row) - len(turn.ids), len(row))
    found = LocalScorer(model=model).logprobs([row.astype(np.int32)], [places])[0]
    return float(np.abs(found - turn.logprobs).max())


def test_requests_wait_where_the_student_itself_answers(start: Any, tmp_path: Path) -> None:
    update = SlowUpdate()
    served = start(proxy_run.options(tmp_path, serve_from="student"), update)
    proxy_run.play(served.ask, sessions=2, turns=4)
    assert update.entered.wait(60)
    answers: list[Any] = []
    asking = threading.Thread(
        target=lambda: answers.append(served.ask([{"role": "user", "content": "Hello"}], "during"))
    )
    asking.start()
    asking.join(0.3)
    assert not answers
    assert served.health()["status"] == "updating"
    update.go.set()
    asking.join(60)
    assert answers
    record = [one for one in read_records(tmp_path) if one["kind"] == "turn"][-1]
    assert record["version"] == 1


@pytest.mark.long
def test_auto_takes_a_process_on_the_cpu_and_recording_needs_no_copy(tmp_path: Path) -> None:
    learning = proxy_run.options(tmp_path / "learns", serve_from="auto")
    for config, kind in ((learning, "EngineProcess"), (proxy_run.options(tmp_path / "records", None), "LocalEngine")):
        service, _ = build(config)
        assert type(service.engine._policy).__name__ == kind
        service.close()


def test_a_wait_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"swap_wait is -1\.0"):
        proxy_run.options(tmp_path, swap_wait=-1.0)


def test_the_patience_of_a_swap_is_the_option(tmp_path: Path) -> None:
    service, training = build(proxy_run.options(tmp_path, serve_from="copy", swap_wait=0.125))
    assert training is not None
    assert training._serving.patience == 0.125
    training.stop()
    service.close()
