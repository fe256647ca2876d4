"""Examples in the prompt: what a file becomes, where it stands, and that a result says which it was."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import DoorEnv
from families import FAMILIES, family_tokenizer

from turngym.agents import evaluate, load_world
from turngym.agents.endpoint.messages import example_messages
from turngym.agents.evaluation.compare import compare_recorded
from turngym.agents.model_agent import ModelAgent
from turngym.agents.playing.rollout import Job, rollout
from turngym.agents.playing.scripted import ExpertAgent, RandomAgent
from turngym.agents.rendering.chat_settings import ChatSettings
from turngym.agents.rendering.chat_template import RenderError
from turngym.agents.rendering.examples import read_examples
from turngym.agents.rendering.memory import Example, Memory
from turngym.agents.rendering.open_renderer import complete_settings, open_renderer
from turngym.agents.rendering.renderer import ChatRenderer
from turngym.core.errors import AgentError, TurngymError
from turngym.core.tools import ToolSpec
from turngym.core.trace import TraceWriter
from turngym.envs.channels import TextChannel, make_channel
from turngym.envs.panels import PanelError
from turngym.scripts.main import main

TOOL = DoorEnv.tool
TEXT = make_channel("text", TOOL)
TWO = Example(
    turns=(
        ("You see 2 doors.", "<action>open door 1</action>"),
        ("door 1 is open", "<think>Next.</think><action>open door 2</action>"),
    ),
    final="door 2 is open",
)
"""The expert's way through two doors; the thought is ours."""


def write(path: Path, episodes: Sequence[Any]) -> Path:
    with TraceWriter(path) as writer:
        for episode in episodes:
            writer.write(episode)
    return path


@pytest.fixture
def trace(tmp_path: Path, make_doors: Any) -> Path:
    """Two doors by the expert in bare actions, after an episode that fails and one that opens a single door."""
    played = rollout([Job(task_id="doors/4", seed=1)], make_doors(channel=None, max_turns=1), RandomAgent())
    played += rollout([Job(task_id="doors/1"), Job(task_id="doors/2")], make_doors(channel=None), ExpertAgent())
    assert [episode.success for episode in played] == [False, True, True]
    return write(tmp_path / "shots.jsonl", played)


def test_successful_episodes_of_a_trace_in_the_channel_of_the_agent(trace: Path) -> None:
    turns = read_examples(trace, "auto", DoorEnv.env_id, TEXT, TOOL)
    assert [task.task_id for task in turns.tasks] == ["doors/1", "doors/2"]
    assert turns.episodes[1].turns[1] == ("door 1 is open", "<action>open door 2</action>")
    assert turns.in_system("S") == "S"
    called = read_examples(trace, "turns", DoorEnv.env_id, make_channel("tool", TOOL), TOOL)
    assert called.episodes[0].turns[0][1].startswith('<tool_call>\n{"name": "door"')
    text = read_examples(trace, "text", DoorEnv.env_id, TEXT, TOOL)
    assert text.in_system("S") == (
        "S\n\nExample 1:\nYou see 1 doors.\n<action>open door 1</action>\n\nExample 2:\nYou see 2 doors.\n"
        "<action>open door 1</action>\ndoor 1 is open\n<action>open door 2</action>"
    )
    assert text.episodes == ()
    assert len({turns.identity, called.identity, text.identity}) == 3


def test_by_category_a_task_is_shown_its_own_kind_alone(
    trace: Path, make_tokenizer: Any, make_policy: Any, make_doors: Any
) -> None:
    """In the prompts of a model and in the requests to an endpoint; a task without examples of its kind is an error."""
    from openai_fake import FakeOpenAI, served

    from turngym.agents.endpoint.agent import EndpointAgent
    from turngym.agents.endpoint.options import EndpointOptions

    found = read_examples(trace, "auto", DoorEnv.env_id, TEXT, TOOL, "category")
    assert [example.category for example in found.episodes] == ["odd", "even"]
    assert str(found.identity).startswith("2 as turns by category, ")
    assert found.identity != read_examples(trace, "auto", DoorEnv.env_id, TEXT, TOOL).identity
    with pytest.raises(AgentError, match="as turns, are shown by category"):
        read_examples(trace, "text", DoorEnv.env_id, TEXT, TOOL, "category")

    tokenizer = make_tokenizer()
    renderer = ChatRenderer(tokenizer, examples=found.episodes)
    model = ModelAgent(make_policy(tokenizer, renderer.template.end_id), renderer, TextChannel())
    jobs = [Job(task_id="doors/3", seed=1), Job(task_id="doors/4", seed=1)]
    prompts = [
        renderer.template.decode(episode.prompt_ids(episode.turns[0]).tolist())
        for episode in rollout(jobs, make_doors(max_turns=1), model)
    ]
    with served(FakeOpenAI()) as server:
        options = EndpointOptions(base_url=server.url, handshake=False)
        agent = EndpointAgent("tiny", options, TEXT, TOOL, examples=found.episodes)
        for job in jobs:
            rollout([job], make_doors(max_turns=1), agent)
    prompts += [str(request["messages"]) for request in server.requests]
    assert [("You see 1 doors." in prompt, "You see 2 doors." in prompt) for prompt in prompts] == [
        (True, False),
        (False, True),
        (True, False),
        (False, True),
    ]
    lonely = ModelAgent(model.policy, ChatRenderer(tokenizer, examples=found.episodes[:1]), TextChannel())
    with pytest.raises(AgentError, match="of category 'even'; there are odd"):
        rollout(jobs[1:], make_doors(max_turns=1), lonely)


def test_a_text_file_is_shown_as_it_stands(tmp_path: Path) -> None:
    path = tmp_path / "react.txt"
    path.write_text("> think: I need a mug.\nOK.\n> go to desk 1\n", encoding="utf-8")
    found = read_examples(path, "auto", DoorEnv.env_id, TEXT, TOOL)
    assert found.in_system("S") == "S\n\n> think: I need a mug.\nOK.\n> go to desk 1"
    assert found.in_system("") == "> think: I need a mug.\nOK.\n> go to desk 1"
    for form, content, said in (
        ("turns", b"x", "only the episodes of a trace"),
        ("auto", b" \n", "is empty"),
        ("auto", b"\xff", "is no UTF-8"),
    ):
        path.write_bytes(content)
        with pytest.raises(AgentError, match=said):
            read_examples(path, form, DoorEnv.env_id, TEXT, TOOL)  # type: ignore[arg-type]
    with pytest.raises(AgentError, match="cannot be read"):
        read_examples(tmp_path / "none.txt", "auto", DoorEnv.env_id, TEXT, TOOL)


def test_traces_that_show_nothing_are_refused(trace: Path, tmp_path: Path, make_doors: Any) -> None:
    with pytest.raises(AgentError, match="the agent plays turngym/Search-v0"):
        read_examples(trace, "auto", "turngym/Search-v0", TEXT, TOOL)
    lost = rollout([Job(task_id="doors/4")], make_doors(max_turns=1), RandomAgent())
    with pytest.raises(AgentError, match="none of its 1 episodes succeeded"):
        read_examples(write(tmp_path / "lost.jsonl", lost), "auto", DoorEnv.env_id, TEXT, TOOL)


def test_turns_stand_between_the_system_message_and_the_task(make_tokenizer: Any) -> None:
    renderer = ChatRenderer(make_tokenizer(), examples=(TWO, TWO))
    thread = renderer.open("S", "o1")
    shown = renderer.template.decode(thread.buffer.view().tolist())
    example = (
        "<user/You see 2 doors.>/<assistant/<action>open door 1</action>>/<user/door 1 is open>/"
        "<assistant/<think>Next.</think><action>open door 2</action>>/"
    )
    drawn = shown.replace("<|im_start|>", "<").replace("<|im_end|>", ">").replace("\n", "/")
    assert drawn == f"<system/S>/{example}{example}<user/o1>/<assistant/"
    renderer.restart(thread, "S", "o2")
    assert renderer.template.decode(thread.buffer.view().tolist()) == shown.replace("o1", "o2")


@pytest.mark.parametrize("channel", ["tool", "text"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_shows_them_and_goes_on(name: str, channel: str) -> None:
    tool = ToolSpec(name="act", description="Act.", argument="action", argument_description="what", examples=("look",))
    tokenizer = family_tokenizer(name)
    chat = complete_settings(ChatSettings(channel=channel), tokenizer, tool)
    spoken = make_channel(chat.channel, tool)
    turns = (("A desk.", spoken.format("look")), ("A lamp.", spoken.format("use lamp")))
    shown = (Example(turns=turns, final="Light."),)
    if (name, channel) == ("mistral", "tool"):
        with pytest.raises(RenderError, match=r"--examples.form text.* must alternate"):
            open_renderer(tokenizer, chat, tool, examples=shown)
        return
    renderer = open_renderer(tokenizer, chat, tool, examples=shown)
    thread = renderer.open("Play.", "A bed.")
    for observation in ("A cup.", "A pan."):
        renderer.write(thread, renderer.template.fit(spoken.format("look")))
        renderer.observe(thread, observation)
    text = renderer.template.decode(thread.buffer.view().tolist())
    assert text == renderer.template.render(thread.messages)
    places = [text.find(part) for part in ("Play.", "A desk.", "use lamp", "A bed.", "A cup.", "A pan.")]
    assert -1 not in places
    assert places == sorted(places)
    assert ("Light." in text) == (chat.observation_role == "tool")


def test_every_prompt_of_a_window_has_them(make_tokenizer: Any, make_policy: Any, make_doors: Any) -> None:
    tokenizer = make_tokenizer()
    renderer = ChatRenderer(tokenizer, memory=Memory("window:1"), examples=(TWO,))
    agent = ModelAgent(make_policy(tokenizer, renderer.template.end_id), renderer, TextChannel())
    (episode,) = rollout([Job(task_id="doors/3", seed=1)], make_doors(max_turns=4), agent)
    assert episode.depth > 1
    for turn in episode.turns:
        assert "<think>Next.</think>" in renderer.template.decode(episode.prompt_ids(turn).tolist())
        assert "You see 2 doors." not in turn.observation


def test_an_endpoint_is_sent_messages_and_calls_with_their_results() -> None:
    assert example_messages((TWO,), TEXT, TOOL) == (
        {"role": "user", "content": "You see 2 doors."},
        {"role": "assistant", "content": "<action>open door 1</action>"},
        {"role": "user", "content": "door 1 is open"},
        {"role": "assistant", "content": "<think>Next.</think><action>open door 2</action>"},
    )
    spoken = make_channel("tool", TOOL)
    called = Example(
        turns=tuple((seen, spoken.format(TEXT.parse(said).action or "")) for seen, said in TWO.turns), final="open"
    )
    messages = example_messages((called,), spoken, TOOL)
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant", "tool"]
    call = messages[1]["tool_calls"][0]
    assert call["function"] == {"name": "door", "arguments": '{"action": "open door 1"}'}
    assert (messages[2]["tool_call_id"], messages[2]["content"]) == (call["id"], "door 1 is open")
    assert messages[4]["content"] == "open"
    search = ToolSpec(
        name="search", description="", argument="query", argument_description="", tags=("search", "answer")
    )
    finder = make_channel("tool", search)
    asked = Example(
        turns=(("Q", finder.format("<search>a</search>")), ("found", finder.format("<answer>b</answer>"))), final=""
    )
    shown = example_messages((asked,), finder, search)
    assert shown[1]["tool_calls"][0]["function"]["arguments"] == '{"query": "a"}'
    assert shown[3] == {"role": "assistant", "content": "<answer>b</answer>"}


def test_an_endpoint_s_requests_begin_with_them(make_doors: Any) -> None:
    from openai_fake import FakeOpenAI, served

    from turngym.agents.endpoint.agent import EndpointAgent
    from turngym.agents.endpoint.options import EndpointOptions

    with served(FakeOpenAI()) as server:
        options = EndpointOptions(base_url=server.url, handshake=False)
        agent = EndpointAgent("tiny", options, TEXT, TOOL, memory=Memory("window:1"), examples=(TWO,))
        rollout([Job(task_id="doors/3", seed=1)], make_doors(max_turns=3), agent)
    assert len(server.requests) > 1
    for request in server.requests:
        roles = [message["role"] for message in request["messages"]]
        assert roles == ["system", "user", "assistant", "user", "assistant", "user"]
        assert request["messages"][1]["content"] == "You see 2 doors."


def test_a_result_says_which_examples_were_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shots = ["rollout", "--split", "generated", "--tasks", "1", "--out", str(tmp_path / "shots.jsonl")]
    assert main(shots) == 0
    student = f"model:{load_world('alfworld').checkpoint('student')}"
    about: dict[str, Any] = {"samples": 1, "limit": 2, "max_turns": 2, "threads": 1, "progress": False}
    about["max_context"] = 900
    plain = evaluate("alfworld-quickstart", student, out=tmp_path / "plain", **about)
    assert plain.spec.agent.chat.examples is None
    given = {"examples": str(tmp_path / "shots.jsonl")}
    shown = evaluate("alfworld-quickstart", student, out=tmp_path / "turns", **about, **given)
    content = shown.spec.agent.chat.examples.content
    assert content.startswith("1 as turns, ")
    assert f", examples {content}" in shown.title
    first = shown.episodes[0]
    assert len(first.prompt_ids(first.turns[0])) > len(plain.episodes[0].prompt_ids(plain.episodes[0].turns[0])) + 20
    text = evaluate("alfworld-quickstart", student, **{"examples.form": "text"}, **about, **given)
    assert "Example 1:\n-= Welcome to TextWorld" in text.episodes[0].system
    with pytest.raises(TurngymError, match="examples"):
        evaluate("alfworld-quickstart", student, out=tmp_path / "turns", **about)
    assert main(["eval", "--config", str(tmp_path / "turns" / "spec.toml"), "--out", str(tmp_path / "again")]) == 0
    notes = compare_recorded(tmp_path / "plain", tmp_path / "again").notes()
    assert [note for note in notes if "examples" in note]
    with pytest.raises(TurngymError, match="examples"):
        evaluate("alfworld-quickstart", "expert", **given)


def test_an_evaluation_never_shows_its_own_tasks(tmp_path: Path) -> None:
    panel: dict[str, Any] = {"samples": 1, "limit": 1, "progress": False}
    evaluate("alfworld-quickstart", "expert", out=tmp_path, **panel)
    student = f"model:{load_world('alfworld').checkpoint('student')}"
    with pytest.raises(PanelError, match="1 evaluation tasks are also training tasks"):
        evaluate("alfworld-quickstart", student, examples=str(tmp_path / "trace.jsonl"), **panel)
