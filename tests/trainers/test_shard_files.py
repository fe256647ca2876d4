"""The list of a sharded checkpoint's tensors comes from anyone: no code in it runs, and no field is believed."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from turngym.trainers.checkpoint import load_shards, save_shards
from turngym.trainers.optimizer_step import make_optimizer
from turngym.trainers.run_config import OptimizerConfig
from turngym.trainers.shard_files import LIST

torch.set_num_threads(1)


def part(seed: int, updates: int = 1) -> Any:
    torch.manual_seed(seed)
    model = torch.nn.Linear(3, 2)
    optimizer = make_optimizer(model, OptimizerConfig())
    for _ in range(updates):
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
    return model, optimizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_shards(tmp_path / "shards", {"model": part(1)})
    return tmp_path / "shards"


def test_what_was_written_is_read_and_there_is_no_pickle(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == ["__0_0.distcp", LIST]
    (wrote, before), (read, after) = part(1), part(2)
    load_shards(folder, {"model": (read, after)})
    for one, other in zip(wrote.parameters(), read.parameters(), strict=True):
        assert torch.equal(one, other)
        assert torch.equal(before.state[one]["exp_avg"], after.state[other]["exp_avg"])
        assert int(after.state[other]["step"]) == 1


class Evil:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


def test_a_list_in_pickle_is_not_read(folder: Path, tmp_path: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "mark")))
    load_shards(folder, {"model": part(2)})
    (folder / LIST).unlink()
    with pytest.raises(ValueError, match=r"a list in pickle \(\.metadata\) is not read"):
        load_shards(folder, {"model": part(2)})
    assert not (tmp_path / "mark").exists()


def test_tensors_in_pickle_are_not_read_either(folder: Path, tmp_path: Path) -> None:
    data = pickle.dumps(Evil(tmp_path / "mark"))
    (folder / "__0_0.distcp").write_bytes(data)
    found = json.loads((folder / LIST).read_text())
    for row in found["places"]:
        row[3:] = [0, len(data)]
    (folder / LIST).write_text(json.dumps(found))
    with pytest.raises(BaseException, match=r"Weights only load failed|could not read its shard"):
        load_shards(folder, {"model": part(2)})
    assert not (tmp_path / "mark").exists()


def place(position: int, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(found: dict[str, Any]) -> None:
        for row in found["places"]:
            row[position] = value

    return change


def tensor(**changes: Any) -> Callable[[dict[str, Any]], None]:
    def change(found: dict[str, Any]) -> None:
        for one in found["tensors"].values():
            one.update(changes)

    return change


LIES: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "a file elsewhere": (place(2, "../../secret"), "is in the file '../../secret'"),
    "an absolute file": (place(2, "/etc/passwd"), "is in the file '/etc/passwd'"),
    "no name": (place(2, 7), "is in the file 7"),
    "behind the end": (place(4, 1 << 50), "lies behind the end"),
    "before the beginning": (place(3, -1), "they must be whole numbers from 0"),
    "a dtype of code": (tensor(dtype="load"), "is of dtype 'load'"),
    "2^60 numbers": (tensor(size=[1 << 31, 1 << 31]), "numbers"),
    "a part outside": (tensor(chunks=[[[1 << 40, 0], [1, 1]]]), "lies outside of its shape"),
    "a size in words": (tensor(size=["3"]), "they must be whole numbers from 0"),
}


@pytest.mark.parametrize("kind", LIES)
def test_no_field_is_believed(kind: str, folder: Path) -> None:
    change, said = LIES[kind]
    found = json.loads((folder / LIST).read_text())
    change(found)
    (folder / LIST).write_text(json.dumps(found))
    with pytest.raises(Exception, match=said):
        load_shards(folder, {"model": part(2)})
    shutil.rmtree(folder)
