"""Who plays what at a step, in literal numbers: jobs, demonstrations, temperatures, tasks that are held out."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from toy_evaluation import toy_evaluation

from turngym.agents.demonstrations import DemonstrationFilter, Demonstrations, RecordedDemonstrator
from turngym.agents.evaluation.play_panel import PanelEvaluation
from turngym.agents.playing.rollout import Job, rollout
from turngym.agents.playing.scripted import ExpertAgent, PlayerMix
from turngym.agents.rendering.renderer import ChatRenderer, TextEpisodes
from turngym.agents.rollout_sources import (
    DemonstrationSource,
    ExpertSource,
    KeptSource,
    LiveSource,
    SharedEnv,
    step_jobs,
)
from turngym.core.episode import SHORT, Episode
from turngym.core.errors import TurngymError
from turngym.core.rollout_request import PlayPlan, RolloutRequest
from turngym.core.tools import ToolSpec
from turngym.core.trace import read_trace
from turngym.envs.channels import TextChannel
from turngym.envs.panels import PanelError, collect_tasks, make_panel, task_order

OPEN = tuple(f"open door {n}" for n in range(1, 11))


class Recorder:
    """Plays as `rollout` does and keeps what it was asked, call by call."""

    def __init__(self) -> None:
        self.calls: list[SimpleNamespace] = []

    def __call__(self, jobs: Any, make_env: Any, agent: Any, **more: Any) -> Any:
        self.calls.append(SimpleNamespace(jobs=list(jobs), make_env=make_env, agent=agent, **more))
        return rollout(jobs, make_env, agent, **more)


class FakePlayer:
    """Plays as the expert does; its agents are named after their temperature."""

    settings = SimpleNamespace(system="Open the doors.", channel="text")

    def agent(self, temperature: float) -> ExpertAgent:
        return ExpertAgent(name=f"at {temperature:g}")


def live(make_doors: Any, play: Any, tasks: tuple[str, ...], **more: Any) -> LiveSource:
    player: Any = FakePlayer()
    return LiveSource(player=player, make_env=make_doors(max_turns=20), task_ids=tasks, play=play, **more)


def request(**more: Any) -> RolloutRequest:
    return RolloutRequest(**{"step": 1, "episodes": 4, "max_turns": 12, **more})


def test_the_order_of_tasks_in_numbers() -> None:
    rows = [task_order(5, seed=7, step=step, batch=2) for step in (1, 2, 3, 4, 5)]
    assert rows == [[2, 0], [4, 1], [3, 3], [0, 2], [1, 4]]
    assert task_order(5, seed=8, step=1, batch=5) != task_order(5, seed=7, step=1, batch=5)


def test_the_jobs_of_a_step_in_numbers() -> None:
    jobs = step_jobs([f"t{n}" for n in range(5)], 7, request(step=3, episodes=6, group=3))
    seed = 7 * 1_000_003 + 3
    assert jobs == [
        Job(task_id="t3", sample=0, group=0, seed=seed),
        Job(task_id="t3", sample=1, group=0, seed=seed),
        Job(task_id="t3", sample=2, group=0, seed=seed),
        Job(task_id="t3", sample=3, group=1, seed=seed),
        Job(task_id="t3", sample=4, group=1, seed=seed),
        Job(task_id="t3", sample=5, group=1, seed=seed),
    ]
    later = step_jobs([f"t{n}" for n in range(5)], 7, request(step=3, group=2, plan=PlayPlan(round=2)))
    places = task_order(5, seed=7, step=3 + 2 * 10**12, batch=2)
    assert [(job.task_id, job.sample, job.group) for job in later] == [
        *((f"t{places[0]}", 8, 4), (f"t{places[0]}", 9, 4), (f"t{places[1]}", 10, 5), (f"t{places[1]}", 11, 5))
    ]
    assert {job.seed for job in later} == {seed + 2_000_000_000_000}
    with pytest.raises(TurngymError, match="the training split has no tasks"):
        step_jobs([], 7, request())


def test_what_is_played_live(make_doors: Any) -> None:
    play = Recorder()
    collect = live(make_doors, play, ("doors/3", "doors/5"), seed=2, slots=3)
    episodes = collect(request(step=4, group=2, temperature=0.7))
    (call,) = play.calls
    assert call.jobs == step_jobs(("doors/3", "doors/5"), 2, request(step=4, group=2))
    assert (call.agent.name, call.slots, call.max_turns, call.system) == ("at 0.7", 3, 12, "Open the doors.")
    assert call.meta == {"temperature": 0.7, "step": 4}
    assert call.make_env is collect.make_env
    assert not any("states" in played.meta for played in episodes)
    collect(request(step=4, group=2, plan=PlayPlan(states=True)))
    assert [job.states for job in play.calls[1].jobs] == [True] * 4
    assert [(e.task.task_id, e.sample, e.group) for e in episodes] == [
        (j.task_id, j.sample, j.group) for j in call.jobs
    ]


def test_the_rest_of_a_partial_probe_stops_at_its_own_cap(make_doors: Any) -> None:
    play = Recorder()
    source = live(make_doors, play, ("doors/3", "doors/5", "doors/6", "doors/4"))
    asked = request(max_turns=5, plan=PlayPlan(short_episodes=2, short_turns=3))
    played = source(asked)
    assert [job.max_turns for job in play.calls[0].jobs] == [None, None, 3, 3]
    full, short = played[:2], played[2:]
    assert [episode.meta.get(SHORT) for episode in played] == [None, None, 3, 3]
    assert all(episode.depth <= 5 for episode in full)
    assert max(episode.depth for episode in full) > 3
    assert [(episode.depth, episode.status) for episode in short if episode.depth == 3]
    assert all(episode.depth <= 3 for episode in short)
    # another process plays the other half: the caps belong to the episodes, not to their places in its list
    source(replace(asked, share=(1, 2)))
    assert [job.max_turns for job in play.calls[1].jobs] == [None, 3]
    # where the cap is full depth there is nothing to mark
    source(replace(asked, plan=PlayPlan(short_episodes=2, short_turns=5)))
    assert [job.max_turns for job in play.calls[2].jobs] == [None] * 4


def test_a_process_plays_its_share(make_doors: Any) -> None:
    every, play = Recorder(), Recorder()
    tasks = ("doors/3", "doors/5", "doors/7", "doors/9")
    live(make_doors, every, tasks)(request())
    live(make_doors, play, tasks)(request(share=(1, 3)))
    assert play.calls[0].jobs == [every.calls[0].jobs[1]]


def test_each_attempt_begins_with_its_own_share_of_the_experts_turns(make_doors: Any) -> None:
    play = Recorder()
    ratios = ((1.0, 0.5, 0.26, 0.01), (0.0, 0.75))
    live(make_doors, play, ("doors/10",), slots=2)(request(episodes=10, group=5, plan=PlayPlan(prefix_ratios=ratios)))
    shown, played = play.calls
    assert (shown.slots, played.slots) == (2, 2)
    assert [(job.group, job.sample) for job in shown.jobs] == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 6)]
    assert shown.agent.name == "expert"
    assert [len(job.demonstration) for job in played.jobs] == [10, 5, 2, 1, 0, 0, 7, 0, 0, 0]
    assert all(job.demonstration == OPEN[: len(job.demonstration)] for job in played.jobs)


def test_shares_of_a_process_belong_to_its_own_attempts(make_doors: Any) -> None:
    play = Recorder()
    ratios = ((1.0, 0.5), (0.2, 0.75))
    live(make_doors, play, ("doors/10",))(request(group=2, plan=PlayPlan(prefix_ratios=ratios), share=(1, 2)))
    assert [(job.group, job.sample, len(job.demonstration)) for job in play.calls[1].jobs] == [(0, 1, 5), (1, 3, 7)]


@pytest.mark.parametrize(("turns", "begun"), [(1, 4), (3, 2), (5, 0), (9, 0)])
def test_the_student_plays_the_last_turns_of_a_demonstration(make_doors: Any, turns: int, begun: int) -> None:
    play = Recorder()
    (episode,) = live(make_doors, play, ("doors/5",), slots=2)(
        request(episodes=1, plan=PlayPlan(demonstration_turns=turns))
    )
    assert [call.slots for call in play.calls] == [2, 2]
    assert [job.demonstration for job in play.calls[1].jobs] == [OPEN[:begun]]
    assert [turn.origin for turn in episode.turns][:begun] == ["demonstration"] * begun


def test_the_named_expert_demonstrates(make_doors: Any) -> None:
    with pytest.raises(TurngymError, match="has no player 'searching'"):
        live(make_doors, Recorder(), ("doors/5",), expert="searching")(request(plan=PlayPlan(demonstration_turns=1)))


def test_tasks_that_are_held_out_are_refused(make_doors: Any) -> None:
    env = make_doors()()
    tasks = ("doors/3", "doors/4")
    collect = live(make_doors, rollout, tasks, held_out=collect_tasks(env, ["doors/9", "doors/3"]))
    with pytest.raises(PanelError, match="1 evaluation tasks are also training tasks: doors/3"):
        collect(request())
    assert len(live(make_doors, rollout, tasks, held_out=collect_tasks(env, ["doors/9"]))(request())) == 4


def test_an_expert_writes_what_it_does_as_tokens(make_doors: Any, make_tokenizer: Any) -> None:
    play, renderer = Recorder(), ChatRenderer(make_tokenizer())
    env = make_doors()()
    more = {"expert": "expert", "noise": (0.5, 0.5), "mistakes": 0.25, "seed": 5, "slots": 2}
    settings: Any = SimpleNamespace(system="Open the doors.", channel="text")
    made = ExpertSource(
        renderer=renderer,
        settings=settings,
        make_env=make_doors(max_turns=40),
        task_ids=("doors/6", "doors/8"),
        play=play,
        **more,
    )
    episodes = made(request(step=2, max_turns=9))
    (call,) = play.calls
    assert call.jobs == step_jobs(("doors/6", "doors/8"), 5, request(step=2))
    assert (call.slots, call.max_turns, call.system) == (2, 9, "Open the doors.")
    assert (call.agent._noise, call.agent._mistakes, call.agent.writer.renderer) == ((0.5, 0.5), 0.25, renderer)
    assert {turn.origin for episode in episodes for turn in episode.turns} == {"demonstration", "noise"}
    assert all(len(episode.segments) == 1 for episode in episodes)
    made(request(step=2, share=(3, 4)))
    assert play.calls[1].jobs == call.jobs[3:]
    mixed = replace(made, players=PlayerMix.parse("repeat:1", loop_after=1.0))(request(step=2, max_turns=9))
    agent = play.calls[-1].agent
    assert (agent._noisy._noise, agent._noisy._mistakes, agent.writer.renderer) == ((0.5, 0.5), 0.25, renderer)
    assert all(len({turn.response for turn in episode.turns}) == 1 and episode.segments for episode in mixed)
    refused = ExpertSource(
        renderer=renderer,
        settings=settings,
        make_env=make_doors(),
        task_ids=("doors/6",),
        held_out=collect_tasks(env, ["doors/6"]),
    )
    with pytest.raises(PanelError, match="doors/6"):
        refused(request())


def test_evaluations_while_training(make_doors: Any, tmp_path: Path) -> None:
    play = Recorder()
    made = make_doors(max_turns=6)
    tasks = collect_tasks(made(), ["doors/3", "doors/4", "doors/9"])
    panel = make_panel("doors", 1, "turngym/Doors-v0", {}, tasks)
    options: dict[str, Any] = {"samples": 2, "temperature": 0.6, "seed": 11, "slots": 5}
    one = toy_evaluation(panel, made, FakePlayer().agent(0.6), play=play, **options)
    one = replace(one, system="Open the doors.")
    point = PanelEvaluation(one, tmp_path / "eval")(7)
    (call,) = play.calls
    assert [(job.task_id, job.sample, job.seed) for job in call.jobs] == [
        (task, sample, 11) for sample in (0, 1) for task in ("doors/3", "doors/4", "doors/9")
    ]
    assert (call.agent.name, call.slots, call.system) == ("at 0.6", 5, "Open the doors.")
    assert call.meta == {"agent": "at 0.6", "temperature": 0.6}
    assert len(read_trace(tmp_path / "eval" / "step_000007.jsonl")[0]) == 6
    assert point.avg == pytest.approx(2 / 3)
    assert point.low < point.avg < point.high
    assert point.extra["pass@2"] == pytest.approx(2 / 3)
    assert (point.extra["category/even"], point.extra["category/odd"]) == (1.0, 0.5)
    assert point.extra["turns"] == pytest.approx((3 + 4 + 6) / 3)
    assert (point.extra["invalid_rate"], point.extra["errors"]) == (0.0, 0.0)
    few = toy_evaluation(panel, made, FakePlayer().agent(0.6), play=play, limit=1, samples=4)
    PanelEvaluation(few, tmp_path / "one")(1)
    assert [(job.task_id, job.sample) for job in play.calls[1].jobs] == [("doors/3", sample) for sample in range(4)]


def test_what_environments_share_lives_as_long_as_it_is_held() -> None:
    closed = []
    held: SharedEnv | None = SharedEnv(lambda: SimpleNamespace(close=lambda: closed.append(True)))
    assert held is not None
    assert closed == []
    held = None
    assert closed == [True]


def test_which_jobs_of_a_step_are_cut_shorter() -> None:
    plan = PlayPlan(short_episodes=4, short_turns=5, leave_loops=2)
    request = RolloutRequest(step=1, episodes=6, max_turns=9, group=3, plan=plan)
    jobs = step_jobs(["a", "b", "c"], 0, request)
    assert [job.leave_loops for job in jobs] == [False] * 4 + [True] * 2
    assert [job.max_turns for job in jobs] == [None if cap == 9 else cap for cap in request.depth_caps()]
    assert sorted(job.max_turns or 9 for job in jobs) == [5, 5, 5, 5, 9, 9]
    assert [job.sample for job in jobs] == [0, 1, 2, 3, 4, 5]
    assert [job.max_turns for job in step_jobs(["a"], 0, RolloutRequest(step=1, episodes=2, max_turns=9))] == [
        None,
        None,
    ]


def test_the_last_rollouts_are_kept_in_files_of_their_own(make_doors: Any, tmp_path: Path) -> None:
    played: list[RolloutRequest] = []

    def collect(request: RolloutRequest) -> list[Episode]:
        played.append(request)
        jobs = [Job(task_id="doors/3", sample=request.step, seed=0)]
        return rollout(jobs, make_doors(), ExpertAgent())

    folder = tmp_path / "rollouts"
    shutil.rmtree(folder, ignore_errors=True)  # the test runs again and again on mutants, in one temporary folder
    kept = KeptSource(source=collect, folder=folder, last=2)
    for step in (1, 2, 3, 10):
        (episode,) = kept(RolloutRequest(step=step, episodes=1, max_turns=9))
        assert (episode.sample, played[-1].step) == (step, step)
        names = [path.name for path in sorted(folder.iterdir())]
        assert names == [f"step_{k:06d}.jsonl" for k in (1, 2, 3, 10) if step - 2 < k <= step]
    assert [episode.sample for episode in read_trace(folder / "step_000010.jsonl")[0]] == [10]
    kept(RolloutRequest(step=10, episodes=1, max_turns=9))  # collected again after a resume: not added
    assert len(read_trace(folder / "step_000010.jsonl")[0]) == 1
    kept(RolloutRequest(step=11, episodes=1, max_turns=9, share=(1, 2)))
    assert sorted(path.name for path in folder.iterdir()) == ["step_000010.jsonl", "step_000011_process_1.jsonl"]
    kept(RolloutRequest(step=13, episodes=1, max_turns=9))
    assert [path.name for path in folder.iterdir()] == ["step_000013.jsonl"]


def test_recorded_demonstrations_become_what_the_student_would_have_written(
    make_doors: Any, make_tokenizer: Any
) -> None:
    tasks = ("doors/2", "doors/3", "doors/4")
    played = list(
        rollout([Job(task_id=task, seed=77, sample=9, group=9) for task in tasks], make_doors(), ExpertAgent())
    )
    turns = played[1].turns
    noisy = replace(played[1], turns=(replace(turns[0], origin="noise"), *turns[1:]))
    lost = replace(played[2], success=False)
    recorded = RecordedDemonstrator.of([played[0], noisy, lost], DemonstrationFilter())
    spec = ToolSpec(name="door", description="Open.", argument="action", argument_description="what to do")
    writer = TextEpisodes(renderer=ChatRenderer(make_tokenizer()), channel=TextChannel(), tool=spec, system="Open.")
    keep = DemonstrationFilter(success=True)
    found = Demonstrations(source=recorded, writer=writer, keep=keep, name="recorded")
    collect = DemonstrationSource(demonstrations=found, task_ids=(*tasks, "doors/5"), seed=5)
    asked = request(episodes=8, group=2)
    jobs = [job for job in step_jobs(collect.task_ids, 5, asked) if job.task_id != "doors/5"]
    episodes = collect(asked)
    assert [(e.task.task_id, e.seed, e.sample, e.group) for e in episodes] == [
        (job.task_id, job.seed, job.sample, job.group) for job in jobs
    ]
    for episode in episodes:
        unsolved = episode.task.task_id == "doors/4"
        assert episode.meta["demonstration"] == ("unsolved" if unsolved else "used")
        assert {turn.excluded for turn in episode.turns} == ({"demonstration: unsolved"} if unsolved else {None})
        first = {"doors/2": "demonstration", "doors/3": "noise", "doors/4": "expert"}[episode.task.task_id]
        assert episode.turns[0].origin == first or unsolved
        assert unsolved or {turn.origin for turn in episode.turns[1:]} == {"demonstration"}
        assert unsolved or len(episode.response_ids(episode.turns[0])) == len("<action>open door 1</action>") + 1
    with pytest.raises(TurngymError, match="step 1: none of its 2 tasks has a demonstration"):
        replace(collect, task_ids=("doors/4",))(request(episodes=2))
    held = collect_tasks(make_doors()(), ["doors/3"])
    with pytest.raises(PanelError, match="1 evaluation tasks are also training tasks: doors/3"):
        replace(collect, held_out=held)(asked)
    unwritten = DemonstrationSource(demonstrations=replace(found, writer=None), task_ids=tasks[:1])
    assert {turn.excluded for turn in unwritten(request(episodes=2))[0].turns} == {"demonstration: used"}
