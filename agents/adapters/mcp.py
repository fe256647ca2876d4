"""A panel as an MCP server (tried with mcp 2.0.0): `begin` opens an episode, the environment's tools act in it.

Over stdio a process is one episode. Since protocol 2026-07-28 HTTP has no sessions, so there `begin` names the episode,
and every action says which one it belongs to. The name cannot be guessed, and is good for the client that got it. What
is judged stays here: the client reads observations.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

from turngym.agents.adapters.panel_sessions import PanelSessions, SessionFailed
from turngym.agents.playing.episode_session import EpisodeSession
from turngym.agents.serving_asgi import CLIENT
from turngym.core.episode import Status
from turngym.core.errors import TurngymError
from turngym.core.tools import Argument, Tool, Tools
from turngym.envs.channels import tagged, with_call

BEGIN, EPISODE = "begin", "episode"
"""The server's own tool, and the argument of the others that names the episode."""
IDLE_SECONDS = 60.0
"""Seconds after its last call for which an episode keeps its place although another client needs one."""


class CallError(TurngymError):
    """A call that does not fit: an unknown episode or tool, a missing argument."""


@dataclass(slots=True)
class Playing:
    """An open episode, whose it is, and when it was last used."""

    session: EpisodeSession
    client: str
    used: float
    busy: bool = False
    """Whether a call of it is being played. It keeps its place meanwhile."""


@dataclass(slots=True)
class Episodes:
    """The episodes that clients of one server play, by name.

    One that nobody has used for `idle` seconds ends. Where no more may be open, the one that was used longest ago makes
    room, if that is a minute ago.
    """

    sessions: PanelSessions
    """Sessions with the channel `tool`: what a client calls is judged as the call of a model is."""
    agent: str = "mcp"
    """Name under which episodes are recorded."""
    named: bool = True
    """Several at a time, each with a name; False: one, which has none."""
    most: int = 64
    """Most that are open at a time."""
    share: int | None = None
    """Most of them that one client may have open; None: all."""
    idle: float = 900.0
    """Seconds without a call after which an episode ends."""
    clock: Callable[[], float] = time.monotonic
    _open: dict[str, Playing] = field(default_factory=dict)
    _over: deque[str] = field(default_factory=lambda: deque(maxlen=1000))
    """The names of the last episodes that ended, so that a late call is told so."""
    _begun: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _begin_lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while an episode is opened, which may take seconds in which the others are played."""

    @property
    def tool(self) -> Tools:
        return self.sessions.pool.tool

    def __post_init__(self) -> None:
        for tool in self.tool.tools:
            if tool.name == BEGIN or (self.named and any(argument.name == EPISODE for argument in tool.arguments)):
                raise TurngymError(
                    f"{self.sessions.pool.env_id}: the tool {tool.name!r} cannot be served over MCP, where the tool "
                    f"{BEGIN!r} and the argument {EPISODE!r} are the server's own; rename yours"
                )

    def tools(self) -> list[Tool]:
        """Every tool of the server: the one that begins an episode, and those of the environment."""
        begins = "Begins an episode: the rules, and what is seen first. Call it once, before anything else."
        tag_tools = (
            Tool(
                name=tag,
                description=f"Acts as <{tag}>...</{tag}> does.",
                arguments=(Argument(name=tag, description=f"The {tag}."),),
            )
            for tag in self.tool.tags[1:]
        )
        extra = (Argument(name=EPISODE, description="What begin called the episode."),) if self.named else ()
        acting = (replace(tool, arguments=(*tool.arguments, *extra)) for tool in (*self.tool.tools, *tag_tools))
        return [Tool(name=BEGIN, description=begins), *acting]

    def call(self, name: str, arguments: dict[str, Any], client: str = "") -> str:
        """Play one call of `client`. Returns the text for the client. Raises CallError, SessionFailed."""
        names = [tool.name for tool in self.tools()]
        if name not in names:
            raise CallError(f"there is no tool {name!r}; tools are: {', '.join(names)}")
        self._end_idle()
        if name == BEGIN:
            return self._begin(client)
        episode = str(arguments.get(EPISODE, "")) if self.named else ""
        with self._lock:  # two calls at a time would step one environment twice
            playing = self._open.get(episode)
            # for a client, episodes of others are not there
            if playing is not None and playing.client != client:
                playing = None
            busy = playing is not None and playing.busy
            if playing is not None:
                playing.busy = True
        if playing is None or busy:
            state = "is being played" if busy else "is over" if episode in self._over else "is not open"
            raise CallError(
                f"episode {episode!r} {state}" if self.named else f"the episode {state}; call {BEGIN} first"
            )
        return self._step(episode, playing, name, arguments)

    def close(self) -> None:
        while self._open:
            self._give_up(*self._open.popitem(), "the client left")
        self.sessions.write_results()

    def _give_up(self, episode: str, playing: Playing, why: str) -> None:
        """An episode that was given up counts as it stands, one that nobody acted in does not."""
        self._over.append(episode)
        if playing.session.turns:
            playing.session.end(Status.TRUNCATED_DEPTH, why)
            self.sessions.keep(playing.session, self.agent)
        playing.session.close()

    def _end_idle(self) -> None:
        with self._lock:
            late = self.clock() - self.idle
            silent = [name for name, playing in self._open.items() if playing.used < late and not playing.busy]
            ended = [(name, self._open.pop(name)) for name in silent] if self.named else []
        for name, playing in ended:
            self._give_up(name, playing, f"the client was silent for {self.idle:g} s")
        if ended:
            self.sessions.write_results()

    def _make_room(self, client: str) -> None:
        """Raises CallError where as many are open as may be, and all of them in use."""
        with self._lock:
            own = [name for name, playing in self._open.items() if playing.client == client]
            full = self.share is not None and len(own) >= self.share
            candidates = own if full else list(self._open)
            if not full and len(candidates) < self.most:
                return
            late = self.clock() - IDLE_SECONDS
            idle = [name for name in candidates if self._open[name].used <= late and not self._open[name].busy]
            if not idle:
                raise CallError(f"{len(candidates)} episodes are open: finish one first, or ask again in a minute")
            oldest = min(idle, key=lambda name: self._open[name].used)
            playing = self._open.pop(oldest)
        self._give_up(oldest, playing, "another episode needed its place")

    def _begin(self, client: str) -> str:
        with self._begin_lock:
            if not self.named and self._begun:
                raise CallError("this process plays one episode, and it has begun: start another process")
            self._make_room(client)
            episode = secrets.token_hex(8) if self.named else ""
            session = self.sessions.open(*self.sessions.next_episode())
            self._begun = True
            self._open[episode] = Playing(session, client, self.clock())
        hints = [f"Where it says to write <{tag}>...</{tag}>, call the tool {tag}." for tag in self.tool.tags[1:]]
        text = "\n\n".join([*(message["content"] for message in session.messages), *hints])
        return f"episode: {episode}\n\n{text}" if self.named else text

    def _step(self, episode: str, playing: Playing, name: str, arguments: dict[str, Any]) -> str:
        session = playing.session
        tool_arguments = {key: value for key, value in arguments.items() if key != EPISODE}
        is_tag = name in self.tool.tags[1:]
        try:
            text = tagged(name, str(tool_arguments.get(name, ""))) if is_tag else with_call("", name, tool_arguments)
            stepped = session.step_text(text)
        except BaseException:
            self._open.pop(episode, None)
            session.close()
            raise
        if not session.done:
            playing.used, playing.busy = self.clock(), False
            return stepped.observation
        self._open.pop(episode, None)
        self._over.append(episode)
        try:
            row = self.sessions.keep(session, self.agent)
        except SessionFailed as error:
            raise SessionFailed(f"the environment failed, the episode does not count: {error}") from error
        finally:
            self.sessions.write_results()
        return f"{stepped.observation}\n\nThe episode is over ({row.status.value})."


def server(episodes: Episodes) -> Any:
    """The MCP server (`mcp.server.lowlevel.Server`) on `episodes`."""
    # by name: mcp 1, which other packages pin, has the same modules and another interface
    types: Any = import_module("mcp.types")
    make_server: Any = import_module("mcp.server.lowlevel").Server
    run_sync: Any = import_module("anyio.to_thread").run_sync

    tools = [
        types.Tool(name=tool.name, description=tool.description, input_schema=tool.parameters())
        for tool in episodes.tools()
    ]

    async def list_tools(context: Any, params: Any) -> Any:
        return types.ListToolsResult(tools=tools)

    async def call_tool(context: Any, params: Any) -> Any:
        # over stdio there is no request, and one client
        request = getattr(context, "request", None)
        client = "" if request is None else request.scope.get(CLIENT, "")
        try:
            text, failed = await run_sync(episodes.call, params.name, params.arguments or {}, client), False
        except TurngymError as error:
            text, failed = str(error), True
        return types.CallToolResult(content=[types.TextContent(type="text", text=text)], is_error=failed)

    return make_server("turngym", on_list_tools=list_tools, on_call_tool=call_tool)
