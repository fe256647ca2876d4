"""The tables beside success that some scenarios have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from turngym.envs.core.tables import Table
from turngym.scripts.bench.scenarios.measures import critic_explained, crossed, forgotten, heldout_nats, more_forgotten
from turngym.scripts.bench.scenarios.options import ScenariosBench
from turngym.scripts.bench.scenarios.passages import text_path
from turngym.scripts.bench.scenarios.plan import Planned
from turngym.scripts.bench.scenarios.scenario import Measure


@dataclass(frozen=True, slots=True, kw_only=True)
class Extra:
    """What a scenario measures beside success."""

    title: str
    table: Table
    numbers: Mapping[str, Any]


def extra_of(options: ScenariosBench, planned: Planned) -> Extra | None:
    """The measure of a scenario with finished runs; None where success is all."""
    make = MEASURES[planned.scenario.measure]
    return None if make is None else make(options, planned)


def _text(options: ScenariosBench, planned: Planned) -> Extra:
    """Held-out text before and after, by arm."""
    from turngym.trainers.lm_loss import read_texts

    documents = list(read_texts([text_path(options.out / "text", "eval")]))
    assert planned.start is not None, "a scenario that measures text begins with a model that has seen some"
    before = heldout_nats(planned.start, documents)
    after = {name: [heldout_nats(job, documents) for job in jobs] for name, jobs in planned.runs.items()}
    control = after[planned.scenario.control.name]
    header = ["row", "nats per token at the start", "at the end [95 %]", "more [95 %]", "minus control's [95 %]"]
    body: list[list[str]] = []
    numbers: dict[str, Any] = {}
    for name, runs in after.items():
        start, end, more = crossed([before]), crossed(runs), forgotten(before, runs)
        against = None if runs is control else more_forgotten(control, runs)
        told = "" if against is None else against.signed
        body.append([f"`{name}`", f"{start.mean:.3f}", str(end), more.signed, told])
        found = {"start": start, "end": end, "more": more, "against": against}
        numbers[name] = {key: None if value is None else asdict(value) for key, value in found.items()}
    title = f"Negative log-likelihood of {len(documents)} held-out documents, intervals over seeds and documents:"
    return Extra(title=title, table=(header, body), numbers=numbers)


def _critic(options: ScenariosBench, planned: Planned) -> Extra:
    """Share of the returns' variance that values explain, by arm and seed."""
    values = {name: [critic_explained(job) for job in jobs] for name, jobs in planned.runs.items()}
    header = ["row", "`critic_explained`, mean of the seeds", "seed by seed"]
    body = []
    for name, found in values.items():
        told = [value for value in found if value is not None]
        line = ["" if value is None else f"{value:.2f}" for value in found]
        body.append([f"`{name}`", f"{fmean(told):.2f}" if told else "", ", ".join(line)])
    title = (
        "Share of the returns' variance that the critic explains before it learns from them, second half of the steps:"
    )
    return Extra(title=title, table=(header, body), numbers=values)


MEASURES: Mapping[Measure, Callable[[ScenariosBench, Planned], Extra] | None] = {
    "success": None,
    "text": _text,
    "critic": _critic,
}
