"""The command line: every verb explains itself, mistakes get one line, imports stay light."""

from __future__ import annotations

import subprocess
import sys

import pytest

from turngym.scripts import main as command


@pytest.mark.parametrize(("verb", "module"), [*command.VERBS.items(), *command.GROUPS["bench"].verbs.items()])
def test_every_verb_has_a_help_line(verb: str, module: str | command.Group) -> None:
    line = command.help_line(module)
    assert len(line.split()) >= 4, f"{verb}: {line!r}"
    assert line.endswith("."), f"{verb}: {line!r}"


def test_an_unknown_verb_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["zzz"]) == 2
    text = capsys.readouterr().err
    assert "unknown verb 'zzz'" in text
    assert "quickstart" in text


def test_importing_envs_is_light() -> None:
    code = (
        "import sys, time; start = time.process_time(); import turngym.envs; spent = time.process_time() - start; "
        "heavy = {'torch', 'faiss', 'transformers', 'textworld', 'pyarrow', 'matplotlib'} & set(sys.modules); "
        "assert not heavy, heavy; print(spent)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 2.0  # the target is 0.5 s on an idle core; the bound only catches a heavy import
