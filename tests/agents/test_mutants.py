"""Who plays what at a step and what is demonstrated, broken in every small way: literal tests notice each of them."""

from __future__ import annotations

from types import ModuleType

import mutants as tools
import pytest

from turngym.agents import demonstrations, rollout_sources
from turngym.agents.rendering import renderer as shown
from turngym.envs import panels as task_order

pytestmark = pytest.mark.long

TESTED: dict[tuple[ModuleType, ...], str] = {
    (rollout_sources, task_order): "rollout_sources",
    (demonstrations, shown): "demonstrations",
}
"""The literal tests of the file on the right must notice every mutant of the modules on the left."""

ELSEWHERE = (
    "SharedEnv",
    *("ChatRenderer.", "TextEpisodes.", "read_exactly", "said_in"),
    *("Panel.", "make_panel", "panel_of_env", "collect_tasks", "write_panel", "list_panels", "load_panel"),
    *("verify_panel", "assert_disjoint", "_folder_of", "_text_env", "_order", "_body", "_to_text", "_read"),
    *("_check_fields", "_check_name", "_check_json", "shipped_panel", "find_panel", "installed_panels"),
    *("_manifest", "_servers", "_task_of"),
)
"""An environment that acts at exit too, and what `test_render`, `test_text_traces` and `test_panels` hold."""


@pytest.mark.parametrize("modules", TESTED, ids=TESTED.get)
def test_every_mutant_fails_a_literal_test(
    modules: tuple[ModuleType, ...], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    tests = tools.literal_tests(TESTED[modules], request, without="evaluations")  # seconds, and it draws no plan
    functions = [one for module in modules for one in tools.functions(module)]
    functions = [one for one in functions if not one.__qualname__.startswith(ELSEWHERE)]
    tools.assert_noticed(functions, tests, {}, monkeypatch)
