"""Do the intervals hold the truth? Coverage, width and power of every interval in simulated studies of your own design.

Examples:
    turngym study coverage
    turngym study coverage --seeds 5 --tasks 134 --samples 1 --seed-spread 0.03
    turngym study coverage --clusters 20 --shared 0.2 --rate 0.3 --difference 0.05
    turngym study coverage --seeds 3 --second-seeds 10 --seed-spread 0.08 --second-spread 0
    turngym study coverage --seed-spread 0 --second-spread 0.08 --family 9
    turngym study coverage --seeds 5 --rate 0.7 --collapse 0.17
    turngym study coverage --seeds 1 --draws 128 --tasks 140
"""

from __future__ import annotations

from collections.abc import Sequence

from turngym.agents.evaluation.coverage import SimulatedStudy, measure, shown_apart
from turngym.core.numbers import Group, Number
from turngym.core.spec import Spec
from turngym.core.tables import print_table
from turngym.scripts.options import read_options


class CoverageOptions(Spec):
    """What is simulated."""

    study: SimulatedStudy = SimulatedStudy()
    repetitions: Group = 400
    """Studies that are drawn; 400 tell coverage to within 2 points."""
    random_seed: Number = 0
    """Fixes the drawing."""


def main(argv: Sequence[str]) -> int:
    options = read_options(CoverageOptions, argv, prog="turngym study coverage", about=__doc__)
    rows = [
        [
            *(measured.name, f"{100 * measured.covered:.1f}", f"{100 * measured.width:.1f}"),
            *(f"{measured.ratio:.2f}", f"{100 * measured.clear:.1f}"),
        ]
        for measured in measure(options.study, options.repetitions, options.random_seed)
    ]
    print_table((["interval (95 %)", "covers %", "width, points", "width / oracle's", "clear of zero %"], rows))
    rate, difference = options.study.truth()
    print(f"truth: {100 * rate:.1f} % and {100 * difference:+z.1f} points; an oracle knows the standard error")
    if options.study.seeds > 2:
        share = shown_apart(options.study, options.repetitions, options.random_seed)
        print(f"a seed that lies apart is said beside the interval in {100 * share:.1f} % of the studies")
    return 0
