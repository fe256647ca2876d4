"""Does depth pay in a world? KL and teacher entropy along episodes of vanilla distillation, against the paper's signs.

A pair of models is measured on full-depth episodes of the student, as the first steps of vanilla OPD would see them
(no update moves anything); a run of vanilla OPD is measured early, late and over all of its steps.

Examples:
    turngym study regime --world alfworld --world webshop --world search
    turngym study regime --run household=runs/opd --out runs/regime
    turngym study regime --student A --teacher B --world alfworld --max-turns 48
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from turngym.agents.worlds import load_world
from turngym.core.errors import TurngymError
from turngym.core.loops import loop_end
from turngym.core.numbers import Count, Million, Seed
from turngym.core.spec import Spec, Unread, needing
from turngym.core.tables import markdown
from turngym.core.trace import read_episodes
from turngym.core.user_files import named_path
from turngym.scripts.options import read_options
from turngym.trainers.diagnostics.depth_regime import full_depth_rows, measure_regime, sign_intervals, turn_sums
from turngym.trainers.metrics import read_metrics
from turngym.trainers.study.records import thirds
from turngym.trainers.study.regime_table import ABOUT, MeasuredRegime, regime_table

TOGETHER = 6
"""Episodes of a step in which a pair is measured: intervals come from the differences between steps."""


def measured(rows: Sequence[Mapping[str, Any]], folder: Path) -> MeasuredRegime:
    """What `rows` of full depth of the run in `folder` say. Raises ValueError if they have no divergence."""
    regime = measure_regime(turn_sums(rows))
    files = [folder / "rollouts" / f"step_{row['step']:06d}.jsonl" for row in rows]
    looping = None
    if all(file.is_file() for file in files):
        looping = fmean(loop_end(episode.turns) is not None for file in files for episode in read_episodes(file))
    return MeasuredRegime(regime=regime, intervals=sign_intervals(rows), looping=looping)


class RegimeOptions(Spec):
    """What is measured, and on how many episodes."""

    world: tuple[str, ...] = ()
    """Embedded world whose shipped pair is measured; may be given several times. With --student and --teacher: the
    world that they play, one."""
    run: tuple[str, ...] = ()
    """PATH or NAME=PATH of a training run (of vanilla OPD; of others the full-depth steps count); may be repeated."""
    student: Path | None = None
    """Folder of another student than the world's."""
    teacher: Path | None = None
    """Folder of another teacher than the world's."""
    episodes: Million = 96
    """Episodes that a pair is measured on, one for each task."""
    max_turns: Count | None = None
    """Full depth, turns, if not the world's."""
    seed: Seed = 0
    """Fixes tasks and sampling."""
    out: Path | None = None
    """Folder for regime.md and regime.json; by default the table is only printed."""

    def unread(self) -> Unread:
        if not self.world:
            yield from needing("--world", "student", "teacher", "episodes", "max_turns", "seed")


def main(argv: Sequence[str]) -> int:
    """Run `turngym study regime`; the exit status is 0 where every world has the signs, else 1."""
    options = read_options(RegimeOptions, argv, prog="turngym study regime", about=__doc__)
    measured = regimes(options)
    text = render(measured)
    print(text)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "regime.md").write_text(text, encoding="utf-8")
        (options.out / "regime.json").write_text(json.dumps(as_json(measured), indent=1) + "\n", encoding="utf-8")
    return 0 if all(item.regime.passes for windows in measured.values() for item in windows.values()) else 1


def regimes(options: RegimeOptions) -> dict[str, dict[str, MeasuredRegime]]:
    """Maps names to windows to what was measured. Raises TurngymError if there is nothing to measure."""
    if not options.world and not options.run:
        raise TurngymError("name what to measure: --world NAME, or --run PATH of a run of vanilla OPD")
    if (options.student or options.teacher) and len(options.world) != 1:
        raise TurngymError("--student and --teacher play one world: give --world once")
    measured = {}
    for spec in options.run:
        name, path = named_path(spec)
        measured[name or path.name] = regime_of_run(path)
    for name in options.world:
        measured[name] = {"before": regime_of_pair(name, options)}
    return measured


def regime_of_run(folder: Path) -> dict[str, MeasuredRegime]:
    """The regime in each of the `thirds` of a run's full-depth steps."""
    rows = full_depth_rows(read_metrics(folder))
    if not rows:
        raise TurngymError(f"{folder}: no training step was played to full depth")
    try:
        return {window: measured(chosen, folder) for window, chosen in thirds(rows).items()}
    except ValueError as error:
        raise TurngymError(f"{folder}: {error}") from error


def regime_of_pair(world: str, options: RegimeOptions) -> MeasuredRegime:
    """The regime of a teacher and a student before any update, on full-depth episodes of the student."""
    import tempfile

    from turngym.trainers import train

    embedded = load_world(world)
    steps = -(-options.episodes // TOGETHER)
    settings = {"micro_tokens": 2048, **embedded.distill.settings, **embedded.settings()}
    settings |= {"max_turns": options.max_turns} if options.max_turns else {}
    with tempfile.TemporaryDirectory(prefix="turngym-regime-") as folder:
        out = Path(folder) / "run"
        # vanilla OPD whose updates move nothing: what is measured is what training itself logs
        train(
            "opd",
            student=options.student or embedded.checkpoint("student"),
            teacher=options.teacher or embedded.checkpoint("teacher"),
            out=out,
            steps=steps,
            episodes=min(TOGETHER, options.episodes),
            seed=options.seed,
            optimizer={"lr": 0.0},
            keep_rollouts=steps,
            eval_every=0,
            checkpoint_every=steps,
            threads=1,
            tracker=None,
            **settings,
        )
        return measured(full_depth_rows(read_metrics(out)), out)


def render(found: Mapping[str, Mapping[str, MeasuredRegime]]) -> str:
    """The report in Markdown: the table, and the signs that are missing in each world."""
    missing = [
        f"- {name}, {window}: {'; '.join(item.regime.failures)}"
        for name, windows in found.items()
        for window, item in windows.items()
        if not item.regime.passes
    ]
    parts = ["# Regime", markdown(regime_table(found)), ABOUT]
    return "\n\n".join(parts + (["Missing:\n\n" + "\n".join(missing)] if missing else [])) + "\n"


def as_json(found: Mapping[str, Mapping[str, MeasuredRegime]]) -> dict[str, Any]:
    def entry(item: MeasuredRegime) -> dict[str, Any]:
        beside = {"intervals": dict(item.intervals), "looping": item.looping, "missing": item.regime.failures}
        return {**asdict(item.regime), **beside}

    return {name: {window: entry(item) for window, item in windows.items()} for name, windows in found.items()}
