"""`--config` for eval and rollout: what a trace or an evaluation was played with, played again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from turngym.agents import evaluate, play_episodes
from turngym.agents.agent_options import AgentOptions
from turngym.agents.executor.worker_count import WorkerOptions
from turngym.agents.playing.env_maker import EnvOptions
from turngym.agents.playing.scripted import RandomAgent
from turngym.agents.servers.server_options import PolicyServer
from turngym.core.errors import TurngymError
from turngym.core.provenance import write_config
from turngym.core.settings import SettingsError, from_table, read_toml
from turngym.core.trace import read_trace
from turngym.scripts import eval as evaluation
from turngym.scripts import rollout
from turngym.scripts.command_line import parse
from turngym.scripts.eval import EvalOptions
from turngym.scripts.main import main
from turngym.scripts.rollout import RolloutOptions

TOML = b'agent = "expert"\nseed = 3\nnoise = 0.25\n# more\nsplit = """\ngenerated"""\n'


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


def test_what_python_asked_for_is_repeated_by_the_command(tmp_path: Path) -> None:
    small = {"config": "small", "max_turns": 3}
    play_episodes("turngym/ALFWorld-v0", "random", tasks=2, seed=4, out=tmp_path / "one.jsonl", env_kwargs=small)
    text = (tmp_path / "one.config.toml").read_text()
    assert 'command = "turngym.agents.play_episodes"' in text
    words = ["--config", str(tmp_path / "one.config.toml"), "--out", str(tmp_path / "two.jsonl")]
    assert rollout.main(words) == 0
    one, two = (read_trace(tmp_path / f"{name}.jsonl")[0] for name in ("one", "two"))
    assert [[t.action for t in e.turns] for e in one] == [[t.action for t in e.turns] for e in two]
    task = one[0].task.task_id
    play_episodes(tasks=[task], agent=RandomAgent(), out=tmp_path / "own.jsonl", env_kwargs=small)
    assert f'task = ["{task}"]' in (tmp_path / "own.config.toml").read_text()

    asked = {"samples": 2, "limit": 1, "max_turns": 2, "slots": 3, "noise": 0.5, "progress": False}
    first = evaluate("alfworld-generated-eval", "expert", out=tmp_path / "python", **asked)  # type: ignore[arg-type]
    path = tmp_path / "python" / "config.toml"
    found = parse(EvalOptions, ["--config", str(path)], prog="turngym eval", description="")
    assert (found.panel, found.samples, found.limit, found.max_turns) == ("alfworld-generated-eval", 2, 1, 2)
    assert (found.player.agent, found.player.noise, found.player.slots) == ("expert", 0.5, 3)
    again = evaluation.run(
        parse(EvalOptions, ["--config", str(path), "--out", str(tmp_path / "b")], prog="", description=""), "test"
    )
    assert again.scores == first.scores
    before = path.read_text()
    assert evaluate("alfworld-generated-eval", "expert", out=tmp_path / "python", **asked).resumed == 2  # type: ignore[arg-type]
    assert path.read_text() == before


def test_every_argument_of_python_is_an_option_of_the_file(tmp_path: Path) -> None:
    playing = WorkerOptions(retries=5)
    servers = PolicyServer(server_parallel=3)
    player = {"temperature": 0.25, "slots": 2, "noise": 0.5, "channel": "text", "system": "Go.", "threads": 1}
    both: dict[str, Any] = {"workers": playing, "servers": servers, "progress": False, **player}
    data = tmp_path / "data"  # a path, as Python users have them
    kwargs = {"config": "small", "max_turns": 2, "data": data}
    more: dict[str, Any] = {"draw": True, "samples": 2, "seed": 4, "depth": 1, "append": True}
    play_episodes(agent="expert", tasks=3, out=tmp_path / "t.jsonl", env_kwargs=kwargs, **more, **both)
    # as the file has them: the command would refuse those of a model, and of servers, with an expert
    found = from_table(RolloutOptions, read_toml(tmp_path / "t.config.toml"), "t.config.toml")
    assert found == RolloutOptions(
        out=tmp_path / "t.jsonl",
        world=EnvOptions(env_kwargs=found.world.env_kwargs),
        player=AgentOptions(**player),
        servers=servers,
        workers=playing,
        tasks=3,
        **more,
    )
    assert found.world.kwargs() == {**kwargs, "data": str(data)}

    more = {"samples": 2, "limit": 1, "seed": 4, "data": str(data), "max_turns": 2, "verify": False}
    evaluate("alfworld-generated-eval", out=tmp_path / "e", env_kwargs={"on_invalid": "noop"}, **more, **both)
    found_eval = from_table(EvalOptions, read_toml(tmp_path / "e" / "config.toml"), "config.toml")
    assert found_eval == EvalOptions(
        panel="alfworld-generated-eval",
        out=tmp_path / "e",
        env_kwargs='{"on_invalid": "noop"}',
        player=AgentOptions(**player),
        servers=servers,
        workers=playing,
        **more,
    )


def test_a_rollout_without_a_trace_shows_its_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--tasks", "1", "--max-turns", "2", "--env-kwargs", '{"config": "small"}']
    assert rollout.main(words) == 0
    assert "1 episodes" in capsys.readouterr().out
    with pytest.raises(TurngymError, match=r"^--append needs --out, "):
        rollout.main([*words, "--append"])


MARK = "\ufeff".encode()


@pytest.mark.parametrize("data", [MARK + TOML, TOML.replace(b"\n", b"\r\n"), MARK + TOML.replace(b"\n", b"\r\n")])
def test_a_configuration_is_read_as_any_editor_writes_it(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_bytes(data)
    assert read_toml(path) == read_toml_of(TOML, tmp_path)
    found = parse(RolloutOptions, ["--config", str(path)], prog="turngym rollout", description="")
    assert (found.seed, found.player.noise) == (3, 0.25)


def read_toml_of(data: bytes, folder: Path) -> dict[str, Any]:
    (folder / "plain.toml").write_bytes(data)
    return read_toml(folder / "plain.toml")


OTHERS = [
    (TOML.decode().encode("utf-16"), "is UTF-16 text; save it as UTF-8"),
    (b"# caf\xe9\n" + TOML, "line 1: byte 0xe9 at column 6 is no UTF-8; save it as UTF-8"),
    (b"seed = " + b"9" * 5000, "is not TOML: Exceeds the limit"),
    (b"seed = " + b"[" * 5000, "is nested too deeply for a configuration"),
]
OUT = (b'out = "a\\u0000b"\n', r"out is 'a\x00b'; valid: a path")


@pytest.mark.parametrize(
    ("verb", "data", "said"),
    [
        *((verb, *other) for verb in ("rollout", "eval", "train", "plan") for other in OTHERS),
        *((verb, *OUT) for verb in ("rollout", "eval", "train")),
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
