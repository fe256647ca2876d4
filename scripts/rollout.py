"""Play episodes of any environment with any agent and write them as a trace.

Examples:
    turngym rollout --agent expert --noise 0.3 --tasks 100 --out expert.jsonl
    turngym rollout --agent model:runs/student --split valid_seen --data ~/alfworld --out student.jsonl
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from turngym.agents.evaluation.play_episodes import ROLLOUT_DEFAULTS, play_rollout
from turngym.agents.play_spec import EvalSpec
from turngym.agents.resolve_play import resolve_play
from turngym.core.errors import TurngymError
from turngym.core.settings import whole_toml
from turngym.core.spec import Spec
from turngym.core.tables import print_table
from turngym.scripts.eval import say_channel
from turngym.scripts.options import Verb, list_presets


class RolloutCall(Spec):
    """What `turngym rollout` has beside the settings of what is played."""

    out: Path | None = None
    """Trace file (JSON lines); without it only the table is shown. An existing file is refused unless --append."""
    append: bool = False
    """Add to an existing trace; episodes that it holds (task, sample, seed) are not played again."""


VERB: Verb[RolloutCall] = Verb(
    name="turngym rollout",
    about=(__doc__ or "").strip(),
    own=RolloutCall,
    spec=EvalSpec,
    usual=ROLLOUT_DEFAULTS,
    first=(
        *("env", "agent", "tasks", "task", "samples", "out", "append", "split", "preset", "temperature", "memory"),
        *("max_turns", "data", "seed", "env_kwargs"),
    ),
)


def main(argv: Sequence[str]) -> int:
    """Run `turngym rollout` with `argv`; status 1 if episodes ended in errors."""
    if list_presets(argv):
        return 0
    line = VERB.asked(argv)
    call = line.own
    if call.append and call.out is None:
        raise TurngymError("--append adds to a trace: name it with --out")
    resolved = resolve_play(line.layers, usual=ROLLOUT_DEFAULTS)
    if line.show:
        print(whole_toml(resolved), end="")
        return 0
    say_channel(resolved)
    played = play_rollout(resolved, out=call.out, append=call.append, command=("turngym", "rollout", *argv))
    table = played.table()
    if table is not None:
        print_table(table)
    print(played.summary)
    return 1 if played.errors else 0
