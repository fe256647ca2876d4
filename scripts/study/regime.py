"""Does depth pay in a world? KL and teacher entropy along episodes of vanilla distillation, against the paper's signs.

A pair of models is measured on full-depth episodes of the student, as the first step of vanilla OPD would see them
(no update is kept); a run of vanilla OPD is measured early, late and over all of its steps.

Examples:
    turngym study regime --world alfworld --world webshop --world search
    turngym study regime --run household=runs/opd --out runs/regime
    turngym study regime --student A --teacher B --world alfworld --max-turns 48
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from turngym.agents.worlds import load_world
from turngym.envs.core.errors import TurngymError
from turngym.envs.core.tables import Table, markdown
from turngym.trainers.diagnostics.depth import Regime, full_depth_rows, measure_regime, turn_sums
from turngym.trainers.metrics import read_metrics

WINDOWS = ("early", "late", "all")
ABOUT = """\
Signs that depth can pay: deep / shallow KL below 60 %, the deep third's share of the KL mass at most 12 %, teacher
entropy falling with depth in failed episodes. Shallow and deep turns are the first and last third of full depth; KL is
the raw reverse KL in nats per token; G is that of failed less that of successful episodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegimeOptions:
    """What is measured, and on how many episodes."""

    world: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Embedded world whose shipped pair is measured; may be given several times. With --student and --teacher: the
    world that they play, one."""
    run: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """PATH or NAME=PATH of a training run (of vanilla OPD; of others the full-depth steps count); may be repeated."""
    student: Path | None = None
    """Folder of another student than the world's."""
    teacher: Path | None = None
    """Folder of another teacher than the world's."""
    episodes: int = 96
    """Episodes that a pair is measured on, one for each task."""
    max_turns: int | None = None
    """Full depth, turns, if not the world's."""
    seed: int = 0
    """Fixes tasks and sampling."""
    out: Path | None = None
    """Folder for regime.md and regime.json; by default the table is only printed."""


def main(argv: Sequence[str]) -> int:
    """Run `turngym study regime`; the exit status is 0 where every world has the signs, else 1."""
    about = (__doc__ or "").split("\n")[0]
    options = tyro.cli(RegimeOptions, args=list(argv), prog="turngym study regime", description=about)
    found = regimes(options)
    text = render(found)
    print(text)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "regime.md").write_text(text, encoding="utf-8")
        (options.out / "regime.json").write_text(json.dumps(as_json(found), indent=1) + "\n", encoding="utf-8")
    return 0 if all(regime.passes for windows in found.values() for regime in windows.values()) else 1


def regimes(options: RegimeOptions) -> dict[str, dict[str, Regime]]:
    """Maps names to windows to regimes. Raises TurngymError if there is nothing to measure."""
    if not options.world and not options.run:
        raise TurngymError("name what to measure: --world NAME, or --run PATH of a run of vanilla OPD")
    if (options.student or options.teacher) and len(options.world) != 1:
        raise TurngymError("--student and --teacher play one world: give --world once")
    found = {}
    for spec in options.run:
        name, _, path = spec.rpartition("=")
        found[name or Path(path).name] = regime_of_run(Path(path).expanduser())
    for name in options.world:
        found[name] = {"before": regime_of_pair(name, options)}
    return found


def regime_of_run(folder: Path) -> dict[str, Regime]:
    """The regime in the first and last third of a run's full-depth steps, and in all of them."""
    rows = full_depth_rows(read_metrics(folder))
    if not rows:
        raise TurngymError(f"{folder}: no training step was played to full depth")
    part = max(1, len(rows) // 3)
    windows = zip(WINDOWS, (rows[:part], rows[-part:], rows), strict=True)
    try:
        return {window: measure_regime(turn_sums(chosen)) for window, chosen in windows}
    except ValueError as error:
        raise TurngymError(f"{folder}: {error}") from error


def regime_of_pair(world: str, options: RegimeOptions) -> Regime:
    """The regime of a teacher and a student before any update, on full-depth episodes of the student."""
    import tempfile

    from turngym.trainers import train

    place = load_world(world)
    given: dict[str, Any] = {**place.settings(), **({"max_turns": options.max_turns} if options.max_turns else {})}
    with tempfile.TemporaryDirectory(prefix="turngym-regime-") as folder:
        out = Path(folder) / "run"
        # one step of vanilla OPD whose update moves nothing: what is measured is what training itself logs
        train(
            "opd",
            student=options.student or place.checkpoint("student"),
            teacher=options.teacher or place.checkpoint("teacher"),
            out=out,
            steps=1,
            episodes=options.episodes,
            seed=options.seed,
            optimizer={"lr": 0.0},
            threads=1,
            tensorboard=False,
            **{"micro_tokens": 2048, **place.distill.settings},
            **given,
        )
        return measure_regime(turn_sums(full_depth_rows(read_metrics(out))))


def regime_table(found: Mapping[str, Mapping[str, Regime]]) -> Table:
    """One row per world and window."""
    header = ["world", "steps", "turns", "KL shallow", "KL deep", "deep / shallow", "deep third of KL mass"]
    header += ["deep third of KL (eq. 11)", "first 3 turns", "entropy deep / shallow (failed)", "deep support"]
    header += ["G", "H_eff", "signs"]
    rows = []
    for name, windows in found.items():
        for window, regime in windows.items():
            shares = (regime.kl_ratio, regime.deep_mass, regime.deep_share, regime.first_mass, regime.entropy_ratio)
            cells = [_number(regime.kl_shallow), _number(regime.kl_deep), *map(_percent, shares)]
            cells += [_percent(regime.deep_support), _number(regime.separation), str(regime.h_eff)]
            rows.append([name, window, str(regime.turns), *cells, "all" if regime.passes else "missing"])
    return header, rows


def render(found: Mapping[str, Mapping[str, Regime]]) -> str:
    """The report in Markdown: the table, and the signs that are missing in each world."""
    missing = [
        f"- {name}, {window}: {'; '.join(regime.failures)}"
        for name, windows in found.items()
        for window, regime in windows.items()
        if not regime.passes
    ]
    parts = ["# Regime", markdown(regime_table(found)), ABOUT]
    return "\n\n".join(parts + (["Missing:\n\n" + "\n".join(missing)] if missing else [])) + "\n"


def as_json(found: Mapping[str, Mapping[str, Regime]]) -> dict[str, Any]:
    return {
        name: {window: {**asdict(regime), "missing": regime.failures} for window, regime in windows.items()}
        for name, windows in found.items()
    }


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
