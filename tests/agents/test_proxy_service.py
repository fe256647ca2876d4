"""Sessions over an engine: order, ends, restarts, updates, limits, clients that go away."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import proxy_tools as tools
import pytest

from turngym.agents.proxy.api_errors import ApiError, ProxyError
from turngym.agents.proxy.engine_queue import STOPS_WITHIN
from turngym.agents.proxy.service import ProxyService
from turngym.agents.proxy.turn_records import ChatMessage, read_records
from turngym.core import running_clock
from turngym.core.trace import add_checksum, episode_to_json

user, until = tools.user, tools.until

Make = Callable[..., Any]


def in_thread(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    result: list[Any] = []

    def run() -> None:
        try:
            result.append(work())
        except Exception as error:
            result.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, result


def kinds(folder: Path) -> list[str]:
    return [record["kind"] for record in read_records(folder)]


def test_a_session_becomes_an_episode(make_bench: Make) -> None:
    bench = make_bench()
    name = "../../etc/my agent"
    messages = [user("hello"), bench.ask([user("hello")], name).reply, user("more")]
    bench.policy.answer = lambda request: "one STOP two"
    stopped = bench.ask(messages, name, stop=["STOP"])
    # cut from the answer, but not from the ids
    assert (stopped.reply.content, stopped.text) == ("one ", "one STOP two")
    assert bench.policy.requests[1].sampling.stop_text == ("STOP",)
    bench.ask([user("unrelated")], None)
    assert bench.service.end(name) == 2
    (episode,) = bench.episodes
    assert (episode.task.env_id, episode.depth, episode.status.value, episode.episode_return) == (
        "proxy",
        2,
        "completed",
        0.0,
    )
    assert episode.final_observation == ""
    assert episode.meta["ended"] == "done"
    key, _, number = episode.task.task_id.rpartition("-")
    assert (len(key), int(key, 16) > 0, number) == (32, True, "1")
    assert "etc" not in bench.service.recorder.path.read_text()
    assert bench.service.health()["turns"] == {"main": 2, "side": 1}
    assert len(bench.service.sessions) == 0
    assert episode_to_json(episode)  # a trace can hold it


def test_a_side_turn_leaves_the_session_alone(make_bench: Make) -> None:
    bench = make_bench()
    messages = bench.talk("a", 1)
    bench.ask([user("title this")], "a", turn_type="side")
    bench.ask([*messages, user("next")], "a", session_done=True)
    assert [turn.observation for turn in bench.episodes[0].turns] == ["hello", "next"]
    assert len(bench.episodes[0].segments) == 1
    assert bench.policy.requests[1].session.startswith("side/")
    assert bench.policy.requests[1].session in bench.policy.released


def test_the_second_request_of_a_session_waits_for_the_first(make_bench: Make) -> None:
    bench = make_bench()
    bench.policy.gate.clear()
    first = bench.begin([user("one")], "a")
    thread, result = in_thread(lambda: bench.begin([user("one"), user("two")], "a").wait(20))
    until(lambda: bench.service.counts["underway"] == 2)
    assert len(bench.service.engine._queue) <= 1
    bench.policy.gate.set()
    assert first.wait(20).reply.content == "answer 1"
    thread.join(20)
    assert result[0].reply.content == "answer 2"
    assert len(bench.policy.batches) == 2


def test_waiting_for_the_session_has_a_deadline(make_bench: Make) -> None:
    bench = make_bench(deadline=0.05)
    bench.policy.gate.clear()
    first = bench.begin([user("one")], "a")
    bench.service.sessions._clock = iter([100.0, *[200.0] * 20]).__next__
    with pytest.raises(ApiError, match="still being answered") as caught:
        bench.begin([user("two")], "a")
    assert (caught.value.status, caught.value.retry_after) == (503, 5)
    bench.policy.gate.set()
    assert first.wait(20) is not None
    assert bench.service.counts["underway"] == 0


def test_requests_of_many_sessions_are_generated_together(make_bench: Make) -> None:
    bench = make_bench()
    bench.policy.gate.clear()
    first = bench.begin([user("0")], "s0")
    until(bench.policy.entered.is_set)
    others = [bench.begin([user(str(n))], f"s{n}") for n in range(1, 9)]
    bench.policy.gate.set()
    assert all(one.wait(20) is not None for one in [first, *others])
    assert bench.policy.batches == [1, 8]
    assert bench.service.engine.largest == 8


def test_while_weights_are_updated_requests_wait(make_bench: Make) -> None:
    bench = make_bench()
    bench.service.engine.pause()
    asked = bench.begin([user("x")], "a")
    assert asked.wait(0.05) is None
    assert bench.policy.asked == 0
    assert bench.service.health()["status"] == "updating"
    bench.policy.version = 7
    bench.service.engine.resume()
    assert asked.wait(20).version == 7


def test_a_pause_waits_for_the_batch_under_way(make_bench: Make) -> None:
    bench = make_bench()
    bench.policy.gate.clear()
    asked = bench.begin([user("x")], "a")
    until(bench.policy.entered.is_set)
    thread, done = in_thread(bench.service.engine.pause)
    assert not done
    bench.policy.gate.set()
    thread.join(20)
    assert done == [None]
    assert asked.wait(20) is not None
    bench.service.engine.resume()


def test_an_update_that_takes_too_long_is_503(make_bench: Make) -> None:
    bench = make_bench(deadline=5.0)
    bench.service.engine.pause()
    asked = bench.begin([user("x")], "a")
    bench.now += 6
    with pytest.raises(ApiError, match="waited too long") as caught:
        asked.wait(0.01)
    assert (caught.value.status, caught.value.retry_after) == (503, 5)
    bench.service.engine.resume()
    assert bench.ask([user("x")], "a").reply.content == "answer 1"  # the first was never generated
    assert bench.service.health()["timed_out"] == 1


def test_a_client_that_leaves_while_it_waits_costs_nothing(make_bench: Make) -> None:
    bench = make_bench()
    bench.service.engine.pause()
    bench.begin([user("x")], "a").abandon()
    bench.service.engine.resume()
    assert bench.ask([user("y")], "a").reply.content == "answer 1"
    assert bench.service.health()["disconnected"] == 1
    assert kinds(bench.service.recorder.path.parent) == ["turn"]


def test_a_client_that_leaves_during_generation_is_dropped_and_its_session_goes_on(make_bench: Make) -> None:
    bench = make_bench()
    bench.policy.gate.clear()
    asked = bench.begin([user("x")], "a")
    until(bench.policy.entered.is_set)
    asked.abandon()
    assert bench.service.counts["underway"] == 1  # the engine is still at it
    bench.policy.gate.set()
    until(lambda: bench.service.counts["underway"] == 0)
    assert bench.ask([user("x")], "a", session_done=True).reply.content == "answer 2"
    assert bench.episodes[0].depth == 1
    until(lambda: any(session.endswith("-1/0") for session in bench.policy.released))


def test_an_end_that_finds_no_room_is_written_by_the_sweep_and_the_turn_is_answered(
    make_bench: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_bench()
    write = bench.service.recorder.write

    def full(record: Mapping[str, Any]) -> Any:
        if record["kind"] == "end":
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(record)

    monkeypatch.setattr(bench.service.recorder, "write", full)
    assert bench.ask([user("x")], "a", session_done=True).reply.content == "answer 1"
    assert (bench.episodes, len(bench.service.sessions)) == ([], 0)
    monkeypatch.undo()
    bench.service.sweep()
    assert [(episode.meta["ended"], episode.depth) for episode in bench.episodes] == [("done", 1)]


def test_asking_again_replaces_the_answer(make_bench: Make) -> None:
    bench = make_bench()
    messages = bench.talk("a", 2)
    bench.ask(messages[:-1], "a")
    bench.ask([*messages[:-1], {"role": "assistant", "content": "answer 3"}, user("go")], "a", session_done=True)
    (episode,) = bench.episodes
    assert [turn.response for turn in episode.turns] == ["answer 1", "answer 3", "answer 4"]
    assert (episode.meta["superseded"], [t.index for t in episode.turns]) == (1, [0, 1, 2])
    for turn in episode.turns:
        text = bench.renderer.decode(episode.response_ids(turn))[0]
        assert text == turn.response


def test_going_back_leaves_the_last_answer_without_a_next_state(make_bench: Make) -> None:
    bench = make_bench()
    messages = bench.talk("a", 3)
    bench.ask(messages[:1], "a", session_done=True)
    assert [turn.excluded for turn in bench.episodes[0].turns] == [None, None, "no next state", None]


def test_what_answers_an_earlier_answer_is_no_next_state_of_the_last(make_bench: Make) -> None:
    bench = make_bench()
    messages = bench.talk("a", 3)
    bench.ask([*messages[:2], user("otherwise")], "a")
    # who shortens a history drops answers, too
    bench.ask([messages[0], user("a summary")], "a", session_done=True)
    assert [turn.excluded for turn in bench.episodes[0].turns] == [None, None, "no next state", None, None]


def test_the_last_answer_at_the_end_of_a_request(make_bench: Make) -> None:
    bench = make_bench()
    bench.talk("other", 1)
    messages = bench.talk("a", 1)
    more = bench.ask(messages, "a")
    bench.ask([*messages, more.reply, user("go on")], "a")
    bench.service.close()
    again = make_bench()
    assert len(again.service.sessions) == 2
    again.service.end("a")
    assert [turn.excluded for turn in again.episodes[0].turns] == ["no next state", None, None]


def test_the_end_of_a_session_with_its_whole_conversation(make_bench: Make) -> None:
    bench = make_bench()
    news = [{"role": "tool", "content": "a"}, user("thanks")]
    for name, final in (("a", lambda said: said), ("b", lambda said: [*said, *news]), ("c", lambda said: news)):
        said = bench.talk(name, 2)
        bench.service.end(name, tuple(ChatMessage.from_json(tools.as_dict(one)) for one in final(said)))
    found = "[tool]\na\n\n[user]\nthanks"
    assert [episode.final_observation for episode in bench.episodes] == ["", found, found]


def test_the_end_of_a_session_that_is_not_known_takes_no_place(make_bench: Make) -> None:
    bench = make_bench(max_sessions=1)
    bench.talk("a", 1)
    assert bench.service.end("b") == 0
    assert bench.episodes == []
    assert bench.service.end("a") == 1


def test_idle_sessions_end(make_bench: Make) -> None:
    bench = make_bench(idle=60.0)
    bench.talk("a", 1)
    bench.now += 30
    bench.talk("b", 1)
    bench.now += 40
    assert bench.service.sweep() == 1
    assert [episode.meta["ended"] for episode in bench.episodes] == ["idle"]
    assert len(bench.service.sessions) == 1
    bench.talk("a", 1)
    assert len({s.key for s in bench.service.sessions._open.values()}) == 2
    bench.policy.gate.clear()
    busy = bench.begin([user("x")], "busy")
    bench.now += 100
    assert bench.service.sweep() == 2
    bench.policy.gate.set()
    assert busy.wait(20) is not None


def test_a_long_session_is_handed_on_in_parts(make_bench: Make) -> None:
    bench = make_bench(session_turns=2)
    messages = bench.talk("a", 5)
    bench.service.end("a", (ChatMessage(role="tool", content="the end"),))
    parts = bench.episodes
    assert [part.depth for part in parts] == [2, 2, 1]
    assert [part.meta["ended"] for part in parts] == ["part", "part", "done"]
    assert [part.final_observation for part in parts] == ["a says 2", "a says 4", "the end"]
    assert [part.status.value for part in parts] == ["truncated_turns", "truncated_turns", "completed"]
    assert len({part.task.task_id for part in parts}) == 3
    whole = bench.renderer.ids([m if isinstance(m, dict) else m.as_json() for m in messages[:-1]])
    assert parts[2].prompt_ids(parts[2].turns[0]).tolist() == whole.tolist()


def test_asking_again_where_a_part_ends(make_bench: Make) -> None:
    bench = make_bench(session_turns=2)
    messages = bench.talk("a", 2)
    again = bench.ask(messages[:-1], "a")
    bench.ask([*messages[:-1], again.reply, user("next")], "a", session_done=True)
    parts = bench.episodes
    assert [[turn.response for turn in part.turns] for part in parts] == [["answer 1", "answer 3"], ["answer 4"]]
    assert [(part.meta["first"], part.meta["superseded"]) for part in parts] == [(0, 1), (2, 0)]


def test_a_full_context_is_an_error_that_clients_know(make_bench: Make) -> None:
    bench = make_bench(max_context=60)
    with pytest.raises(ApiError, match="tokens; with an answer this model holds 60") as caught:
        bench.ask([user("x" * 60)], "a")
    assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")
    finished = bench.ask([user("x" * 20)], "a")
    assert len(finished.prompt_ids) + len(finished.ids) <= 60


@pytest.mark.parametrize(("fixed", "main", "side"), [(1.0, 1.0, 0.3), (None, 0.3, 0.3)])
def test_temperatures(make_bench: Make, fixed: float | None, main: float, side: float) -> None:
    bench = make_bench(temperature=fixed)
    bench.ask([user("x")], "a", temperature=0.3)
    bench.ask([user("x")], None, temperature=0.3)
    assert [request.sampling.temperature for request in bench.policy.requests] == [main, side]


def test_turns_of_another_temperature_are_not_trained_on(make_bench: Make) -> None:
    first = make_bench(temperature=None)
    messages = first.talk("a", 1, temperature=0.3)
    first.service.close()
    second = make_bench(temperature=1.0)
    second.ask([*messages, user("next")], "a", session_done=True)
    assert [turn.excluded for turn in second.episodes[0].turns] == ["sampled at temperature 0.3", None]


def test_random_streams(make_bench: Make) -> None:
    bench = make_bench(seed=5)
    messages = bench.talk("a", 2)
    for _ in range(2):
        bench.ask(messages[:-1], "a")
    messages[-1] = {"role": "assistant", "content": "answer 4"}
    bench.ask([*messages, user("x")], "a", seed=9)
    streams = [request.stream for request in bench.policy.requests]
    # two turns, the second asked again twice, and one more: five draws, none of which shares its numbers
    assert [stream[0] for stream in streams] == [5, 5, 5, 5, 9]
    assert [stream[2] for stream in streams] == [0, 1, 2, 3, 4]
    assert len({stream[1] for stream in streams}) == 1


def test_a_restart_goes_on_in_the_same_segment(make_bench: Make) -> None:
    first = make_bench()
    messages = first.talk("a", 2)
    first.talk("b", 1)
    first.service.end("b")
    first.service.close()
    second = make_bench()
    assert len(second.service.sessions) == 1
    assert [episode.turns[0].response for episode in second.service.unused] == ["answer 3"]
    assert episode_to_json(second.service.unused[0]) == episode_to_json(first.episodes[0])
    second.ask([*messages, user("back again")], "a", session_done=True)
    (episode,) = second.episodes
    assert (episode.depth, len(episode.segments)) == (3, 1)
    assert np.array_equal(episode.prompt_ids(episode.turns[2]), second.policy.requests[0].prompt_ids)
    assert episode.turns[0].logprobs is not None
    assert episode.turns[0].logprobs.tolist() == (-np.arange(1, 10, dtype=np.float32) / 8).tolist()


def test_a_restart_in_the_middle_of_a_long_session(make_bench: Make) -> None:
    first = make_bench(session_turns=2)
    messages = first.talk("a", 3)
    first.service.close()
    second = make_bench(session_turns=2)
    assert [episode.depth for episode in second.service.unused] == [2]
    second.ask([*messages, user("more")], "a", session_done=True)
    assert (second.episodes[0].depth, len(second.episodes[0].segments)) == (2, 1)
    assert second.episodes[0].meta["before"][0]["content"] == "hello"


def test_a_torn_record_costs_only_itself(make_bench: Make) -> None:
    first = make_bench()
    messages = first.talk("a", 2)
    first.service.close()
    path = first.service.recorder.path
    path.write_bytes(path.read_bytes()[:-30])
    second = make_bench()
    second.ask([*messages, user("next")], "a")
    second.service.close()
    lines = path.read_text().splitlines()
    assert len(lines) == 2
    last = json.loads(lines[-1])
    assert last["kept"] == 2  # the second answer is not known as one's own any more: it is part of the prompt
    assert [message["content"] for message in last["messages"]] == ["a says 1", "answer 2", "next"]


def records_with(make_bench: Make, number: int, change: Callable[[bytes], bytes]) -> list[bytes]:
    """Session a ends before b begins, c goes on: 6 lines, of which line `number` is changed."""
    first = make_bench()
    for name in ("a", "b"):
        first.talk(name, 1)
        first.service.end(name)
    first.talk("c", 2)
    first.service.close()
    path = first.service.recorder.path
    lines = path.read_bytes().splitlines(keepends=True)
    lines[number - 1] = change(lines[number - 1])
    path.write_bytes(b"".join(lines))
    return lines


def flip(line: bytes) -> bytes:
    """One letter of what was said becomes another: valid JSON of another session."""
    return line.replace(b'"text":"answer', b'"text":"anTwer').replace(b'"done"', b'"d0ne"')


@pytest.mark.parametrize(
    ("number", "unused", "underway"), [(1, ["answer 2"], 1), (2, ["answer 2"], 1), (3, [], 1), (5, [], 0), (6, [], 0)]
)
def test_a_damaged_record_sets_aside_what_it_may_belong_to(
    make_bench: Make, number: int, unused: list[str], underway: int
) -> None:
    """Line 2 is the end of a; with line 5, c lacks its first turn, and its second alone would be another session."""
    records_with(make_bench, number, flip)
    with pytest.warns(UserWarning, match=rf"records cannot be used \(line {number}: it was changed.*; sessions"):
        second = make_bench()
    assert [episode.turns[0].response for episode in second.service.unused] == unused
    assert len(second.service.sessions) == underway
    assert second.service.sessions.serial == 3


def test_a_record_that_was_cut_by_a_kill_is_no_damage_after_a_restart(make_bench: Make) -> None:
    first = make_bench()
    first.talk("a", 2)
    first.service.close()
    path = first.service.recorder.path
    whole = path.read_bytes()
    path.write_bytes(whole[:-30])
    make_bench().service.close()
    assert path.read_bytes() == whole[: whole[:-30].rindex(b"\n") + 1]
    path.write_bytes(whole[:-1])  # nothing is missing but the end of the line
    assert len(make_bench().service.sessions.expired()) == 0
    assert kinds(path.parent) == ["turn", "turn"]


def test_two_processes_cannot_share_a_folder(make_bench: Make) -> None:
    make_bench()
    with pytest.raises(ProxyError, match=rf"records\.jsonl is in use by process {os.getpid()} on "):
        make_bench()


def test_records_of_a_newer_version(make_bench: Make, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "records.jsonl").write_text(add_checksum('{"v":2,"kind":"turn"}') + "\n")
    with pytest.raises(ProxyError, match="line 1: records of version 2"):
        make_bench()


def test_what_was_trained_on_is_not_handed_on_again_unless_its_step_was_lost(make_bench: Make) -> None:
    first = make_bench(resumed_from=0)
    for name in ("a", "b", "c"):
        first.talk(name, 1)
        first.service.end(name)
    keys = [episode.task.task_id for episode in first.episodes]
    for step, key in ((1, keys[0]), (2, keys[1])):
        first.service.recorder.write({"kind": "trained", "step": step, "sessions": [key]})
    first.service.close()
    again = make_bench(resumed_from=1)
    assert [episode.task.task_id for episode in again.service.unused] == [keys[1], keys[2]]
    again.service.recorder.write({"kind": "trained", "step": 2, "sessions": [keys[2]]})
    again.service.close()
    last = make_bench(resumed_from=2)
    assert [episode.task.task_id for episode in last.service.unused] == [keys[1]]


def test_an_engine_that_fails_fails_only_the_request_at_fault(make_bench: Make) -> None:
    bench = make_bench()
    bench.policy.gate.clear()
    first = bench.begin([user("first")], "s0")
    until(bench.policy.entered.is_set)

    def answer(request: Any) -> str:
        if "poison" in bench.policy.prompts[-1]:
            raise RuntimeError("out of memory")
        return "fine"

    bench.policy.answer = answer
    asked = [bench.begin([user(text)], text) for text in ("a", "poison", "b")]
    bench.policy.gate.set()
    assert first.wait(20).reply.content == "fine"
    assert asked[0].wait(20).reply.content == "fine"
    with pytest.raises(ApiError, match="RuntimeError: out of memory") as caught:
        asked[1].wait(20)
    assert caught.value.status == 500
    assert asked[2].wait(20).reply.content == "fine"
    assert bench.service.health()["failed"] == 1
    assert bench.service.counts["underway"] == 0


@pytest.fixture
def waits_for_its_engine(make_bench: Make) -> Any:
    """A proxy whose engine streams, and has not drawn anything since it was asked."""
    bench = make_bench(policy=tools.StreamingEcho)
    bench.policy.gate.clear()
    thread, _ = in_thread(lambda: bench.ask([user("hello")], "a"))
    assert bench.policy.entered.wait(20)
    yield bench
    bench.policy.flow()
    thread.join(20)


def test_an_engine_that_stands_still_is_no_healthy_server(waits_for_its_engine: Any) -> None:
    bench = waits_for_its_engine
    assert bench.service.health()["status"] == "ok"
    bench.now += STOPS_WITHIN + 1
    assert bench.service.health()["status"] == "stalled"
    bench.policy.flow()
    until(lambda: bench.service.health()["turns"]["main"] == 1)
    assert bench.service.health()["status"] == "ok"


def test_time_in_which_the_machine_was_suspended_is_no_engines_and_no_requests(
    waits_for_its_engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the clock that a service has by itself."""
    bench, moment = waits_for_its_engine, [0.0]
    for name, value in {"_stood": 0.0, "_looked": 0.0, "_looks": True}.items():
        monkeypatch.setattr(running_clock, name, value)
    monkeypatch.setattr(running_clock, "time", SimpleNamespace(monotonic=lambda: moment[0], sleep=time.sleep))
    service = ProxyService(bench.policy, bench.renderer, tmp_path / "own", max_context=4096)
    bench.policy.entered.clear()
    waits = service.begin(bench.request([user("hello")], "a"))
    assert bench.policy.entered.wait(20)
    moment[0] += service.settings.deadline + 1
    assert service.health()["status"] == "ok"
    assert waits.wait(0) is None
    # what the machine runs counts
    for _ in range(int(STOPS_WITHIN / running_clock.PERIOD) + 1):
        moment[0] += running_clock.PERIOD
        stalled = service.health()["status"]
    assert stalled == "stalled"
    bench.policy.flow()
    service.close()
