"""Names in files are no code and no addresses, and texts of strangers are no commands to a terminal."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from turngym.agents.models import base_model, file_hashes
from turngym.core.errors import ModelError
from turngym.core.tables import print_table
from turngym.retrieval.index import EncoderRecord, IndexFolderError
from turngym.retrieval.open_retriever import open_encoder
from turngym.scripts.main import Terminal, main, plain_terminal


@pytest.mark.parametrize("name", ["this:s", "os:system", "antigravity:x", "nowhere"])
def test_an_index_names_no_code(name: str, tmp_path: Path) -> None:
    record = EncoderRecord(kind="other", fingerprint="x", dim=8, model=name)
    sys.modules.pop("this", None)
    with pytest.raises(IndexFolderError, match="no installed package has as an entry point"):
        open_encoder(record, tmp_path, given=None, device="cpu")
    assert "this" not in sys.modules


@pytest.mark.parametrize("place", ["model", "passage_model"])
def test_an_index_asks_no_hub(place: str, tmp_path: Path) -> None:
    names: dict[str, Any] = {"model": "minilm", place: "somebody/bert-of-mine"}
    record = EncoderRecord(kind="hf", fingerprint="x", dim=8, style={}, **names)
    with pytest.raises(IndexFolderError, match="a file does not say what is downloaded"):
        open_encoder(record, tmp_path, given=None, device="cpu")


def adapter(folder: Path, base: Path) -> Path:
    folder.mkdir()
    config = {"peft_type": "LORA", "base_model_name_or_path": str(base), "r": 1, "lora_alpha": 1}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("length", [1, 2, 3, 20])
def test_adapters_that_are_their_own_base(length: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(length):
        adapter(tmp_path / str(number), tmp_path / str((number + 1) % length))
    with pytest.raises(ModelError, match="no model lies below"):
        base_model(tmp_path / "0")
    with pytest.raises(ModelError, match="no model lies below"):
        file_hashes(tmp_path / "0")
    for command in (["plan", "--student"], ["eval", "--limit", "1", "--panel", "alfworld-quickstart", "--agent"]):
        named = str(tmp_path / "0") if command[0] == "plan" else f"model:{tmp_path / '0'}"
        assert main([*command, named]) == 2
        assert "no model lies below" in capsys.readouterr().err


CODES = ["\x1b]0;title\x07", "\x1b[2J", "\x1b[31m", "\x9b2J", "\x08\x08", "\x7f", "\u202eevil", "\x0b", "\x1bc"]


@pytest.mark.parametrize("code", CODES)
def test_no_code_of_a_stranger_reaches_a_terminal(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    with plain_terminal():
        print(f"a{code}b")
        sys.stderr.writelines([f"a{code}b\n"])
    assert sys.stdout is out
    assert out.getvalue() == err.getvalue() == f"a{repr(code)[1:-1]}b\n"
    # an error of any verb
    assert main([f"no{code}verb"]) == 2
    assert code not in err.getvalue()


@pytest.mark.parametrize("name", ["FORCE_COLOR", "TTY_COMPATIBLE"])
def test_a_pipe_gets_no_colors_though_they_are_asked_for(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, "1")
    with plain_terminal():
        print_table((["a"], [["b"]]), "title")
    assert capsys.readouterr().out.startswith("title\n")
    assert os.environ[name] == "1"


def test_a_terminal_gets_our_colors_and_nothing_else() -> None:
    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Screen()
    Terminal(screen).write(
        "\x1b[1;31mred\x1b[0m \x1b[2K\x1b[1A\r\x1b[?25l \x1b]0;title\x07 \x1b[2J \x1b[10;10H\x1b[?1049h\n"
    )
    assert screen.getvalue() == (
        "\x1b[1;31mred\x1b[0m \x1b[2K\x1b[1A\r\x1b[?25l \\x1b]0;title\\x07 \\x1b[2J \\x1b[10;10H\\x1b[?1049h\n"
    )
