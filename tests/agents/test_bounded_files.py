"""Files of folders that come from elsewhere: what is nested, a pipe, a device or a folder is one line that says so."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from turngym.agents.evaluation.packed_file import read_result
from turngym.agents.evaluation.results import read_results
from turngym.agents.local_engine.lora_weights import adapter_config
from turngym.agents.proxy.turn_records import iter_records
from turngym.agents.servers.server_connection import model_config
from turngym.core.errors import RetrievalError, TurngymError
from turngym.core.protocols import separate
from turngym.core.trace import TraceProblem, iter_trace
from turngym.retrieval.index import read_manifest
from turngym.trainers.metrics import iter_metrics
from turngym.trainers.study.records import read_record, read_records

NESTED = b"[" * 200_000 + b"\n"
READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "index": ("manifest.json", read_manifest),
    "record": ("cell.json", read_record),
    "study": ("study.json", read_records),
    "results": ("results.json", lambda folder: read_results(folder / "results.json")),
    "packed": ("r.xz", lambda folder: read_result(folder / "r.xz")),
    "adapter": ("adapter_config.json", adapter_config),
    "metrics": ("metrics.jsonl", lambda folder: list(iter_metrics(folder))),
}


@pytest.mark.parametrize("name", list(READERS))
@pytest.mark.parametrize("kind", ["nested", "pipe", "device", "folder"])
def test_what_is_no_such_file_is_one_line(name: str, kind: str, tmp_path: Path) -> None:
    file, read = READERS[name]
    path = tmp_path / file
    if kind == "nested":
        # a torn last line of metrics is skipped
        path.write_bytes(NESTED + b"{}\n")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    with pytest.raises((TurngymError, RetrievalError)) as caught:
        read(tmp_path)
    said = str(caught.value)
    assert str(tmp_path) in said
    assert "\n" not in said
    assert len(said) < 500
    if kind != "nested":
        assert "damaged" not in said


def test_what_is_nested_is_a_problem_of_its_line(tmp_path: Path) -> None:
    (tmp_path / "records.jsonl").write_bytes(NESTED)
    assert isinstance(next(iter_records(tmp_path)), TraceProblem)
    (tmp_path / "t.jsonl").write_bytes(NESTED)
    assert isinstance(next(iter(iter_trace(tmp_path / "t.jsonl"))), TraceProblem)
    (tmp_path / "config.json").write_bytes(NESTED)
    assert model_config(str(tmp_path)) == {}
    assert separate(NESTED.decode()) == (None, None)
