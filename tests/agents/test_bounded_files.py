"""Files of folders that come from elsewhere: what is nested, a pipe, a device or a folder is one line that says so."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from turngym.agents.evaluation.packed_file import read_result
from turngym.agents.local_engine.lora_weights import adapter_config
from turngym.agents.proxy.turn_records import iter_records
from turngym.agents.servers.server_connection import model_config
from turngym.core import user_files
from turngym.core.errors import RetrievalError, TurngymError
from turngym.core.protocols import separate
from turngym.core.trace import TraceProblem, iter_trace
from turngym.core.user_files import json_object, read_text
from turngym.trainers.study.records import read_records

NESTED = b"[" * 200_000 + b"\n"
READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    # of models, adapters, panels, and of what turngym has written
    "an object": ("adapter_config.json", adapter_config),
    "study": ("study.json", read_records),
    "packed": ("r.xz", lambda folder: read_result(folder / "r.xz")),
}


@pytest.mark.parametrize("name", list(READERS))
@pytest.mark.parametrize("kind", ["nested", "pipe", "device", "folder"])
def test_what_is_no_such_file_is_one_line(name: str, kind: str, tmp_path: Path) -> None:
    file, read = READERS[name]
    path = tmp_path / file
    if kind == "nested":
        path.write_bytes(NESTED)
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


def test_a_longer_file_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_files, "LARGEST_FILE", 10)
    (tmp_path / "a.json").write_text('{"a": "long"}')
    with pytest.raises(TurngymError, match=r"a\.json cannot be read: it has more than 10 bytes"):
        json_object(tmp_path / "a.json", TurngymError)
    # a device has no end
    with pytest.raises(TurngymError, match="/dev/zero cannot be read: it has more"):
        read_text("/dev/zero", TurngymError)
