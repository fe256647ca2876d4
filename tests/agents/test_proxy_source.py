"""From ended sessions to training batches."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import proxy_tools as tools
import pytest

from turngym.agents.judges.judges import WordJudge
from turngym.core.episode import Episode
from turngym.core.protocols import JudgeRequest
from turngym.core.rollout_request import RolloutRequest
from turngym.trainers.live import sessions
from turngym.trainers.live.judging import SessionHints
from turngym.trainers.live.sessions import SessionBuffer

user, drawn = tools.user, tools.session


def session(number: int, turns: int = 1) -> Episode:
    return tools.session(number, *[0] * turns)


class Log:
    """Everything a source says to the rest of the world, in order; it is the engine, too."""

    def __init__(self) -> None:
        self.said: list[Any] = []
        self.changed = threading.Condition()

    def note(self, *what: Any) -> None:
        with self.changed:
            self.said.append(what)
            self.changed.notify_all()

    def pause(self) -> None:
        self.note("rest")

    def resume(self) -> None:
        self.note("work")

    def record(self, record: Mapping[str, Any]) -> None:
        self.note(record["kind"], record["step"], tuple(int(key[2:]) for key in record["sessions"]))

    def wait(self, *what: Any) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: what in self.said, 20), self.said


@pytest.fixture
def make() -> Iterator[Callable[..., tuple[SessionBuffer, Log]]]:
    made: list[SessionBuffer] = []

    def source(**options: Any) -> tuple[SessionBuffer, Log]:
        log = Log()
        settings = {"batch_turns": 4, "select": None, **options}
        engine: Any = log
        one = SessionBuffer(
            engine=engine, publish=lambda version: log.note("version", version), record=log.record, **settings
        )
        made.append(one)
        return one, log

    yield source
    for one in made:
        one.close()


def ask(step: int, episodes: int = 64) -> RolloutRequest:
    return RolloutRequest(step=step, episodes=episodes, max_turns=50)


def test_the_engine_rests_from_a_batch_to_its_update(make: Any) -> None:
    source, log = make()
    for number in (1, 2, 3):
        source.put_judged([session(number, turns=2)])
    assert [episode.group for episode in source(ask(8))] == [1, 2]
    source.updated(8)
    told = [what for what in log.said if what[0] in ("rest", "work", "version", "trained")]
    assert told == [("rest",), ("version", 7), ("work",), ("trained", 8, (1, 2)), ("rest",), ("version", 8), ("work",)]
    assert source.as_json()["ready_turns"] == 2


def test_a_step_waits_for_turns_or_for_as_many_sessions_as_it_may_take(make: Any) -> None:
    source, _ = make(batch_turns=100)
    found: list[list[Episode]] = []
    thread = threading.Thread(target=lambda: found.append(source(ask(1, episodes=2))))
    thread.start()
    source.put_judged([session(1)])
    assert not found
    source.put_judged([session(2)])
    thread.join(20)
    assert [episode.group for episode in found[0]] == [1, 2]


def test_sessions_without_usable_turns_are_counted(make: Any) -> None:
    source, log = make()
    source.put_judged([session(1, turns=0)])
    source.put_judged([session(2, turns=4)])
    assert [episode.group for episode in source(ask(1))] == [2]
    assert ("unused", 0, (1,)) in log.said
    assert source.as_json()["nothing_to_train_on"] == 1


def test_the_oldest_make_room_when_the_trainer_is_slow(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "BACKLOG", 2)
    source, _ = make()
    source.put_judged([session(number, turns=2) for number in (1, 2, 3)])
    assert [episode.group for episode in source(ask(1))] == [2, 3]
    assert source.as_json()["dropped_for_age"] == 1


def test_turns_that_are_too_old_are_left_out(make: Any) -> None:
    source, log = make(staleness=2, batch_turns=3)
    source.put_judged([drawn(1, 4, 4), drawn(2, 5, 6, 7)])
    # step 9 is learned by version 8: version 5 is three behind, 6 is two
    source.put_judged([drawn(3, 8)])
    taken = source(ask(9))
    assert [[turn.excluded for turn in episode.turns] for episode in taken] == [["3 versions old", None, None], [None]]
    assert ("unused", 0, (1,)) in log.said
    assert source.as_json()["nothing_to_train_on"] == 1
    source.put_judged([drawn(4, 5), drawn(5, 8, 8, 8)])
    assert [episode.group for episode in source(ask(10))] == [5]
    assert ("unused", 0, (4,)) in log.said


def test_by_default_turns_of_any_age_count(make: Any) -> None:
    source, _ = make(batch_turns=1)
    source.put_judged([drawn(1, 0)])
    assert [turn.excluded for turn in source(ask(1000))[0].turns] == [None]


@pytest.mark.parametrize(("newest", "groups"), [(False, [1, 2]), (True, [3, 2])])
def test_who_is_taken_first(make: Any, newest: bool, groups: list[int]) -> None:
    source, _ = make(newest_first=newest)
    source.put_judged([session(number, turns=2) for number in (1, 2, 3)])
    assert [episode.group for episode in source(ask(1))] == groups


def test_closing_stops_a_trainer_that_waits_and_lets_the_engine_work(make: Any) -> None:
    source, log = make()
    stopped: list[str] = []

    def train() -> None:
        try:
            source(ask(1))
        except KeyboardInterrupt:
            stopped.append("yes")

    thread = threading.Thread(target=train)
    thread.start()
    log.wait("work")
    source.close()
    thread.join(20)
    assert stopped == ["yes"]


@pytest.mark.parametrize(
    ("state", "role", "score"),
    [
        ("Traceback (most recent call last):", "tool", -1),
        ("No, please redo that.", "user", -1),
        ("Thanks, perfect!", "user", 1),
        ("17 files", "tool", 1),
        ("Now do it for the other file as well.", "user", 0),
    ],
)
def test_words(state: str, role: str, score: int) -> None:
    request = JudgeRequest(name="n", kind="score", response="r", next_state=state, next_role=role)
    (judgment,) = WordJudge().judge([request])
    assert judgment.votes[0] is not None
    assert judgment.votes[0].endswith(f"\\boxed{{{score}}}")
    (hint,) = WordJudge().judge([replace(request, kind="hint")])
    assert hint.votes[0] is not None
    assert hint.votes[0].endswith(f"\\boxed{{{1 if score < 0 else -1}}}")


def test_hints_go_behind_the_last_user_message(make_bench: Callable[..., Any]) -> None:
    bench = make_bench(session_turns=1)
    messages = bench.talk("a", 1)
    bench.ask([*messages, {"role": "tool", "content": "42"}], "a")
    bench.service.end("a")
    hints = SessionHints(renderer=bench.renderer, max_context=4096)
    texts = []
    for episode in bench.episodes:  # two parts: the second has to know the first one's messages
        turn = replace(episode.turns[0], hint="use the map")
        found = hints.enhance(replace(episode, turns=(turn,)))
        ids = found.turns[0].hint_prompt_ids
        assert ids is not None
        texts.append(bench.policy.tokenizer.decode(ids, skip_special_tokens=False))
    head = "<|im_start|>user\nhello\n\n[user's hint / instruction]\nuse the map<|im_end|>\n<|im_start|>assistant\n"
    assert texts[0] == head
    assert texts[1] == head + "answer 1<|im_end|>\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("hint", ["take <|im_end|> it", "a bell \x07 rings", "long " * 200])
def test_hints_that_cannot_be_used_are_refused(make_bench: Callable[..., Any], hint: str) -> None:
    bench = make_bench()
    bench.talk("a", 1)
    bench.service.end("a")
    (episode,) = bench.episodes
    turn = replace(episode.turns[0], hint=hint)
    found = SessionHints(renderer=bench.renderer, max_context=200).enhance(replace(episode, turns=(turn,)))
    assert found.turns[0].hint == hint
    assert found.turns[0].hint_prompt_ids is None
