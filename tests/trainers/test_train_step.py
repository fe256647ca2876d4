"""One training step by hand: what is asked of each part, and which of its numbers goes where."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from turngym.core.episode import Episode, Status
from turngym.core.errors import SettingsError
from turngym.core.rollout_request import PlayPlan, RolloutRequest
from turngym.core.spec import changed
from turngym.trainers import optimizer_step as epochs
from turngym.trainers import train_loop
from turngym.trainers.algorithm import DepthPlan, DepthState, Scorers, Targets
from turngym.trainers.batch import EmptyBatchError, pack
from turngym.trainers.learning_rate import learning_rate
from turngym.trainers.optimizer_step import (
    Epochs,
    Forward,
    RunStep,
    UpdateResult,
    drawn_temperatures,
    minibatches,
    run_epochs,
)
from turngym.trainers.ranks import SINGLE, Ranks
from turngym.trainers.run_config import OptimizerConfig, RunConfig
from turngym.trainers.run_folder import RunState
from turngym.trainers.token_weights import Blend, Static, TurnLevel, trajectory_weights
from turngym.trainers.train_loop import ClockReading, TrainError, TrainLoop

# as the token loss gives them, at the five tokens 10 11 | 12 and 20 21 of the ragged episodes
KL_BIN, KL_RAW = np.array([1, 2, 5, 3, 4], np.float32), np.array([10, 20, 50, 30, 40], np.float32)
ONES = np.ones(5, np.float32)
COLUMNS = {"loss": ONES, "logp": -ONES, "sampled_logp": -ONES, "entropy": ONES, "kl_bin": KL_BIN, "kl_raw": KL_RAW}
RUN = RunConfig(
    steps=9,
    episodes=6,
    temperature=0.7,
    micro_tokens=77,
    head_chunk=33,
    autocast="bfloat16-body",
    gradient_checkpointing=True,
    packing="on",
    eval_every=2,
)


class Depth:
    """Plans what it was told, and notes what it was shown."""

    def __init__(self) -> None:
        self.planned: list[Any] = []
        self.shown: list[Any] = []

    def plan(self, state: DepthState, step: int) -> DepthPlan:
        self.planned.append((state, step))
        return DepthPlan(cap=5, probe=True, demonstration_turns=3)

    def learn(self, *shown: Any) -> DepthState:
        self.shown.append(shown)
        return DepthState(hbar=4.5)


class Bench:
    """A training loop whose parts note what they are asked."""

    def __init__(self, **algorithm: Any) -> None:
        self.asked: list[Any] = []
        self.rows: list[dict[str, Any]] = []
        self.updated: list[int] = []
        self.evaluated: list[int] = []
        self.phases: list[str] = []
        self.depth = Depth()
        parts: dict[str, Any] = {
            "name": "fake",
            "depth": self.depth,
            "group": 2,
            "guide": lambda step: step / 8,
            "prefix": lambda step, groups: ((step / 10,),) * groups,
            "prefix_unit": "turns",
            "states": False,
            "refill": 0,
            "select": None,
            "origins": ("policy",),
            "target_fn": self.target_fn,
            "weight": Blend(),
            "distill_temperature": 1.5,
            "entropy_gradient": True,
        }
        self.trainer: Any = SimpleNamespace(
            algorithm=SimpleNamespace(**(parts | algorithm)),
            run=RUN,
            optimizer=OptimizerConfig(lr=0.5),
            model="student",
            teacher="teacher",
            reference="reference",
            vocab_size=60,
            ranks=SINGLE,
            servers=None,
            out=Path("out"),
            source="the source",
            on_update=self.updated.append,
            evaluate=self.evaluate,
            order=lambda step, planned, collect: (planned(step), self.answer(collect)),
            progress=SimpleNamespace(phase=self.phases.append, row=lambda row: None),
        )
        state = RunState(step=3, depth=DepthState(hbar=7.0), train_seconds=100.0)
        log: Any = SimpleNamespace(write=self.rows.append)
        nothing: Any = None
        critic: Any = SimpleNamespace(values="its values")
        folder: Any = SimpleNamespace(refresh=None)
        self.loop = TrainLoop(self.trainer, nothing, folder, log, state, critic)
        self.episodes: list[Episode] = []

    def answer(self, collect: Any) -> list[Episode]:
        self.asked.append(collect)
        return self.episodes

    def target_fn(self, batch: Any, kept: Any, scorers: Scorers) -> Targets:
        self.asked.append((batch.label_N.tolist(), kept, scorers))
        return Targets(advantage_N=ONES if batch.tokens == len(ONES) else ONES[: batch.tokens])

    def evaluate(self, step: int) -> Any:
        self.evaluated.append(step)
        return SimpleNamespace(avg=0.5, low=0.25, high=0.75, extra={"turns": 3.0})


def learned(asked: list[Any], columns: dict[str, Any]) -> Callable[..., Epochs]:
    def run(*given: Any) -> Epochs:
        asked.append(given)
        result = UpdateResult(loss=0.5, grad_norm=2.0, skipped=False, columns={}, terms={})
        fresh_N = np.ones(5, np.bool_)
        return Epochs(results=[result], columns=columns, weight_N=ONES / 5, fresh_N=fresh_N, lr=0.5)

    return run


def stepped(ragged: list[Episode], monkeypatch: pytest.MonkeyPatch, columns: dict[str, Any], **more: Any) -> Bench:
    bench, plan = Bench(**more), DepthPlan(cap=5, probe=True)
    monkeypatch.setattr(train_loop, "run_epochs", learned(bench.asked, columns))
    now = ClockReading.now()
    bench.loop._step(replace(now, wall=now.wall - 50.0, cpu=now.cpu - 40.0), plan, ragged)
    return bench


def test_the_depth_controller_sees_the_raw_divergence(ragged: list[Episode], monkeypatch: pytest.MonkeyPatch) -> None:
    bench = stepped(ragged, monkeypatch, COLUMNS)
    ((state, plan, batch, episodes, kl_N),) = bench.depth.shown
    assert (state, plan) == (DepthState(hbar=7.0), DepthPlan(cap=5, probe=True))
    # the raw form, which may be negative
    assert kl_N.tolist() == [10.0, 20.0, 50.0, 30.0, 40.0]
    assert (batch.tokens, batch.depth_E.tolist(), episodes) == (5, [2, 1], ragged)
    (row,) = bench.rows
    assert (row["kl_bin"], row["kl_raw"], row["turn/kl"], row["turn/kl_raw"]) == (3.0, 30.0, [2.5, 5.0], [25.0, 50.0])
    assert (row["step"], row["kind"], row["depth/hbar"], row["depth/cap"]) == (4, "train", 4.5, 5)
    assert bench.loop.state.depth == DepthState(hbar=4.5)
    without = stepped(ragged, monkeypatch, {k: v for k, v in COLUMNS.items() if not k.startswith("kl_")})
    assert without.depth.shown[0][4].tolist() == [0.0] * 5


def test_a_step_hands_on_what_was_kept(ragged: list[Episode], monkeypatch: pytest.MonkeyPatch) -> None:
    bench = stepped(ragged, monkeypatch, COLUMNS, select=lambda episodes: episodes[::-1])
    labels, kept, scorers = bench.asked[0]
    assert (labels, kept) == ([20, 21, 10, 11, 12], ragged[::-1])
    assert (scorers.teacher, scorers.reference, scorers.critic, scorers.step) == (
        "teacher",
        "reference",
        "its values",
        4,
    )
    student: Any = scorers.student
    assert (student.model, student.vocab_size, student.temperature) == ("student", 60, 1.5)
    assert (student.max_tokens, student.chunk, student.packing) == (77, 33, "on")
    model, _, batch, episodes, targets, algorithm, run_step, forward, critic = bench.asked[1]
    assert (model, batch.label_N.tolist(), episodes) == ("student", labels, kept)
    assert critic is bench.loop.critic
    assert targets.advantage_N is ONES
    assert algorithm is bench.trainer.algorithm
    assert run_step == RunStep(config=OptimizerConfig(lr=0.5), step=4, total_steps=9)
    assert forward == bench.loop._forward()
    assert bench.updated == [4]
    assert bench.loop.state.step == 4
    assert bench.loop.state.train_seconds > 100.0
    (row,) = bench.rows
    assert row["time/train_s"] == bench.loop.state.train_seconds
    assert row["time/step_s"] == pytest.approx(row["time/train_s"] - 100.0)
    parts = [row[f"time/{name}_s"] for name in ("rollout", "teacher", "update")]
    assert all(part >= 0 for part in parts)
    assert sum(parts) == pytest.approx(row["time/step_s"])
    cpu = [row[f"time/{name}_cpu_s"] for name in ("rollout", "teacher", "update")]
    assert cpu[0] == pytest.approx(40.0, abs=5.0)
    assert all(0 <= seconds < 5 for seconds in cpu[1:])
    assert parts[0] == pytest.approx(50.0, abs=5.0)
    assert bench.phases == ["teacher", "update"]
    assert row["tokens_per_s"] == pytest.approx(5 / row["time/step_s"])
    # the labels of the first episode have a behavior policy of version 0: three versions behind step 3
    assert (row["staleness_mean"], row["staleness_max"]) == (3.0, 3)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_process_lets_servers_sleep_before_anything_is_scored(
    rank: int, ragged: list[Episode], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench()
    bench.trainer.ranks = Ranks(rank, 1)
    bench.trainer.servers = SimpleNamespace(sleep=lambda: bench.asked.append("sleep"))
    monkeypatch.setattr(train_loop, "run_epochs", learned(bench.asked, COLUMNS))
    bench.loop._step(ClockReading.now(), DepthPlan(cap=5, probe=True), ragged)
    assert [place for place, one in enumerate(bench.asked) if one == "sleep"] == ([] if rank else [0])


def test_a_step_in_which_nothing_is_kept(
    ragged: list[Episode], make_episode: Callable[..., Episode], monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = make_episode([([1], [2])], status=Status.ERROR_ENV)
    turns = sum(episode.depth for episode in ragged) + 1
    bench = stepped([*ragged, failed], monkeypatch, COLUMNS, select=lambda episodes: [])
    assert (bench.asked, bench.depth.shown, bench.updated) == ([], [], [4])
    (row,) = bench.rows
    names = ("step", "kind", "episodes", "episodes_failed", "episodes_dropped", "success", "depth/cap")
    assert {name: row[name] for name in names} == {
        "step": 4,
        "kind": "train",
        "episodes": 0,
        "episodes_failed": 1,
        "episodes_dropped": 2,
        "success": 0.5,
        "depth/cap": 5,
    }
    assert (bench.loop.state.step, bench.loop.state.depth) == (4, DepthState(hbar=7.0))
    assert row["time/train_s"] == bench.loop.state.train_seconds > 100.0
    bench.trainer.on_update = None
    assert row["time/train_s"] == pytest.approx(150.0, abs=5.0)
    # what was spent is written whatever came of it, lost episodes included
    assert row["cost/turns"] == turns
    assert row["cost/sampled"] == sum(t.response_length for e in [*ragged, failed] for t in e.turns) > 0
    assert row["tokens"] == 0
    assert row["time/step_s"] == pytest.approx(
        sum(row[f"time/{phase}_s"] for phase in ("rollout", "teacher", "update"))
    )
    assert {f"time/{phase}_cpu_s" for phase in ("rollout", "teacher", "update")} < row.keys()
    now = ClockReading.now()
    bench.loop._skip((now, now), DepthPlan(cap=5), ragged)
    assert bench.loop.state.step == 5


def test_a_step_without_a_trainable_token_counts_and_learns_nothing(
    make_episode: Callable[..., Episode],
) -> None:
    """Every response was broken off, say: the next step may hold some."""
    bench, start = Bench(), ClockReading.now()
    episode = make_episode([([1, 2], [3])])
    broken = replace(episode, turns=(replace(episode.turns[0], excluded="broken off"),))
    bench.loop._step(start, DepthPlan(cap=5), [broken, replace(broken, sample=1)])
    (row,) = bench.rows
    assert (row["step"], row["episodes"], row["episodes_dropped"]) == (4, 0, 2)
    assert (bench.loop.state.step, bench.updated, bench.asked) == (4, [4], [])
    # texts will never have ids
    with pytest.raises(EmptyBatchError, match="text-only"):
        bench.loop._step(start, DepthPlan(cap=5), [replace(broken, segments=(), turns=())])


class Half:
    """Keeps the first episode, or none, and says so."""

    def __init__(self, keeps: int) -> None:
        self.keeps = keeps

    def __call__(self, episodes: list[Episode]) -> list[Episode]:
        return episodes[: self.keeps]

    def row(self, episodes: list[Episode]) -> dict[str, int]:
        return {"groups/kept": self.keeps, "groups/uniform": len(episodes) - self.keeps}


@pytest.mark.parametrize("keeps", [1, 0])
def test_what_a_filter_says_is_in_the_row(ragged: list[Episode], monkeypatch: pytest.MonkeyPatch, keeps: int) -> None:
    columns = {name: column[:3] for name, column in COLUMNS.items()}
    with monkeypatch.context() as patch:  # the next literal test needs the real row
        patch.setattr(train_loop.step_metrics, "step_row", lambda *given: {})
        (row,) = stepped(ragged, patch, columns, select=Half(keeps)).rows
    assert (row["groups/kept"], row["groups/uniform"]) == (keeps, 2 - keeps)


def test_a_filter_has_no_name_that_every_run_has(ragged: list[Episode], monkeypatch: pytest.MonkeyPatch) -> None:
    class Named(Half):
        def row(self, episodes: list[Episode]) -> dict[str, Any]:
            return {"loss": 1.0}

    with pytest.raises(SettingsError, match="its select has 'loss'"):
        stepped(ragged, monkeypatch, COLUMNS, select=Named(9))


def test_what_is_asked_of_the_rollouts(ragged: list[Episode]) -> None:
    bench = Bench()
    planned = bench.loop._planned(4)
    assert planned.request == RolloutRequest(
        step=4,
        episodes=6,
        max_turns=5,
        temperature=0.7,
        group=2,
        plan=PlayPlan(demonstration_turns=3, prefix_ratios=((0.4,), (0.4,), (0.4,)), teacher_turns=0.5),
    )
    assert planned.plan == DepthPlan(cap=5, probe=True, demonstration_turns=3)
    assert bench.depth.planned == [(DepthState(hbar=7.0), 4)]
    assert Bench(prefix=None).loop._planned(4).request.plan.prefix_ratios == ()
    assert Bench(prefix_unit="tokens").loop._planned(4).request.plan.prefix_unit == "tokens"
    assert Bench(states=True).loop._planned(4).request.plan.states
    assert Bench(guide=None).loop._planned(4).request.plan.teacher_turns == 0.0
    bench.episodes = ragged
    _, plan, found = bench.loop._collect()
    assert (plan, found, bench.asked) == (planned.plan, ragged, ["the source"])
    assert bench.depth.planned[-1] == (DepthState(hbar=7.0), 4)
    assert bench.phases == ["rollout"]
    with pytest.raises(TrainError, match=r"step 4: all 0 episodes failed; the first: the source returned none$"):
        Bench().loop._collect()
    bench.episodes = [replace(ragged[0], status=Status.ERROR_ENGINE, meta={"error": "no memory"})]
    with pytest.raises(TrainError, match=r"all 1 episodes failed; .*no memory"):
        bench.loop._collect()
    bench.episodes = [replace(ragged[0], status=Status.ERROR_ENGINE), ragged[1]]
    assert bench.loop._collect()[2] == bench.episodes


def test_how_the_forward_passes_are_computed() -> None:
    bench = Bench()
    assert bench.loop._forward() == Forward(
        micro_tokens=77,
        head_chunk=33,
        vocab_size=60,
        distill_temperature=1.5,
        sampling_temperature=0.7,
        entropy_gradient=True,
        autocast=True,
        autocast_head=False,
        gradient_checkpointing=True,
        packing="on",
        ranks=SINGLE,
    )
    for word, wanted in (("off", (False, False)), ("bfloat16", (True, True))):
        bench.trainer.run = changed(RUN, autocast=word)
        assert (bench.loop._forward().autocast, bench.loop._forward().autocast_head) == wanted


def test_when_a_run_is_evaluated() -> None:
    bench = Bench()
    for step in (0, 1, 2, 2, 3, 9):
        bench.loop.state = replace(bench.loop.state, step=step)
        bench.loop._maybe_evaluate()
    assert bench.evaluated == [0, 2, 9]  # the last step too
    assert bench.phases == ["evaluate"] * 3
    row = bench.rows[1]
    assert {name: row[name] for name in row if name != "time/eval_s"} == {
        "step": 2,
        "kind": "eval",
        "eval/avg": 0.5,
        "eval/low": 0.25,
        "eval/high": 0.75,
        "eval/turns": 3.0,
        "time/train_s": 100.0,
    }
    assert 0 <= row["time/eval_s"] < 60
    for change in ({"evaluate": None}, {"run": changed(RUN, eval_every=0)}):
        quiet = Bench()
        for name, value in change.items():
            setattr(quiet.trainer, name, value)
        quiet.loop._maybe_evaluate()
        assert (quiet.evaluated, quiet.rows) == ([], [])


class Critic:
    """Notes what it is taught."""

    def __init__(self) -> None:
        self.taught: list[Any] = []

    def update(self, batch: Any, return_N: Any, value_N: Any) -> float:
        self.taught.append((batch.label_N.tolist(), return_N.tolist(), value_N.tolist()))
        return float(len(self.taught))


def test_epochs_and_minibatches_by_hand(ragged: list[Episode], monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []

    def update(model: Any, optimizer: Any, part: Any, **given: Any) -> UpdateResult:
        terms = {term.name: term.backward(model, given["step"], given["forward"].ranks) for term in given["terms"]}
        calls.append({"model": model, "optimizer": optimizer, "labels": part.label_N.tolist(), **given, "terms": terms})
        columns = {"loss": (part.label_N + 100 * len(calls)).astype(np.float32)}
        return UpdateResult(loss=float(len(calls)), grad_norm=1.0, skipped=False, columns=columns, terms=terms)

    def weight(part: Any, *, step: int, total_steps: int) -> Any:
        assert (step, total_steps) == (2, 4)
        return np.arange(1.0, part.tokens + 1) / sum(range(1, part.tokens + 1))

    monkeypatch.setattr(epochs, "update", update)
    batch, critic = pack(ragged), Critic()
    numbers = np.arange(5, dtype=np.float32)
    targets = Targets(advantage_N=numbers, return_N=numbers * 2, value_N=numbers * 3)
    term = SimpleNamespace(name="lpt", backward=lambda model, step, ranks: float(step) if ranks is SINGLE else -1.0)
    algorithm: Any = SimpleNamespace(name="mine", weight=weight, token_loss="loss", origins=("policy",), terms=(term,))
    config = OptimizerConfig(lr=1.0, ppo_epochs=2, minibatches=2, max_grad_norm=0.3, schedule="linear")
    given: Any = ("model", "optimizer", batch, ragged, targets, algorithm)
    done = run_epochs(*given, RunStep(config=config, step=2, total_steps=4), Forward(micro_tokens=7), critic)  # type: ignore[arg-type]
    assert [call["labels"] for call in calls] == [[10, 11, 12], [20, 21]] * 2
    first = calls[0]
    assert (first["model"], first["optimizer"], first["token_loss"]) == ("model", "optimizer", "loss")
    assert (first["forward"].micro_tokens, first["lr"], first["max_grad_norm"]) == (7, 0.75, 0.3)
    assert first["terms"] == {"lpt": 2.0}
    assert calls[1]["targets"].advantage_N.tolist() == [3.0, 4.0]
    assert calls[1]["weight_N"].tolist() == pytest.approx([1 / 3, 2 / 3])
    # the weights of both minibatches together sum to 1
    assert done.weight_N.tolist() == pytest.approx([1 / 12, 2 / 12, 3 / 12, 1 / 6, 2 / 6])
    # columns are those of the first epoch; only the first minibatch was seen before any update
    assert done.columns["loss"].tolist() == [110.0, 111.0, 112.0, 220.0, 221.0]
    assert done.fresh_N.tolist() == [True, True, True, False, False]
    assert ([result.loss for result in done.results], done.lr) == ([1.0, 2.0, 3.0, 4.0], 0.75)
    assert critic.taught[1] == ([20, 21], [6.0, 8.0], [9.0, 12.0])
    assert done.critic_losses == [1.0, 2.0, 3.0, 4.0]
    # returns 0 2 4 6 8 and values 0 3 6 9 12: var(R - V) / var(R) = 2 / 8
    assert done.critic_explained == pytest.approx(0.75)


def test_a_critic_learns_only_from_returns(ragged: list[Episode], monkeypatch: pytest.MonkeyPatch) -> None:
    result = UpdateResult(loss=0.0, grad_norm=1.0, skipped=False, columns={}, terms={})
    monkeypatch.setattr(epochs, "update", lambda *_, **__: result)
    algorithm: Any = SimpleNamespace(
        name="mine",
        weight=lambda part, **_: np.full(part.tokens, 1 / part.tokens),
        token_loss=None,
        origins=("policy",),
        terms=(),
    )
    run_step = RunStep(config=OptimizerConfig(), step=1, total_steps=1)
    for targets in (Targets(return_N=np.arange(5, dtype=np.float32)), Targets(value_N=ONES), Targets()):
        critic: Any = Critic()
        done = run_epochs(None, None, pack(ragged), ragged, targets, algorithm, run_step, Forward(), critic)  # type: ignore[arg-type]
        assert (critic.taught, list(done.critic_losses), done.critic_explained) == ([], [], None)
        assert done.fresh_N.all()


def test_minibatches_by_hand(ragged: list[Episode], make_episode: Callable[..., Episode]) -> None:
    failed = make_episode([([1], [9])], status=Status.ERROR_ENV)
    third = make_episode([([7], [30]), ([8], [31])], origins=["demonstration", "policy"])
    episodes = [failed, *ragged, third]
    batch = pack(episodes, origins=("policy", "demonstration"))
    targets = Targets(advantage_N=np.arange(7, dtype=np.float32))
    algorithm: Any = SimpleNamespace(origins=("policy", "demonstration"))
    parts = minibatches(batch, episodes, targets, algorithm, 2)
    assert [part.label_N.tolist() for part, *_ in parts] == [[10, 11, 12, 30, 31], [20, 21]]
    assert [tokens.tolist() for *_, tokens in parts] == [[0, 1, 2, 5, 6], [3, 4]]
    found = [chosen.advantage_N.tolist() for _, chosen, _ in parts if chosen.advantage_N is not None]
    assert found == [[0.0, 1.0, 2.0, 5.0, 6.0], [3.0, 4.0]]
    assert [len(minibatches(batch, episodes, targets, algorithm, count)) for count in (1, 3, 9)] == [1, 3, 3]
    ((whole, same, tokens),) = minibatches(batch, episodes, targets, algorithm, 1)
    assert (whole is batch, same is targets, tokens.tolist()) == (True, True, list(range(7)))


def test_the_learning_rate_by_step() -> None:
    config = OptimizerConfig(lr=0.5, lr_warmup=1, schedule="linear")
    assert [learning_rate(config, step, 5) for step in (1, 2, 3, 5)] == [0.25, 0.5, 0.375, 0.125]
    cosine = changed(config, schedule="cosine", lr_warmup=0)
    assert [learning_rate(cosine, step, 4) for step in (1, 3)] == pytest.approx([0.5, 0.25])
    assert learning_rate(changed(config, schedule="constant"), 5, 5) == 0.5
    # warm-up as long as the run: it ends where the fall would begin
    assert [learning_rate(changed(config, lr_warmup=3), step, 3) for step in (1, 3)] == [0.125, 0.375]


def test_how_far_the_weights_have_moved(ragged: list[Episode], monkeypatch: pytest.MonkeyPatch) -> None:
    def alpha(weight: Any) -> Any:
        return stepped(ragged, monkeypatch, COLUMNS, weight=weight).rows[0].get("weight/alpha")

    # step 4 of 9
    assert alpha(Blend()) == pytest.approx(4 / 9)
    assert alpha(Blend(start=4 / 9, end=0.5)) == 0.0
    assert alpha(TurnLevel()) == 1.0
    assert alpha(Static(trajectory_weights)) is None


def test_a_step_at_full_depth_knows_its_failures(ragged: list[Episode], monkeypatch: pytest.MonkeyPatch) -> None:
    cut = [replace(ragged[0], status=Status.TRUNCATED_DEPTH), ragged[1]]

    def failed(full_depth: bool) -> Any:
        bench, now = Bench(), ClockReading.now()
        monkeypatch.setattr(train_loop, "run_epochs", learned(bench.asked, COLUMNS))
        bench.loop._step(now, DepthPlan(cap=5, full_depth=full_depth), cut)
        return bench.rows[0]["turn/tokens_failure"]

    assert (failed(False), failed(True)) == ([0, 0], [2, 1])


def test_what_a_partial_probe_asks_of_the_rollouts(ragged: list[Episode], monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()

    def request(**plan: Any) -> RolloutRequest:
        monkeypatch.setattr(bench.depth, "plan", lambda state, step: DepthPlan(cap=50, adaptive_cap=11, **plan))
        return bench.loop._planned(4).request

    asked = request(probe=True, short_share=0.5)
    assert (asked.max_turns, asked.plan.short_episodes, asked.plan.short_turns) == (50, 3, 11)
    assert asked.depth_caps() == [50, 50, 50, 11, 11, 11]
    assert request(probe=True, short_share=0.99).depth_caps() == [50, 11, 11, 11, 11, 11]
    assert request(loop_share=0.5).plan.leave_loops == 3
    whole = request(probe=True)
    assert (whole.plan.short_episodes, whole.plan.short_turns, whole.depth_caps()) == (0, None, [50] * 6)


def test_groups_that_are_left_out_are_refilled(ragged: list[Episode]) -> None:
    """Three groups of two are wanted; each round brings one that counts."""
    bench = Bench(select=lambda episodes: [episode for episode in episodes if episode.group >= 0], refill=5)
    bench.episodes = [replace(ragged[0], group=-1), replace(ragged[1], group=0)]
    rounds: list[int] = []

    def more(request: RolloutRequest) -> list[Episode]:
        rounds.append(request.plan.round)
        return [replace(episode, group=request.plan.round) for episode in ragged]

    bench.trainer.source = more
    _, _, found = bench.loop._collect()
    assert rounds == [1, 2]
    assert [episode.group for episode in found] == [-1, 0, 1, 1, 2, 2]
    bench.trainer.algorithm.refill = 1
    assert len(bench.loop._collect()[2]) == 4
    bench.trainer.algorithm.refill = 0
    assert len(bench.loop._collect()[2]) == 2


def test_temperatures_at_which_labels_were_drawn(ragged: list[Episode]) -> None:
    """As recorded, by episode; 1 for greedy ids; the run's for who records none."""
    recorded = [replace(ragged[0], meta={"temperature": 0.5}), ragged[1]]
    batch = pack(recorded)
    np.testing.assert_array_equal(drawn_temperatures(batch, 0.7), [0.5, 0.5, 0.5, 0.7, 0.7])
    np.testing.assert_array_equal(drawn_temperatures(batch, 0.0), [0.5, 0.5, 0.5, 1.0, 1.0])
    greedy = pack([replace(ragged[0], meta={"temperature": 0}), ragged[1]])
    np.testing.assert_array_equal(drawn_temperatures(greedy, 0.7), [1.0, 1.0, 1.0, 0.7, 0.7])


def test_an_id_that_only_a_padded_head_can_draw_is_named(ragged: list[Episode]) -> None:
    batch = pack(ragged)  # ids up to 21
    train_loop.check_ids(batch, 22)
    train_loop.check_ids(batch, None)
    with pytest.raises(TrainError, match="id 21 "):
        train_loop.check_ids(batch, 21)
