"""Inspect plays our panels with a model of its own kind, and its log says what `turngym eval` says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import stdev
from types import SimpleNamespace
from typing import Any

import pytest
from chat_server import Recorded, chat_server
from evaluator_commands import inspect_eval

pytest.importorskip("inspect_ai", reason="needs the extra turngym[inspect]")

from inspect_ai import eval as run_eval
from inspect_ai.log import EvalLog, read_eval_log
from inspect_ai.model import ChatMessageAssistant, ModelAPI, ModelOutput, modelapi
from inspect_ai.tool import ToolCall

from turngym.agents.adapters.inspect_ai import panel_task
from turngym.agents.evaluation.compare import rescore
from turngym.core.errors import EnvBackendError, TurngymError
from turngym.core.trace import read_trace
from turngym.envs.panels import panel_of_env

pytestmark = pytest.mark.long  # to import inspect_ai takes seconds in every process; test_same_episode has a quick one

PANEL = "alfworld-quickstart"
ANSWERS: dict[str, Callable[..., ModelOutput]] = {}
"""Model name to what it answers; a ModelAPI of our own counts no tokens, which would need a download."""


class Scripted(ModelAPI):
    async def generate(self, input: Any, tools: Any, tool_choice: Any, config: Any) -> ModelOutput:
        return ANSWERS[self.model_name](input, tools)


@modelapi(name="turngym-test")
def scripted() -> type[ModelAPI]:
    return Scripted


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    ANSWERS.clear()


def says(text: str) -> ModelOutput:
    return ModelOutput.from_content("test", text)


def run(name: str, answer: Callable[..., ModelOutput], folder: Path, **arguments: Any) -> EvalLog:
    """Play `panel_task` and read the log back from its file."""
    ANSWERS[name] = answer
    options = {key: arguments.pop(key) for key in ("message_limit", "fail_on_error") if key in arguments}
    task = panel_task(PANEL, **{"samples": 1, "trace": str(folder / "trace.jsonl"), **arguments})
    (log,) = run_eval(task, model=f"turngym-test/{name}", display="none", log_dir=str(folder / "logs"), **options)
    return read_eval_log(log.location)


def metric(log: EvalLog, name: str, reducer: str = "mean") -> float:
    assert log.results is not None
    (found,) = [score for score in log.results.scores if score.reducer == reducer]
    return found.metrics[name].value


def test_the_command_scores_as_turngym_eval_does(
    played: SimpleNamespace, tmp_path: Path, assert_same_episodes: Callable[..., None]
) -> None:
    """`inspect eval turngym/alfworld` in a process of its own, against a local server (docs/evaluators.md)."""
    pytest.importorskip("openai", "3.4", reason="Inspect's provider for chat servers; verifiers wants an older one")
    trace = tmp_path / "trace.jsonl"
    with chat_server(played.recorded) as (url, requests):
        options = ("limit=6", "max_turns=12", f"trace={trace}")
        file = inspect_eval(tmp_path, url, *(w for o in options for w in ("-T", o)), panel=PANEL)
    assert_same_episodes(trace, played.result)
    assert rescore(trace).spec.agent.temperature == 0.85
    assert {request["temperature"] for request in requests} == {0.85}
    log = read_eval_log(str(file))
    assert (log.status, log.eval.task) == ("success", "turngym/alfworld")
    assert log.eval.metadata is not None
    assert log.eval.metadata["spec"]["play"]["tasks"]["sha256"] == played.result.spec.play.tasks.sha256
    overall = played.result.scores.overall
    assert 0 < overall.avg.mean < 1
    assert metric(log, "mean") == pytest.approx(overall.avg.mean)
    for row in played.result.scores.categories:
        assert metric(log, row.name) == pytest.approx(row.avg.mean)
    for sample in log.samples or []:
        episode = next(e for e in played.result.episodes if e.task.task_id == sample.id)
        score = (sample.scores or {})["success"]
        assert score.value == float(episode.success)
        assert (score.metadata or {})["turns"] == episode.depth
        assert [m.text for m in sample.messages if m.role == "assistant"] == [t.response for t in episode.turns]


def test_epochs_are_attempts_and_the_error_is_clustered_by_task(played: SimpleNamespace, tmp_path: Path) -> None:
    """Avg@2, pass@2 and the standard error over tasks: the same numbers as ours on the same episodes."""
    wins = {e.turns[0].observation for e in played.result.episodes if e.success}
    asked: dict[str, int] = {}

    def answer(messages: Any, tools: Any) -> ModelOutput:
        """Wins what was won, in one of two attempts for every second task."""
        first = messages[1].text
        said = [(m.role, m.text) for m in messages]
        if len(messages) == 2:
            asked[first] = asked.get(first, 0) + 1
        spoiled = any("examine nothing" in m.text for m in messages if m.role == "assistant")
        lose = len(messages) == 2 and asked[first] == 2 and sorted(wins).index(first) % 2 if first in wins else False
        if lose or spoiled:
            return says("<action>examine nothing</action>")
        return says(played.recorded.answer(said))

    log = run("twice", answer, tmp_path, samples=2, limit=6, max_turns=12)
    ours = rescore(tmp_path / "trace.jsonl").scores.overall
    assert log.status == "success"
    assert metric(log, "mean") == pytest.approx(ours.avg.mean)
    assert metric(log, "mean", "pass_at_2") == pytest.approx(ours.pass_at[2])
    assert ours.avg.mean < ours.pass_at[2]
    by_task: dict[str, list[bool]] = {}
    for episode in read_trace(tmp_path / "trace.jsonl")[0]:
        by_task.setdefault(episode.task.task_id, []).append(bool(episode.success))
    means = [sum(won) / len(won) for won in by_task.values()]
    assert metric(log, "stderr") == pytest.approx(stdev(means) / len(means) ** 0.5, rel=0.01)


def test_function_calls_are_judged_as_our_tool_channel_judges_them(tmp_path: Path) -> None:
    calls = [
        ("alfworld_step", {"action": "look"}),
        ("alfworld_step", {"wrong": "look"}),
        ("other", {"action": "look"}),
        None,
        ("alfworld_step", {"action": "fly away"}),
    ]

    def answer(messages: Any, tools: Any) -> ModelOutput:
        assert [tool.name for tool in tools] == ["alfworld_step"]
        call = calls[sum(m.role == "assistant" for m in messages)]
        made = [] if call is None else [ToolCall(id=f"c{n}", function=call[0], arguments=call[1]) for n in range(2)]
        output = says("I look.")
        output.choices[0].message = ChatMessageAssistant(content="I look.", tool_calls=made or None)
        return output

    log = run("calls", answer, tmp_path, channel="tool", limit=1, max_turns=5)
    (episode,) = read_trace(tmp_path / "trace.jsonl")[0]
    assert [turn.verdict.value for turn in episode.turns] == [
        "ok", "malformed", "malformed", "malformed", "inadmissible",
    ]  # fmt: skip
    (sample,) = log.samples or []
    answers = [m for m in sample.messages if m.role == "tool"]
    assert [m.tool_call_id for m in answers[:2]] == ["c0", "c1"]
    assert answers[0].text == episode.turns[1].observation
    assert answers[1].text == "Only the first call of a response is played."


def test_several_tools_are_inspects_tools(tmp_path: Path) -> None:
    panel = panel_of_env("oven", "turngym.scripts.examples.oven:example/Oven-v0", task_ids=["cake/200/fan"])
    calls = [("heat", {"degrees": "hot"}), ("heat", {"degrees": 200, "fan": True}), ("bake", {"dish": "cake"})]
    shown: list[Any] = []

    def answer(messages: Any, tools: Any) -> ModelOutput:
        shown.append({tool.name: tool.parameters for tool in tools})
        name, arguments = calls[sum(m.role == "assistant" for m in messages)]
        output = says("")
        output.choices[0].message = ChatMessageAssistant(
            content="", tool_calls=[ToolCall(id="c", function=name, arguments=arguments)]
        )
        return output

    ANSWERS["oven"] = answer
    task = panel_task(panel, samples=1, channel="tool", trace=str(tmp_path / "trace.jsonl"))
    run_eval(task, model="turngym-test/oven", display="none", log_dir=str(tmp_path / "logs"))
    (episode,) = read_trace(tmp_path / "trace.jsonl")[0]
    assert [turn.verdict.value for turn in episode.turns] == ["inadmissible", "ok", "ok"]
    assert episode.success
    assert [*shown[0]] == ["read_recipe", "heat", "bake"]
    assert shown[0]["heat"].required == ["degrees"]
    assert shown[0]["heat"].properties["fan"].type == "boolean"
    assert shown[0]["bake"].properties["dish"].enum == ["bread", "cake", "pizza"]


def test_what_inspect_cuts_is_scored_as_it_stands(tmp_path: Path) -> None:
    log = run("slow", lambda messages, tools: says("<action>look</action>"), tmp_path, limit=1, message_limit=6)
    (sample,) = log.samples or []
    assert sample.limit is not None
    assert (sample.scores or {})["success"].explanation == "truncated_depth"
    (episode,) = read_trace(tmp_path / "trace.jsonl")[0]
    assert (episode.status.value, episode.success, episode.depth) == ("truncated_depth", False, 2)


def test_an_environment_that_fails_is_an_error_and_no_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from turngym.envs.alfworld.env import ALFWorldEnv

    def broken(self: Any, action: str) -> Any:
        raise EnvBackendError("no answer")

    monkeypatch.setattr(ALFWorldEnv, "_apply", broken)
    answer = lambda messages, tools: says("<action>look</action>")  # noqa: E731
    log = run("broken", answer, tmp_path, limit=1, fail_on_error=False)
    (sample,) = log.samples or []
    assert sample.error is not None
    assert "no answer" in sample.error.message
    assert not sample.scores
    assert read_trace(tmp_path / "trace.jsonl")[0][0].status.value == "error_env"


def test_options_that_do_not_exist_are_named() -> None:
    with pytest.raises(TurngymError, match=r"unknown -T max_turn; .*Did you mean 'max_turns'"):
        panel_task(PANEL, max_turn=3)


def test_the_recording_itself_notices_another_conversation(played: SimpleNamespace) -> None:
    with pytest.raises(KeyError):
        Recorded(played.result.episodes).answer([("user", "another house")])
