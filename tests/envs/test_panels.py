"""Panels: hashes that cannot drift unnoticed, manifests that are never replaced, disjoint splits."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest

from turngym.core.errors import EnvBackendError, TurngymError
from turngym.core.files import FolderInUseError
from turngym.core.task import Task
from turngym.envs import panels
from turngym.envs.panels import (
    Panel,
    PanelError,
    assert_disjoint,
    collect_tasks,
    list_panels,
    load_panel,
    make_panel,
    verify_panel,
    write_panel,
)
from turngym.envs.registration import NOT_GIVEN
from turngym.envs.search.sources import read_questions
from turngym.scripts import panel as verb

TOY = "turngym-test/Toy-v0"


def toy_panel(version: int = 1, ids: tuple[str, ...] = ("corridor/3", "corridor/5")) -> Panel:
    return make_panel("toy", version, TOY, {"max_turns": 9}, collect_tasks(gym.make(TOY), ids))


def task(task_id: str, sha256: str) -> Task:
    return Task(env_id=TOY, task_id=task_id, sha256=sha256, split="toy", category="corridor")


def test_written_panels_load_equal(tmp_path: Path) -> None:
    panel = toy_panel()
    path = write_panel(panel, tmp_path)
    assert path.name == "toy-v1.json"
    for name in ("toy", "toy-v1"):
        assert load_panel(name, tmp_path) == panel
    assert load_panel(str(path)) == panel
    assert panel.task_ids == ("corridor/3", "corridor/5")
    assert json.loads(path.read_text())["sha256"] == panel.sha256


def test_the_hash_covers_every_field() -> None:
    panel = toy_panel()
    first, second = panel.tasks
    tasks = collect_tasks(gym.make(TOY))
    others = [
        make_panel("toi", 1, TOY, {"max_turns": 9}, panel.tasks),
        make_panel("toy", 2, TOY, {"max_turns": 9}, panel.tasks),
        make_panel("toy", 1, TOY, {"max_turns": 8}, panel.tasks),
        make_panel("toy", 1, TOY, {"max_turns": 9}, tasks),
        make_panel("toy", 1, TOY, {"max_turns": 9}, panel.tasks[::-1]),
        *(
            make_panel("toy", 1, TOY, {"max_turns": 9}, (dataclasses.replace(first, **{field: "x"}), second))
            for field in ("task_id", "sha256", "split", "category")
        ),
    ]
    assert len({other.sha256 for other in others} | {panel.sha256}) == len(others) + 1


def test_the_newest_version_is_the_default(tmp_path: Path) -> None:
    for version in (1, 2, 10):
        write_panel(toy_panel(version), tmp_path)
    assert list_panels(tmp_path) == ["toy-v1", "toy-v2", "toy-v10"]
    assert load_panel("toy", tmp_path).version == 10
    assert load_panel("toy-v2", tmp_path).version == 2


def test_a_manifest_is_never_replaced(tmp_path: Path) -> None:
    path = write_panel(toy_panel(), tmp_path)
    before = path.read_bytes()
    assert write_panel(toy_panel(), tmp_path) == path
    with pytest.raises(PanelError, match="exists with other content"):
        write_panel(toy_panel(ids=("corridor/4",)), tmp_path)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("corridor/3", "corridor/4", "the content has sha256"),
        ('"max_turns": 9', '"max_turns": 10', "was changed"),
        ('"schema": 1', '"schema": 2', "schema"),
        ('"sha256"', '"sha"', "is not a panel manifest: .*`sha256`"),
        ("{", "", "cannot be read"),
        ("corridor/5", "corridor/3", "listed twice"),
    ],
)
def test_changed_manifests_are_refused(old: str, new: str, message: str, tmp_path: Path) -> None:
    path = write_panel(toy_panel(), tmp_path)
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(PanelError, match=message):
        load_panel("toy", tmp_path)


def test_unknown_panels_name_the_known(tmp_path: Path) -> None:
    write_panel(toy_panel(), tmp_path)
    with pytest.raises(PanelError, match=r"no panel 'toyy'; .*Did you mean 'toy-v1'"):
        load_panel("toyy", tmp_path)
    with pytest.raises(PanelError, match="no panel manifest"):
        load_panel(str(tmp_path / "none.json"))


def test_bad_panels_cannot_be_made() -> None:
    tasks = toy_panel().tasks
    for name, version in (("Toy", 1), ("toy", 0), ("../toy", 1)):
        with pytest.raises(PanelError, match="lower-case letters"):
            make_panel(name, version, TOY, {}, tasks)
    for env_id, listed, text in ((TOY, (), "there are no tasks"), ("other", tasks, "belongs to turngym-test/Toy-v0")):
        with pytest.raises(PanelError, match=text):
            make_panel("toy", 1, env_id, {}, listed)


@pytest.mark.parametrize(
    ("changes", "where"), [({"task_id": 5}, r"tasks\[0\]\[0\]"), ({"category": None}, r"tasks\[0\]\[3\]")]
)
def test_a_panel_is_made_of_what_its_manifest_gives_back(changes: dict[str, Any], where: str) -> None:
    first, *others = toy_panel().tasks
    with pytest.raises(PanelError, match=where):
        make_panel("toy", 1, TOY, {}, [dataclasses.replace(first, **changes), *others])
    wrong: Any = [1]
    with pytest.raises(PanelError, match="panel toy"):
        make_panel("toy", 1, TOY, wrong, [first])


@pytest.mark.parametrize("name", [*NOT_GIVEN, "channel"])
def test_a_manifest_names_no_code_and_no_channel(name: str, tmp_path: Path) -> None:
    with pytest.raises(PanelError, match=f"make_kwargs has {name}"):
        make_panel("toy", 1, TOY, {name: "this:s"}, toy_panel().tasks)


def test_a_manifest_of_elsewhere_names_code_and_servers_in_vain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("evilmod.py").write_text("open('ran', 'w').close()\n")
    panel = toy_panel()
    code = write_panel(make_panel("code", 1, f"evilmod:{TOY}", {}, panel.tasks), tmp_path)
    assert panels.find_panel(str(code)).env_id == f"evilmod:{TOY}"
    for named in (str(code), f"other:{code}"):
        with pytest.raises(PanelError, match=r"name it, too: evilmod:.*code-v1\.json"):
            load_panel(named)
    assert not Path("ran").exists()
    load_panel(f"evilmod:{code}").make_env().close()
    assert Path("ran").exists()
    values = {"retriever": "here", "rerank": "org/model", "x": {"y": ["http://127.0.0.1/admin"]}}
    for version, (name, value) in enumerate(values.items(), start=1):
        asked = write_panel(make_panel("asked", version, TOY, {name: value}, panel.tasks), tmp_path)
        with pytest.raises(PanelError, match=f"make_kwargs has {name}"):
            load_panel(str(asked))
        with pytest.raises(PanelError, match=f"{name} is no part of a task"):
            panels.panel_of_env("asked", TOY, make_kwargs={name: value})


def test_a_bad_name_is_refused_before_all_tasks_are_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(panels, "collect_tasks", lambda *_: pytest.fail("tasks were begun"))
    with pytest.raises(PanelError, match="'Z_'"):
        panels.panel_of_env("Z_", TOY)


def test_verification_finds_what_differs() -> None:
    panel = toy_panel()
    assert verify_panel(panel, panel.make_env()) == []
    first, second = panel.tasks
    fields = [
        dataclasses.replace(first, sha256="f" * 64),
        dataclasses.replace(second, category="hall"),
        dataclasses.replace(second, task_id="corridor/9"),
    ]
    problems = verify_panel(make_panel("toy", 1, TOY, {}, fields), gym.make(TOY))
    assert len(problems) == 3
    assert problems[0] == f"corridor/3: sha256 is {first.sha256}, the panel says {'f' * 64}"
    assert problems[1] == "corridor/5: category is corridor, the panel says hall"
    assert problems[2].startswith("corridor/9: turngym-test/Toy-v0: unknown task 'corridor/9'")
    assert "the environment is turngym-test/Open-v0" in verify_panel(panel, gym.make("turngym-test/Open-v0"))[0]


def test_a_task_that_is_known_without_being_begun_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    panel, env = toy_panel(), gym.make(TOY)
    known = {one.task_id: one for one in panel.tasks}

    def begin(*_: object, **__: object) -> None:
        raise AssertionError("a task was begun")

    monkeypatch.setattr(type(env.unwrapped), "reset", begin)
    monkeypatch.setattr(type(env.unwrapped), "task_of", lambda self, task_id: known[task_id])
    assert verify_panel(panel, env) == []
    assert collect_tasks(env, panel.task_ids) == panel.tasks


@pytest.mark.parametrize("gives", [ValueError("no\nhash"), None], ids=str)
def test_an_environment_that_cannot_say_its_task_is_told_in_a_line(
    gives: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    panel, env = toy_panel(), gym.make(TOY)

    def task_of(*_: object) -> None:
        if gives is not None:
            raise gives

    monkeypatch.setattr(type(env.unwrapped), "task_of", task_of)
    problems = verify_panel(panel, env)
    assert [line.partition(":")[0] for line in problems] == list(panel.task_ids)
    assert not any("\n" in line for line in problems)
    with pytest.raises(EnvBackendError, match=r"\.task_of\(.*no hash|None"):
        collect_tasks(env, panel.task_ids)


def test_make_env_uses_the_panels_arguments() -> None:
    assert toy_panel().make_env().get_wrapper_attr("max_turns") == 9
    assert toy_panel().make_env(max_turns=4).get_wrapper_attr("max_turns") == 4


def test_overlap_of_training_and_evaluation() -> None:
    train = [task("a", "1"), task("b", "2")]
    assert_disjoint(train, [task("c", "3")])
    with pytest.raises(PanelError, match=r"1 evaluation tasks are also training tasks: a$"):
        assert_disjoint(train, [task("a", "9")])
    with pytest.raises(PanelError, match=r"copy \(in training as b\)"):
        assert_disjoint(train, [task("copy", "2")])
    many = [task(str(number), str(number)) for number in range(8)]
    with pytest.raises(PanelError, match=r"8 evaluation tasks.*0, 1, 2, 3, 4 and 3 more"):
        assert_disjoint(many, iter(many))


def test_shipped_panels_are_sound() -> None:
    for name in list_panels():
        assert load_panel(name).full_name == name


def test_verbs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = tmp_path / "ids.txt"
    ids.write_text("corridor/3\ncorridor/4\n\n")
    options = ["--out", str(tmp_path), "--env-kwargs", '{"max_turns": 9}', "--ids", str(ids)]
    words = ["write", "toy", "--env", TOY, *options]
    assert verb.main(words) == 0
    path = str(tmp_path / "toy-v1.json")
    assert verb.main(["verify", path]) == 0
    assert "all 2 tasks are the panel's" in capsys.readouterr().out
    assert verb.main(["show", path, "--tasks"]) == 0
    assert "corridor/4" in capsys.readouterr().out
    assert verb.main(["list"]) == 0
    wrong = [dataclasses.replace(item, sha256="f" * 64) for item in load_panel(path).tasks]
    write_panel(make_panel("wrong", 1, TOY, {}, wrong), tmp_path)
    capsys.readouterr()
    assert verb.main(["verify", str(tmp_path / "wrong-v1.json")]) == 1
    assert "2 of 2 tasks differ" in capsys.readouterr().out
    with pytest.raises(PanelError, match="other content"):
        verb.main(words[:-2])


@pytest.mark.parametrize(
    ("make", "message"),
    [("{", "is not JSON"), ('{"data": "/mine"}', "--data"), ('{"env_class": "this:s"}', "env_class is no argument")],
)
def test_bad_arguments_of_write(make: str, message: str, tmp_path: Path) -> None:
    words: Any = ["write", "toy", "--env", TOY, "--out", str(tmp_path), "--env-kwargs", make]
    with pytest.raises(TurngymError, match=message):
        verb.main(words)
    with pytest.raises(TurngymError, match="unknown environment 'turngym-test/Toy-v1'"):
        verb.main(["write", "toy", "--env", "turngym-test/Toy-v1", "--out", str(tmp_path)])


def test_questions_become_prompts_for_other_trainers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "prompts.parquet"
    assert verb.main(["export-prompts", "search-quickstart", "--out", str(out), "--prompt", "Q: {question}"]) == 0
    panel = load_panel("search-quickstart")
    questions = read_questions(out)
    assert [question.task_id for question in questions] == list(panel.task_ids)
    assert f"{len(panel.tasks)} prompts in" in capsys.readouterr().out
    with pytest.raises(TurngymError, match="--form search-r1: only"):
        verb.main(
            ["export-prompts", "alfworld-generated-eval", "--form", "search-r1", "--out", str(tmp_path / "other")]
        )


@pytest.mark.parametrize("text", ["[]", "[" * 100_000, "{"])
def test_files_that_are_no_manifest(tmp_path: Path, text: str) -> None:
    (tmp_path / "toy-v1.json").write_text(text)
    with pytest.raises(PanelError, match=r"toy-v1\.json cannot be read"):
        load_panel("toy", tmp_path)


@pytest.mark.parametrize("field", ["task_id", "sha256", "split", "category"])
def test_what_a_manifest_cannot_hold_is_refused_before_it_is_written(field: str) -> None:
    (first, *_) = toy_panel().tasks
    with pytest.raises(PanelError, match=f"{field} of"):
        make_panel("toy", 1, TOY, {}, [dataclasses.replace(first, **{field: "half \ud800"})])


@pytest.mark.parametrize("kwargs", [{"split": "\ud800"}, {"path": Path("x")}, {"rate": math.nan}, {"x": {1, 2}}])
def test_arguments_that_are_no_json_are_refused(kwargs: Any) -> None:
    with pytest.raises(PanelError, match="make_kwargs"):
        make_panel("toy", 1, TOY, kwargs, toy_panel().tasks)


def test_a_panel_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = write_panel(toy_panel(), tmp_path).read_bytes()
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        write_panel(toy_panel(2), tmp_path)
    assert {found.name: found.read_bytes() for found in tmp_path.iterdir()} == {"toy-v1.json": before}


def test_two_that_write_the_same_panel_give_one(tmp_path: Path) -> None:
    panel = make_panel("toy", 1, TOY, {}, [task(f"corridor/{number}", f"{number:064x}") for number in range(300)])

    def written() -> str:
        try:
            return write_panel(panel, tmp_path).name
        except FolderInUseError:
            return "in use"

    with ThreadPoolExecutor(8) as pool:
        done = [future.result() for future in [pool.submit(written) for _ in range(32)]]
    assert set(done) <= {"toy-v1.json", "in use"}
    assert load_panel("toy", tmp_path) == panel
    assert [found.name for found in tmp_path.iterdir()] == ["toy-v1.json"]
