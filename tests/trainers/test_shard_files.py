"""A checkpoint's shards are read without code, whoever wrote them."""

from __future__ import annotations

import json
import os
import pickle
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
    with pytest.raises(FileNotFoundError, match=LIST):
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
