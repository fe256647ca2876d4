"""Old names of options: followed with a warning, on every verb that had them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from turngym.envs.core.errors import TurngymError
from turngym.envs.core.trace import read_trace
from turngym.scripts import rollout
from turngym.scripts.options import OPTIONS, VALUES, current


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (["--batch", "3"], ["--slots", "3"]),
        (["--batch=3"], ["--slots=3"]),
        (["--make", '{"batch": "--make"}'], ["--env-kwargs", '{"batch": "--make"}']),
        (["--blunders", "0.1"], ["--mistakes", "0.1"]),
        (["--optimiser.lr", "1"], ["--optimizer.lr", "1"]),
        (["--optimiser.passes", "2"], ["--optimizer.ppo-epochs", "2"]),
        (["--on-invalid", "penalise"], ["--on-invalid", "penalize"]),
        (["--on_invalid=penalise"], ["--on_invalid=penalize"]),
        (["--packing"], ["--packing", "on"]),
        (["--packing", "--steps", "2"], ["--packing", "on", "--steps", "2"]),
        (["--no-packing"], ["--packing", "off"]),
        (["--turnopd.reliable_share", "0.1"], ["--turnopd.n-min-share", "0.1"]),
    ],
)
def test_old_names_become_new_ones_with_a_warning(old: list[str], new: list[str]) -> None:
    with pytest.warns(FutureWarning, match="is now"):
        assert current(old) == new


def test_everything_else_stays_and_warns_of_nothing(recwarn: pytest.WarningsRecorder) -> None:
    words = [
        "--batch-turns",
        "4",
        "--agent",
        "penalise",
        "batch",
        "--optimizer.lr",
        "1",
        "-h",
        "--",
        "--maker",
        "--made=3",
        "--packing",
        "off",
        "--packing=auto",
    ]
    assert current(words) == words
    assert not recwarn.list


def test_no_new_name_is_an_old_one() -> None:
    assert not set(OPTIONS.values()) & set(OPTIONS) - {"optimizer.passes"}
    assert not set(VALUES.values()) & {value for _, value in VALUES}


def test_old_words_play_the_same_episodes(tmp_path: Path, capsys: Any) -> None:
    words = ["--agent", "random", "--tasks", "2", "--max-turns", "5"]
    old = ["--batch", "2", "--make", '{"list_admissible": false}', "--on-invalid", "penalise"]
    new = ["--slots", "2", "--env-kwargs", '{"list_admissible": false}', "--on-invalid", "penalize"]
    with pytest.warns(FutureWarning) as caught:
        assert rollout.main([*words, *old, "--out", str(tmp_path / "old.jsonl")]) == 0
    assert sorted({str(one.message).split(" is now ")[0] for one in caught}) == [
        "--batch",
        "--make",
        "--on-invalid penalise",
    ]
    assert rollout.main([*words, *new, "--out", str(tmp_path / "new.jsonl")]) == 0
    turns = [[episode.turns for episode in read_trace(tmp_path / f"{name}.jsonl")[0]] for name in ("old", "new")]
    assert turns[0] == turns[1]
    with pytest.raises(TurngymError, match=r"--env-kwargs '.1.' must be a JSON object"):
        rollout.main([*words, "--env-kwargs", "[1]", "--out", str(tmp_path / "none.jsonl")])
