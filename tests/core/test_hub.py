"""Models by name: from the hub's cache, else from an endpoint; the commit in the identity; nothing asked unasked."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fake_hub import COMMIT, fake_hub

from turngym.agents import load_world
from turngym.agents.models import load_tokenizer
from turngym.core.hub import is_hub_name, model_folder, pinned
from turngym.core.user_files import user_path


@dataclass
class Done:
    """How a command ended."""

    returncode: int
    stderr: str


Command = tuple[Sequence[str], Mapping[str, str]]
"""The words of a command, and what its environment has beside the hub's address."""

COMMANDS = """
import contextlib, io, json, os, sys
from turngym.core import hub
from turngym.scripts.main import main
for line in sys.stdin:
    folder, words, more = json.loads(line)
    os.chdir(folder)
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
    print(json.dumps([code or 0, said.getvalue()]), flush=True)
"""


@contextmanager
def commands_at(url: str, home: Path) -> Iterator[Any]:
    """Yields a function of a folder and commands, which runs `turngym` there with the words of each, or `folder NAME`,
    which asks for the model alone.

    One process for all of them: the hub's library reads its address and folder once, and torch is imported once.
    """
    env = {**os.environ, "HF_ENDPOINT": url, "HF_HOME": str(home), "OMP_NUM_THREADS": "1"}
    env = {name: value for name, value in env.items() if "OFFLINE" not in name}
    words = [sys.executable, "-c", COMMANDS]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def run(folder: Path, *commands: Command) -> list[Done]:
            found = []
            for command in commands:
                print(json.dumps([str(folder), *command]), file=process.stdin, flush=True)
                found.append(Done(*json.loads(process.stdout.readline())))
            return found

        yield run
        process.stdin.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The hub, with `run` and the `home` of its library."""
    place = tmp_path_factory.mktemp("hub")
    folder, bare = place / "served", place / "bare"
    shutil.copytree(load_world("alfworld").checkpoint("student"), folder)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ messages }}")
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    (folder / "modeling_own.py").write_text("raise SystemExit('code of a stranger was run')")
    bare.mkdir()
    (bare / "config.json").write_text("{}")
    (bare / "pytorch_model.bin").write_bytes(b"a pickle")
    with (
        fake_hub({"some-org/tiny": folder, "some-org/pickled": bare}) as server,
        commands_at(server.url, place / "hf") as run,
    ):
        server.run, server.home = run, place / "hf"
        yield server


@pytest.fixture
def hub(served: Any) -> Any:
    """Nothing of it is in the cache."""
    shutil.rmtree(served.home, ignore_errors=True)
    served.asked.clear()
    return served


OFF = {"TURNGYM_OFFLINE": "1"}


EVAL = ["--panel", "alfworld-quickstart", "--limit", "1", "--samples", "1", "--max-turns", "2", "--threads", "1"]


def test_a_model_by_name_is_fetched_once_and_pinned(tmp_path: Path, hub: Any) -> None:
    out = tmp_path / "a"
    words = ["eval", "--agent", "model:some-org/tiny", *EVAL, "--out", str(out)]
    (done,) = hub.run(tmp_path, (words, {}))
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stderr.splitlines() if "fetching" in line)
    assert f"fetching some-org/tiny@{COMMIT}" in line
    assert " MB, from http://127.0.0.1" in line
    assert not [path for path in hub.asked if path.endswith((".bin", ".py"))]
    written = json.loads((out / "results.json").read_text())
    assert written["spec"]["agent"]["folder"] == f"some-org/tiny@{COMMIT}"
    assert written["agent"] == f"model some-org/tiny@{COMMIT[:8]}"
    assert f'folder = "some-org/tiny@{COMMIT}"' in (out / "spec.toml").read_text()
    snapshot = hub.home / "hub" / "models--some-org--tiny" / "snapshots" / COMMIT
    assert pinned(snapshot) == f"some-org/tiny@{COMMIT}"
    assert set(load_tokenizer(snapshot).chat_template) == {"default", "tool_use"}

    # the cache has it now: by its branch, and by the commit, nobody is asked, with or without a network
    asked, names = len(hub.asked), ("some-org/tiny", f"some-org/tiny@{COMMIT}")
    for again in hub.run(tmp_path, *((("folder", name), more) for name in names for more in ({}, OFF))):
        assert again.returncode == 0, again.stderr
        assert f"turngym: some-org/tiny@{COMMIT} from the cache" in again.stderr
    assert len(hub.asked) == asked

    # another name of the commit is looked up, what is there already is not fetched again
    (tagged,) = hub.run(tmp_path, (("folder", "some-org/tiny@v1"), {}))
    assert tagged.returncode == 0, tagged.stderr
    # half a model is none
    (snapshot / "model.safetensors").unlink()
    (cut,) = hub.run(tmp_path, (words, OFF))
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
    found = hub.run(tmp_path, *commands[3:])
    assert hub.asked == []
    found = hub.run(tmp_path, *commands[:3]) + found
    with commands_at("http://127.0.0.1:9", tmp_path / "hf") as run:
        found += run(tmp_path, (("folder", "some-org/tiny"), {}))
    for done, said in zip(found, [*(said for *_, said in MISSING), "the hub cannot be reached"], strict=True):
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        assert done.returncode == 2
        assert said in lines[-1]
        assert "Traceback" not in done.stderr


@pytest.mark.long
def test_every_place_that_takes_a_model_goes_through_the_one_door(tmp_path: Path, hub: Any) -> None:
    words = ["train", "sft", "--student", "some-org/tiny", "--steps", "1", "--episodes", "1", "--tracker", "none"]
    words += ["--threads", "1", "--max-turns", "3", "--out", str(tmp_path / "run"), "--no-progress"]
    (tmp_path / "t.jsonl").write_text("")
    places: list[list[str]] = [
        words[:-1],
        ["serve", "proxy", "--student", "some-org/tiny", "--out", str(tmp_path / "p")],
        ["rollout", "--env", "turngym/Search-v0", "--env-kwargs", '{"rerank": "hf:some-org/tiny", "config": "tiny"}'],
        ["index", "build", "--corpus", str(tmp_path / "t.jsonl"), "--encoder", "hf:some-org/tiny", "--out", "i"],
    ]
    for done, place in zip(hub.run(tmp_path, *((place, OFF) for place in places)), places, strict=True):
        assert done.returncode != 0, place
        assert "Traceback" not in done.stderr
    assert hub.asked == []
    (trained,) = hub.run(tmp_path, (words[:-1], {}))
    assert trained.returncode == 0, trained.stderr
    assert f"snapshots/{COMMIT}" in (tmp_path / "run" / "config.toml").read_text()


@pytest.mark.long
def test_a_teacher_of_another_environment_may_be_named_as_on_the_hub(tmp_path: Path, hub: Any) -> None:
    own = load_world("alfworld").checkpoint("student")
    also = "turngym/WebShop-v0,share=1,teacher=some-org/tiny,split=train"
    words = ["train", "opd", "--student", str(own), "--teacher", str(own), "--steps", "1", "--episodes", "2"]
    words += ["--max-turns", "2", "--tracker", "none", "--threads", "1", "--also"]
    missing, done = hub.run(
        tmp_path,
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


@pytest.mark.long
def test_an_adapter_names_its_base_as_on_the_hub_and_the_cache_alone_is_asked(tmp_path: Path, hub: Any) -> None:
    from turngym.agents.models import load_model
    from turngym.trainers.lora import LoraConfig, add_adapters, save_adapter

    model = load_model(load_world("alfworld").checkpoint("student"))
    add_adapters(model, LoraConfig(rank=2), base="some-org/tiny")
    save_adapter(model, model.state_dict(), tmp_path / "adapter")
    words = ["eval", "--agent", "model:adapter", *EVAL, "--out", "played"]
    (missing,) = hub.run(tmp_path, (words, {}))
    assert (missing.returncode, "some-org/tiny, which is not whole in the hub's cache" in missing.stderr) == (2, True)
    assert hub.asked == []
    merge = ["model", "merge", "adapter", "--out"]
    found = hub.run(tmp_path, ([*merge, "named", "--base", "some-org/tiny"], {}), (words, OFF), ([*merge, "own"], OFF))
    assert [done.returncode for done in found] == [0, 0, 0], found
    assert (tmp_path / "named" / "turngym.json").read_bytes() == (tmp_path / "own" / "turngym.json").read_bytes()


@pytest.mark.long
def test_the_proxy_reads_the_chat_settings_of_a_model_by_name(tmp_path: Path, hub: Any) -> None:
    (fetched,) = hub.run(tmp_path, (("folder", "some-org/tiny"), {}))
    assert fetched.returncode == 0, fetched.stderr
    settings = hub.home / "hub" / "models--some-org--tiny" / "snapshots" / COMMIT / "turngym.json"
    settings.unlink()
    settings.write_text('{"max_contxt": 9}')
    # an unknown judge is noticed later, and ends a proxy that did not read them
    words = ["serve", "proxy", "--student", "some-org/tiny", "--judge", "nobody", "--port", "0", "--threads", "1"]
    (done,) = hub.run(tmp_path, ([*words, "--out", "p"], OFF))
    assert (done.returncode, "max_contxt" in done.stderr) == (2, True), done.stderr


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
