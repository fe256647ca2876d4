"""`--config` for eval and rollout: what a trace or an evaluation was played with, played again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from turngym.agents import evaluate, play_episodes
from turngym.agents.evaluation.compare import spec_of
from turngym.agents.evaluation.play_episodes import ROLLOUT_DEFAULTS
from turngym.agents.play_spec import EnvPlayer, EvalSpec, Model
from turngym.agents.playing.scripted import RandomAgent
from turngym.agents.resolve_play import resolve_play
from turngym.agents.worlds import load_world
from turngym.core.errors import SettingsError, TurngymError
from turngym.core.provenance import write_config
from turngym.core.settings import read_toml
from turngym.core.spec import diff, expand, read
from turngym.core.trace import read_trace
from turngym.scripts import eval as evaluation
from turngym.scripts import rollout
from turngym.scripts.main import main

TOML = b'agent = "expert"\nseed = 3\nnoise = 0.25\n# more\nsplit = """\ngenerated"""\n'


def shown(capsys: pytest.CaptureFixture[str], verb: str, *words: str) -> EvalSpec:
    """What `--print` shows, as settings."""
    capsys.readouterr()
    assert main([verb, *words, "--print"]) == 0
    path = Path("shown.toml")
    path.write_text(capsys.readouterr().out)
    return read(EvalSpec, expand(EvalSpec, read_toml(path), "shown"), "shown")


def actions(trace: Path) -> list[list[str]]:
    return [[turn.action for turn in episode.turns] for episode in read_trace(trace)[0]]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_rollout_is_repeated_from_the_file_beside_its_trace(tmp_path: Path) -> None:
    words = ["--agent", "random", "--tasks", "2", "--seed", "4", "--max-turns", "3"]
    words += ["--env-kwargs", '{"config": "small"}', "--out", "one.jsonl"]
    assert rollout.main(words) == 0
    before = Path("one.spec.toml").read_text()
    assert 'command = "turngym rollout --agent random' in before
    assert "max_turns = 3  # command line" in before
    config = ["--config", "one.spec.toml"]
    assert rollout.main([*config, "--out", "two.jsonl"]) == 0
    assert len(actions(tmp_path / "one.jsonl")) == 2
    assert actions(tmp_path / "one.jsonl") == actions(tmp_path / "two.jsonl")
    assert rollout.main([*config, "--out", "one.jsonl", "--append", "--seed", "5"]) == 0
    assert len(actions(tmp_path / "one.jsonl")) == 4
    assert Path("one.spec.toml").read_text() == before
    with pytest.raises(TurngymError, match="a trace holds one player in one game"):
        rollout.main([*config, "--out", "one.jsonl", "--append", "--agent", "expert"])


def test_what_is_printed_is_read_again_to_the_byte(capsys: pytest.CaptureFixture[str]) -> None:
    for verb, words in (
        ("eval", ["--panel", "alfworld-quickstart", "--preset", "verl-agent", "--agent", "openai:m", "--limit", "2"]),
        ("rollout", ["--env", "turngym/Search-v0", "--tasks", "3", "--agent", "random", "--draw", "--workers", "2"]),
    ):
        first = shown(capsys, verb, *words)
        Path("shown.toml").rename("first.toml")
        again = shown(capsys, verb, "--config", "first.toml")
        assert not diff(first, again)
        # the file is a layer like any other: what is given beside it stands on top
        assert list(diff(first, shown(capsys, verb, "--config", "first.toml", "--seed", "7"))) == ["play.seed"]


def test_an_evaluation_leaves_its_settings_and_takes_them(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--panel", "alfworld-generated-eval", "--samples", "1", "--limit", "1", "--max-turns", "2"]
    evaluation.main([*words, "--out", "one"])
    path = Path("one/spec.toml")
    found = shown(capsys, "eval", "--config", str(path), "--samples", "3")
    assert list(diff(found, spec_of(Path("one/trace.jsonl")))) == ["play.samples"]
    assert (found.play.samples, found.play.env.max_turns) == (3, 2)
    path.write_text('panel = "alfworld-quickstart"\nslts = 3\n')
    with pytest.raises(SettingsError, match=r"there is no setting 'slts'\. Did you mean 'slots'"):
        evaluation.main(["--config", str(path)])


def test_another_agent_or_panel_on_top_of_a_record_is_opened_anew(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--panel", "alfworld-quickstart", "--samples", "1", "--limit", "1", "--max-turns", "1"]
    house = load_world("alfworld")
    evaluation.main([*words, "--agent", f"model:{house.folder('student')}", "--out", "one"])
    record = shown(capsys, "eval", "--config", "one/spec.toml")
    assert isinstance(record.agent, Model)
    assert record == spec_of(Path("one/trace.jsonl"))
    assert record.agent.weights
    # what opening found is checked where nothing else is asked for, and found anew where it is
    other = shown(capsys, "eval", "--config", "one/spec.toml", "--agent", f"model:{house.folder('teacher')}")
    assert isinstance(other.agent, Model)
    assert (other.agent.weights, other.agent.temperature) == ("", record.agent.temperature)
    later = shown(capsys, "eval", "--config", "one/spec.toml", "--seed", "2").agent
    assert later == record.agent
    shop = shown(capsys, "eval", "--config", "one/spec.toml", "--panel", "webshop-quickstart").play
    assert (shop.env.id, shop.env.max_turns, shop.samples) == ("turngym/WebShop-v0", 1, 1)


@pytest.mark.long
def test_what_python_asked_for_is_repeated_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = {"config": "small", "max_turns": 3}
    play_episodes("turngym/ALFWorld-v0", "random", tasks=2, seed=4, out=tmp_path / "one.jsonl", env_kwargs=small)
    assert 'command = "turngym.agents.play_episodes"' in Path("one.spec.toml").read_text()
    assert rollout.main(["--config", "one.spec.toml", "--out", "two.jsonl"]) == 0
    assert actions(tmp_path / "one.jsonl") == actions(tmp_path / "two.jsonl")
    task = read_trace(tmp_path / "one.jsonl")[0][0].task.task_id
    play_episodes(task=[task], agent=RandomAgent(), out=tmp_path / "own.jsonl", env_kwargs=small)
    assert f'task = ["{task}"]' in Path("own.spec.toml").read_text()

    asked: dict[str, Any] = {"samples": 2, "limit": 1, "max_turns": 2, "slots": 3, "noise": 0.5, "progress": False}
    first = evaluate("alfworld-generated-eval", "expert", out=tmp_path / "python", **asked)
    path = tmp_path / "python" / "spec.toml"
    assert shown(capsys, "eval", "--config", str(path)) == first.spec
    before = path.read_text()
    assert evaluate("alfworld-generated-eval", "expert", out=tmp_path / "python", **asked).resumed == 2
    assert path.read_text() == before
    # a value is taken as the file is
    again = evaluate(first.spec, progress=False)
    assert (again.spec, again.scores) == (first.spec, first.scores)


def test_the_keywords_of_python_are_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    given = {"temperature": 0.25, "slots": 2, "system": "Go.", "workers": 5, "tasks": 3, "draw": True, "depth": 1}
    given |= {"agent": "openai:m", "memory": "window:2", "env_kwargs": {"config": "small", "max_turns": 2}}
    words = ["--temperature", "0.25", "--slots", "2", "--system", "Go.", "--workers", "5", "--tasks", "3", "--draw"]
    words += ["--depth", "1", "--agent", "openai:m", "--memory", "window:2"]
    found = shown(capsys, "rollout", *words, "--env-kwargs", '{"config": "small", "max_turns": 2}')
    assert resolve_play([("call", given)], usual=ROLLOUT_DEFAULTS).spec == found
    assert expand(EvalSpec, {"tasks": 3}, "x") == expand(EvalSpec, {"tasks": "3"}, "x")


def test_a_rollout_without_a_trace_shows_its_table(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--tasks", "1", "--max-turns", "2", "--env-kwargs", '{"config": "small"}']
    assert rollout.main(words) == 0
    assert "1 episodes" in capsys.readouterr().out
    with pytest.raises(TurngymError, match=r"^--append "):
        rollout.main([*words, "--append"])


def test_an_environment_by_itself_is_read_back(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["play", "--max-turns", "7", "--print"]) == 0
    Path("house.toml").write_text(capsys.readouterr().out)
    assert main(["play", "--config", "house.toml", "--env", "turngym/WebShop-v0", "--print"]) == 0
    Path("shop.toml").write_text(capsys.readouterr().out)
    found = read_toml(Path("shop.toml"))["play"]
    assert (found["env"]["id"], found["env"]["max_turns"]) == ("turngym/WebShop-v0", 7)
    assert "profile" in found["env_kwargs"]
    assert "words" not in found["env_kwargs"], "an argument of the household"


MARK = "\ufeff".encode()


@pytest.mark.parametrize("data", [MARK + TOML, TOML.replace(b"\n", b"\r\n"), MARK + TOML.replace(b"\n", b"\r\n")])
def test_a_configuration_is_read_as_any_editor_writes_it(data: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    Path("plain.toml").write_bytes(TOML)
    Path("c.toml").write_bytes(data)
    assert read_toml(Path("c.toml")) == read_toml(Path("plain.toml"))
    found = shown(capsys, "rollout", "--config", "c.toml")
    assert (found.play.seed, found.play.env.split, found.agent) == (3, "generated", EnvPlayer(noise=0.25))


OTHERS = [
    (TOML.decode().encode("utf-16"), "is UTF-16 text; save it as UTF-8"),
    (b"# caf\xe9\n" + TOML, "line 1: byte 0xe9 at column 6 is no UTF-8; save it as UTF-8"),
    (b"seed = " + b"9" * 5000, "is not TOML: Exceeds the limit"),
    (b"seed = " + b"[" * 3000 + b"]" * 3000, "is not TOML: it is nested too deep"),
    (b"a." * 3000 + b"b = 1", "is not TOML: it is nested too deep"),
]
OUT = (b'out = "a\\u0000b"\npanel = "alfworld-quickstart"\n', "valid: a path")


@pytest.mark.parametrize(
    ("verb", "data", "said"),
    [
        *((verb, *other) for verb in ("rollout", "eval", "train", "plan") for other in OTHERS),
        *((verb, *OUT) for verb in ("eval", "train")),
        ("rollout", OUT[0].partition(b"\n")[0], OUT[1]),
    ],
)
def test_other_configurations_are_one_line(verb: str, data: bytes, said: str, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "c.toml"
    path.write_bytes(data)
    assert main([verb, "--config", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_settings_with_a_path_that_is_no_text_are_read_again(tmp_path: Path) -> None:
    raw = os.fsdecode(b"/models/caf\xe9")
    write_config(tmp_path / "config.toml", {"student": raw, "note": "café"}, "test")
    assert (tmp_path / "config.toml").read_bytes().startswith(b"# some paths below are no UTF-8")
    assert read_toml(tmp_path / "config.toml") == {"student": raw, "note": "café"}
