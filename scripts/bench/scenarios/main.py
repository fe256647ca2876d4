"""Where each algorithm earns its name: settings in which a paper's claim should show, against its control, over seeds.

Each run is a `turngym train` in a process of its own. Runs that are finished are kept, so that the same command goes on
where it stopped. Ends with a report (`report.md`), a figure and the numbers as JSON. A scenario without its runs is
reported as such.

Examples:
    turngym bench scenarios
    turngym bench scenarios --scenarios luffy grpo-kd --seeds 6
    turngym bench scenarios --scenarios luffy --chosen     # seed 0, on the tasks that settings were chosen on
    turngym bench scenarios --no-run
"""

from __future__ import annotations

from collections.abc import Sequence

import tyro

from turngym.scripts.bench.learn.jobs import Runner
from turngym.scripts.bench.scenarios.options import ScenariosBench
from turngym.scripts.bench.scenarios.panels import write_panels
from turngym.scripts.bench.scenarios.passages import write_passages
from turngym.scripts.bench.scenarios.plan import Planned, all_jobs, plan
from turngym.scripts.bench.scenarios.settings import chosen_scenarios


def main(argv: Sequence[str]) -> int:
    """Run `turngym bench scenarios` with `argv`."""
    options = tyro.cli(ScenariosBench, args=list(argv), prog="turngym bench scenarios", description=__doc__)
    planned = [plan(options, scenario) for scenario in chosen_scenarios(options.scenarios)]
    if options.run:
        prepare(options, planned)
        Runner(jobs=all_jobs(planned), parallel=options.parallel).run()
    from turngym.scripts.bench.scenarios.report import write_report

    write_report(options, planned)
    return 0


def prepare(options: ScenariosBench, planned: Sequence[Planned]) -> None:
    """Write the panels and texts that the runs read."""
    for one in planned:
        write_panels(options.out / "panels", one.scenario.place)
        if one.scenario.measure == "text":
            write_passages(options.out / "text")
