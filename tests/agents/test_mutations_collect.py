"""Who plays what at a step, broken in every small way: a literal test of `test_collect` notices each of them."""

from __future__ import annotations

import importlib

import mutants as tools
import pytest

from turngym.agents import collect
from turngym.agents import demonstrations as plans
from turngym.envs import panels as task_order

ONE_EACH = "every job has one episode"
SAME = {
    "ExpertCollect.__call__: assert_disjoint([episode.task for episode in episodes], self.held_out) -> "
    "assert_disjoint(self.held_out, [episode.task for episode in episodes])": "disjoint either way round",
    "LiveCollect._demonstrated: True -> False": ONE_EACH,
    "LiveCollect._prefixed: True -> False": ONE_EACH,
}
"""Mutants that compute the same, and why."""


def test_luffys_prefix_share_cannot_be_ignored(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    literal = importlib.import_module("test_collect").test_each_attempt_begins_with_its_own_share_of_the_experts_turns
    make_doors = request.getfixturevalue("make_doors")
    literal(make_doors)
    code = importlib.import_module("test_mutations").mutated_code(plans.Demonstrations.begun, "* ratio", "* 1.0")
    monkeypatch.setattr(plans.Demonstrations.begun, "__code__", code)
    with pytest.raises(AssertionError):
        literal(make_doors)


def test_nothing_that_is_played_can_change_unnoticed(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    tests = [test for test in tools.literal_tests("collect", request) if "evaluations" not in test.func.__name__]
    found = [*tools.functions(collect), *tools.functions(task_order)]
    functions = [function for function in found if "SharedEnv" not in function.__qualname__]  # it acts at exit too
    alive = tools.survivors(functions, tests, monkeypatch)
    assert sorted(alive) == sorted(SAME), "\n".join(["survivors:", *sorted(set(alive) - set(SAME))])
