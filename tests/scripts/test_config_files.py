"""`--config` for eval and rollout: what a trace or an evaluation was played with, played again."""

from __future__ import annotations

from pathlib import Path

import pytest

from turngym.envs.common.settings import SettingsError
from turngym.envs.trace import read_trace
from turngym.scripts import eval as evaluation
from turngym.scripts import rollout
from turngym.scripts.options.eval import EvalOptions
from turngym.scripts.options.parsing import parse


def test_a_rollout_is_repeated_from_the_file_beside_its_trace(tmp_path: Path) -> None:
    words = ["--agent", "random", "--tasks", "2", "--seed", "4", "--max-turns", "3"]
    words += ["--env-kwargs", '{"config": "small"}', "--out", str(tmp_path / "one.jsonl")]
    assert rollout.main(words) == 0
    assert 'command = "turngym rollout --agent random' in (tmp_path / "one.config.toml").read_text()
    config = ["--config", str(tmp_path / "one.config.toml")]
    assert rollout.main([*config, "--out", str(tmp_path / "two.jsonl")]) == 0
    one, two = (read_trace(tmp_path / f"{name}.jsonl")[0] for name in ("one", "two"))
    assert len(one) == 2
    assert [[t.action for t in e.turns] for e in one] == [[t.action for t in e.turns] for e in two]
    before = (tmp_path / "one.config.toml").read_text()
    assert rollout.main([*config, "--append", "--seed", "5"]) == 0
    assert len(read_trace(tmp_path / "one.jsonl")[0]) == 4
    assert (tmp_path / "one.config.toml").read_text() == before


def test_an_evaluation_leaves_its_settings_and_takes_them(tmp_path: Path) -> None:
    words = ["--panel", "alfworld-generated-eval", "--samples", "1", "--limit", "1", "--max-turns", "2"]
    evaluation.main([*words, "--out", str(tmp_path / "one")])
    path = tmp_path / "one" / "config.toml"
    found = parse(EvalOptions, ["--config", str(path), "--samples", "3"], prog="turngym eval", description="")
    assert (found.panel, found.samples, found.limit, found.max_turns) == ("alfworld-generated-eval", 3, 1, 2)
    assert found.out == tmp_path / "one"
    path.write_text('panel = "x"\nslts = 3\n')
    with pytest.raises(SettingsError, match=r"there is no setting slts\. Did you mean 'slots'"):
        evaluation.main(["--config", str(path)])
