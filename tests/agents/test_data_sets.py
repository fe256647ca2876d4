"""`turngym data`: files of a server that cuts, moves, lies and answers with pages; archives; where everything looks."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import gymnasium as gym
import pytest

from turngym.agents.data_sets import DATA_SETS, DataError, fetch, get, unpack
from turngym.core.errors import TurngymError
from turngym.envs.alfworld.env import ALFWorldEnv
from turngym.envs.alfworld.games import export_games
from turngym.envs.search import test_sets
from turngym.envs.search.test_sets import OFFICIAL
from turngym.scripts import main as command

ARCHIVE = DATA_SETS["alfworld"].files[0].name


class Mirror(BaseHTTPRequestHandler):
    """Serves `server.files` by path, with ranges; `server.faults` says by path what goes wrong."""

    def log_message(self, *args: Any) -> None:
        """Says nothing."""

    def do_GET(self) -> None:
        server: Any = self.server
        path = self.path.lstrip("/")
        server.asked.append((path, self.headers.get("Range")))
        fault = server.faults.get(path)
        if fault == "moved":
            self.send_response(302)
            self.send_header("Location", f"/new/{path}")
            self.end_headers()
            return
        data = server.files.get(path.removeprefix("new/"))
        if data is None or fault == "gone":
            self.send_error(404)
            return
        kind = "application/octet-stream"
        if fault == "page":
            data, kind = b"<html>Quota exceeded</html>", "text/html; charset=utf-8"
        tag, start = f'"{hashlib.sha256(data).hexdigest()}"', 0
        asked = self.headers.get("Range")
        if asked is not None and self.headers.get("If-Range") == tag:
            start = int(asked.removeprefix("bytes=").rstrip("-"))
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Type", kind)
        self.send_header("ETag", tag)
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        self.wfile.write(data[start : start + (len(data) - start) // 2] if fault == "cut" else data[start:])


@pytest.fixture
def mirror() -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Mirror)
    server.files, server.faults, server.asked = {}, {}, []
    server.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """An archive in the form of ALFWorld's release, of generated games."""
    folder = tmp_path_factory.mktemp("games")
    env: Any = gym.make(ALFWorldEnv.env_id, split="generated", part="eval")
    export_games(env.unwrapped.source, env.unwrapped.task_ids()[:2], folder)
    found = io.BytesIO()
    with zipfile.ZipFile(found, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("json_2.1.1/README.txt", "not a game")
        for number, game in enumerate(sorted(folder.rglob("game.tw-pddl"))):
            for split in ("valid_seen", "valid_unseen"):
                archive.write(game, f"json_2.1.1/{split}/{game.parents[1].name}/trial_T{number}/game.tw-pddl")
    return found.getvalue()


def test_games_are_fetched_unpacked_and_found(
    tmp_path: Path, mirror: Any, release: bytes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path / "games"))
    with pytest.raises(TurngymError, match="turngym data get alfworld"):
        gym.make(ALFWorldEnv.env_id, split="valid_seen")
    mirror.files[ARCHIVE] = release
    mirror.faults[ARCHIVE] = "moved"
    assert command.main(["data", "get", "alfworld", "--mirror", mirror.url]) == 0
    assert "fetching json_2.1.2_tw-pddl.zip, 0.0 MB, from http://127.0.0.1" in capsys.readouterr().err
    env = gym.make(ALFWorldEnv.env_id, split="valid_seen")
    assert len(env.get_wrapper_attr("task_ids")()) == 2
    # nothing of the way there stays
    assert [path.name for path in (tmp_path / "games").iterdir() if path.is_dir()] == ["json_2.1.1"]
    # they are not the original's, and verify says so
    capsys.readouterr()
    assert command.main(["data", "verify", "alfworld"]) == 1
    assert "alfworld-valid-seen-v2: 140 of 140 tasks differ" in capsys.readouterr().out
    assert command.main(["data", "where", "alfworld"]) == 0
    assert str(tmp_path / "games") in capsys.readouterr().out
    assert command.main(["data", "list"]) == 0
    assert f"{tmp_path / 'games'} ($ALFWORLD_DATA), here" in capsys.readouterr().out


def test_games_are_added_beside_what_is_there(tmp_path: Path, mirror: Any, release: bytes) -> None:
    """alfworld's own files of a game lie in its folder, and people put games of their own beside the release's."""
    mirror.files[ARCHIVE] = release
    root = tmp_path / "json_2.1.1"
    get("alfworld", out=tmp_path, mirror=mirror.url)
    games = sorted(root.rglob("*.tw-pddl"))
    own = [games[0].with_name("traj_data.json"), root / "valid_seen/my-own/trial_T1/game.tw-pddl"]
    for path in own:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    games[1].unlink()
    get("alfworld", out=tmp_path, mirror=mirror.url)
    assert [path.read_text() for path in own] == ["mine", "mine"]
    assert len(games[1].read_bytes()) > 100
    # a game that was changed is not replaced, and nothing else is put in
    games[0].write_text("changed")
    games[1].unlink()
    with pytest.raises(DataError, match=f"{games[0]} has other content.*--out"):
        get("alfworld", out=tmp_path, mirror=mirror.url)
    assert games[0].read_text() == "changed"
    assert not games[1].exists()
    assert [path.name for path in tmp_path.iterdir()] == ["json_2.1.1"]


def test_a_shop_and_questions_of_ones_own_are_not_replaced(
    tmp_path: Path, mirror: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"id": "test_0", "question": "who", "golden_answers": ["Ada"]}
    for name in ("webshop", "search"):
        for file in DATA_SETS[name].files:
            mirror.files[file.name] = (json.dumps(row) + "\n").encode()
    monkeypatch.setattr(test_sets, "OFFICIAL", dict.fromkeys(OFFICIAL, 1))
    for name, own in (("webshop", "items_ins_v2_1000.json"), ("search", "musique_questions.jsonl")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / own).write_text("mine")
        with pytest.raises(TurngymError, match=f"{own} has other content"):
            get(name, out=folder, mirror=mirror.url)
        assert [path.name for path in folder.iterdir()] == [own]
        assert (folder / own).read_text() == "mine"
        (folder / own).unlink()
        for _ in range(2):
            get(name, out=folder, mirror=mirror.url)


def test_a_fetch_that_was_cut_goes_on(tmp_path: Path, mirror: Any) -> None:
    data = bytes(range(256)) * 4000
    mirror.files["f"], mirror.faults["f"] = data, "cut"
    target = tmp_path / "f"
    with pytest.raises(DataError, match="cut at 512,000 of 1,024,000 bytes"):
        fetch(f"{mirror.url}/f", target, largest=1 << 30)
    assert not target.exists()
    mirror.faults.clear()
    fetch(f"{mirror.url}/f", target, largest=1 << 30, sha256=hashlib.sha256(data).hexdigest())
    assert target.read_bytes() == data
    assert mirror.asked[-1] == ("f", "bytes=512000-")
    # what is there is not fetched again
    count = len(mirror.asked)
    fetch(f"{mirror.url}/f", target, largest=1 << 30)
    assert len(mirror.asked) == count


def test_a_file_that_changed_in_between_begins_anew(tmp_path: Path, mirror: Any) -> None:
    mirror.files["f"], mirror.faults["f"] = b"a" * 1000, "cut"
    with pytest.raises(DataError, match="cut"):
        fetch(f"{mirror.url}/f", tmp_path / "f", largest=1 << 20)
    mirror.files["f"] = b"b" * 900
    mirror.faults.clear()
    fetch(f"{mirror.url}/f", tmp_path / "f", largest=1 << 20)
    assert (tmp_path / "f").read_bytes() == b"b" * 900


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("page", "answers with a page of HTML instead of the file .*--mirror URL"),
        ("gone", "answers 404 .*--mirror URL, or put the files into the folder by hand"),
    ],
)
def test_what_is_not_the_file_is_refused(tmp_path: Path, mirror: Any, fault: str, said: str) -> None:
    mirror.files["f"], mirror.faults["f"] = b"x" * 10, fault
    with pytest.raises(DataError, match=said) as error:
        fetch(f"{mirror.url}/f", tmp_path / "f", largest=1 << 20)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "f").exists()


def test_hash_size_and_address(tmp_path: Path, mirror: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mirror.files["f"] = b"x" * 10
    with pytest.raises(DataError, match="expected is 0000; it was thrown away"):
        fetch(f"{mirror.url}/f", tmp_path / "f", largest=1 << 20, sha256="0000")
    assert not list(tmp_path.glob("f*"))
    with pytest.raises(DataError, match="10 bytes; the file has at most 9"):
        fetch(f"{mirror.url}/f", tmp_path / "f", largest=9)
    for url, said in (("file:///etc/passwd", "must begin with http"), ("http://127.0.0.1:99999/f", "99999.* port")):
        with pytest.raises(DataError, match=said):
            fetch(url, tmp_path / "f", largest=9)
    with pytest.raises(DataError, match=r"cannot be fetched \(.*refused.*run it again"):
        fetch("http://127.0.0.1:9/f", tmp_path / "f", largest=9)
    # read as every other client of ours reads it: this machine is asked without a proxy
    for proxy in ("/nowhere", "x" * 64):
        monkeypatch.setenv("HTTP_PROXY", proxy)
        fetch(f"{mirror.url}/f", tmp_path / "f", largest=10)
        with pytest.raises(DataError, match="HTTP_PROXY"):
            fetch("http://example.invalid/f", tmp_path / "g", largest=9)


def test_a_full_disk_keeps_what_there_is(tmp_path: Path, mirror: Any) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("only Linux has a disk that is always full")
    mirror.files[ARCHIVE] = b"x" * 100_000
    kept = tmp_path / ".turngym.download"
    kept.mkdir()
    (kept / f"{ARCHIVE}.part").symlink_to("/dev/full")
    with pytest.raises(DataError, match="the disk is full; make room and run it again"):
        get("alfworld", out=tmp_path, mirror=mirror.url)
    assert not (tmp_path / "json_2.1.1").exists()


@pytest.mark.parametrize(
    "name",
    [
        "../../outside/x/y/game.tw-pddl",
        "/etc/a/b/c/game.tw-pddl",
        "json_2.1.1/valid_seen/../../game.tw-pddl",
        "json_2.1.1/elsewhere/task/trial/game.tw-pddl",
        "json_2.1.1/valid_seen/task/game.tw-pddl",
        "link",
    ],
)
def test_an_archive_writes_nowhere_else(tmp_path: Path, name: str) -> None:
    archive, out = tmp_path / "a.zip", tmp_path / "out"
    with zipfile.ZipFile(archive, "w") as opened:
        opened.writestr("json_2.1.1/valid_seen/task/trial/game.tw-pddl", "{}")
        entry = zipfile.ZipInfo("json_2.1.1/valid_seen/task/trial2/game.tw-pddl" if name == "link" else name)
        entry.external_attr = (0o120777 if name == "link" else 0o100644) << 16
        opened.writestr(entry, "/etc/passwd")
    out.mkdir()
    with pytest.raises(DataError, match="which is no game's place or size"):
        unpack(archive, out)
    assert list(out.iterdir()) == []
    archive.write_bytes(b"no archive")
    with pytest.raises(DataError, match="is no archive that can be read"):
        unpack(archive, out)


def test_the_shop_and_the_questions(
    tmp_path: Path, mirror: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for variable in ("WEBSHOP_DATA", "TURNGYM_SEARCH_DATA", "ALFWORLD_DATA"):
        monkeypatch.delenv(variable, raising=False)
    for env_id, kwargs, named in (
        ("turngym/WebShop-v0", {"profile": "1k-synthetic"}, "webshop"),
        ("turngym/Search-v0", {"source": "nq"}, "search"),
        ("turngym/ALFWorld-v0", {"split": "valid_seen"}, "alfworld"),
    ):
        with pytest.raises(TurngymError, match=f"turngym data get {named}"):
            gym.make(env_id, **kwargs)
    for file in DATA_SETS["webshop"].files:
        mirror.files[file.name] = b"[]"
    assert command.main(["data", "get", "webshop", "--mirror", mirror.url]) == 0
    assert (tmp_path / ".cache/turngym/webshop/items_human_ins.json").read_bytes() == b"[]"
    # one of the seven sets is too short: nothing is installed
    for file in DATA_SETS["search"].files:
        row = {"id": "test_0", "question": "who", "golden_answers": ["Ada"]}
        mirror.files[file.name] = (json.dumps(row) + "\n").encode()
    assert command.main(["data", "get", "search", "--mirror", mirror.url]) == 2
    assert "nq has 1 questions in these files, Search-R1's test set has 3,610" in capsys.readouterr().err
    monkeypatch.setattr(test_sets, "OFFICIAL", dict.fromkeys(OFFICIAL, 1))
    assert command.main(["data", "get", "search", "--mirror", mirror.url]) == 0
    assert gym.make("turngym/Search-v0", source="nq", split="eval").get_wrapper_attr("task_ids")() == ("nq/test_0",)
    assert command.main(["data", "verify", "search"]) == 0
    assert "search-bamboogle-test-v1: all 1 tasks are the panel's" in capsys.readouterr().out
    assert command.main(["data", "get", "alfwrld"]) == 2
    assert "Did you mean 'alfworld'?" in capsys.readouterr().err
    assert command.main(["data", "get", "webshop", "--sha256", '{"other": "00"}']) == 2
    assert "webshop has no file 'other'; its files: items_shuffle_1000.json" in capsys.readouterr().err
