"""Models by name: from the hub's cache, else from an endpoint; the commit in the identity; nothing asked unasked."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fake_hub import COMMIT, fake_hub

from turngym.agents import load_world
from turngym.retrieval.hub import is_hub_name, model_folder, pinned
from turngym.retrieval.user_files import user_path

pytest.importorskip("huggingface_hub")


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Any]:
    folder = tmp_path / "served"
    shutil.copytree(load_world("alfworld").checkpoint("student"), folder)
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    (folder / "modeling_own.py").write_text("raise SystemExit('code of a stranger was run')")
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text("{}")
    (bare / "pytorch_model.bin").write_bytes(b"a pickle")
    with fake_hub({"some-org/tiny": folder, "some-org/pickled": bare}) as server:
        yield server


@dataclass
class Done:
    """How a command ended."""

    returncode: int
    stderr: str


Command = tuple[Sequence[str], Mapping[str, str]]
"""The words of a command, and what its environment has beside the hub's address."""

# One process for all: what takes seconds is the import of torch. The hub's library reads its address and folder once.
COMMANDS = """
import contextlib, io, json, os, sys
from turngym.retrieval import hub
from turngym.scripts.main import main
for words, more in json.load(sys.stdin):
    hub._folder.cache_clear()
    said = io.StringIO()
    os.environ.update(more)
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = hub.model_folder(words[1]) and 0 if words[0] == "folder" else main(words)
        except SystemExit as end:
            code = end.code
        except hub.HubError as error:
            code = 2
            print(error, file=sys.stderr)
    for name in more:
        del os.environ[name]
    print(json.dumps([code or 0, said.getvalue()]))
"""


def run(tmp_path: Path, url: str, *commands: Command) -> list[Done]:
    """Runs `turngym` with the words of each command, or `folder NAME`, which asks for the model alone."""
    env = {**os.environ, "HF_ENDPOINT": url, "HF_HOME": str(tmp_path / "hf"), "OMP_NUM_THREADS": "1"}
    env = {name: value for name, value in env.items() if "OFFLINE" not in name}
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS],
        input=json.dumps(commands),
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [Done(*json.loads(line)) for line in done.stdout.splitlines()]


OFF = {"TURNGYM_OFFLINE": "1"}


EVAL = ["--panel", "alfworld-quickstart", "--limit", "1", "--samples", "1", "--max-turns", "2", "--threads", "1"]


def test_a_model_by_name_is_fetched_once_and_pinned(tmp_path: Path, hub: Any) -> None:
    out = tmp_path / "a"
    words = ["eval", "--agent", "model:some-org/tiny", *EVAL, "--out", str(out)]
    (done,) = run(tmp_path, hub.url, (words, {}))
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stderr.splitlines() if "fetching" in line)
    assert f"fetching some-org/tiny@{COMMIT}" in line
    assert " MB, from http://127.0.0.1" in line
    assert not [path for path in hub.asked if path.endswith((".bin", ".py"))]
    written = json.loads((out / "results.json").read_text())
    assert written["settings"]["origin"] == f"some-org/tiny@{COMMIT}"
    assert written["agent"] == f"model some-org/tiny@{COMMIT[:8]}"
    assert f'agent = "model:some-org/tiny@{COMMIT}"' in (out / "config.toml").read_text()
    snapshot = tmp_path / "hf" / "hub" / "models--some-org--tiny" / "snapshots" / COMMIT
    assert pinned(snapshot) == f"some-org/tiny@{COMMIT}"

    # the cache has it now: by its branch, and by the commit, nobody is asked, with or without a network
    asked, names = len(hub.asked), ("some-org/tiny", f"some-org/tiny@{COMMIT}")
    for again in run(tmp_path, hub.url, *((("folder", name), more) for name in names for more in ({}, OFF))):
        assert again.returncode == 0, again.stderr
        assert f"turngym: some-org/tiny@{COMMIT} from the cache" in again.stderr
    assert len(hub.asked) == asked

    # another name of the commit is looked up, what is there already is not fetched again
    (tagged,) = run(tmp_path, hub.url, (("folder", "some-org/tiny@v1"), {}))
    assert tagged.returncode == 0, tagged.stderr
    # half a model is none
    (snapshot / "model.safetensors").unlink()
    (cut,) = run(tmp_path, hub.url, (words, OFF))
    assert (cut.returncode, "not whole in the hub's cache, and $TURNGYM_OFFLINE is set" in cut.stderr) == (2, True)


MISSING = [
    ("some-org/nothing", {}, "the hub gives no such model"),
    ("some-org/tiny@v9", {}, "the hub gives no such model"),
    ("some-org/pickled", {}, "no weights of it as safetensors"),
    ("some-org/tiny", OFF, "$TURNGYM_OFFLINE is set: get it where there is a network"),
    ("some-org/tiny", {"HF_HUB_OFFLINE": "1"}, "$HF_HUB_OFFLINE is set"),
]


def test_what_cannot_be_had_is_one_line(tmp_path: Path, hub: Any) -> None:
    commands = [(("eval", "--agent", f"model:{name}", *EVAL), more) for name, more, _ in MISSING]
    # those that may ask nobody first
    found = run(tmp_path, hub.url, *commands[3:])
    assert hub.asked == []
    found = run(tmp_path, hub.url, *commands[:3]) + found
    found += run(tmp_path, "http://127.0.0.1:9", (("folder", "some-org/tiny"), {}))
    for done, said in zip(found, [*(said for *_, said in MISSING), "the hub cannot be reached"], strict=True):
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        assert done.returncode == 2
        assert said in lines[-1]
        assert "Traceback" not in done.stderr


def test_every_place_that_takes_a_model_goes_through_the_one_door(tmp_path: Path, hub: Any) -> None:
    words = ["train", "sft", "--student", "some-org/tiny", "--steps", "1", "--episodes", "1", "--no-tensorboard"]
    words += ["--threads", "1", "--max-turns", "3", "--out", str(tmp_path / "run"), "--no-progress"]
    (tmp_path / "t.jsonl").write_text("")
    places: list[list[str]] = [
        words[:-1],
        ["serve", "proxy", "--student", "some-org/tiny", "--out", str(tmp_path / "p")],
        ["rollout", "--env", "turngym/Search-v0", "--env-kwargs", '{"rerank": "hf:some-org/tiny", "config": "tiny"}'],
        ["index", "build", "--corpus", str(tmp_path / "t.jsonl"), "--encoder", "hf:some-org/tiny", "--out", "i"],
    ]
    for done, place in zip(run(tmp_path, hub.url, *((place, OFF) for place in places)), places, strict=True):
        assert done.returncode != 0, place
        assert "Traceback" not in done.stderr
    assert hub.asked == []
    (trained,) = run(tmp_path, hub.url, (words[:-1], {}))
    assert trained.returncode == 0, trained.stderr
    assert f"snapshots/{COMMIT}" in (tmp_path / "run" / "config.toml").read_text()


def test_a_teacher_of_another_environment_may_be_named_as_on_the_hub(tmp_path: Path, hub: Any) -> None:
    own = load_world("alfworld").checkpoint("student")
    also = "turngym/WebShop-v0,share=1,teacher=some-org/tiny,split=train"
    words = ["train", "opd", "--student", str(own), "--teacher", str(own), "--steps", "1", "--episodes", "2"]
    words += ["--max-turns", "2", "--no-tensorboard", "--threads", "1", "--also"]
    missing, done = run(
        tmp_path,
        hub.url,
        ([*words, also.replace("tiny", "nothing"), "--out", "missing"], {}),
        ([*words, also, "--out", "run"], {}),
    )
    assert (missing.returncode, missing.stderr.count("\n")) == (2, 1)
    assert "the hub gives no such model" in missing.stderr
    assert done.returncode == 0, done.stderr
    # by its commit in the record of the run, and with its own weights' hash in the identity
    written = (tmp_path / "run" / "config.toml").read_text()
    assert f"snapshots/{COMMIT},split=train" in written
    assert "teacher=some-org/tiny" not in written.partition("[provenance")[0]


def test_paths_are_no_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    for path in ("runs/studnt", "/a/b", "./a/b", "a/b/c", "name", "~/x", "a/b@", "../a", "-x/y", "a b/c"):
        assert not is_hub_name(path), path
        assert model_folder(path) == user_path(path)
    assert is_hub_name("Qwen/Qwen3-0.6B")
    assert is_hub_name("Qwen/Qwen3-0.6B@refs/pr/1")
    (tmp_path / "Qwen" / "Qwen3-0.6B").mkdir(parents=True)
    assert not is_hub_name("Qwen/Qwen3-0.6B")
    assert pinned(tmp_path) is None
