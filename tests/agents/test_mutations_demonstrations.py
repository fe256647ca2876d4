"""Demonstrations, broken in every small way: a literal test of `test_demonstrations` notices each of them."""

from __future__ import annotations

import mutants as tools
import pytest

from turngym.agents import demonstrations as filters
from turngym.agents import demonstrations as plans
from turngym.agents import demonstrations as sources
from turngym.agents.rendering import renderer as shown

SAME = {
    "begun_response: range(len(ids), -1, -1) -> range(len(ids), -1, -1)": "both are -1",
    "begun_response: 1 -> 2": "size 0 is always found before",
}
"""Mutants that compute the same, and why."""


def test_nothing_that_is_shown_can_change_unnoticed(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    tests = tools.literal_tests("demonstrations", request)
    functions = [one for module in (filters, plans, sources, shown) for one in tools.functions(module)]
    alive = tools.survivors(functions, tests, monkeypatch)
    assert sorted(alive) == sorted(SAME), "\n".join(["survivors:", *sorted(set(alive) - set(SAME))])
