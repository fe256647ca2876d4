"""The studies that come along, and what each asks."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from turngym.core.spec import Spec
from turngym.scripts.options import read_options
from turngym.scripts.study.study_file import built_in, read_study_file


class ListOptions(Spec):
    """It has no options."""


def main(argv: Sequence[str]) -> int:
    read_options(ListOptions, argv, prog="turngym study list", about=__doc__)
    for name, path in built_in().items():
        study = read_study_file(path)
        where = ", ".join(place.name for place in study.places)
        print(f"{name}\n{textwrap.fill(study.title, 78, initial_indent='  ', subsequent_indent='  ')}")
        methods = ", ".join(study.methods)
        print(textwrap.fill(f"{where}: {methods}", 78, initial_indent="  ", subsequent_indent="  "))
    return 0
