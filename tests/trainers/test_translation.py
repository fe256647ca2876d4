"""What `--distill.vocabulary` names: nothing, a translation of this package, or one of somebody else's."""

from __future__ import annotations

from pathlib import Path

import pytest

from turngym.core.plugins import PluginError
from turngym.trainers.contrib.other_vocabulary import of_other_vocabulary
from turngym.trainers.teacher import find_translation


def test_a_name_stands_for_a_translation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "their_ids.py").write_text("def made(algorithm, distill, *, student, reader, sizes): ...\nSIZE = 3\n")
    monkeypatch.chdir(tmp_path)
    assert find_translation("same") is None
    assert find_translation("other") is of_other_vocabulary
    assert getattr(find_translation("their_ids:made"), "__module__", "") == "their_ids"
    for wrong, said in (("othr", "other"), ("their_ids:SIZE", "3"), ("their_ids:mad", "made")):
        with pytest.raises(PluginError, match=said):
            find_translation(wrong)
