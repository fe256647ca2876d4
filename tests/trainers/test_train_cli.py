"""`turngym train` on generated games: every algorithm, resumption, evaluation, and what it refuses."""

from __future__ import annotations

import shutil
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import toy_run as toy
from metric_columns import known_metric
from tiny_runs import break_off, columns, command, save_tiny, untimed
from transformers import AutoTokenizer

from turngym.agents.mixed_policy import guided_player, mixed_player
from turngym.agents.models import load_model
from turngym.agents.play_spec import PartOfPanel, part_of
from turngym.agents.playing.rollout import rollout
from turngym.agents.rendering.chat_settings import ChatSettings
from turngym.agents.rollout_sources import KeptSource, LiveSource, step_jobs
from turngym.agents.saved_model import companions
from turngym.core.errors import TurngymError
from turngym.core.nested import at
from turngym.core.rollout_request import PlayPlan, RolloutRequest
from turngym.core.settings import read_toml
from turngym.core.trace import TraceWriter, read_trace
from turngym.envs.panels import PanelError, load_panel
from turngym.scripts import rollout as rollout_verb
from turngym.scripts import train
from turngym.trainers.metrics import read_metrics
from turngym.trainers.run import build_trainer
from turngym.trainers.run_config import RunConfig
from turngym.trainers.train_loop import TrainError

torch.set_num_threads(1)
PANEL = "alfworld-generated-eval"


def long(algorithm: str, more: tuple[str, ...]) -> Any:
    """Every algorithm trains a quick step in `test_every_algorithm` and with each option in `test_options_read`."""
    return pytest.param(algorithm, more, marks=pytest.mark.long)


@pytest.mark.parametrize(
    ("algorithm", "more"),
    [
        long("opd", ("--distill.form", "sampled")),
        ("turnopd", ("--turnopd.weight", "turn", "turnopd.depth.p = 0.6", "--distill.support", "student")),
        long("tcod", ("--tcod.direction", "b2f", "--tcod.schedule.k-start", "1", "--expert", "searching")),
        long("sft", ("--expert", "searching", "--sft.noise", "0", "0.5", "--sft.weight", "turn_mean")),
        long("sft", ("--sft.players", "expert:.5,cycle:.5", "--sft.train-on", "both", "--sft.weight", "episode_mean")),
        long(
            "grpo", ("--grpo.n", "2", "--grpo.no-filter-groups", "--grpo.kl-coef", "0.1", "--grpo.entropy-coef", "0.01")
        ),
        ("luffy", ("--luffy.n", "2", "--luffy.kl-coef", "0.1", "luffy.on_shape = 'square_root'", "--max-turns", "30")),
        long("grpo-kd", ("--grpo-kd.n", "2", "grpo_kd.student_entropy = true")),
        long("grpo-minillm", ("--grpo-kd.n", "2", "--lm-loss.files", str(Path(__file__)), "--lm-loss.documents", "2")),
        long("grpo-minillm", ("--grpo-kd.n", "2", "--lm-loss.files", str(Path(__file__)), "grpo_kd.teacher_mix = 0.5")),
        long("ppo-kd", ("--optimizer.ppo-epochs", "2", "--optimizer.minibatches", "2", "--ppo-kd.kl-coef", "0.1")),
        long("ppo-minillm", ("--lm-loss.files", str(Path(__file__)), "ppo_kd.critic.kind = 'head'")),
        long("ppo-minillm", ("--lm-loss.files", str(Path(__file__)), "--ppo-kd.advantage", "minillm")),
        long(
            "ppo-kd",
            ("--ppo-kd.advantage", "minillm", "--ppo-kd.student-entropy", "--ppo-kd.single-step", "1"),
        ),
        pytest.param(
            "ppo-minillm",
            ("--lm-loss.files", str(Path(__file__)), "lm_loss.in_reward = 0.1"),
            marks=(pytest.mark.long, pytest.mark.filterwarnings("ignore:lm_loss.in_reward")),
        ),
    ],
)
def test_every_algorithm_trains_and_leaves_a_model(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], algorithm: str, more: tuple[str, ...]
) -> None:
    out = tmp_path / "run"
    assert train.main(command(models, out, algorithm, "--steps", "2", "--eval-every", "0", *more)) == 0
    assert "2 steps in" in capsys.readouterr().out
    rows = [row for row in read_metrics(out) if row["kind"] == "train"]
    assert [row["step"] for row in rows] == [1, 2]
    assert all(known_metric(name) for row in rows for name in row)
    if algorithm != "sft":
        assert all(row["gap_max"] is None or row["gap_max"] < 1e-4 for row in rows)
    model = out / "checkpoints" / "step_000002" / "model"
    assert ChatSettings.load(model).system == "Do the task."
    # as it was, and not as this release of transformers would write it
    name = "tokenizer_config.json"
    assert companions(model)[name] == companions(models / "student")[name]
    start, end = load_model(models / "student"), load_model(model)
    assert any(not torch.equal(a, b) for a, b in zip(start.parameters(), end.parameters(), strict=True))


def test_teacher_and_reference_score_at_the_distillation_temperature(models: Path, tmp_path: Path) -> None:
    warm = ("--distill.temperature", "2.5", "--temperature", "0.5", "--opd-hints.kl-coef", "0.1")
    trainer: Any = build_trainer(train.resolved(command(models, tmp_path / "run", "opd-hints", *warm)).spec)
    assert trainer.teacher is not trainer.reference
    assert (trainer.teacher.temperature, trainer.reference.temperature) == (2.5, 2.5)
    ids, where = [np.array([3, 4, 5], np.int32)], [np.array([1, 2])]
    for scorer in (trainer.teacher, trainer.reference):
        logits = scorer.model(torch.from_numpy(ids[0])[None].long()).logits[0, :-1]
        wanted = (logits / 2.5).log_softmax(-1)[torch.arange(2), torch.tensor([4, 5])]
        np.testing.assert_allclose(scorer.logprobs(ids, where)[0], wanted.detach(), rtol=1e-4)


def test_scorers_have_the_settings_of_the_teacher_and_not_of_the_student(models: Path, tmp_path: Path) -> None:
    words = command(models, tmp_path / "run", "opd-hints", "--opd-hints.kl-coef", "0.1", "--micro-tokens", "77")
    trainer: Any = build_trainer(train.resolved([*words, "--teacher-dtype", "bfloat16", "--head-chunk", "33"]).spec)
    assert trainer.model.dtype == torch.float32
    for scorer, name in ((trainer.teacher, "teacher"), (trainer.reference, "student")):
        assert (scorer.model.dtype, scorer.max_tokens, scorer.chunk) == (torch.bfloat16, 77, 33)
        wanted = load_model(models / name).get_input_embeddings().weight
        assert torch.equal(scorer.model.get_input_embeddings().weight, wanted.bfloat16())


def test_a_served_teacher_scores_at_the_distillation_temperature(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, float]] = []

    tried = []
    teacher = SimpleNamespace(topk=lambda ids, positions, k: tried.append(k), longest=10**6)

    def served(servers: Any, folder: Any, tokenizer: Any, size: int, temperature: float, load: Any) -> tuple[Any, int]:
        asked.append((size, temperature))
        return teacher, size

    monkeypatch.setattr(import_module("turngym.agents.servers.open_servers"), "teacher_scorer", served)
    words = command(models, tmp_path / "run", "opd", "--teacher-server", "http://127.0.0.1:1", "--temperature", "0.5")
    trainer: Any = build_trainer(train.resolved([*words, "--distill.temperature", "2.5"]).spec)
    assert asked == [(trainer.vocab_size, 2.5)]
    assert trainer.teacher is teacher
    assert tried == [50]  # what every step will ask for is asked for at the start


def test_stopped_run_resumes_to_the_same_rows_with_evaluations_as_traces(models: Path, tmp_path: Path) -> None:
    evaluated = ("--panel", PANEL, "--eval-limit", "2", "--eval-samples", "2", "--eval-every", "2", "--steps", "3")
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    train.main(command(models, whole, "turnopd", *evaluated, "--checkpoint-every", "1"))

    options = command(models, stopped, "turnopd", *evaluated, "--checkpoint-every", "1")
    parsed = train.resolved(options).spec
    trainer = build_trainer(parsed)
    break_off(trainer, 3)
    with pytest.raises(TurngymError, match="already holds a run"):
        train.main(options)
    train.main([*options, "--resume"])
    assert untimed(stopped) == untimed(whole)
    assert columns(whole, "step", kind="eval") == [(0,), (2,), (3,)]
    episodes, problems = read_trace(whole / "eval" / "step_000003.jsonl")
    assert len(episodes) == 4
    assert not problems
    assert {e.task for e in episodes} == set(part_of(load_panel(PANEL).tasks, PartOfPanel(limit=2)))
    with pytest.raises(TurngymError, match=r"run\.episodes: checkpoint 4, now 5"):
        train.main([*options, "--resume", "--episodes", "5"])


@pytest.mark.long
def test_a_resumed_run_is_evaluated_as_before_or_for_the_first_time(models: Path, tmp_path: Path) -> None:
    options = command(models, tmp_path / "run", "opd", "--steps", "1")
    train.main(options)
    # a run that was not evaluated may be from here on
    evaluated = ["--panel", PANEL, "--eval-limit", "1", "--eval-samples", "1"]
    train.main([*options, *evaluated, "--steps", "2", "--resume"])
    before = read_toml(tmp_path / "run" / "config.toml")
    for changed, said in {
        ("--eval-samples", "2"): r"evaluation\.samples: checkpoint 1, now 2",
        ("--eval-temperature", "0.1"): r"temperature: checkpoint 0\.85, now 0\.1",
        ("--eval-limit", "2"): r"limit: checkpoint 1, now 2",
        ("--panel", "alfworld-generated-unseen"): r"panel: checkpoint 'alfworld-generated-eval",
    }.items():
        with pytest.raises(TurngymError, match=said):
            train.main([*options, *evaluated, *changed, "--steps", "3", "--resume"])
    with pytest.raises(TurngymError, match=r"evaluation\.env\.id: .*now None.* and \d+ more"):
        train.main([*options, "--steps", "3", "--resume"])
    assert read_toml(tmp_path / "run" / "config.toml") == before


@pytest.mark.long
def test_a_finished_run_gets_more_steps_and_its_folder_says_so(models: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    options = command(models, out, "opd", "--eval-every", "0")
    train.main([*options, "--steps", "1"])
    written = (out / "config.toml").read_text()
    train.main([*options, "--steps", "1", "--resume"])
    assert (out / "config.toml").read_text() == written
    # as if it had been killed between its first checkpoint and this file
    (out / "config.toml").unlink()
    train.main([*options, "--steps", "1", "--resume"])
    assert at(read_toml(out / "config.toml"), "run.steps") == 1
    train.main([*options, "--steps", "2", "--resume"])
    assert [row["step"] for row in read_metrics(out)] == [1, 2]
    again = read_toml(out / "config.toml")
    assert (at(again, "run.steps"), at(again, "models.resume")) == (2, False)
    with pytest.raises(TurngymError, match=r"cannot be made one of 3: .*linear"):
        train.main([*options, "--steps", "3", "--resume", "--optimizer.schedule", "linear"])


def test_the_last_steps_rollouts_are_kept_as_they_were_trained_on(models: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    options = command(models, out, "opd", "--eval-every", "0", "--keep-rollouts", "2")
    train.main([*options, "--steps", "3"])
    kept = sorted((out / "rollouts").iterdir())
    assert [path.name for path in kept] == ["step_000002.jsonl", "step_000003.jsonl"]
    rows = {row["step"]: row for row in read_metrics(out)}
    for step, path in zip((2, 3), kept, strict=True):
        episodes = read_trace(path)[0]
        assert len(episodes) == rows[step]["episodes"]
        assert {turn.policy_version for episode in episodes for turn in episode.turns} == {step - 1}
    train.main([*options, "--steps", "4", "--resume"])
    assert [path.name for path in sorted((out / "rollouts").iterdir())] == ["step_000003.jsonl", "step_000004.jsonl"]


def test_players_and_their_loops_are_those_of_the_command_line(tmp_path: Path) -> None:
    save_tiny(tmp_path / "student", length=16_384)  # an episode ends at the student's context

    def collected(*words: str) -> list[list[str]]:
        trainer = build_trainer(train.resolved(command(tmp_path, tmp_path / "run", "sft", *words)).spec)
        episodes = trainer.source(RolloutRequest(step=1, episodes=6, max_turns=3, temperature=1.0))
        return [[turn.origin for turn in episode.turns] for episode in episodes]

    assert (
        collected("--sft.players", "repeat:1", "--sft.loop-after", "1") == [["demonstration", "policy", "policy"]] * 6
    )
    assert collected("--sft.players", "cycle:1", "--sft.loop-after", "90") == [["demonstration"] * 3] * 6
    slipping = collected("--sft.players", "repeat:1", "--sft.loop-after", "1", "--sft.loop-slips", "0.99")
    assert slipping == [["demonstration", "noise", "noise"]] * 6
    assert collected("--sft.players", "noisy:1", "--sft.noise", "1", "1") == [["noise"] * 3] * 6
    with pytest.raises(TurngymError, match=r"players: 'cyle'; .*Did you mean"):
        collected("--sft.players", "cyle:1")


@pytest.mark.long
def test_examples_stand_in_every_prompt_of_a_run_and_in_no_saved_model(tmp_path: Path) -> None:
    """In played and in demonstrated episodes, as turns of the task's category or as text; a resumed run keeps them."""
    shots, small = tmp_path / "shots.jsonl", ("--env-kwargs", '{"config": "small"}')
    played = tmp_path / "played.jsonl"
    assert rollout_verb.main(["--split", "generated", "--tasks", "30", *small, "--out", str(played)]) == 0
    first = {e.task.category: e for e in reversed(read_trace(played)[0]) if e.success}
    assert len(first) > 2
    with TraceWriter(shots) as writer:
        for episode in first.values():
            writer.write(episode)
    for seed, name in enumerate(("student", "teacher")):
        save_tiny(tmp_path / name, seed=seed, length=16_384)
    given = ("--examples", str(shots), "--keep-rollouts", "1", "--steps", "1", "--eval-every", "0")

    def run(algorithm: str, *how: str) -> list[tuple[str, str]]:
        """(first prompt, system message) of each episode of the step."""
        out = tmp_path / f"{algorithm} {how[-1]}"
        assert train.main([*command(tmp_path, out, algorithm, *given), *how]) == 0
        model = out / "checkpoints" / "step_000001" / "model"
        assert ChatSettings.load(model).system == "Do the task."
        tokenizer = AutoTokenizer.from_pretrained(model)
        (kept,) = (out / "rollouts").glob("*.jsonl")
        return [(tokenizer.decode(e.prompt_ids(e.turns[0])), e.system) for e in read_trace(kept)[0]]

    for algorithm in ("opd", "sft"):
        for prompt, system in run(algorithm, "--examples.shown-for", "category"):
            assert system == "Do the task."
            assert prompt.count("Your task is to") == 2  # that of one example, and the episode's own
        for prompt, system in run(algorithm, "--examples.form", "text"):
            assert system.startswith("Do the task.\n\nExample 1:\n")
            assert f"Example {len(first)}:" in system
            assert prompt.count("Your task is to") == len(first) + 1
    out = tmp_path / "opd text"
    with pytest.raises(TurngymError, match=r"examples\.form: checkpoint 'text', now 'turns'"):
        train.main([*command(tmp_path, out, "opd", *given), "--resume", "--examples.form", "turns"])


def test_a_resumed_run_has_the_same_student_wherever_it_lies(models: Path, tmp_path: Path) -> None:
    held = command(models, tmp_path / "prm", "prm-rl", "--steps", "1")
    train.main(held)
    other = tmp_path / "other"
    shutil.copytree(models / "student", other)
    words = [str(other) if word == str(models / "student") else word for word in held]
    train.main([*words, "--resume"])  # the same weights elsewhere
    shutil.copy(models / "teacher" / "model.safetensors", other)
    with pytest.raises(TurngymError, match=r"content of models\.student: checkpoint '\w+', now '\w+'"):
        train.main([*words, "--resume"])


def test_a_resumed_run_is_asked_what_it_read_and_nothing_else(models: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a text\n\nand another\n")
    words = ("--steps", "1", "--eval-every", "0", "--grpo-kd.n", "2", "--lm-loss.files", str(text))
    made = command(models, tmp_path / "text", "grpo-minillm", *words)
    train.main(made)
    with pytest.raises(TurngymError, match=r"method\.lm_loss\.coef: checkpoint 1\.0, now 0\.5"):
        train.main([*made, "--resume", "--lm-loss.coef", "0.5"])
    train.main([*made, "--resume"])
    spec = build_trainer(train.resolved(command(models, tmp_path / "opd", "opd")).spec).spec
    assert not {"demonstrations", "expert", "lm_loss"} & spec["method"].keys()


def test_sft_on_recorded_episodes(models: Path, tmp_path: Path) -> None:
    trainer = build_trainer(train.resolved(command(models, tmp_path / "x", "sft")).spec)
    episodes = trainer.source(RolloutRequest(step=1, episodes=4, max_turns=3))
    with TraceWriter(tmp_path / "expert.jsonl") as writer:
        for episode in episodes:
            writer.write(episode)
    more = ("--traces", str(tmp_path / "expert.jsonl"), "--steps", "1", "--eval-every", "0")
    train.main(command(models, tmp_path / "run", "sft", *more))
    assert columns(tmp_path / "run", "episodes") == [(4,)]


def test_what_does_not_fit_is_refused_before_anything_is_written(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    base = command(models, out, "turnopd")
    student = base.index("--student") + 1
    teacher = base.index("--teacher") + 1
    for change, text in (
        ({teacher: str(models / "other")}, "different vocabularies"),
        ({teacher: str(models / "none")}, "there is no folder .*none"),
        ({student: str(tmp_path)}, "holds no model"),
    ):
        words = [change.get(place, word) for place, word in enumerate(base)]
        with pytest.raises(TurngymError, match=text):
            train.main(words)
    with pytest.raises(TurngymError, match="name its folder with --teacher"):
        train.main([word for place, word in enumerate(base) if place not in (teacher - 1, teacher)])
    with pytest.raises(TurngymError, match="--steps is"):
        train.main([*base, "--steps", "0"])
    with pytest.raises(TurngymError, match=r"depth\.h_min is 9 and h_max 5"):
        train.main([*base, "--turnopd.depth.h-min", "9", "--turnopd.depth.h-max", "5"])
    mixed = "grpo_kd.teacher_mix = 0.2"
    with pytest.raises(TurngymError, match=r"needs --temperature 1.*it is 0\.5"):
        train.main(command(models, out, "grpo-kd", mixed, "--temperature", "0.5"))
    with pytest.raises(TurngymError, match="generatde"):
        train.main([*base, "--split", "generatde"])
    assert not out.exists()


def test_a_teacher_that_chooses_tokens_plays_along_in_training_alone(models: Path, tmp_path: Path) -> None:
    words = command(models, tmp_path / "run", "grpo-kd", "--grpo-kd.n", "2", "grpo_kd.teacher_mix = 0.5")
    trainer = build_trainer(train.resolved([*words, "--panel", PANEL, "--eval-limit", "1", "--eval-samples", "2"]).spec)
    turns = [turn for e in trainer.source(RolloutRequest(step=1, episodes=4, max_turns=3, group=2)) for turn in e.turns]
    own = np.concatenate([np.isfinite(turn.logprobs) for turn in turns])
    assert 0.2 < own.mean() < 0.8
    assert trainer.evaluate is not None
    trainer.evaluate(0)
    for episode in read_trace(tmp_path / "run" / "eval" / "step_000000.jsonl")[0]:
        assert all(np.isfinite(turn.logprobs).all() for turn in episode.turns)
    with pytest.raises(TurngymError, match="no --teacher-server, no --workers"):
        mixed_player(trainer.source.player, trainer.algorithm.teacher_mix, None, None, slots=1, play=rollout)


def test_a_teacher_that_takes_turns_plays_whole_ones_in_training_alone(models: Path, tmp_path: Path) -> None:
    words = command(models, tmp_path / "run", "guided-opd")
    trainer = build_trainer(train.resolved([*words, "--panel", PANEL, "--eval-limit", "1", "--eval-samples", "2"]).spec)

    def played(share: float) -> list[Any]:
        asked = RolloutRequest(step=1, episodes=4, max_turns=6, plan=PlayPlan(teacher_turns=share))
        return [turn for episode in trainer.source(asked) for turn in episode.turns]

    turns = played(0.5)
    for turn in turns:
        assert np.isfinite(turn.logprobs).tolist() == [turn.origin == "policy"] * turn.response_length
    assert {turn.origin for turn in turns} == {"policy", "demonstration"}
    assert {turn.origin for turn in played(0.0)} == {"policy"}
    assert {turn.origin for turn in played(1.0)} == {"demonstration"}
    assert trainer.evaluate is not None
    trainer.evaluate(0)
    for episode in read_trace(tmp_path / "run" / "eval" / "step_000000.jsonl")[0]:
        assert all(turn.origin == "policy" for turn in episode.turns)
    with pytest.raises(TurngymError, match="no --teacher-server, no --workers"):
        guided_player(trainer.source.player, None, None, slots=1, play=rollout)


def test_a_step_asks_for_the_share_of_its_schedule(models: Path, tmp_path: Path) -> None:
    asked = []
    asked_for = ("--steps", "5", "--guided-opd.start", "0.6", "guided_opd.ratio = 0.8")
    trainer = build_trainer(train.resolved(command(models, tmp_path / "run", "guided-opd", *asked_for)).spec)
    play = trainer.source

    def heard(request: RolloutRequest) -> Any:
        asked.append(request.plan.teacher_turns)
        return play(request)

    trainer.source = heard
    trainer.train()
    # 4 steps of a cosine: 0.3 (1 + cos(pi k / 4)), then the student alone
    assert asked == pytest.approx([0.3 + 0.3 * 0.5**0.5, 0.3, 0.3 - 0.3 * 0.5**0.5, 0.0, 0.0])
    assert trainer._fixed_end() == "guided-opd changes with the share of the run that is done"


def test_evaluation_tasks_are_never_trained_on(models: Path, tmp_path: Path) -> None:
    part = '{"on_invalid": "noop", "part": "eval"}'
    words = command(models, tmp_path / "run", "opd", "--panel", PANEL, "--eval-limit", "1", "--eval-samples", "1")
    trainer = build_trainer(train.resolved([*words, "--env-kwargs", part, "--episodes", "8"]).spec)
    assert isinstance(trainer.source, LiveSource)
    with pytest.raises(PanelError, match="evaluation tasks are also training tasks"):
        trainer.source(RolloutRequest(step=1, episodes=8, max_turns=1))


def test_jobs_follow_from_seed_and_step() -> None:
    ids = [f"t{n}" for n in range(6)]
    one = [step_jobs(ids, 3, RolloutRequest(step=k, episodes=4, max_turns=1)) for k in (1, 2, 3)]
    names = [job.task_id for jobs in one for job in jobs]
    assert sorted(names[:6]) == sorted(names[6:]) == ids
    assert len({job.seed for jobs in one for job in jobs}) == 3
    assert one[1] == step_jobs(ids, 3, RolloutRequest(step=2, episodes=4, max_turns=9))
    assert RunConfig().seed == 0


def test_all_rounds_of_a_step_are_kept_in_one_file(tmp_path: Path) -> None:
    asked = [RolloutRequest(step=3, episodes=6, max_turns=1, group=2, plan=PlayPlan(round=k)) for k in (0, 1, 2)]
    made = KeptSource(source=lambda request: toy.demonstrations(1 + request.plan.round), folder=tmp_path, last=2)
    for _ in range(2):  # played anew it is written anew
        for request in asked:
            made(request)
        assert len(read_trace(tmp_path / "step_000003.jsonl")[0]) == 1 + 2 + 3


def test_groups_are_refilled_with_further_tasks(models: Path, tmp_path: Path) -> None:
    """The untrained student never succeeds: every round is played, and nothing is trained on."""
    words = command(models, tmp_path / "run", "grpo", "--grpo.n", "2", "--grpo.refill", "2", "--steps", "1")
    train.main([*words, "--keep-rollouts", "1"])
    (row,) = read_metrics(tmp_path / "run")
    assert (row["episodes"], row["episodes_dropped"], row["groups/uniform"]) == (0, 12, 6)
    played = read_trace(tmp_path / "run" / "rollouts" / "step_000001.jsonl")[0]
    assert [episode.group for episode in played] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    with pytest.raises(TrainError, match="refill plays further tasks"):
        train.main([*words, "--out", str(tmp_path / "ahead"), "--staleness", "1"])
    trace = str(tmp_path / "run" / "rollouts" / "step_000001.jsonl")
    with pytest.raises(TurngymError, match=r"refill is \d+; it needs episodes that are played"):
        train.main([*words, "--out", str(tmp_path / "again"), "--traces", trace])
