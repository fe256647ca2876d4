"""Break things on purpose (kills, double starts, changed bytes, senseless actions), and count what goes wrong.

Examples:
    turngym bench faults
    turngym bench faults --only files actions --flips 200 --actions 20000 --seed 7
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import tyro

from turngym.envs.core.tables import markdown
from turngym.scripts.bench.faults.tally import Tally, cpu_spent, fault_table, tally_of

Part = Literal["files", "actions", "kills", "twice", "coverage", "servers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How often each thing is tried; the defaults take a few minutes of one core."""

    only: tuple[Part, ...] = get_args(Part)
    """Which parts."""
    flips: int = 25
    """Changed bits for each kind of file."""
    checksums: bool = True
    """Without: files as versions before checksums wrote and read them, to see what the checksums are for."""
    actions: int = 1500
    """Senseless actions for each environment."""
    kills: int = 2
    """kill -9 for each kind of work."""
    twice: int = 2
    """Second starts for each kind of work."""
    evaluations: int = 300
    """Simulated evaluations for each true rate and correlation, of whose 95 % intervals at least 95 % must hold it."""
    requests: int = 200
    """Malformed requests for each server, over sockets."""
    inside: int = 1000
    """Malformed requests for each server inside its own process, without sockets."""
    seed: int = 0
    """Of places, bits, actions and moments."""


def main(argv: Sequence[str]) -> int:
    """Run `turngym bench faults` with `argv`; status 1 if anything went wrong."""
    description = (__doc__ or "").split("\n")[0]
    options = tyro.cli(Options, args=list(argv), prog="turngym bench faults", description=description)
    found = []
    for tally in run(options):
        found.append(tally)
        print(f"{tally.what}: {tally.failures} failures in {tally.tries} tries", file=sys.stderr, flush=True)
    print(markdown(fault_table(found)))
    for one in found:
        print("\n".join(one.notes), end="\n" if one.notes else "")
    print(f"{sum(one.failures for one in found)} failures in {sum(one.tries for one in found)} tries")
    return 1 if any(one.failures for one in found) else 0


def run(options: Options) -> Iterator[Tally]:
    """Every part that is asked for, with the CPU time of each kind."""
    with tempfile.TemporaryDirectory(prefix="turngym-faults-") as scratch:
        before = cpu_spent()
        for tally in _parts(options, Path(scratch)):
            now = cpu_spent()
            tally.seconds, before = now - before, now
            yield tally


def _parts(options: Options, scratch: Path) -> Iterator[Tally]:
    if "files" in options.only:
        from turngym.scripts.bench.faults.files import flips

        yield from flips(scratch / "files", options.flips, options.seed, checksums=options.checksums)
    if "actions" in options.only:
        from turngym.scripts.bench.faults.actions import fuzzed

        yield from fuzzed(options.actions, options.seed)
    if "kills" in options.only:
        from turngym.scripts.bench.faults.kills import kills

        yield from kills(scratch / "kills", options.kills, options.seed)
    if "twice" in options.only:
        from turngym.scripts.bench.faults.twice import doubles

        yield from doubles(scratch / "twice", options.twice)
    if "coverage" in options.only:
        yield _coverage(options)
    if "servers" in options.only:
        from turngym.scripts.bench.faults.servers import run_server_faults

        for row in run_server_faults(options.requests, options.seed, inside=options.inside):
            yield row.tally()


def _coverage(options: Options) -> Tally:
    """Intervals that hold the true value too seldom: in less than 95 % by more than chance (three standard errors)."""
    from turngym.scripts.bench.intervals import Options as Simulated
    from turngym.scripts.bench.intervals import coverages

    n = options.evaluations
    simulated = Simulated(tasks=50, repetitions=n, widths=1, rates=(0.02, 0.5, 0.98), seed=options.seed)
    limit = 0.95 - 3 * (0.95 * 0.05 / n) ** 0.5
    tally = tally_of("interval coverage", ("too narrow",), {})
    for one in coverages(simulated):
        said = f"{one.measure} at rate {one.rate}, correlation {one.correlation}: {100 * one.covered:.1f} % hold it"
        tally.count("held" if one.covered >= limit else "too narrow", said)
    return tally
