"""Signs of life: what is counted while episodes are played, and the lines of a log that nobody watches."""

from __future__ import annotations

import io
import re
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from turngym.agents.playing.rollout import Job, rollout
from turngym.agents.playing.scripted import ExpertAgent
from turngym.core import progress
from turngym.core.progress import ACTIVITY, Activity, progress_bar
from turngym.trainers import progress as training
from turngym.trainers.progress import LiveProgress


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "FIRST_LINE", 0.05)
    monkeypatch.setattr(progress, "LINE_EVERY", 0.05)


def test_turns_are_counted_as_they_are_played(make_doors: Any) -> None:
    before, seen = replace(ACTIVITY), []

    class Wrong(ExpertAgent):
        def respond(self, waiting: Any) -> Any:
            seen.append((ACTIVITY.playing, ACTIVITY.deepest))
            said = super().respond(waiting)
            return [replace(one, text="what?") if ACTIVITY.deepest == 1 else one for one in said]

    rollout([Job(task_id="doors/2"), Job(task_id="doors/3")], make_doors(), Wrong())
    # the second answer of both opens no door
    assert (ACTIVITY.turns - before.turns, ACTIVITY.malformed - before.malformed) == (7, 2)
    assert seen == [(2, 0), (2, 1), (2, 2), (1, 3)]
    assert ACTIVITY.playing == 0


def until(condition: Callable[[], Any]) -> None:
    end = time.perf_counter() + 60  # tests set the other clocks
    while not condition():
        assert time.perf_counter() < end
        time.sleep(0.01)


def heard(capsys: pytest.CaptureFixture[str], wanted: str) -> list[str]:
    """Lines of standard error, once one has `wanted`."""
    said: list[str] = []
    until(lambda: said.append(capsys.readouterr().err) or wanted in "".join(said))
    return "".join(said).splitlines()


def test_a_log_file_gets_lines_while_the_first_episode_lasts(
    often: None, make_doors: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    (episode,) = rollout([Job(task_id="doors/3")], make_doors(), ExpertAgent())
    with progress_bar("evaluate", 4) as report:
        ACTIVITY.turns += 30
        ACTIVITY.tokens += 900
        ACTIVITY.malformed += 3
        early = heard(capsys, "0/4 episodes")
        report(episode)
        report(replace(episode, success=False))
        late = heard(capsys, "2/4 episodes")
    assert re.fullmatch(
        r"evaluate: 0/4 episodes, 30 turns \([\d.]+/s\), 900 tokens \(\d+/s\), 10 % malformed, 0:00:00", early[0]
    )
    assert late[-1].startswith("evaluate: 2/4 episodes, success 50.0 %, 30 turns")
    assert late[-1].endswith("about 0:00:00 left")
    with progress_bar("evaluate", 4, enabled=False) as report:
        time.sleep(0.1)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("limit", "wanted"), [(None, "0:16:40"), (30, "0:01:46")])
def test_the_time_left_counts_what_the_unfinished_have_played(
    limit: int | None, wanted: str, often: None, make_doors: Any, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    (episode,) = rollout([Job(task_id="doors/3")], make_doors(), ExpertAgent())
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(ACTIVITY, "playing", 8)
    monkeypatch.setattr(ACTIVITY, "limit", limit)
    monkeypatch.setattr(ACTIVITY, "turns", ACTIVITY.turns)
    with progress_bar("evaluate", 12) as report:
        # two ended after 3 turns each, eight have played 194 and two have not begun; a turn takes a second
        ACTIVITY.turns += 200
        for _ in range(2):
            report(episode)
        now[0] = 200.0
        # 100 turns for each episode that ended: ten times as many are left, or at most 8 x 30 - 194 and 2 x 30
        assert heard(capsys, f"about {wanted} left")


def test_a_quick_evaluation_says_nothing_before_its_table(make_doors: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("evaluate", 1) as report:
        report(rollout([Job(task_id="doors/3")], make_doors(), ExpertAgent())[0])
    assert capsys.readouterr().err == ""


def test_training_that_goes_on_says_where() -> None:
    live = LiveProgress("opd", total=50)
    live.begin(7)
    live.phase("rollout")
    assert live.line().startswith("opd: step 8/50, rollout")
    assert live.bar.tasks[0].completed == 7


def test_the_bar_of_training_has_the_time_of_a_step_and_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """In 80 columns, and beside the latest loss."""
    now = [1000.0]
    monkeypatch.setattr(training.time, "monotonic", lambda: now[0])
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")
    live = LiveProgress("opd", total=50)

    def shown() -> str:
        with live.console.capture() as printed:
            live.console.print(live.bar.get_renderable())
        return " ".join(re.sub(r"\x1b\[[\d;]*m|━", "", printed.get()).split())

    live.row({"step": 1, "kind": "train", "loss": 0.5})
    assert "left" not in shown()
    now[0] += 100
    live.row({"step": 2, "kind": "train", "loss": 0.25, "success": 0.5})
    assert re.fullmatch(r"opd 2/50 \S+ 0:01:40 a step, about 1:20:00 left loss 0.2.*", shown().replace("start ", ""))
    now[0] += 50
    live.phase("update")
    assert shown().startswith("opd update")
    assert "0:01:40 a step, about 1:19:10 left" in shown()


def test_activity_in_words() -> None:
    done = Activity(turns=130, malformed=13, tokens=4000, playing=8, deepest=14)
    assert done.since(Activity(turns=10, malformed=1, tokens=600), 60.0) == (
        "120 turns (2.0/s), 3,400 tokens (57/s), 10 % malformed, 8 playing at turn 15"
    )
    assert Activity().since(Activity(), 1.0) == "0 turns (0.0/s)"


def test_a_student_that_falls_below_its_start_is_said_once() -> None:
    def told(*points: tuple[float, float, float], start: dict[str, float] | None = None) -> list[str]:
        live = LiveProgress("grpo", total=50, every=100)
        live.console.file = io.StringIO()
        with live:
            if start is not None:
                live.started_at(start)
            for place, (low, avg, high) in enumerate(points):
                row = {"eval/low": low, "eval/avg": avg, "eval/high": high}
                live.row({"step": 10 * (place + (start is not None)), "kind": "eval", **row})
        return [line for line in live.console.file.getvalue().splitlines() if "began with" in line]

    begun = {"eval/low": 0.4, "eval/avg": 0.5, "eval/high": 0.6}
    (line,) = told((0.4, 0.5, 0.6), (0.3, 0.39, 0.41), (0.1, 0.2, 0.3), (0.0, 0.1, 0.2))
    assert line.startswith("grpo: step 20: the student evaluates at 20.0 % [10.0, 30.0], below the 50.0 % [40.0, 60.0]")
    # a run that goes on knows where it began
    assert len(told((0.1, 0.2, 0.3), start=begun)) == 1
    assert not told((0.1, 0.2, 0.3), (0.0, 0.1, 0.2))
    assert not told((0.4, 0.5, 0.6), (0.3, 0.4, 0.5))


def test_steps_that_teach_nothing_are_said() -> None:
    """Where all rewards are equal and no group is left out, an update is made of a gradient of 0."""
    live = LiveProgress("rloo", total=50, every=100)
    live.console.file = io.StringIO()
    with live:
        for step, (norm, lr) in enumerate([(0.0, 1e-3), (0.5, 1e-3), (0.0, 0.0)], start=1):
            live.row({"step": step, "kind": "train", "episodes": 4, "updates": 1, "grad_norm": norm, "lr": lr})
    found = [line for line in live.console.file.getvalue().splitlines() if "compared" in line]
    assert found[0] == "rloo: step 1: its gradient is 0: nothing in its 4 episodes could be compared"
    assert found[1].startswith("rloo: 1 of 3 steps taught nothing")
    assert len(found) == 2
