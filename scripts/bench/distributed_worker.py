"""Runs several `turngym train` command lines one after another in one group of processes: starting one takes longest.

torchrun --nproc-per-node 2 -m turngym.scripts.bench.distributed_worker commands.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from turngym.scripts.train import parse, run
from turngym.trainers.distributed import world_of


def main(path: Path) -> None:
    """`path` holds a JSON list of command lines, each a list of words."""
    torch.set_num_threads(1)
    with world_of() as world:
        for words in json.loads(path.read_text(encoding="utf-8")):
            run(parse(words), world)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
