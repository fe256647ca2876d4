"""What the processes of `test_distributed.py` do, one thing after another in one group; results go to OUT as JSON.

torchrun --nproc-per-node 2 distributed_worker.py OUT
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from distributed_cases import command

from turngym.agents.models import load_model
from turngym.agents.worlds.worlds import CHECKPOINTS
from turngym.core.errors import TurngymError
from turngym.core.rollout_request import RolloutRequest
from turngym.scripts.train import resolved
from turngym.trainers.distributed import distribute_trainer, open_ranks
from turngym.trainers.ranks import Ranks
from turngym.trainers.run import build_trainer, run_training


def words(name: str, out: Path) -> list[str]:
    """A case of the bench, made short; 5 episodes are 3 and 2."""
    grouped = {"grpo", "luffy", "grpo-kd", "grpo-minillm", "grpo-opd", "atod"}
    return command(name, out, steps=3, turns=3, episodes=6 if name in grouped else 5)


def trainer(ranks: Ranks, out: Path, *more: str) -> Any:
    return distribute_trainer(build_trainer(resolved([*words("opd", out), *more]).spec), ranks)


def caught(ranks: Ranks, work: Callable[[], Any]) -> list[str]:
    """How `work` ended in every process."""
    try:
        work()
        note = "nothing was raised"
    except (TurngymError, KeyboardInterrupt, ValueError) as error:
        note = f"{type(error).__name__}: {error}"
    return ranks.all_gather(note)


def whole_weights(ranks: Ranks, out: Path) -> list[str]:
    """A sharded model made whole gives all weights and runs by itself, as often as each process likes."""
    plain, model = (load_model(CHECKPOINTS / "alfworld" / "student") for _ in range(2))
    ranks.shard(model)
    ids = torch.arange(20)[None]
    with torch.no_grad(), ranks.full_params(model), ranks.full_params(model):
        weights = model.state_dict()
        for _ in range(1 + ranks.rank):
            logits = model(ids).logits
        same = [torch.equal(weights[name], value) for name, value in plain.state_dict().items()]
        checks = f"{all(same)} {weights.keys() == plain.state_dict().keys()} {torch.equal(logits, plain(ids).logits)}"
    share = sum(parameter.to_local().numel() for parameter in model.parameters())
    return ranks.all_gather(f"{checks} {2 * share == sum(parameter.numel() for parameter in plain.parameters())}")


def two_precisions(ranks: Ranks, out: Path) -> list[str]:
    """A head in float32 learns behind a trunk in bfloat16; one module that holds both is refused."""

    class Values(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.trunk, self.head = torch.nn.Linear(4, 4).bfloat16(), torch.nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return cast("torch.Tensor", self.head(self.trunk(x).float()))

    plain: Any
    model: Any
    plain, model = Values(), Values()
    ranks.shard(model)
    for each in (plain, model):
        each(torch.ones(3, 4).bfloat16()).sum().backward()
    pairs = zip(plain.parameters(), model.parameters(), strict=True)
    same = all(torch.equal(whole.grad, sharded.grad.full_tensor()) for whole, sharded in pairs)
    model = Values()
    model.head.bias.data = model.head.bias.data.bfloat16()
    return ranks.all_gather(f"{same} {caught(ranks, lambda: ranks.shard(model))[0]}")


def failing_collect(ranks: Ranks, out: Path) -> list[str]:
    """Process 1 cannot play the second step."""
    made = trainer(ranks, out)
    source = made.source.source

    def collect(request: RolloutRequest) -> Any:
        if request.step == 2 and ranks.rank == 1:
            raise ValueError("the environment of process 1 is gone")
        return source(request)

    made = replace(made, source=replace(made.source, source=collect))
    return caught(ranks, made.train)


def deaf_collect(ranks: Ranks, out: Path) -> list[str]:
    """A source that plays everything in every process."""
    made = trainer(ranks, out)
    source = made.source.source
    made = replace(made, source=replace(made.source, source=lambda r: source(replace(r, share=(0, 1)))))
    return caught(ranks, made.train)


def interrupted(ranks: Ranks, out: Path) -> list[str]:
    """Process 1 hears Ctrl-C while step 2 is played; both save step 2."""
    made = trainer(ranks, out)
    source = made.source.source

    def collect(request: RolloutRequest) -> Any:
        if request.step == 2 and ranks.rank == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return source(request)

    return caught(ranks, replace(made, source=replace(made.source, source=collect)).train)


def full_disk(ranks: Ranks, out: Path) -> list[str]:
    """Process 1 finds no room for its shard of step 2."""
    made = trainer(ranks, out, "--checkpoint-every", "2")
    write, calls = dcp.FileSystemWriter.write_data, []

    def write_data(self: Any, plan: Any, planner: Any) -> Any:
        calls.append(1)
        if len(calls) == 2 and ranks.rank == 1:
            raise OSError(28, "No space left on device")
        return write(self, plan, planner)

    dcp.FileSystemWriter.write_data = write_data  # type: ignore[method-assign]
    try:
        return caught(ranks, made.train)
    finally:
        dcp.FileSystemWriter.write_data = write  # type: ignore[method-assign]


def main(out: Path) -> None:
    torch.set_num_threads(1)
    with open_ranks(timeout=15) as ranks:
        for line in json.loads((out / "commands.json").read_text()):
            run_training(resolved(line).spec, ranks)
        endings = {work.__name__: work(ranks, out / work.__name__) for work in TRIALS}
        if ranks.rank == 0:
            (out / "said.json").write_text(json.dumps(endings))
        rank = ranks.rank
    (out / f"threads-{rank}.json").write_text(json.dumps(threads()))


def threads() -> list[str]:
    """The names of this process's threads, torch's own included."""
    return sorted(name.read_text().strip() for name in Path("/proc/self/task").glob("*/comm"))


TRIALS = (whole_weights, two_precisions, failing_collect, deaf_collect, interrupted, full_disk)

if __name__ == "__main__":
    main(Path(sys.argv[1]))
