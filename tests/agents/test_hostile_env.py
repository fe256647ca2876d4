"""An environment that hangs, raises, exits or returns nonsense costs its episode, never the run."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hostile_env
import pytest
from hostile_env import BEGINS, FAILING, STEPS

from turngym.agents.evaluation.play_episodes import play_episodes
from turngym.agents.executor.worker_count import LocalProcesses
from turngym.agents.executor.workers import open_workers
from turngym.agents.playing.env_maker import env_maker, probe
from turngym.agents.playing.episode_session import SessionPool
from turngym.agents.playing.rollout import FAILURES, FailureWatch, Job, failed_episode, rollout
from turngym.agents.playing.scripted import ExpertAgent, RandomAgent
from turngym.agents.playing.timed_calls import CallTimeout, TimedCalls, attempt
from turngym.core import running_clock
from turngym.core.episode import Episode, Status
from turngym.core.errors import AgentError, EnvBackendError, TaskError, TurngymError
from turngym.core.trace import read_trace
from turngym.scripts import main

MAKE = env_maker("hostile_env:tests/Hostile-v0", channel="text")
SHORT = 1.0  # a busy machine begins an episode in less
WHY = {
    "hangs": f"the environment's step or reset took more than {SHORT:g} s",
    "raises": "KeyError: 'no such house' (",
    "prints": "ValueError: two lines (",
    "cannot say why": "_Unsaid: it has no text (",
    "exits": "SystemExit: 3 (",
    "exits without a word": "SystemExit: ",
    "runs out of memory": "MemoryError: ",
    "recurses": "RecursionError: maximum recursion depth exceeded",
    "nan": "the reward is nan; it must be a finite number",
    "inf": "the reward is -inf; it must be a finite number",
    "text": "the reward is '1.0'; it must be a finite number",
    "nothing": "the reward is None; it must be a finite number",
    "success of text": "success is 'False'; it must be True or False",
    "score of 3": "the score is 3.0; it must be a number from 0 to 1",
    "goals of text": "the goal rate is 'many'; it must be a number from 0 to 1",
    "admissible numbers": "one of the admissible actions is 1; it must be text",
    "action of a number": "the action in info is 5; it must be text",
    "hangs at reset": f"the environment's step or reset took more than {SHORT:g} s",
    "raises at reset": "KeyError: 'no such house' (",
    "exits at reset": "SystemExit: 3 (",
}


@pytest.fixture(autouse=True)
def _hang_no_longer_than_the_test() -> Iterator[None]:
    hostile_env.HANGING.clear()
    yield
    hostile_env.HANGING.set()


def check(name: str, episode: Episode) -> None:
    late = "hangs" in name
    assert episode.status is (Status.ERROR_TIMEOUT if late else Status.ERROR_ENV)
    assert episode.depth == (0 if name in BEGINS else 1)
    assert WHY[name] in episode.meta["error"]
    assert "\n" not in episode.meta["error"]
    assert episode.episode_return == 0.0


@pytest.mark.parametrize("tasks", [None, "abc", iter("abc"), {"a"}])
def test_a_list_of_tasks_that_is_none(tasks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    env = MAKE()
    monkeypatch.setattr(hostile_env.HostileEnv, "task_ids", lambda self: tasks)
    for ask in (env.task_ids, env.reset):
        with pytest.raises(EnvBackendError, match=r"HostileEnv\.task_ids\(\) gave"):
            ask()


@pytest.mark.parametrize("fails", [hostile_env._raises, hostile_env._cannot_say, lambda: sys.exit(3)])
def test_an_environment_that_fails_before_it_plays_is_a_line(fails: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    env = MAKE()
    monkeypatch.setattr(hostile_env.HostileEnv, "task_ids", lambda self: fails())
    with pytest.raises(EnvBackendError, match=r"HostileEnv\.task_ids\(\) failed: "):
        env.task_ids()
    monkeypatch.setattr(hostile_env.HostileEnv, "__init__", lambda self, **given: fails())
    with pytest.raises(TurngymError, match="tests/Hostile-v0 cannot be made: "):
        MAKE()


def test_an_environment_that_cannot_be_closed_loses_nothing() -> None:
    for name in hostile_env.CLOSES:
        env = MAKE()
        env.reset(options={"task": name})
        with pytest.warns(UserWarning, match="HostileEnv failed as it was closed: "):
            env.close()


def test_an_environment_that_hangs_as_it_is_closed_keeps_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only those of a rollout: the one whose tool, players and tasks are read first, too."""
    monkeypatch.setitem(hostile_env.CLOSES, "fine", hostile_env._hangs)
    with pytest.warns(UserWarning, match=f"closing the environment took more than {SHORT:g} s"):
        assert probe("hostile_env:tests/Hostile-v0", {}, SHORT).tool.name == "hostile_step"


@pytest.mark.filterwarnings("ignore:HostileEnv failed as it was closed")
@pytest.mark.parametrize("slots", [1, 64])
def test_each_costs_its_episode(slots: int) -> None:
    names = [*STEPS, *BEGINS, "fine"]
    jobs = [Job(task_id=name) for name in names]
    found = rollout(jobs, MAKE, ExpertAgent(), slots=slots, step_timeout=SHORT)
    for name, episode in zip(names, found, strict=True):
        if name == "fine":
            assert (episode.status, episode.episode_return, episode.depth) == (Status.COMPLETED, 0.5, 2)
        else:
            check(name, episode)


def test_workers_say_the_same_and_stay_alive() -> None:
    jobs = [Job(task_id=name) for name in (*FAILING, "fine")]
    with open_workers(LocalProcesses(processes=1, step_timeout=SHORT, worker_timeout=60.0)) as play:
        found = play(jobs, MAKE, ExpertAgent())
        assert play.deaths == []  # type: ignore[attr-defined]
    for name, episode in zip(FAILING, found, strict=False):
        check(name, episode)
    assert found[-1].status is Status.COMPLETED


def test_steps_that_all_hang_cost_two_limits() -> None:
    began = time.monotonic()
    found = rollout([Job(task_id="hangs")] * 20, MAKE, ExpertAgent(), step_timeout=SHORT)
    assert {episode.status for episode in found} == {Status.ERROR_TIMEOUT}
    assert time.monotonic() - began < 20 * SHORT  # one after the other would take at least that


@pytest.mark.parametrize("name", FAILING)
def test_a_session_ends(name: str) -> None:
    pool = SessionPool(MAKE, step_timeout=SHORT)
    session = pool.open(name)
    if not session.done:
        session.step_text("<action>go</action>")
        stepped = session.step_text("<action>go</action>")
        assert stepped.done
        assert WHY[name] in stepped.observation
    check(name, session.episode())
    again = pool.open("fine")
    again.step_text("<action>go</action>")
    assert again.step_text("<action>go</action>").reward == 0.5
    again.close()
    pool.close()


@pytest.mark.parametrize(
    ("act", "error"),
    [
        (lambda: 1 / 0, "ZeroDivisionError: division by zero ("),
        (lambda: 5, "the expert's action is 5; it must be"),
    ],
)
def test_an_expert_that_fails_costs_its_episode(act: Any, error: str) -> None:
    player = SimpleNamespace(observe=lambda action: None, act=act)
    (episode,) = rollout([Job(task_id="fine")], MAKE, ExpertAgent(expert=lambda guard: player))
    assert episode.status is Status.ERROR_ENV
    assert episode.meta["error"].startswith(error)


def test_an_episode_in_which_nothing_is_possible_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostile_env.HostileEnv, "sample_action", lambda self, rng: None)
    (episode,) = rollout([Job(task_id="fine")], MAKE, RandomAgent())
    assert (episode.status, episode.depth) == (Status.ERROR_ENGINE, 0)


def test_a_task_that_is_named_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TurngymError, match=r"'fine' (is named )?twice"):
        play_episodes("hostile_env:tests/Hostile-v0", "expert", tasks=["fine", "fine"], progress=False)
    twice = {"only": ("hangs", "fine", "fine")}
    with pytest.raises(TurngymError, match=r"'fine' (is named )?twice"):
        play_episodes("hostile_env:tests/Hostile-v0", "expert", tasks=1, env_kwargs=twice, progress=False, workers=0)


def test_what_turngym_names_is_no_fault_of_the_environment() -> None:
    with pytest.raises(TaskError, match="the data differ"):
        rollout([Job(task_id="fine", sha256="0" * 64)], MAKE, ExpertAgent())


def failed(text: str, status: Status = Status.ERROR_ENV) -> Episode:
    return failed_episode(Job(task_id="t"), "e", text, {}, status)


def test_a_run_whose_episodes_all_fail_stops() -> None:
    seen: list[Episode] = []
    watch = FailureWatch(seen.append)
    for number in range(FAILURES - 1):
        watch(failed(f"reason {number}"))
    with pytest.raises(AgentError, match=rf"all {FAILURES} episodes failed; the first: reason 0"):
        watch(failed("the last"))
    assert len(seen) == FAILURES
    few = FailureWatch(seen.append)
    few.check()
    few(failed("alone"))
    with pytest.raises(AgentError, match="all 1 episodes failed; the first: alone"):
        few.check()
    (fine,) = rollout([Job(task_id="fine")], MAKE, ExpertAgent())
    few(fine)
    for number in range(2 * FAILURES):
        few(failed(f"reason {number}"))
    few.check()


def test_the_command_stops_with_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "t.jsonl"
    words = ["rollout", "--env", "hostile_env:tests/Hostile-v0", "--agent", "expert", "--out", str(out)]
    words += ["--workers", "0", "--step-timeout", "0.2", "--samples", "40", "--slots", "4", "--task"]
    assert main.main([*words, "hangs"]) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.endswith("all 16 episodes failed; the first: the environment's step or reset took more than 0.2 s")
    assert len(read_trace(out)[0]) == 16
    out.unlink()
    # as always where some ended in errors
    assert main.main([*words, "exits", "fine"]) == 1
    assert sum(episode.status.is_error for episode in read_trace(out)[0]) == 40


def test_options_that_cannot_be() -> None:
    with pytest.raises(TurngymError, match="worker_timeout is 100;"):
        LocalProcesses(processes=2, worker_timeout=100.0, step_timeout=60.0)


def test_calls_come_back_in_order_and_one_thread_serves_them() -> None:
    calls = TimedCalls(30.0, "a call")
    where: list[int] = []

    def noted(number: int) -> int:
        where.append(threading.get_ident())
        return number

    for _ in range(3):
        assert [one.value for one in calls.run([partial(noted, n) for n in range(5)])] == [0, 1, 2, 3, 4]
    assert len(set(where)) == 1
    assert threading.get_ident() not in where
    assert TimedCalls(float("inf"), "a call").call(threading.get_ident).value == threading.get_ident()
    assert calls.run([]) == []
    calls.close()
    with pytest.raises(TurngymError, match="the time for a call is 0 s"):
        TimedCalls(0.0, "a call")


def test_a_call_that_hangs_takes_no_other_with_it() -> None:
    calls = TimedCalls(SHORT, "a call")
    stuck = threading.Event()
    found = calls.run([lambda: 1, lambda: stuck.wait(30), lambda: 2, lambda: stuck.wait(30), lambda: 3])
    assert [one.value for one in found] == [1, None, 2, None, 3]
    assert [type(one.error) for one in found] == [type(None), CallTimeout] * 2 + [type(None)]
    assert calls.call(lambda: 4).value == 4
    stuck.set()


def test_ctrl_c_twice_waits_for_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(lock: threading.Lock, end: float) -> bool:
        raise KeyboardInterrupt

    gate = threading.Event()
    calls = TimedCalls(1.0, "the step")
    monkeypatch.setattr(running_clock, "acquired", interrupted)
    with pytest.raises(KeyboardInterrupt):
        calls.call(gate.wait)
    monkeypatch.undo()
    assert calls.call(lambda: 5).value == 5
    gate.set()
    calls.close()


def test_failures_in_words() -> None:
    def interrupted() -> Any:
        raise KeyboardInterrupt

    def wrong() -> Any:
        raise TaskError("no such task")

    def down() -> Any:
        raise EnvBackendError("the server is gone")

    assert attempt(lambda: 3).failure == ""
    assert attempt(down).failure == "the server is gone"
    for call, error in ((interrupted, KeyboardInterrupt), (wrong, TaskError)):
        with pytest.raises(error):
            _ = attempt(call).failure
