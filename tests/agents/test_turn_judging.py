"""Turns before a judge: as soon as the next one is there, side by side, again after a failure, across restarts."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import proxy_tools as tools
import pytest

from turngym.agents.proxy.sessions import Feedback
from turngym.agents.proxy.turn_records import votes_record
from turngym.core.episode import Episode
from turngym.core.protocols import JudgeRequest, Judgment
from turngym.trainers.judged_episodes import ScoredTurns, UnreadVotes
from turngym.trainers.live import judging as turn_judging
from turngym.trainers.live.judging import SessionJudge, TurnJudging
from turngym.trainers.live.sessions import SessionBuffer

user, until = tools.user, tools.until


class Judge:
    """Says 1; notes what it was asked; fails while `down`, or for a `next_state` in `poison`; waits at its gate."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.down: BaseException | bool = False
        self.poison: set[str] = set()
        self.gate = threading.Event()
        self.gate.set()
        self.inside = self.most = 0
        self.lock = threading.Lock()

    def judge(self, requests: Sequence[JudgeRequest]) -> list[Judgment]:
        with self.lock:
            self.inside += 1
            self.most = max(self.most, self.inside)
            self.asked += [request.next_state for request in requests]
        assert self.gate.wait(20)
        with self.lock:
            self.inside -= 1
        if isinstance(self.down, BaseException):
            raise self.down
        return [
            Judgment(votes=(None, None), error="no answer")
            if self.down or request.next_state in self.poison
            else Judgment(votes=(f"{request.next_role} \\boxed{{1}}", None))
            for request in requests
        ]


class Desk:
    """A service whose turns go to a judge, as `turngym serve proxy` connects them."""

    def __init__(self, tokenizer: Any, folder: Path, judge: Judge, **options: Any) -> None:
        self.judge, self.done = judge, list[Episode]()
        self.changed = threading.Condition()
        workers = options.pop("workers", 1)
        self.bench = tools.Bench(tokenizer, folder, **options)
        self.now = 0.0
        self.desk = TurnJudging(
            SessionJudge(judge=judge, kind="score", workers=workers, batch=1),
            on_votes=lambda *what: self.bench.service.recorder.write(votes_record(*what)),
            on_judged=self.done.append,
            votes=self.bench.service.votes,
            clock=lambda: self.now,
        )
        for episode in (*self.bench.service.unused, *self.bench.service.open_episodes()):
            self.desk.put(episode)
        self.bench.service.on_session = self.desk.put
        self.bench.service.heard.tell = lambda *what: "counted" if self.desk.hear(*what) else "late"
        self.talk = self.bench.talk

    def end(self, name: str, *final: str) -> None:
        self.bench.service.end(name, tuple(tools.message(text) for text in final))

    def close(self) -> None:
        self.judge.gate.set()
        self.desk.close()
        self.bench.service.close()


@pytest.fixture
def make(make_tokenizer: Callable[..., Any], tmp_path: Path) -> Iterator[Callable[..., Desk]]:
    made: list[Desk] = []

    def desk(judge: Judge, **options: Any) -> Desk:
        made.append(Desk(make_tokenizer(), tmp_path, judge, **options))
        return made[-1]

    yield desk
    for one in made:
        one.close()


def test_a_turn_is_judged_when_the_next_one_is_there(make: Any) -> None:
    judge = Judge()
    desk = make(judge)
    desk.talk("a", 3)
    until(lambda: judge.asked == ["a says 1", "a says 2"])
    assert not desk.done  # the session goes on
    until(lambda: not desk.desk.as_json()["to_judge"])
    desk.end("a", "thanks")
    until(lambda: desk.done)
    assert judge.asked == ["a says 1", "a says 2", "thanks"]
    (episode,) = desk.done
    assert [turn.judge_scores for turn in episode.turns] == [(1.0,)] * 3
    assert [turn.judge_votes[0] for turn in episode.turns] == ["user \\boxed{1}"] * 3
    assert desk.desk.as_json() == {"to_judge": 0, "sessions_to_judge": 0, "turns_judged": 3}


def test_an_open_session_is_kept_once(make: Any) -> None:
    """Hundreds are open for a quarter of an hour: neither the queue before the judge nor their turns hold their ids."""
    desk = make(Judge())
    desk.talk("open", 3)
    until(lambda: desk.desk.as_json().get("turns_judged") == 2)
    (session,) = desk.bench.service.sessions.all()
    gc.collect()
    copies = [one for one in gc.get_objects() if type(one) is Episode and one.task.task_id == session.key]
    assert copies == []
    assert [turn.record.ids.size + turn.record.prompt_ids.size for turn in session.turns] == [0, 0, 0]


def test_many_sessions_are_judged_at_once(make: Any) -> None:
    judge = Judge()
    judge.gate.clear()
    desk = make(judge, workers=4)
    for number in range(6):
        desk.talk(f"s{number}", 2)
    until(lambda: judge.inside == 4)
    judge.gate.set()
    for number in range(6):
        desk.end(f"s{number}")
    until(lambda: len(desk.done) == 6)
    assert judge.most == 4
    assert len(judge.asked) == 6


@pytest.mark.parametrize("down", [True, OSError("no judge here")])
def test_after_an_outage_everything_is_judged_without_a_restart(make: Any, down: Any) -> None:
    judge = Judge()
    judge.down = down
    desk = make(judge)
    desk.talk("a", 2)
    until(lambda: desk.desk.counts["judge_failed"] == 1)
    desk.end("a", "thanks")
    until(lambda: desk.desk.counts["judge_failed"] == 2)
    assert desk.desk.as_json()["judge_error"] == ("no answer" if down is True else "OSError: no judge here")
    asked = len(judge.asked)
    desk.now += 0.9  # the first wait is a second
    threading.Event().wait(0.6)
    assert len(judge.asked) == asked
    desk.now += 0.2
    until(lambda: desk.desk.counts["judge_failed"] == 4)
    judge.down = False
    desk.now += 1.5  # the second one two
    threading.Event().wait(0.6)
    assert not desk.done
    desk.now += 0.6
    until(lambda: desk.done)
    assert [turn.judge_scores for turn in desk.done[0].turns] == [(1.0,), (1.0,)]


def test_waits_double_up_to_the_longest(make: Any) -> None:
    judge = Judge()
    judge.down = True
    desk = make(judge)
    desk.talk("a", 2)
    waits = []
    for number in range(1, 10):
        until(lambda number=number: desk.desk.counts["judge_failed"] == number)
        until(lambda: desk.desk._jobs)
        waits.append(desk.desk._jobs[0].due - desk.now)
        desk.now = desk.desk._jobs[0].due
    assert waits == [1, 2, 4, 8, 16, 32, 64, 120, 120]
    assert not desk.desk.counts["judge_gave_up"]  # the judge answers nobody: that is no fault of the turn


def test_a_turn_that_fails_while_others_are_judged_is_given_up(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn_judging, "GIVE_UP", 2)
    judge = Judge()
    judge.poison = {"a says 1"}
    desk = make(judge)
    desk.talk("a", 2)
    desk.end("a", "thanks")
    for number in range(2):
        until(lambda number=number: desk.desk.counts["judge_failed"] == number + 1)
        desk.talk(f"b{number}", 2)
        until(lambda number=number: desk.desk.counts["turns_judged"] == number + 2)
        desk.now += 200
    until(lambda: desk.done)
    assert [turn.judge_scores for turn in desk.done[0].turns] == [None, (1.0,)]
    assert desk.done[0].turns[0].judge_votes == (None, None)
    assert desk.desk.counts["judge_gave_up"] == 1


def test_the_queue_survives_a_restart_and_votes_are_not_asked_for_again(make: Any) -> None:
    judge = Judge()
    first = make(judge)
    first.talk("a", 2)
    messages = first.talk("b", 3)
    until(lambda: first.desk.counts["turns_judged"] == 3)
    judge.down = True
    first.end("a", "thanks")
    until(lambda: first.desk.counts["judge_failed"])
    first.close()
    assert sorted(judge.asked) == ["a says 1", "b says 1", "b says 2", "thanks"]
    judge.asked.clear()
    judge.down = False
    second = make(judge)
    until(lambda: second.done)
    assert judge.asked == ["thanks"]
    assert [turn.judge_scores for turn in second.done[0].turns] == [(1.0,), (1.0,)]
    second.bench.ask([*messages, user("and on")], "b", session_done=False)
    second.end("b")
    until(lambda: len(second.done) == 2)
    assert judge.asked == ["thanks", "and on"]
    assert [turn.judge_scores for turn in second.done[1].turns] == [(1.0,), (1.0,), (1.0,), None]


def test_what_was_being_judged_when_the_process_ended_is_judged_by_the_next(make: Any) -> None:
    judge = Judge()
    first = make(judge)
    judge.down = True
    first.talk("a", 2)
    until(lambda: first.desk.counts["judge_failed"])
    first.close()
    judge.down = False
    second = make(judge)
    until(lambda: second.desk.counts["turns_judged"] == 1)
    second.end("a")
    until(lambda: second.done)
    assert [turn.judge_scores for turn in second.done[0].turns] == [(1.0,), None]


def test_an_answer_asked_for_again_leaves_the_turn_before_it_its_next_state(make: Any) -> None:
    judge = Judge()
    desk = make(judge)
    messages = desk.talk("a", 2)
    desk.bench.ask(messages[:-1], "a")
    desk.end("a", "thanks")
    until(lambda: desk.done)
    assert [turn.excluded for turn in desk.done[0].turns] == [None, None]
    assert [turn.observation for turn in desk.done[0].turns] == ["hello", "a says 1"]
    assert [turn.judge_scores for turn in desk.done[0].turns] == [(1.0,), (1.0,)]
    assert judge.asked == ["a says 1", "thanks"]


def test_the_oldest_make_room_while_the_judge_is_down(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn_judging, "BACKLOG", 2)
    judge = Judge()
    judge.down = True
    desk = make(judge)
    for name in "abc":
        desk.talk(name, 1)
        desk.end(name, f"thanks from {name}")
    assert desk.desk.as_json()["dropped_for_age"] == 1
    judge.down = False
    desk.now += 500
    until(lambda: len(desk.done) == 2)
    assert [episode.final_observation for episode in desk.done] == ["thanks from b", "thanks from c"]


@pytest.mark.filterwarnings("ignore")
def test_votes_that_nobody_can_read_count_as_failed_after_a_while() -> None:
    class Mumbles:
        def judge(self, requests: Sequence[JudgeRequest]) -> list[Judgment]:
            return []

    judge = SessionJudge(judge=Mumbles(), kind="score", unread=UnreadVotes(limit=0.5))
    scores = []
    for number in range(4):
        episode = judge.finished(tools.session(number, 0, judge_votes=("hm",), judge_scores=()))
        scores.append(episode.turns[0].judge_scores)
    assert scores == [(), (), None, None]


UP, DOWN = Feedback(score=1), Feedback(score=-1, text="it was the other drawer")


def test_a_thumb_takes_the_judges_place(make: Any) -> None:
    judge = Judge()
    desk = make(judge)
    messages = desk.talk("s", 1)
    desk.bench.service.feedback(DOWN, session_id="s", turn=0)
    desk.bench.ask([*messages, user("next")], "s")
    desk.bench.service.feedback(UP, session_id="s", turn=1)
    desk.end("s")
    until(lambda: desk.done)
    # the last turn has no next state, and teaches all the same
    assert [turn.judge_scores for turn in desk.done[0].turns] == [(-1.0,), (1.0,)]
    assert judge.asked == []
    assert desk.bench.service.feedback(UP, session_id="s", turn=0) == "late"


def test_a_thumb_ends_the_wait_for_a_judge_that_is_down(make: Any) -> None:
    judge = Judge()
    judge.down = True
    desk = make(judge)
    desk.talk("s", 2)
    until(lambda: desk.desk.as_json().get("judge_failed"))
    desk.end("s")
    assert not desk.done
    assert desk.bench.service.feedback(UP, session_id="s", turn=0) == "counted"
    until(lambda: desk.done)
    assert desk.done[0].turns[0].judge_scores == (1.0,)
    assert desk.desk.as_json()["to_judge"] == 0


def test_a_session_that_waits_for_its_step_is_changed_and_counted_anew(make_bench: Any) -> None:
    bench = make_bench()
    bench.talk("s", 2)
    bench.service.end("s")
    episode = bench.episodes[0]
    # judged before the user's word, and no next state: the second turn is not trained on
    judged = replace(episode.turns[0], judge_votes=("\\boxed{1}",), judge_scores=(1.0,))
    episode = replace(episode, turns=(judged, episode.turns[1]))
    buffer = SessionBuffer(
        engine=bench.service.engine,
        publish=lambda version: None,
        select=ScoredTurns(),
        record=bench.service.recorder.write,
    )
    buffer.put_judged([episode])
    assert buffer.as_json()["ready_turns"] == 1
    judge = SessionJudge(judge=Judge(), kind="score")
    assert buffer.amend(episode.task.task_id, lambda one: judge.amended(one, 1, UP))
    assert buffer.as_json()["ready_turns"] == 2
    assert not buffer.amend("nobody-7", lambda one: one)
    buffer.close()
