"""One run in two processes equals one in one: all algorithms, checkpoints across numbers of ranks, ways to fail."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import distributed_worker as worker
import numpy as np
import pytest
import torch
import toy_run as toy
from distributed_cases import CASES, difference, place
from engine_requests import tiny
from hypothesis import given
from hypothesis import strategies as st
from late import late
from thread_ranks import in_ranks
from tiny_runs import untimed

from turngym.agents.servers.fleet import WeightVersions
from turngym.agents.servers.weights import SyncedPolicy
from turngym.core.errors import TurngymError
from turngym.core.rollout_request import RolloutRequest
from turngym.scripts.train import resolved
from turngym.trainers.batch import pack
from turngym.trainers.checkpoint import latest_model, list_checkpoints
from turngym.trainers.distributed import SharedSource, blocks, open_ranks, shared_scorer
from turngym.trainers.microbatch import micro_batches
from turngym.trainers.ranks import (
    SINGLE,
    DistributedError,
    Ranks,
    balanced_shares,
    broadcast,
    on_all_ranks,
    on_rank_zero,
)
from turngym.trainers.rollout_order import update_servers
from turngym.trainers.run import run_training
from turngym.trainers.scorer import LocalScorer

torch.set_num_threads(1)
T = TypeVar("T")


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 6))
def test_items_are_divided_once_and_evenly(costs: list[int], parts: int) -> None:
    shares = balanced_shares(costs, parts)
    assert sorted(np.concatenate(shares).tolist()) == list(range(len(costs)))
    loads = [sum(costs[item] for item in part) for part in shares]
    assert max(loads) - min(loads) <= max(costs, default=0)


def test_division_by_hand() -> None:
    assert [part.tolist() for part in balanced_shares([5, 1, 4, 3], 2)] == [[0, 1], [2, 3]]
    assert [part.tolist() for part in balanced_shares([2], 3)] == [[0], [], []]


@given(st.integers(1, 9), st.integers(1, 5), st.sampled_from([1, 20, 64, 1000]))
def test_processes_get_whole_episodes_and_equally_many_passes(episodes: int, size: int, budget: int) -> None:
    batch = pack(toy.demonstrations(episodes), origins=("demonstration",))
    shares = [micro_batches(batch, budget, Ranks(rank=rank, size=size)) for rank in range(size)]
    assert len({len(micros) for micros in shares}) == 1
    tokens = [micro.tokens for micros in shares for micro in micros]
    assert sorted(np.concatenate(tokens).tolist()) == list(range(batch.tokens))
    owners = [{int(e) for micro in micros for e in batch.episode_N[micro.tokens]} for micros in shares]
    assert sum(map(len, owners)) == episodes


def test_options_in_the_page_exist(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "distributed.md").read_text(encoding="utf-8")
    named = set(re.findall(r"--[a-z][a-z0-9.-]+[a-z0-9]", page))
    torchruns = {"--nproc-per-node", "--nnodes", "--rdzv-backend", "--rdzv-endpoint"}
    with pytest.raises(SystemExit):
        resolved(["turnopd", "--help-all"])
    known = set(re.findall(r"--[a-z][a-z0-9.-]+[a-z0-9]", capsys.readouterr().out))
    assert torchruns < named
    others = {"--algorithm", "--agent", "--base"}  # of other verbs
    assert named - torchruns - others <= known


def test_a_ray_of_its_own_for_every_training_process_is_refused(tmp_path: Path) -> None:
    words = [*worker.words("opd", tmp_path / "run"), "--workers", "ray:2"]
    with pytest.raises(TurngymError, match="--ray-address"):
        run_training(resolved(words).spec, Ranks(rank=0, size=2))


def test_layers_are_found_by_name_or_by_number() -> None:
    model = toy.tiny(1)
    assert blocks(model) == list(model.model.layers)
    assert blocks(torch.nn.Sequential(torch.nn.ModuleList([torch.nn.ReLU()] * 3), torch.nn.ModuleList())) != []
    model.model.layers[0].experts = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(9))
    assert blocks(model) == list(model.model.layers)
    assert blocks(torch.nn.Linear(2, 2)) == []
    # Mamba names what is inside of its layers, too: the inner group met weights that the outer one had divided
    mamba = tiny("Mamba")
    assert blocks(mamba) == list(mamba.backbone.layers)
    # layers of shared weights are no groups
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    assert blocks(model) == []


def test_what_fails_in_one_process_ends_all() -> None:
    def work(ranks: Any) -> int:
        return on_all_ranks(ranks, lambda: 6 // (ranks.rank - 1))

    zero, one, two = in_ranks(3, work)
    assert isinstance(one, ZeroDivisionError)
    for other in (zero, two):
        assert isinstance(other, DistributedError)
        assert "process 1 of 3 failed, so all stop: ZeroDivisionError: integer division" in str(other)
    assert in_ranks(3, lambda ranks: broadcast(ranks, ranks.rank + 5)) == [5, 5, 5]
    assert in_ranks(2, lambda ranks: on_rank_zero(ranks, lambda: ranks.rank + 7)) == [7, 7]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_shares_of_episodes_and_scores_come_back_in_order(size: int) -> None:
    model = toy.tiny(1)
    request = RolloutRequest(step=1, episodes=4, max_turns=6)
    whole = toy.Sampled(model)(request)

    def play(request: RolloutRequest) -> list[Any]:
        assert request.share[1] == size
        return request.own(whole)

    scorer = LocalScorer(model=model)
    ids = [episode.segments[0] for episode in whole]
    positions = [np.arange(1, len(row)) for row in ids]
    support = [np.tile(np.array([3, 4]), (len(row) - 1, 1)) for row in ids]

    def work(ranks: Any) -> Any:
        collect = SharedSource(source=play, ranks=ranks, model=model)
        shared = shared_scorer(scorer, ranks)
        found = shared.gather(ids, positions, support)  # type: ignore[attr-defined]
        return collect(request), shared.logprobs(ids, positions), shared.topk(ids, positions, 3), found

    for episodes, logps, best, found in in_ranks(size, work):
        assert episodes == whole
        for place_, row in enumerate(positions):
            assert np.allclose(logps[place_], scorer.logprobs([ids[place_]], [row])[0], atol=1e-5)
            assert np.array_equal(best[place_].ids, scorer.topk([ids[place_]], [row], 3)[0].ids)
            alone = scorer.gather([ids[place_]], [row], [support[place_]])[0]
            assert np.allclose(found[place_].logp, alone.logp, atol=1e-5)
            assert np.allclose(found[place_].tail, alone.tail, atol=1e-5)


def test_one_process_sends_the_weights_to_servers_that_all_share() -> None:
    """Each process has its own engine; two steps, and an evaluation between that needs no new weights."""
    sent: list[tuple[int, int]] = []

    def work(ranks: Any) -> Any:
        versions, stamp = WeightVersions(), [0]

        class Sink:
            def publish(self, version: int) -> None:
                sent.append((ranks.rank, version))
                versions.add(f"weights {version}", version)

        policy = SimpleNamespace(fleet=SimpleNamespace(versions=versions), generate=lambda requests: requests)
        engine = SyncedPolicy(policy=policy, sink=Sink(), stamp=lambda: stamp[0])  # type: ignore[arg-type]
        for version in (0, 0, 1):
            engine.weights_changed(version)
            stamp[0] += 1  # whole parameters lie elsewhere every time
            update_servers(ranks, engine)
            engine.generate([])
        update_servers(ranks, None)
        return versions.current, versions.version

    assert in_ranks(3, work) == [("weights 1", 1)] * 3
    assert sent == [(0, 0), (0, 1)]


def test_a_single_process_is_no_group_and_a_lost_one_is_told_what_to_start() -> None:
    with open_ranks({}) as ranks:
        assert ranks is SINGLE
    with open_ranks({"WORLD_SIZE": "1", "RANK": "0"}) as ranks:
        assert ranks is SINGLE
    with (
        pytest.raises(DistributedError, match=r"process 1 of 2 cannot reach the others.*torchrun"),
        open_ranks({"WORLD_SIZE": "2", "RANK": "1"}),
    ):
        pass
    with pytest.raises(TurngymError, match="WORLD_SIZE is 'many'"), open_ranks({"WORLD_SIZE": "many"}):
        pass


ACROSS = "ppo-kd"
"""The case that is resumed in the other number of processes: it has a critic."""
OFTEN = ("sft", "opd", "opd, sampled", "turnopd", "turnopd, ahead", "opd, workers", "opd, lora", "grpo", "prm-rl")
"""With the two that have a critic and a text's loss, all that processes share: the other cases are nightly."""
KEEP = ("--checkpoint-every", "1", "--keep-checkpoints", "9")


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cases that are asked for in one process and in two, and what `distributed_worker` tried; one group of
    processes for all."""
    asked = {item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")}
    cases = [name for name in CASES if name in {*asked, "opd", "turnopd", ACROSS}]
    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "distributed_runs"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:  # tests of one file may be dealt to several workers
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "said.json").exists():
            play(folder, cases)
    return folder


def play(folder: Path, cases: Sequence[str]) -> None:
    evaluated = ("--panel", "alfworld-quickstart", "--eval-limit", "2", "--eval-samples", "1", "--eval-every", "3")
    more = {ACROSS: KEEP, "turnopd": evaluated}
    for name in cases:
        run_training(resolved([*worker.words(name, place(folder, name, 1)), *more.get(name, ())]).spec, SINGLE)
    cut(place(folder, ACROSS, 1), folder / "one_then_two", 2)
    commands = [[*worker.words(name, place(folder, name, 2)), *more.get(name, ())] for name in cases]
    commands.append([*worker.words(ACROSS, folder / "one_then_two"), *KEEP, "--resume"])
    (folder / "commands.json").write_text(json.dumps(commands))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = [sys.executable, *torchrun, str(worker.__file__), str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr[-6000:]


def cut(run_folder: Path, copy: Path, step: int) -> None:
    """A copy of a run as it was when it had saved `step`."""
    shutil.copytree(run_folder, copy)
    for checkpoint in list_checkpoints(copy):
        if checkpoint.name > f"step_{step:06d}":
            shutil.rmtree(checkpoint)


@pytest.mark.long
@pytest.mark.parametrize("name", late(CASES, *OFTEN, ACROSS, "grpo-minillm", mark=pytest.mark.nightly))
def test_two_processes_equal_one(runs: Path, name: str) -> None:
    found = difference(runs, name, (1, 2))
    assert found.same_episodes
    assert found.loss < 2e-5
    assert found.norm < 1e-3
    assert found.other < 1e-3
    # AdamW divides by the gradient's size, so where that is mere rounding, so is the direction
    assert found.parameter < 0.3 * found.moved
    assert found.moved > 1e-5


@pytest.mark.long
def test_evaluations_are_played_once_and_give_the_same_numbers(runs: Path) -> None:
    one, two = ([row for row in untimed(place(runs, "turnopd", n)) if row["kind"] == "eval"] for n in (1, 2))
    assert [row["step"] for row in one] == [0, 3]
    assert one == two
    traces = [sorted(path.name for path in (place(runs, "turnopd", n) / "eval").iterdir()) for n in (1, 2)]
    assert traces[0] == traces[1]


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_a_world_ends_with_its_threads(runs: Path) -> None:
    """One of them left, and the process may abort while the interpreter ends."""
    names = [json.loads((runs / f"threads-{rank}.json").read_text()) for rank in (0, 1)]
    assert all("python" in own or "pt_main_thread" in own for own in names)
    assert not [name for own in names for name in own if "gloo" in name]


def close(one: Sequence[Mapping[str, Any]], two: Sequence[Mapping[str, Any]]) -> bool:
    return all(a[n] == pytest.approx(b[n], abs=2e-3) for a, b in zip(one, two, strict=True) for n in ("loss", "tokens"))


@pytest.mark.long
def test_a_run_of_one_process_goes_on_in_two(runs: Path) -> None:
    resumed, whole = untimed(runs / "one_then_two"), untimed(place(runs, ACROSS, 1))
    assert resumed[:2] == whole[:2]
    assert close(resumed, whole)
    assert resumed[2]["critic_loss"] == pytest.approx(whole[2]["critic_loss"], rel=1e-3)
    assert (list_checkpoints(runs / "one_then_two")[-1] / "shards").is_dir()


@pytest.mark.long
def test_a_run_of_two_processes_goes_on_in_one(runs: Path) -> None:
    cut(place(runs, ACROSS, 2), runs / "two_then_one", 2)
    run_training(resolved([*worker.words(ACROSS, runs / "two_then_one"), *KEEP, "--resume"]).spec, SINGLE)
    resumed, whole = untimed(runs / "two_then_one"), untimed(place(runs, ACROSS, 2))
    assert resumed[:2] == whole[:2]
    assert close(resumed, whole)
    assert resumed[2]["critic_loss"] == pytest.approx(whole[2]["critic_loss"], rel=1e-3)
    assert (list_checkpoints(runs / "two_then_one")[-1] / "optimizer.pt").is_file()


@pytest.mark.long
def test_a_model_made_whole_runs_without_the_others(runs: Path) -> None:
    """Weights, their names, logits, and that each process otherwise holds half."""
    assert json.loads((runs / "said.json").read_text())["whole_weights"] == ["True True True True"] * 2
    for said in json.loads((runs / "said.json").read_text())["two_precisions"]:
        assert said.startswith("True DistributedError: head of Values learns in torch.bfloat16 and torch.float32")


def failure(runs: Path, name: str) -> tuple[str, str]:
    first, second = json.loads((runs / "said.json").read_text())[name]
    return first, second


@pytest.mark.long
def test_a_process_that_fails_ends_all_with_its_error(runs: Path) -> None:
    waiting, failed = failure(runs, "failing_collect")
    assert failed == "ValueError: the environment of process 1 is gone"
    assert waiting == f"DistributedError: process 1 of 2 failed, so all stop: {failed}"
    assert [row["step"] for row in untimed(runs / "failing_collect")] == [1]


@pytest.mark.long
def test_a_source_that_plays_everything_everywhere_is_refused(runs: Path) -> None:
    first, _ = failure(runs, "deaf_collect")
    assert "share 0 of 2 is 3 of 5 episodes, but function gave 5" in first
    assert "RolloutRequest.own" in first


@pytest.mark.long
def test_ctrl_c_in_one_process_stops_all_at_the_same_step_and_the_run_goes_on(runs: Path) -> None:
    assert [note.partition(":")[0] for note in failure(runs, "interrupted")] == ["KeyboardInterrupt"] * 2
    assert [row["step"] for row in untimed(runs / "interrupted")] == [1, 2]
    assert list_checkpoints(runs / "interrupted")[-1].name == "step_000002"
    run_training(resolved([*worker.words("opd", runs / "interrupted"), "--resume"]).spec, SINGLE)
    assert close(untimed(runs / "interrupted"), untimed(place(runs, "opd", 2)))


@pytest.mark.long
def test_a_full_disk_in_one_process_leaves_the_checkpoint_before(runs: Path) -> None:
    for note in failure(runs, "full_disk"):
        assert note.startswith("CheckpointError: no room left under ")
        assert "checkpoint of step 2 could not be written" in note
        assert "--resume" in note
    checkpoints = runs / "full_disk" / "checkpoints"
    assert [path.name for path in checkpoints.iterdir()] == ["step_000000"]
    run_training(
        resolved([*worker.words("opd", runs / "full_disk"), "--resume", "--checkpoint-every", "2"]).spec, SINGLE
    )
    assert close(untimed(runs / "full_disk"), untimed(place(runs, "opd", 1)))


@pytest.mark.long
def test_a_checkpoint_of_another_configuration_is_refused_before_anything_is_touched(runs: Path) -> None:
    with pytest.raises(TurngymError, match=r"another configuration.*optimizer\.lr"):
        run_training(
            resolved([*worker.words("opd", place(runs, "opd", 2)), "--resume", "--optimizer.lr", "1e-2"]).spec, SINGLE
        )


@pytest.mark.long
def test_exported_models_are_ordinary_folders(runs: Path) -> None:
    folders = [latest_model(place(runs, "opd", size)) for size in (1, 2)]
    names = [{path.name for path in folder.iterdir()} for folder in folders]
    assert names[0] == names[1]
    assert (folders[0] / "config.json").read_text() == (folders[1] / "config.json").read_text()
