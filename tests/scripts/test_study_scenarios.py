"""`turngym study scenarios`: what each run is told, which tasks it is reported on, and the report by hand."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the bench needs turngym[train]")

from turngym.agents.evaluation.seeds import differences
from turngym.agents.evaluation.statistics import Interval
from turngym.agents.worlds import load_world
from turngym.envs.core.episode import Episode, Status, Turn
from turngym.envs.core.errors import TurngymError
from turngym.envs.core.task import Task, Verdict
from turngym.envs.core.trace import TraceWriter
from turngym.envs.panels import PanelError, load_panel
from turngym.scripts import train
from turngym.scripts.jobs import Job
from turngym.scripts.study import scenarios as bench
from turngym.scripts.study.grid import Cell, make_record, to_json
from turngym.scripts.study.scenario_settings import (
    QUESTIONS,
    SCENARIOS,
    Scenario,
    ScenarioOptions,
    chosen_scenarios,
    panel_path,
    text_path,
    write_panels,
    write_passages,
)
from turngym.scripts.study.scenarios import (
    NATS,
    Planned,
    all_jobs,
    critic_explained,
    crossed,
    extra_of,
    plan,
    text_nats,
    verdict,
    write_report,
)

DIFFER = {
    **{key: {"--algorithm", "--gigpo.weight", "--gigpo.kl-coef", "--grpo.weight"} for key in ("gigpo", "gigpo-shop")},
    "luffy": {"--algorithm", "--expert", "--luffy.weight", "--grpo.weight"},
    "prm-rl": {"--algorithm", "--expert", "--judge", "--judge-strict", "--grpo.weight"},
    # each at the learning rate, and with as many updates, as suit its own loss
    "hints": {
        *("--algorithm", "--judge-repeats", "--opd-hints.form", "--distill.top-k", "--opd-hints.reject-below"),
        *("--optimizer.lr", "--optimizer.ppo-epochs", "--optimizer.minibatches"),
    },
    "grpo-kd": {"--algorithm", "--teacher", "--grpo.weight"},
    "text": {"--algorithm", "--lm-loss.files"},
    "ppo-kd": {"--ppo-kd.critic.lr", "--ppo-kd.critic.clip"},
}
"""What a method's command may have otherwise than its control's, beside --out."""


def given(job: Job) -> dict[str, tuple[str, ...]]:
    """Option -> its values; of an option that comes twice the last one counts."""
    found: dict[str, tuple[str, ...]] = {}
    name = ""
    for word in job.words:
        if word.startswith("--"):
            name, found[word] = word, ()
        else:
            found[name] += (word,)
    return found


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=list(SCENARIOS))
@pytest.mark.parametrize("chosen", [False, True])
def test_every_command_is_one_that_train_takes(scenario: Scenario, chosen: bool, tmp_path: Path) -> None:
    one = plan(ScenarioOptions(out=tmp_path, chosen=chosen), scenario)
    seeds = [0] if chosen else [1, 2, 3]
    assert list(one.runs) == [arm.row for arm in scenario.arms]
    for arm in scenario.arms:
        for seed, job in zip(seeds, one.runs[arm.row], strict=True):
            parsed = train.parse(shlex.split(job.command)[2:])
            assert parsed.algorithm == arm.algorithm
            assert (parsed.run.seed, parsed.run.steps, parsed.run.episodes) == (seed, scenario.steps, scenario.episodes)
            panel = f"{scenario.place.name}-{'chosen' if chosen else 'reported'}-v1.json"
            assert Path(given(job)["--panel"][0]).name == panel
            assert parsed.run.max_turns == scenario.place.opened().max_turns
    if one.start is not None:
        parsed = train.parse(shlex.split(one.start.command)[2:])
        assert parsed.run.steps == one.start.steps
        assert all(
            job.needs is one.start and str(one.start.model) in job.words for jobs in one.runs.values() for job in jobs
        )


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=list(SCENARIOS))
def test_a_control_differs_in_what_the_claim_is_about(scenario: Scenario, tmp_path: Path) -> None:
    one = plan(ScenarioOptions(out=tmp_path), scenario)
    method, control = (given(one.runs[arm.row][0]) for arm in (scenario.method, scenario.control))
    differing = {name for name in method | control if method.get(name) != control.get(name)}
    assert differing == DIFFER[scenario.name]
    assert "--eval-every" not in differing
    assert one.runs[scenario.method.row][0].same_start == one.runs[scenario.control.row][0].same_start


def test_weights_and_critics_are_what_the_papers_have() -> None:
    """L_PT at weight 1, PPO's usual critic against one that may learn."""
    assert "--lm-loss.coef" not in SCENARIOS["text"].recipe(SCENARIOS["text"].method).words
    scenario = SCENARIOS["ppo-kd"]
    one = plan(ScenarioOptions(), scenario)
    parsed = [train.parse(shlex.split(one.runs[arm.row][0].command)[2:]).own for arm in scenario.arms]
    assert [(own.critic.lr, own.critic.clip) for own in parsed] == [(1e-5, 0.2), (1e-3, None)]
    text = plan(ScenarioOptions(), SCENARIOS["text"]).runs["grpo-minillm"][0]
    assert train.parse(shlex.split(text.command)[2:]).lm_loss.coef == 1.0  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "place", {one.place.name: one.place for one in SCENARIOS.values()}.values(), ids=lambda p: p.name
)
def test_nothing_is_reported_on_the_tasks_of_the_choice(place: Any, tmp_path: Path) -> None:
    assert not set(place.chosen) & set(place.reported)
    assert len(place.chosen) == len(place.reported) == 100
    few = replace(place, chosen=place.chosen[:2], reported=place.reported[:2])
    write_panels(tmp_path, few)
    both = [load_panel(str(panel_path(tmp_path, few, use))) for use in ("chosen", "reported")]  # type: ignore[arg-type]
    assert [panel.task_ids for panel in both] == [place.chosen[:2], place.reported[:2]]
    assert all(panel.make_kwargs["max_turns"] == place.opened().max_turns for panel in both)
    world = load_world(place.world)
    assert both[0].make_kwargs["part" if world.name.startswith("alfworld") else "split"] == "eval"
    assert world.panel.split("-")[0] in ("alfworld", "webshop", "search")
    with pytest.raises(PanelError, match="1 evaluation tasks are also training tasks"):
        write_panels(tmp_path / "other", replace(place, chosen=place.chosen[:2], reported=place.chosen[1:3]))


def test_questions_have_the_shares_of_the_quickstart() -> None:
    assert sorted(QUESTIONS.chosen) == sorted(load_panel("search-quickstart").task_ids)
    kinds = [task.split("/")[0] for task in QUESTIONS.reported]
    assert {kind: kinds.count(kind) for kind in kinds} == {"popqa-like": 20, "2wiki-like": 60, "musique-like": 20}


def test_the_seed_of_the_choice_is_never_reported() -> None:
    assert list(ScenarioOptions(seeds=3).seeds_played) == [1, 2, 3]
    assert list(ScenarioOptions(short=True).seeds_played) == [1]
    assert list(ScenarioOptions(chosen=True, seeds=3).seeds_played) == [0]
    with pytest.raises(TurngymError, match="--seeds is 0"):
        ScenarioOptions(seeds=0)
    with pytest.raises(TurngymError, match=r"'lufy': there are .*luffy, .* Did you mean 'luffy'"):
        chosen_scenarios(["lufy"])
    assert [one.name for one in chosen_scenarios(["text", "luffy"])] == ["luffy", "text"]


def test_a_shared_control_is_run_once_and_pairs_come_together(tmp_path: Path) -> None:
    options = ScenarioOptions(out=tmp_path, seeds=2)
    both = [plan(options, SCENARIOS[name]) for name in ("luffy", "grpo-kd")]
    names = [job.folder.name for job in all_jobs(both)]
    assert names == [
        *("start", "grpo-seed1", "luffy-seed1", "grpo-seed2", "luffy-seed2"),
        *("grpo-kd-seed1", "grpo-kd-seed2"),
    ]
    longer = plan(options, replace(SCENARIOS["grpo-kd"], steps=3))
    with pytest.raises(TurngymError, match=r"two scenarios want different runs in .*grpo-seed1"):
        all_jobs([both[0], longer])


def test_a_start_that_reads_gets_the_training_text_alone(tmp_path: Path) -> None:
    one = plan(ScenarioOptions(out=tmp_path), SCENARIOS["text"])
    assert one.start is not None
    files = {str(path) for job in one.jobs for path in given(job).get("--lm-loss.files", ())}
    assert files == {str(text_path(tmp_path / "text", "train"))}
    assert train.parse(shlex.split(one.start.command)[2:]).lm_loss.documents == 16  # type: ignore[attr-defined]


def test_held_out_documents_tell_of_other_worlds(tmp_path: Path) -> None:
    write_passages(tmp_path)
    read, held = (text_path(tmp_path, part).read_text().strip().split("\n\n") for part in ("train", "eval"))
    assert (len(read), len(held)) == (2000, 100)
    assert {len(document.splitlines()) for document in held} == {16}, "eight titles and eight texts"
    facts = {line for document in read for line in document.splitlines()[1::2]}
    assert not [line for document in held for line in document.splitlines()[1::2] if line in facts]
    stamp = text_path(tmp_path, "eval").stat().st_mtime_ns
    write_passages(tmp_path)
    assert text_path(tmp_path, "eval").stat().st_mtime_ns == stamp


def test_text_is_scored_as_the_term_scores_it(tmp_path: Path) -> None:
    from turngym.trainers.config import LmLossConfig
    from turngym.trainers.lm_loss import LmLoss
    from turngym.trainers.scorer import load_scorer, load_student

    model = load_world("search").checkpoint("student")
    documents = ["Ashen Anchor\nAshen Anchor was helmed by Voarvel Gruoneth.", "Copper Compass"]
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(documents))
    found = text_nats(model, documents)
    _, tokenizer = load_student(model, "float32", "cpu")

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    tokens = [len(encode(text)) - 1 for text in documents]
    term = LmLoss(LmLossConfig(files=(path,), documents=2), encode)
    scorer = load_scorer(model, dtype="float32", device="cpu", temperature=1.0, max_tokens=512)
    mean = (found["0"] * tokens[0] + found["1"] * tokens[1]) / sum(tokens)
    assert mean == pytest.approx(term.value(scorer, 1), rel=1e-5)
    assert mean > 1.0


def test_what_is_forgotten_by_hand() -> None:
    before = {"a": 1.0, "b": 2.0}
    control = [{"a": 1.5, "b": 2.5}, {"a": 1.7, "b": 2.7}]
    method = [{"a": 1.1, "b": 2.1}, {"a": 1.3, "b": 2.3}]
    # differences 0.5 and 0.7 by seed, alike over documents: variance 0.02 / 2 seeds, one degree of freedom
    half = 12.706204736432095 * math.sqrt(0.01)
    found = crossed(differences([before] * 2, control))
    assert (found.mean, found.low, found.high) == pytest.approx((0.6, 0.6 - half, 0.6 + half))
    assert crossed(differences(control, method)).mean == pytest.approx(-0.4)
    # one seed: over documents, t(0.975, 1) sd / sqrt(2) with sd = 0.7071
    alone = crossed([before])
    assert (alone.mean, alone.high - alone.mean) == pytest.approx((1.5, 12.706204736432095 * 0.5))


def test_a_verdict_needs_an_interval_clear_of_zero() -> None:
    ends = [(0.01, 0.2), (-0.01, 0.2), (-0.2, -0.01), (0.0, 0.2)]
    found = [verdict(Interval(mean=0.0, low=low, high=high, tasks=9), 2) for low, high in ends]
    assert found == ["appears", "open", "reversed", "open"]
    assert verdict(Interval(mean=0.5, low=0.4, high=0.6, tasks=9), 1) == "one seed"


def finish(job: Cell, curve: Sequence[Sequence[int]], **more: float) -> None:
    """A finished run; `curve` has, evaluation by evaluation, what each task's one episode came to."""
    job.model.mkdir(parents=True)
    steps = [0, job.steps]
    rows: list[dict[str, Any]] = [{"step": step, "kind": "eval"} for step in steps]
    rows += [{"step": step, "kind": "train", "time/train_s": 7.0 * step, **more} for step in range(1, job.steps + 1)]
    (job.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (job.folder / "eval").mkdir()
    for step, values in zip(steps, curve, strict=True):
        with TraceWriter(job.folder / "eval" / f"step_{step:06d}.jsonl") as writer:
            for place, value in enumerate(values):
                writer.write(episode(f"task{place}", bool(value)))
    job.record.write_text(json.dumps(to_json(make_record(job))))


def episode(task: str, success: bool) -> Episode:
    turn = Turn(index=0, observation="", admissible=None, response="", action="", verdict=Verdict.OK, reward=0.0)
    return Episode(
        task=Task(env_id="e", task_id=task, sha256=f"sha {task}", split="s", category="heat"),
        seed=0,
        sample=0,
        group=0,
        segments=(),
        turns=(turn,),
        status=Status.COMPLETED if success else Status.TRUNCATED_TURNS,
        success=success,
        episode_return=float(success),
        score=float(success),
    )


def test_the_report_of_recorded_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ScenarioOptions(out=tmp_path, seeds=4, run=False)
    planned = [plan(options, SCENARIOS[name]) for name in ("ppo-kd", "luffy")]
    runs = planned[0].runs
    none = [0] * 20
    for seed, solved in enumerate((6, 10, 14)):
        finish(runs["ppo-kd, slow critic"][seed], [none, none], critic_explained=0.25)
        finish(runs["ppo-kd"][seed], [none, [1] * solved + [0] * (20 - solved)], critic_explained=0.5 + 0.1 * seed)
    finish(runs["ppo-kd"][3], [none, none])  # its control has no such seed
    write_report(options, planned)
    text = (tmp_path / "report.md").read_text()
    assert text in capsys.readouterr().out
    # seeds 0.3, 0.5, 0.7: A = 0.04 / 3; tasks 6 x 1, 4 x 2/3, 4 x 1/3, 6 x 0: B = 0.16959 / 20; the other method's runs
    # are all alike, so f is 3.2 (`degrees_of_two`)
    row = next(
        line for line in text.splitlines() if line.startswith("| ppo-kd | `ppo-kd` | `ppo-kd, slow critic` | 3 |")
    )
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert (cells[4], cells[6], cells[7]) == ("+50.0 [+10.7, +89.3]", "+50.0 [+10.7, +89.3]", "appears")
    assert cells[5].startswith("+0.0 [-")
    assert "| luffy | `luffy` | `grpo` | 0 | not run |" in text
    assert "No seed is finished in both arms" in text
    assert "| `ppo-kd` | 0.60 | 0.50, 0.60, 0.70 |" in text
    assert "| `ppo-kd, slow critic` | 0.25 | 0.25, 0.25, 0.25 |" in text
    found = json.loads((tmp_path / "scenarios.json").read_text())
    against = found["scenarios"]["ppo-kd"]["ppo-kd: ppo-kd"]["against"]
    assert (against["mean"], against["tasks"], against["seeds"]) == (pytest.approx(0.5), 20, [3, 3])
    assert found["scenarios"]["luffy"] == {}
    assert found["measures"]["ppo-kd"] == {"ppo-kd, slow critic": [0.25, 0.25, 0.25], "ppo-kd": [0.5, 0.6, 0.7]}
    assert (tmp_path / "scenarios.png").stat().st_size > 5000


def test_a_critic_is_judged_by_the_second_half(tmp_path: Path) -> None:
    job = Job(name="one", folder=tmp_path, words=(), steps=4)
    assert critic_explained(job) is None
    rows = [
        {"step": step, "kind": "train", "critic_explained": value} for step, value in enumerate((-9, -9, 0.5, 0.7), 1)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert critic_explained(job) == pytest.approx(0.6)


def test_seeds_without_their_pair_are_left_out(tmp_path: Path) -> None:
    one: Planned = plan(ScenarioOptions(out=tmp_path, seeds=2), SCENARIOS["prm-rl"])
    finish(one.runs["grpo"][0], [(0,), (1,)])
    finish(one.runs["grpo"][1], [(0,), (1,)])
    finish(one.runs["prm-rl"][1], [(0,), (1,)])
    assert [job.folder.name for job in one.finished().jobs] == ["start", "grpo-seed2", "prm-rl-seed2"]


@pytest.mark.long
def test_the_whole_path_shortened(tmp_path: Path) -> None:
    assert bench.main(["--out", str(tmp_path), "--short", "--scenarios", "ppo-kd"]) == 0
    found = json.loads((tmp_path / "scenarios.json").read_text())
    rows = found["scenarios"]["ppo-kd"]
    assert list(rows) == ["ppo-kd: ppo-kd, slow critic", "ppo-kd: ppo-kd"]
    assert all(list(row["curve"]) == ["0", "2"] and row["seeds"] == 1 for row in rows.values())
    assert all(len(values) == 1 and values[0] is not None for values in found["measures"]["ppo-kd"].values())
    assert "questions-reported-v1.json" in (tmp_path / "report.md").read_text()


def test_the_table_of_held_out_text_by_hand(tmp_path: Path) -> None:
    options = ScenarioOptions(out=tmp_path, seeds=2)
    one = plan(options, SCENARIOS["text"])
    path = text_path(tmp_path / "text", "eval")
    path.parent.mkdir()
    path.write_text("first\n\nsecond\n")
    assert one.start is not None
    control, method = one.runs.values()
    kept = {
        one.start: (1.0, 2.0),
        control[0]: (1.5, 2.5),
        control[1]: (1.7, 2.7),
        method[0]: (1.1, 2.1),
        method[1]: (1.3, 2.3),
    }
    for job, values in kept.items():
        job.folder.mkdir(parents=True)
        (job.folder / NATS).write_text(json.dumps(dict(zip("01", values, strict=True))))
    extra = extra_of(options, one)
    assert extra is not None
    assert "2 held-out documents" in extra.title
    # ends: A = 0.02 / 2, B = 0.5 / 2, t(1) = 12.706; "more" has no B, the difference neither
    assert extra.table[1] == [
        ["`grpo-kd`", "1.500", "2.100 [-4.379, 8.579]", "+0.600 [-0.671, +1.871]", ""],
        ["`grpo-minillm`", "1.500", "1.700 [-4.779, 8.179]", "+0.200 [-1.071, +1.471]", "-0.400 [-0.400, -0.400]"],
    ]
    assert extra.numbers["grpo-minillm"]["against"]["mean"] == pytest.approx(-0.4)
