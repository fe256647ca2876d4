"""Visits come and go within their bounds, and every one that did something is in the trace; the server as a process."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from turngym.core.episode import Episode, Status
from turngym.core.trace import TraceWriter, read_trace
from turngym.envs.visitors import EpisodeRecorder
from turngym.envs.webshop.shop import Shop
from turngym.envs.webshop.web import ShopPages, WebSettings
from turngym.scripts.main import main


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def episodes() -> list[Episode]:
    return []


@pytest.fixture
def pages(tiny_shop: Shop, clock: Clock, episodes: list[Episode]) -> ShopPages:
    settings = WebSettings(split="eval", visits=3, idle=100.0, turns=50)
    return ShopPages(tiny_shop, settings, episodes.append, clock)


def test_who_was_away_longest_makes_room(pages: ShopPages, episodes: list[Episode]) -> None:
    for name in "abc":
        pages.visit(name).begin("tiny/0")
    pages.visit("a").play("search[mug]")
    first = pages.visits.get("b")
    assert first is not None
    first.play("search[lamp]")
    pages.visit("d")
    assert [pages.visits.get(name) is None for name in "abcd"] == [False, False, True, False]
    assert episodes == []
    pages.visit("e")
    assert len(pages.visits) == 3
    assert [episode.turns[0].action for episode in episodes] == ["search[mug]"]
    assert (episodes[0].status, episodes[0].meta["error"]) == (Status.TRUNCATED_DEPTH, "the player left")


def test_idle_visits_end(pages: ShopPages, clock: Clock, episodes: list[Episode]) -> None:
    for name in "ab":
        pages.visit(name).begin("tiny/1")
        clock.now += 40
    pages.visit("a").play("search[mug]")
    clock.now += 90
    assert pages.visits.get("b") is None
    assert pages.visits.get("a") is not None
    assert episodes == []
    clock.now += 101
    assert pages.visits.get("x") is None
    assert len(pages.visits) == 0
    assert len(episodes) == 1


def test_another_goal_records_the_one_before(pages: ShopPages, episodes: list[Episode]) -> None:
    visit = pages.visit("a")
    assert not visit.under_way
    for goal in (0, 1, 2):
        visit.begin(f"tiny/{goal}")
        if goal != 1:
            visit.play("search[mug]")
    pages.visits.close()
    assert [episode.task.task_id for episode in episodes] == ["tiny/0", "tiny/2"]
    assert not visit.under_way


def test_many_visitors_at_once(pages: ShopPages, episodes: list[Episode]) -> None:
    """Threads that enter, play and are pushed out: nothing breaks, nothing is held beyond the bound."""
    problems: list[BaseException] = []

    def shop(number: int) -> None:
        try:
            for turn in range(20):
                visit = pages.visit(f"{number}-{turn % 2}")
                with visit.lock:
                    visit.begin("tiny/0")
                    visit.play("search[mug]")
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=shop, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pages.visits.close()
    assert problems == []
    assert len(pages.visits) == 0
    assert len(episodes) <= 120


def test_samples_go_on_in_the_same_file(tmp_path: Path, pages: ShopPages, episodes: list[Episode]) -> None:
    path = tmp_path / "sessions.jsonl"
    for expected in ([0, 1], [0, 1, 2, 3]):
        recorder = EpisodeRecorder(path)
        pages.record = recorder
        for name in (f"{len(expected)}a", f"{len(expected)}b"):
            visit = pages.visit(name)
            visit.begin("tiny/3")
            visit.play("search[mug]")
        pages.visits.close()
        recorder.close()
        found, problems = read_trace(path)
        assert [episode.sample for episode in found] == expected
        assert problems == []


def test_a_full_disk_does_not_stop_the_shop(
    tmp_path: Path, pages: ShopPages, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = EpisodeRecorder(tmp_path / "sessions.jsonl")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(TraceWriter, "write", full)
    pages.record = recorder
    visit = pages.visit("a")
    visit.begin("tiny/0")
    visit.play("search[mug]")
    pages.visits.close()
    assert recorder.failed == 1
    assert "No space left" in caplog.text


def test_without_flask_the_verb_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "flask", None)
    for module in ("turngym.envs.webshop.web", "turngym.envs.visitors"):
        monkeypatch.delitem(sys.modules, module)
    assert main(["serve", "webshop"]) == 2
    assert "need Flask: pip install 'turngym[serve]'" in capsys.readouterr().err


@pytest.fixture
def serve(tmp_path: Path) -> Callable[..., Any]:
    """Starts `turngym serve webshop`; (process, its address)."""

    def start(*options: str) -> tuple[subprocess.Popen[str], str]:
        command = [sys.executable, "-m", "turngym.scripts", "serve", "webshop", "--port", "0", *options]
        process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"ready: (http://127\.0\.0\.1:\d+/)", line)
        assert found is not None, line + process.stdout.read()
        return process, found[1]

    return start


def test_the_command_serves_and_records(
    serve: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A visit through real HTTP; SIGTERM in the middle of it still records it, and `turngym trace` reads it."""
    process, address = serve("--profile", "embedded-small", "--out", "mine.jsonl", "--seed", "1")
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
    try:
        page = opener.open(address, timeout=20).read().decode()
        token = re.search(r'name="token" value="(\w+)"', page)
        assert token is not None
        page = opener.open(f"{address}start", f"token={token[1]}&goal=".encode(), timeout=20).read().decode()
        assert 'id="turns">0<' in page
        page = opener.open(f"{address}act", f"token={token[1]}&turn=0&search=red".encode(), timeout=20).read().decode()
        assert 'id="turns">1<' in page
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0, process.stdout.read()
    (episode,), problems = read_trace(tmp_path / "mine.jsonl")
    assert problems == []
    assert [turn.action for turn in episode.turns] == ["search[red]"]
    assert episode.status is Status.TRUNCATED_DEPTH
    assert main(["trace", "print", str(tmp_path / "mine.jsonl")]) == 0
    assert episode.task.task_id in capsys.readouterr().out


def test_bad_options_say_what_is_valid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path / "x.jsonl")]
    assert main(["serve", "webshop", "--profile", "embeded", *out]) == 2
    assert "Did you mean" in capsys.readouterr().err
    assert main(["serve", "webshop", "--visits", "0", *out]) == 2
    assert "--visits is " in capsys.readouterr().err
    assert main(["serve", "webshop", "--port", "99999", *out]) == 2
    assert re.search(r"--port is .* 65,?535", capsys.readouterr().err)


@pytest.mark.long
def test_idle_visitors_keep_nobody_out_and_the_end_answers_whom_it_accepted(serve: Callable[..., Any]) -> None:
    """500 sockets say nothing; 64 clients ask in the moment of SIGTERM, and every answer is whole."""
    process, address = serve("--profile", "embedded-small", "--out", "none", "--threads", "2")
    host, port = re.findall(r"//([\d.]+):(\d+)/", address)[0]
    idle = [socket.create_connection((host, int(port)), timeout=20) for _ in range(500)]
    try:
        with urllib.request.urlopen(address, timeout=20) as page:
            assert page.status == 200
        clients = [socket.create_connection((host, int(port)), timeout=20) for _ in range(64)]
        for client in clients:
            client.sendall(f"GET / HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode())
        process.send_signal(signal.SIGTERM)
        for client in clients:
            found = b"".join(iter(lambda client=client: client.recv(65536), b""))
            assert found.startswith(b"HTTP/1.1 200 OK")
            assert found.rstrip().endswith(b"</html>")
        assert process.wait(timeout=30) == 0
        assert "everything accepted was answered" in process.stdout.read()
    finally:
        process.kill()
        for client in idle:
            client.close()
