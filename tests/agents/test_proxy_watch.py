"""What the proxy says of itself: numbers for Prometheus, a page, times in records, a line per minute."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from turngym.agents.client_keys import ClientKeys
from turngym.agents.proxy.app import PAGE, prometheus
from turngym.agents.proxy.config import ProxySettings
from turngym.agents.proxy.turn_records import TurnRecorder
from turngym.scripts.serve_proxy import every_minute


def test_numbers_for_prometheus() -> None:
    health = {
        "status": "ok",
        "turns": {"main": 1234567, "side": 0},
        "engine": {"streams": True},
        "serving": {"from": "copy", "longest_pause_s": 0.25},
        "unnamed": {'curl "x"\\y': 2},
    }
    assert prometheus(health).splitlines() == [
        "turngym_turns_main 1234567",
        "turngym_turns_side 0",
        "turngym_engine_streams 1",
        "turngym_serving_longest_pause_s 0.25",
        'turngym_unnamed{name="curl \\"x\\"\\\\y"} 2',
    ]


def health(main: int, **training: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"turns": {"main": main, "side": 1}, "sessions": {"open": 4}, "engine": {"waiting": 2}}
    return found | ({"training": {"step": 6, "state": "running", "ready_turns": 5, **training}} if training else {})


def test_it_is_said_again_and_again_until_the_end() -> None:
    over, said, heard = threading.Event(), list[str](), threading.Event()
    counts = iter(range(10, 100, 10))

    def say(line: str) -> None:
        said.append(line)
        if len(said) == 2:
            heard.set()

    thread = every_minute(lambda: health(next(counts)), over, say, seconds=0.01)
    assert heard.wait(20)
    over.set()
    thread.join(20)
    assert [line.split(" main")[0] for line in said[:2]] == ["served 10", "served 10"]


def test_records_say_when(tmp_path: Path) -> None:
    recorder = TurnRecorder(tmp_path, now=lambda: 1234.56789)
    recorder.write({"kind": "unused", "step": 0, "sessions": []})
    recorder.close()
    assert json.loads((tmp_path / "records.jsonl").read_text())["at"] == 1234.568


def test_the_page_loads_nothing_from_elsewhere() -> None:
    # names of clients are text, never markup
    assert not [word for word in ("http:", "https:", "src=", "innerHTML") if word in PAGE.read_text()]


@pytest.mark.parametrize("keys", [None, {}, {"": "k"}])
def test_what_was_left_out_is_shown_to_those_who_share_a_key(make_bench: Any, keys: Any) -> None:
    from turngym.agents.proxy.app import create_app

    client = create_app(make_bench().service, keys=None if keys is None else ClientKeys(keys)).test_client()
    head = {"Authorization": "Bearer k", "User-Agent": "a-tool/7"}
    asked = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "effort": "high"}
    assert client.post("/v1/chat/completions", json=asked, headers=head).status_code == 200
    # what is ignored in a request that is refused is counted, too
    assert client.post("/v1/chat/completions", json={**asked, "top_logprobs": 3}, headers=head).status_code == 400
    found = client.get("/healthz", headers=head).json
    assert (found["ignored"], found["unnamed"]) == ({"effort": 2}, {"a-tool/7": 1})
    assert found["unsupported"] == {"top_logprobs": 1}
    said = client.get("/metrics", headers=head).text
    assert {'turngym_ignored{name="effort"} 2', 'turngym_unsupported{name="top_logprobs"} 1'} <= set(said.splitlines())
    # without the key nobody learns a name
    assert client.get("/healthz").json["ignored"] == (2 if keys else found["ignored"])


def test_a_stream_that_waits_says_little_and_notices_who_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients written in Go give up after 300 lines without data; the deadline is 300 s by default."""
    from turngym.agents.proxy import app

    now = [0.0]

    def nothing(seconds: float) -> list[Any]:
        now[0] += seconds
        return []

    monkeypatch.setattr(app, "time", SimpleNamespace(monotonic=lambda: now[0], time=lambda: 0))
    for deadline, gone_at in ((300.0, 299.0), (3000.0, 2999.0), (300.0, 1.0)):
        now[0], dropped = 0.0, []
        service = SimpleNamespace(
            renderer=SimpleNamespace(incremental_decoder=lambda: None),
            name="m",
            settings=ProxySettings(deadline=deadline),
        )
        inflight: Any = SimpleNamespace(
            service=service,
            reader=lambda: None,
            answer_id="x",
            request=SimpleNamespace(usage_in_stream=False, logprobs=False),
            new_tokens=nothing,
            wait=lambda seconds: None,
            abandon=lambda dropped=dropped: dropped.append(True),
        )
        stream = app.EventStream(inflight, gone=lambda gone_at=gone_at: now[0] >= gone_at)
        lines = b"".join(stream).split(b"\n")
        stream.close()
        assert sum(not line.startswith(b"data:") for line in lines) <= 300
        assert dropped == [True]
        assert now[0] <= gone_at + 1


def test_routes_and_the_key(make_bench: Any) -> None:
    from turngym.agents.proxy.app import create_app

    bench = make_bench()
    client = create_app(
        bench.service, keys=ClientKeys({"": "k"}), more_health=lambda: {"training": {"step": 3}}
    ).test_client()
    assert client.get("/watch").data == PAGE.read_bytes()
    refused = client.get("/metrics")
    assert (refused.status_code, refused.json["error"]["code"]) == (401, "invalid_api_key")
    found = client.get("/metrics", headers={"Authorization": "Bearer k"})
    assert found.content_type == "text/plain; version=0.0.4"
    assert "turngym_training_step 3\n" in found.data.decode()
