"""Episodes played by MCP clients: over stdio with the real command, over HTTP, and what they do wrong."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from servers import running

from turngym.agents.adapters.mcp import CallError, Episodes, server
from turngym.agents.adapters.panel_sessions import PanelSessions, SessionFailed
from turngym.agents.client_keys import ClientKeys
from turngym.agents.evaluation.compare import rescore
from turngym.agents.serving_asgi import AsgiServer, JsonBodies, KeyedClients
from turngym.core.errors import TurngymError
from turngym.core.tools import Argument, Tool, ToolSet, tool_call
from turngym.core.trace import read_trace
from turngym.envs.panels import panel_of_env

PANEL = "alfworld-quickstart"


def open_episodes(folder: Path, panel: str = PANEL, **options: Any) -> Episodes:
    settings = {key: options.pop(key) for key in ("limit", "max_turns") if key in options}
    sessions = PanelSessions.of(panel, channel="tool", trace=folder / "trace.jsonl", **settings)
    return Episodes(sessions, **options)


def begin(episodes: Episodes, client: str = "") -> str:
    """The name of a new episode."""
    return episodes.call("begin", {}, client).splitlines()[0].removeprefix("episode: ")


def text_of(result: Any) -> str:
    (content,) = result.content
    return str(content.text)


def test_a_failed_environment_is_said_and_the_next_episode_is_played(tmp_path: Path) -> None:
    panel = panel_of_env("hostile", "hostile_env:tests/Hostile-v0", task_ids=["raises", "fine"])
    episodes = Episodes(PanelSessions.of(panel, channel="tool", trace=tmp_path / "trace.jsonl"))
    for goes in (False, True):
        named = {"action": "go", "episode": begin(episodes)}
        episodes.call("hostile_step", named)
        if goes:
            assert "(completed)" in episodes.call("hostile_step", named)
        else:
            with pytest.raises(SessionFailed, match="no such house"):
                episodes.call("hostile_step", named)
            assert not (tmp_path / "results.json").exists()
            # a server whose only episode failed ends as it should
            episodes.close()
    assert [one.status.value for one in read_trace(tmp_path / "trace.jsonl")[0]] == ["error_env", "completed"]
    assert json.loads((tmp_path / "results.json").read_text())["scores"]["overall"]["avg"]["mean"] == 1.0


async def play(client: Any, actions: list[str]) -> list[str]:
    """Begin an episode and take `actions`; what the client was told."""
    told = [text_of(await client.call_tool("begin", {}))]
    named = {"episode": told[0].splitlines()[0].removeprefix("episode: ")} if told[0].startswith("episode:") else {}
    for action in actions:
        told.append(text_of(await client.call_tool("alfworld_step", {"action": action, **named})))
    return told


def test_a_process_is_an_episode_and_scores_as_turngym_eval_does(played: SimpleNamespace, tmp_path: Path) -> None:
    """`turngym serve mcp` over stdio, six processes one after another: the tasks of the panel in its order."""
    pytest.importorskip("mcp.server.mcpserver", reason="needs the extra turngym[mcp]")
    import anyio
    from mcp import StdioServerParameters
    from mcp.client import Client
    from mcp.client.stdio import stdio_client

    words = ["serve", "mcp", "--panel", PANEL, "--out", str(tmp_path), "--limit", "6", "--max-turns", "12"]

    async def one(actions: list[str]) -> list[str]:
        command = StdioServerParameters(command=sys.executable, args=["-m", "turngym.scripts", *words])
        async with Client(stdio_client(command)) as client:
            tools = {tool.name: tool for tool in (await client.list_tools()).tools}
            assert set(tools) == {"begin", "alfworld_step"}
            assert tools["alfworld_step"].input_schema["required"] == ["action"]
            return await play(client, actions)

    for episode in played.result.episodes[:3]:
        told = anyio.run(one, [turn.action or turn.response for turn in episode.turns])
        assert episode.turns[0].observation in told[0]
        assert told[1:-1] == [turn.observation for turn in episode.turns[1:]]
        assert told[-1] == f"{episode.final_observation}\n\nThe episode is over ({episode.status.value})."
    again = rescore(tmp_path)
    for theirs, ours in zip(again.episodes, played.result.episodes, strict=False):
        assert (theirs.task, theirs.status, theirs.success, theirs.score) == (
            ours.task, ours.status, ours.success, ours.score,
        )  # fmt: skip
        assert [(t.action, t.verdict, t.reward) for t in theirs.turns] == [
            (t.action, t.verdict, t.reward) for t in ours.turns
        ]
    written = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert (written["agent"], len(written["episodes"]), again.missing) == ("mcp", 3, 3)
    assert written["scores"] == json.loads(json.dumps(again.scores.to_json()))


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """Where a server with named episodes listens."""
    pytest.importorskip("mcp.server.mcpserver", reason="needs the extra turngym[mcp]")
    episodes = open_episodes(tmp_path, max_turns=3, limit=3)
    app = server(episodes).streamable_http_app(stateless_http=True, json_response=True)
    with running(AsgiServer(app, extra="mcp")) as address:
        yield f"{address}/mcp"
    episodes.close()


def test_clients_over_http_play_their_own_episodes(url: str, tmp_path: Path) -> None:
    """One client speaks the protocol with a handshake, one without; their turns interleave."""
    import anyio
    from mcp.client import Client

    async def both() -> tuple[list[str], list[str]]:
        async with Client(url) as one, Client(url, mode="legacy") as other:
            begun = [(await play(client, []))[0] for client in (one, other)]
            names = [text.splitlines()[0].removeprefix("episode: ") for text in begun]
            return names, await turns((one, names[0]), (other, names[1]))

    async def turns(*clients: Any) -> list[str]:
        told = []
        for _ in range(3):
            for client, name in clients:
                told.append(text_of(await client.call_tool("alfworld_step", {"episode": name, "action": "look"})))
        client, name = clients[0]
        late = await client.call_tool("alfworld_step", {"episode": name, "action": "look"})
        assert late.is_error
        return [*told, text_of(late)]

    names, told = anyio.run(both)
    assert told[4:] == [told[4], told[5], f"episode {names[0]!r} is over"]
    assert "The episode is over (truncated_turns)." in told[4]
    episodes, _ = read_trace(tmp_path / "trace.jsonl")
    panel = open_episodes(tmp_path, limit=3).sessions.tasks
    assert [e.task for e in episodes] == list(panel[:2])
    assert rescore(tmp_path).scores.turns == 3


def test_what_is_played_next(tmp_path: Path) -> None:
    """Every task once, then again; a server that comes later goes on where the trace ends."""
    asked = []
    for _ in range(2):
        episodes = open_episodes(tmp_path, limit=2, max_turns=1)
        for _ in range(2):
            episodes.call("alfworld_step", {"episode": begin(episodes), "action": "look"})
        episodes.close()
        asked = [(e.task.task_id, e.sample) for e in read_trace(tmp_path / "trace.jsonl")[0]]
    tasks = [task.task_id for task in episodes.sessions.tasks]
    assert asked == [(task, sample) for sample in (0, 1) for task in tasks]
    again = rescore(tmp_path)
    assert again.missing == 0
    assert "max_turns 1 (24)" in again.title


def test_calls_are_judged_and_wrong_ones_are_told(tmp_path: Path) -> None:
    episodes = open_episodes(tmp_path, limit=1, max_turns=3, named=False)
    with pytest.raises(CallError, match="the episode is not open; call begin first"):
        episodes.call("alfworld_step", {"action": "look"})
    episodes.call("begin", {})
    with pytest.raises(CallError, match="one episode, and it has begun"):
        episodes.call("begin", {})
    with pytest.raises(CallError, match="'reset'; tools are: begin, alfworld_step"):
        episodes.call("reset", {})
    episodes.call("alfworld_step", {"step": "look"})
    episodes.call("alfworld_step", {"action": "fly"})
    episodes.call("alfworld_step", {"action": "<think></tool_call>"})
    (episode,) = read_trace(tmp_path / "trace.jsonl")[0]
    assert [turn.verdict.value for turn in episode.turns] == ["malformed", "inadmissible", "inadmissible"]


def test_who_leaves_has_not_succeeded(tmp_path: Path) -> None:
    episodes = open_episodes(tmp_path, limit=2)
    begin(episodes)
    episodes.call("alfworld_step", {"episode": begin(episodes), "action": "look"})
    episodes.close()
    (episode,) = read_trace(tmp_path / "trace.jsonl")[0]
    assert (episode.status.value, episode.success, episode.meta["error"]) == (
        "truncated_depth",
        False,
        "the client left",
    )
    assert json.loads((tmp_path / "results.json").read_text())["scores"]["overall"]["avg"]["mean"] == 0.0


LOOK = {"action": "look"}


def test_names_of_episodes_cannot_be_guessed_and_are_their_clients_own(tmp_path: Path) -> None:
    episodes = open_episodes(tmp_path)
    names = [begin(episodes, "ann") for _ in range(3)]
    # 64 random bits: no two share more than by chance
    assert all(len(name) == 16 for name in names)
    assert len({name[:8] for name in names}) == 3
    with pytest.raises(CallError, match="is not open"):
        episodes.call("alfworld_step", {"episode": names[0], **LOOK}, "bob")
    assert episodes.call("alfworld_step", {"episode": names[0], **LOOK}, "ann")
    episodes.close()
    (played,) = read_trace(tmp_path / "trace.jsonl")[0]
    assert played.depth == 1


def test_idle_episodes_end_and_lock_nobody_out(tmp_path: Path) -> None:
    now = [0.0]
    episodes = open_episodes(tmp_path, most=2, idle=900.0, clock=lambda: now[0])
    first = begin(episodes)
    episodes.call("alfworld_step", {"episode": first, **LOOK})
    begin(episodes)
    with pytest.raises(CallError, match="2 episodes are open"):
        begin(episodes)
    now[0] = 50.0
    episodes.call("alfworld_step", {"episode": first, **LOOK})
    now[0] = 70.0
    third = begin(episodes)  # in the place of the second, which was used longest ago
    now[0] = 960.0
    assert episodes.call("alfworld_step", {"episode": third, **LOOK})
    with pytest.raises(CallError, match="is over"):
        episodes.call("alfworld_step", {"episode": first, **LOOK})
    (played,) = read_trace(tmp_path / "trace.jsonl")[0]
    assert (played.depth, played.meta["error"]) == (2, "the client was silent for 900 s")
    episodes.close()


def test_a_client_has_its_share_of_the_episodes(tmp_path: Path) -> None:
    now = [0.0]
    episodes = open_episodes(tmp_path, most=4, share=2, clock=lambda: now[0])
    taken = [begin(episodes, "ann") for _ in range(2)]
    with pytest.raises(CallError, match="2 episodes are open"):
        begin(episodes, "ann")
    others = begin(episodes, "bob")
    now[0] = 61.0
    begin(episodes, "ann")  # in the place of one of her own
    with pytest.raises(CallError, match="is over"):
        episodes.call("alfworld_step", {"episode": taken[0], **LOOK}, "ann")
    assert episodes.call("alfworld_step", {"episode": others, **LOOK}, "bob")
    episodes.close()


def test_an_episode_keeps_its_place_while_a_call_is_played(tmp_path: Path) -> None:
    """Else a client could begin another one during each call, and have as many open as it likes."""
    episodes = open_episodes(tmp_path, most=4, share=1)
    name = begin(episodes, "ann")
    session = episodes._open[name].session

    def step(text: str) -> Any:
        with pytest.raises(CallError, match="1 episodes are open"):
            begin(episodes, "ann")
        with pytest.raises(CallError, match="is being played"):
            episodes.call("alfworld_step", {"episode": name, **LOOK}, "ann")
        return session.step_text(text)

    episodes._open[name].session = SimpleNamespace(step_text=step, done=False)  # type: ignore[assignment]
    assert episodes.call("alfworld_step", {"episode": name, **LOOK}, "ann")
    closed: list[bool] = []
    broken = SimpleNamespace(step_text={}.__getitem__, close=lambda: closed.append(True))
    episodes._open[name].session = broken  # type: ignore[assignment]
    with pytest.raises(KeyError):
        episodes.call("alfworld_step", {"episode": name, **LOOK}, "ann")
    assert closed
    assert begin(episodes, "ann")
    session.close()
    episodes.close()


def test_over_http_a_key_says_whose_episode_it_is(tmp_path: Path) -> None:
    pytest.importorskip("mcp.server.mcpserver", reason="needs the extra turngym[mcp]")
    import httpx

    keys = ClientKeys({"ann": "a" * 16, "bob": "b" * 16})
    episodes = open_episodes(tmp_path, limit=1)
    app = server(episodes).streamable_http_app(stateless_http=True, json_response=True)

    def call(url: str, client: str, name: str, **arguments: Any) -> Any:
        headers = {"Accept": "application/json, text/event-stream", "Authorization": f"Bearer {keys.keys[client]}"}
        params = {"name": name, "arguments": arguments}
        body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
        return httpx.post(f"{url}/mcp", json=body, headers=headers, timeout=60).json()["result"]

    with running(AsgiServer(KeyedClients(JsonBodies(app), keys), extra="mcp")) as url:
        name = call(url, "ann", "begin")["content"][0]["text"].splitlines()[0].removeprefix("episode: ")
        assert call(url, "bob", "alfworld_step", episode=name, action="look")["isError"]
        assert not call(url, "ann", "alfworld_step", episode=name, action="look")["isError"]
        assert httpx.post(f"{url}/mcp", json={}).status_code == 401
    episodes.close()


def test_search_answers_with_a_tool_of_its_own(tmp_path: Path) -> None:
    episodes = open_episodes(tmp_path, "search-quickstart", limit=1, named=False)
    assert [tool.name for tool in episodes.tools()] == ["begin", "search", "answer"]
    begun = episodes.call("begin", {})
    assert "call the tool answer" in begun
    assert "Doc 1" in episodes.call("search", {"query": begun.partition("Question: ")[2].partition("\n")[0]})
    assert "The episode is over (completed)." in episodes.call("answer", {"answer": "nobody"})
    (episode,) = read_trace(tmp_path / "trace.jsonl")[0]
    assert [turn.verdict.value for turn in episode.turns] == ["ok", "ok"]
    assert episode.turns[1].action == "<answer>nobody</answer>"


def test_expert_actions_win(tmp_path: Path, played: SimpleNamespace, assert_same_episodes: Callable[..., None]) -> None:
    """The recorded actions through calls: the same ends, scores and verdicts."""
    episodes = open_episodes(tmp_path, limit=6, max_turns=12)
    for episode in played.result.episodes:
        name = begin(episodes)
        for turn in episode.turns:
            episodes.call("alfworld_step", {"episode": name, "action": turn.action})
    assert rescore(tmp_path).scores == played.result.scores


OVEN = "turngym.scripts.examples.oven:example/Oven-v0"


def test_several_tools_are_the_servers_tools(tmp_path: Path) -> None:
    panel = panel_of_env("oven", OVEN, task_ids=["cake/200/fan"])
    episodes = Episodes(PanelSessions.of(panel, channel="tool", trace=tmp_path / "trace.jsonl"))
    _, recipe, heat, bake = episodes.tools()
    assert (recipe.name, heat.name, bake.name) == ("read_recipe", "heat", "bake")
    schema = heat.parameters()
    assert [kind["type"] for kind in schema["properties"].values()] == ["integer", "boolean", "string"]
    assert schema["required"] == ["degrees", "episode"]
    name = begin(episodes)
    assert '"degrees" of heat must be an integer' in episodes.call("heat", {"degrees": "hot", "episode": name})
    assert "hot" in episodes.call("heat", {"degrees": 200, "fan": True, "episode": name})
    assert "Delicious." in episodes.call("bake", {"dish": "cake", "episode": name})


@pytest.mark.parametrize(("tool", "argument"), [("begin", "dish"), ("bake", "episode")])
def test_a_tool_that_is_called_as_the_servers_own_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: str, argument: str
) -> None:
    one = Tool(name=tool, description="", arguments=(Argument(name=argument, description=""),))
    sessions = PanelSessions.of(panel_of_env("oven", OVEN, task_ids=["cake/200/fan"]), channel="tool")
    monkeypatch.setattr(sessions.pool, "tool", ToolSet(tools=(one,), examples=(tool_call(tool, **{argument: "x"}),)))
    with pytest.raises(TurngymError, match=f"'{tool}' cannot be served over MCP"):
        Episodes(sessions)
