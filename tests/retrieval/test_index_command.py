"""`turngym index`: the command end to end on a small corpus."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from turngym.scripts.main import main


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "c.jsonl"
    path.write_text("".join(json.dumps({"id": i, "contents": f'"T{i}"\nword{i} text'}) + "\n" for i in range(40)))
    return path


def test_build_inspect_verify(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "index"
    build = ["index", "build", "--corpus", str(corpus), "--out", str(out), "--kind", "dense"]
    assert main([*build, "--factory", "IVF4,Flat", "--parameters", '{"nprobe": 4}']) == 0
    assert "nprobe=4" in capsys.readouterr().out
    assert main(["index", "verify", str(out)]) == 0
    assert "files are as built" in capsys.readouterr().out
    with (out / "passages" / "passages.bin").open("r+b") as file:
        file.write(b"!")
    assert main(["index", "inspect", str(out)]) == 0
    assert main(["index", "verify", str(out)]) == 1
    assert "passages/passages.bin was changed after it was written" in capsys.readouterr().err
    assert main(build) == 2
    assert "exists already" in capsys.readouterr().err


def test_interrupted_build_says_how_to_go_on(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt(signal.SIGTERM)

    monkeypatch.setattr("turngym.retrieval.index.write_vectors", interrupted)
    build = ["index", "build", "--corpus", str(corpus), "--out", str(tmp_path / "i"), "--kind", "dense"]
    assert main(build) == 128 + signal.SIGTERM
    assert "the same command goes on" in capsys.readouterr().err
    monkeypatch.undo()
    assert main(build) == 0
