"""Every verb takes every path: whatever a file system allows in a name, and a path for a path before it is a label."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from late import late

from turngym.agents.worlds import load_world
from turngym.scripts.main import main
from turngym.scripts.report_data import expanded, load_run
from turngym.trainers.several_envs import further_env

NAMES = {
    "signs": "a b=c:d,e@f#[g]{h}'\"$*?%!;&|<>()^`\\ü",
    "line": "new\nline",
    "bytes": os.fsdecode(b"raw\xff\xfe"),
    "markup": "[bold]x[",
    "ending": "a.b.jsonl.d",
    "label": "x=y",
    "home": "~here",
    "dash": "-dash",
}
NAMES["all"] = "/".join(["x=y/-dash", *(NAMES[name] for name in ("signs", "line", "bytes", "markup", "ending"))])
"""What is special wherever it stands is in one path; a home must come first."""
QUICK = "all"
Run = Callable[..., str]


@pytest.fixture(params=late(NAMES, QUICK, mark=pytest.mark.nightly))
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder of that name in the working folder, as it is typed."""
    monkeypatch.chdir(tmp_path)
    name = NAMES[request.param]
    Path(name).mkdir(parents=True)
    return f"./{name}" if name.startswith("-") else name


@pytest.fixture
def run(capfdbinary: Any) -> Run:
    def one(*words: str) -> str:
        assert main(words) == 0, capfdbinary.readouterr().err.decode(errors="replace")
        sys.stdout.flush()
        output = capfdbinary.readouterr()
        assert b"Traceback" not in output.err
        return os.fsdecode(output.out)

    return one


@pytest.mark.long
def test_evaluations_traces_results_and_reports(place: str, run: Run) -> None:
    env = ["--env", "turngym/ALFWorld-v0", "--env-kwargs", '{"split": "generated_unseen"}']
    run("panel", "write", "own", *env, "--out", f"{place}/panels")
    panel = f"{place}/panels/own-v1.json"
    short = ["--samples", "1", "--limit", "2", "--max-turns", "3"]
    run("panel", "show", panel)
    run("eval", "--panel", panel, "--agent", "expert", *short, "--out", f"{place}/one")
    run("eval", "--config", f"{place}/one/spec.toml", "--out", f"{place}/two")
    run("eval", "--rescore", f"{place}/one", "--out", f"{place}/again")
    assert "0.0" in run("eval", "--compare", f"{place}/one", f"{place}/two")

    run("rollout", "--agent", "expert", "--split", "generated", "--tasks", "2", "--out", f"{place}/r.jsonl")
    run("rollout", "--config", f"{place}/r.spec.toml", "--out", f"{place}/r.jsonl", "--append", "--seed", "1")
    run("rollout", "--agent", f"replay:{place}/r.jsonl", "--split", "generated", "--tasks", "2", "--max-turns", "2")
    for words in (["print"], ["print", "--turns", "--prompt"], ["verify"]):
        run("trace", words[0], f"{place}/r.jsonl", *words[1:])
    for verb, name in (("filter", "f.jsonl"), ("parquet", "f.parquet"), ("html", "f.html"), ("picture", "f.svg")):
        run("trace", verb, f"{place}/r.jsonl", "--out", f"{place}/{name}")
        assert Path(place, name).stat().st_size

    run("result", "pack", f"{place}/one", "--panel", panel, "--out", f"{place}/a.result.xz")
    run("result", "check", f"{place}/a.result.xz", "--panel", panel)
    run("result", "table", place, "--out", f"{place}/table")

    for spec in (f"{place}/one", f"label={place}/one"):
        assert "1 episode" not in run("report", spec)
    run("report", f"{place}/one", f"two={place}/two", "--no-figure", "--out", f"{place}/report")
    assert "two" in Path(place, "report", "report.html").read_text(encoding="utf-8")


def test_corpora_and_indexes(place: str, run: Run) -> None:
    rows = [{"id": str(n), "contents": f'"Title {n}"\nword{n} of a passage'} for n in range(20)]
    Path(place, "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    kinds = ["bm25", *(["dense"] if find_spec("faiss") else [])]
    for kind in kinds:
        more = ["--factory", "Flat"] if kind == "dense" else []
        run("index", "build", "--corpus", f"{place}/c.jsonl", "--kind", kind, "--out", f"{place}/{kind}", *more)
        run("index", "verify", f"{place}/{kind}")
    for spec in (*(f"{place}/{kind}" for kind in kinds), f"bm25:{place}/c.jsonl"):
        words = ["--env", "turngym/Search-v0", "--env-kwargs", json.dumps({"retriever": spec}), "--tasks", "1"]
        run("rollout", "--agent", "expert", *words)


@pytest.mark.long
def test_models_runs_and_checkpoints(place: str, run: Run) -> None:
    world = load_world("alfworld")
    for role in ("student", "teacher"):
        shutil.copytree(world.checkpoint(role), Path(place, role))
    student, teacher = f"{place}/student", f"{place}/teacher"
    settings = world.settings()
    words = ["--env-kwargs", json.dumps(settings["env_kwargs"]), "--max-turns", "2", "--episodes", "2", "--steps", "1"]
    words += ["--split", settings["split"], "--eval-every", "1", "--eval-samples", "1", "--eval-limit", "1"]
    models = ["--student", student, "--teacher", teacher]
    own = ["--env", "turngym/ALFWorld-v0", "--env-kwargs", '{"split": "generated_unseen"}']
    run("panel", "write", "own", *own, "--out", f"{place}/panels")
    run("train", "opd", *models, *words, "--panel", f"{place}/panels/own-v1.json", "--out", f"{place}/run")
    run("train", "--config", f"{place}/run/config.toml", "--resume", "--steps", "2")
    run("train", "--config", f"{place}/run/config.toml", "--out", f"{place}/other", "--lora.rank", "2")
    adapter = f"{place}/other/checkpoints/step_000002/model"
    run("model", "merge", adapter, "--out", f"{place}/merged")
    run("model", "verify", f"{place}/run")
    run("model", "average", f"{place}/run", "--last", "2")
    for model in (student, f"{place}/run/checkpoints/step_000002/model", adapter, f"{place}/merged"):
        run("eval", "--panel", "alfworld-quickstart", "--agent", f"model:{model}", "--limit", "1", "--samples", "1")
    run("report", f"own={place}/run", f"{place}/other", "--out", f"{place}/report")
    assert Path(place, "report", "report.png").stat().st_size
    run("plan", "--config", f"{place}/run/config.toml")


def test_a_run_is_called_by_its_whole_name(tmp_path: Path) -> None:
    for name in ("opd-lr0.1", "opd-lr0.2", "x=opd"):
        (tmp_path / name / "eval").mkdir(parents=True)
        out = str(tmp_path / name / "trace.jsonl")
        assert main(["rollout", "--agent", "expert", "--tasks", "1", "--out", out]) == 0
        shutil.copy(tmp_path / name / "trace.jsonl", tmp_path / name / "eval" / "trace.jsonl")
        for spec in (name, f"{name}/trace.jsonl", f"{name}/eval"):
            assert load_run("", tmp_path / spec).name == name
    assert expanded(f"mine={tmp_path}/x=opd")[0][0] == "mine"


def test_two_traces_whose_names_have_dots_have_settings_of_their_own(tmp_path: Path) -> None:
    for name in ("lr.1", "lr.2", "trace.jsonl"):
        assert main(["rollout", "--agent", "expert", "--tasks", "1", "--out", str(tmp_path / name)]) == 0
    found = {path.name for path in tmp_path.glob("*.toml")}
    assert found == {"lr.1.spec.toml", "lr.2.spec.toml", "trace.spec.toml"}


def test_a_comma_in_a_path_ends_no_setting_of_a_further_environment() -> None:
    found = further_env("turngym/Search-v0,share=2,data=/a,b=c/d,teacher=/e,f,env.config=tiny")
    assert (found.share, found.data, found.teacher) == (2.0, "/a,b=c/d", Path("/e,f"))
    assert found.make == {"config": "tiny"}


def test_a_home_folder_stands_in_every_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "c.toml").write_text('agent = "expert"\nsplit = "generated"\ntasks = 1\nout = "~/x.jsonl"\n')
    assert main(["rollout", "--config", "~/c.toml"]) == 0
    assert (tmp_path / "x.jsonl").is_file()


@pytest.mark.parametrize(
    "words",
    [("panel", "verify", "x", "--data"), ("result", "check", "x", "--data"), ("trace", "print", "x", "--tokenizer")],
)
def test_a_folder_without_a_name_is_none(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """What a shell makes of a variable that is not set would be the usual folder, or the one where we are."""
    assert main([*words, ""]) == 2
    assert f"{words[-1]} is ''" in capsys.readouterr().err
