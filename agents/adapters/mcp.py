"""A panel as an MCP server (tried with mcp 2.0.0): `begin` opens an episode, the environment's action is another tool.

Over stdio a process is one episode. Since protocol 2026-07-28 HTTP has no sessions, so there `begin` names the episode,
and every action says which one it belongs to. What is judged stays here: the client reads observations.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from importlib import import_module
from itertools import count
from typing import Any

from turngym.agents.adapters.panel_sessions import PanelSessions, SessionFailed, with_call
from turngym.agents.playing.episode_session import EpisodeSession
from turngym.envs.channels import tagged
from turngym.envs.core.episode import Status
from turngym.envs.core.errors import TurngymError
from turngym.envs.core.task import ToolSpec

BEGIN = "begin"


class CallError(TurngymError):
    """A call that does not fit: an unknown episode or tool, a missing argument."""


@dataclass(slots=True)
class Episodes:
    """The episodes that clients of one server play, by name."""

    sessions: PanelSessions
    """With the channel `tool`: what a client calls is judged as the call of a model is."""
    agent: str = "mcp"
    """Under which name episodes are recorded."""
    named: bool = True
    """Several at a time, each with a name; False: one, which has none."""
    most: int = 64
    """Most that are open at a time."""
    _open: dict[str, EpisodeSession] = field(default_factory=dict)
    _over: set[str] = field(default_factory=set)
    _numbers: count[int] = field(default_factory=lambda: count(1))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def tool(self) -> ToolSpec:
        return self.sessions.pool.tool

    def schemas(self) -> list[tuple[str, str, dict[str, Any]]]:
        """(name, description, JSON Schema of the arguments) of every tool."""
        which = {"episode": {"type": "string", "description": "What begin called the episode."}} if self.named else {}
        described = {self.tool.argument: self.tool.argument_description}
        rows = [(self.tool.name, self.tool.description, described)]
        rows += [(tag, f"Acts as <{tag}>...</{tag}> does.", {tag: f"The {tag}."}) for tag in self.tool.tags[1:]]
        begins = "Begins an episode: the rules, and what is seen first. Call it once, before anything else."
        found: list[tuple[str, str, dict[str, Any]]] = [(BEGIN, begins, {})]
        for name, said, texts in rows:
            strings = {argument: {"type": "string", "description": text} for argument, text in texts.items()}
            found.append((name, said, strings | which))
        return [
            (name, said, {"type": "object", "properties": properties, "required": list(properties)})
            for name, said, properties in found
        ]

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Play one call; the text for the client. Raises CallError, SessionFailed."""
        known = {tool: schema for tool, _, schema in self.schemas()}
        if name not in known:
            raise CallError(f"there is no tool {name!r}; tools are: {', '.join(known)}")
        if name == BEGIN:
            return self._begin()
        episode = str(arguments.get("episode", "")) if self.named else ""
        with self._lock:  # two calls at a time would step one environment twice: the second finds no episode
            session = self._open.pop(episode, None)
        if session is None:
            state = "is over" if episode in self._over else "is not open"
            raise CallError(
                f"episode {episode!r} {state}" if self.named else f"the episode {state}; call {BEGIN} first"
            )
        return self._step(episode, session, name, arguments)

    def close(self) -> None:
        """End what is open: an episode that was given up counts as it stands, one that nobody acted in does not."""
        while self._open:
            _, session = self._open.popitem()
            if session.turns:
                session.end(Status.TRUNCATED_DEPTH, "the client left")
                self.sessions.keep(session, self.agent)
            session.close()
        self.sessions.write_results()

    def _begin(self) -> str:
        with self._lock:
            if not self.named and (self._open or self._over):
                raise CallError("this process plays one episode, and it has begun: start another process")
            if len(self._open) >= self.most:
                raise CallError(f"{self.most} episodes are open: finish one first")
            episode = f"e{next(self._numbers)}" if self.named else ""
            session = self.sessions.open(*self.sessions.next_episode())
            self._open[episode] = session
        spoken = [f"Where it says to write <{tag}>...</{tag}>, call the tool {tag}." for tag in self.tool.tags[1:]]
        text = "\n\n".join([*(message["content"] for message in session.messages), *spoken])
        return f"episode: {episode}\n\n{text}" if self.named else text

    def _step(self, episode: str, session: EpisodeSession, name: str, arguments: dict[str, Any]) -> str:
        given = {key: value for key, value in arguments.items() if key != "episode"}
        is_tag = name in self.tool.tags[1:]
        stepped = session.step_text(tagged(name, str(given.get(name, ""))) if is_tag else with_call("", name, given))
        if not session.done:
            self._open[episode] = session
            return stepped.observation
        self._over.add(episode)
        try:
            row = self.sessions.keep(session, self.agent)
        except SessionFailed as error:
            raise SessionFailed(f"the environment failed, the episode does not count: {error}") from error
        finally:
            self.sessions.write_results()
        return f"{stepped.observation}\n\nThe episode is over ({row.status})."


def server(episodes: Episodes) -> Any:
    """The MCP server (`mcp.server.lowlevel.Server`) on `episodes`."""
    # by name: mcp 1, which other packages pin, has the same modules and another interface
    types: Any = import_module("mcp.types")
    make_server: Any = import_module("mcp.server.lowlevel").Server
    run_sync: Any = import_module("anyio.to_thread").run_sync

    tools = [types.Tool(name=name, description=said, input_schema=schema) for name, said, schema in episodes.schemas()]

    async def list_tools(context: Any, params: Any) -> Any:
        return types.ListToolsResult(tools=tools)

    async def call_tool(context: Any, params: Any) -> Any:
        try:
            text, failed = await run_sync(episodes.call, params.name, params.arguments or {}), False
        except TurngymError as error:
            text, failed = str(error), True
        return types.CallToolResult(content=[types.TextContent(type="text", text=text)], is_error=failed)

    return make_server("turngym", on_list_tools=list_tools, on_call_tool=call_tool)
