"""The command line: every verb explains itself, and mistakes get one line."""

from __future__ import annotations

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
