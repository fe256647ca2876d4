"""The examples of docs/adapters.md run as they stand."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from turngym.envs.core.episode import Episode
from turngym.envs.core.plugins import MissingExtra, need
from turngym.envs.core.trace import TraceWriter

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "adapters.md").read_text(encoding="utf-8")


def example(heading: str, number: int = 0) -> str:
    """The Python example `number` under a heading."""
    section = re.split(r"^## ", TEXT, flags=re.MULTILINE)
    (body,) = [part for part in section if part.startswith(heading)]
    return re.findall(r"```python\n(.*?)```", body, flags=re.DOTALL)[number]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder, so that nothing of the repository is written to."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(source: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(source, "docs/adapters.md", "exec"), names)
    return names


def test_a_session_by_hand(folder: Path) -> None:
    assert run(example("A session by hand"))["trajectory"].response_mask.any()


def test_slime(folder: Path) -> None:
    assert callable(run(example("slime"))["generate_rollout"])


def test_trl_rollout_func(folder: Path) -> None:
    pytest.importorskip("trl", reason="needs the extra turngym[trl]")
    assert run(example("TRL", 0))["trainer"].state.global_step == 2


def test_trl_environment_factory(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = run(example("TRL", 1))
    assert names["dataset"][0]["prompt"][0]["role"] == "system"
    assert "You are in the middle of a room" in capsys.readouterr().out


def test_skyrl(folder: Path) -> None:
    pytest.importorskip("skyrl_gym", reason="needs the extra turngym[skyrl]")
    from skyrl_gym.envs.registration import deregister

    run(example("SkyRL"))
    deregister("turngym-alfworld")


def test_datasets(folder: Path, recorded: list[Episode], capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("datasets", reason="needs the extra turngym[datasets]")
    with TraceWriter(folder / "episodes.jsonl") as writer:
        for episode in recorded:
            writer.write(episode)
    run(example("Parquet"))
    assert capsys.readouterr().out.startswith(str(recorded[0].episode_return))


def test_the_trace_verb_writes_trajectories(folder: Path, recorded: list[Episode]) -> None:
    pq = pytest.importorskip("pyarrow.parquet", reason="needs the extra turngym[parquet]")
    from turngym.scripts import trace
    from turngym.trainers.adapters.datasets import rows as rows_of

    with TraceWriter(folder / "episodes.jsonl") as writer:
        for episode in recorded:
            writer.write(episode)
    assert trace.main(["parquet", "episodes.jsonl", "--rows", "trajectories", "--out", "t.parquet"]) == 0
    rows = pq.read_table("t.parquet").to_pylist()
    assert len(rows) == len(recorded)
    assert rows == list(rows_of(recorded))


def test_a_missing_trainer_is_named_with_its_extra() -> None:
    with pytest.raises(MissingExtra, match=r"the agent loop needs nosuchtrainer: pip install 'turngym\[verl\]'"):
        need("nosuchtrainer.deep.inside", "the agent loop", "verl")


def test_every_adapter_is_named_in_the_table(student: SimpleNamespace) -> None:
    adapters = {path.stem for path in (ROOT / "trainers" / "adapters").glob("*.py")}
    assert all(f"`{name}`" in TEXT for name in adapters - {"__init__", "token_session"})
