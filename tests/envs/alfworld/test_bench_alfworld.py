"""`turngym bench alfworld` on generated games, as small as it goes."""

from __future__ import annotations

import pytest

from turngym.scripts.bench import alfworld


def test_it_measures_without_real_games_and_without_textworld(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    monkeypatch.setattr(alfworld, "open_reference", lambda: None)
    status = alfworld.main(["--rate-steps", "400", "--episodes", "40", "--differential", "3"])
    text = capsys.readouterr().out
    assert status in (0, 1)
    assert "playing generated ones" in text
    assert "gym.make with all wrappers (generated), one core: " in text
    assert "memory over 40 episodes, 5,000 games, start after 20: MB resident start " in text
