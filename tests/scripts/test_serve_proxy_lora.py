"""Adapters in the proxy: they alone are learned, and what answers has them merged in, under new versions."""

from __future__ import annotations

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

from turngym.agents import models
from turngym.agents.models import load_model
from turngym.agents.proxy.turn_records import TurnRecord, read_records
from turngym.agents.rendering.chat_settings import ChatSettings
from turngym.core.errors import ModelError
from turngym.core.files import weights_hash
from turngym.trainers.checkpoint import latest_model
from turngym.trainers.lora import merged_weights
from turngym.trainers.scorer import LocalScorer


@pytest.fixture
def start() -> Iterator[Callable[..., Any]]:
    with ExitStack() as held:

        def make(config: Any) -> Any:
            one = proxy_run.Running(config)
            held.callback(one.stop_if_running)
            return one

        yield make


def logprobs(folder: Path, turn: TurnRecord) -> Any:
    """Of a first turn's answer, by the model of `folder`."""
    ids = np.concatenate([turn.prompt_ids, turn.ids])
    where = np.arange(len(turn.prompt_ids), len(ids))
    return LocalScorer(model=load_model(folder)).logprobs([ids], [where])[0]


@pytest.mark.parametrize("kind", late(["student", "copy", "process", "servers"], "copy"))
def test_only_adapters_learn_and_what_answers_has_them(start: Any, tmp_path: Path, kind: str) -> None:
    with ExitStack() as held:
        more: dict[str, Any] = {"serve_from": "auto" if kind == "servers" else kind}
        if kind == "servers":
            server = held.enter_context(ModelServer(folder=proxy_run.STUDENT))
            more["policy_server"] = server.url
        config = proxy_run.options(
            tmp_path, lora={"rank": 4, "alpha": 8}, optimizer={"lr": 1e-2}, batch_turns=4, **more
        )
        served = start(config)
        held.callback(served.stop_if_running)
        model = served.training.trainer.model
        base = {name: value.clone() for name, value in model.named_parameters() if ".lora_" not in name}
        assert base
        assert {name for name, value in model.named_parameters() if value.requires_grad} == {
            name for name, _ in model.named_parameters() if ".lora_" in name
        }
        proxy_run.play(served.ask, sessions=2, turns=3)
        served.until_step(1)
        served.ask([{"role": "user", "content": "You are in the middle of a room."}], "after")
        served.stop()
    assert all(torch.equal(value, dict(model.named_parameters())[name]) for name, value in base.items())
    plain = load_model(proxy_run.STUDENT)
    learned = merged_weights(model, model.state_dict())
    moved = [name for name, value in plain.state_dict().items() if not torch.equal(value, learned[name])]
    assert moved
    turns = [TurnRecord.from_json(record) for record in read_records(tmp_path) if record["kind"] == "turn"]
    first, last = turns[0], turns[-1]
    assert (first.version, last.version) == (0, served.training.step)
    assert served.training.step >= 1
    # each is scored as it was drawn: the first by the student, the last by the student with its adapters
    np.testing.assert_allclose(first.logprobs, logprobs(proxy_run.STUDENT, first), atol=2e-5)
    assert latest_model(tmp_path).joinpath("adapter_config.json").is_file()
    np.testing.assert_allclose(last.logprobs, logprobs(latest_model(tmp_path), last), atol=2e-5)
    assert np.abs(last.logprobs - logprobs(proxy_run.STUDENT, last)).max() > 1e-4


def test_a_run_with_adapters_goes_on_with_the_same_ones_only(start: Any, tmp_path: Path) -> None:
    served = start(proxy_run.options(tmp_path, lora={"rank": 4}, batch_turns=4))
    proxy_run.play(served.ask, sessions=2, turns=3)
    served.until_step(1)
    served.stop()
    other = start(proxy_run.options(tmp_path, lora={"rank": 8}, batch_turns=4))
    other.training._thread.join(60)
    assert other.training.error.startswith("CheckpointError: ")
    assert "lora" in other.training.error


def test_a_student_named_as_on_the_hub_is_the_base_and_known_by_its_weights(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "model_folder", lambda named, weights=True: proxy_run.STUDENT)
    config = proxy_run.options(tmp_path, student=Path("some-org/tiny"), lora={"rank": 4}, proxy={"max_waiting": 8})
    served = start(config)
    trainer = served.training.trainer
    assert trainer.model.peft_config["default"].base_model_name_or_path == str(proxy_run.STUDENT)
    assert trainer.contents["student"] == weights_hash(proxy_run.STUDENT)
    assert trainer.spec["chat"] == ChatSettings.load(proxy_run.STUDENT).identity
    assert served.service.name == "tiny"
    with pytest.raises(ModelError, match="some-org/tiny holds no weights"):
        weights_hash("some-org/tiny")
