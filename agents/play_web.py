"""Play in the browser: an environment and a task to choose, actions to click or type, an agent to watch and to relieve.

Every page is rendered here and works without scripts; the only script presses "one step" again while one watches. What
environments and models say is escaped. Who plays and what pages may load is in `envs/visitors.py`.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from turngym.agents.named_agent import OpenedAgent, open_agent
from turngym.agents.playing.env_maker import env_maker, probe
from turngym.agents.playing.rollout import EpisodeRunner, Job, begin
from turngym.agents.playing.timed_calls import attempt
from turngym.agents.resolve_play import resolve_agent
from turngym.core.episode import Episode, Status
from turngym.core.errors import TurngymError, did_you_mean
from turngym.core.redaction import excerpt
from turngym.envs.base import tasks_of
from turngym.envs.spaces import printable
from turngym.envs.visitors import LEFT, MAX_FORM, Forms, Visitors, guard_pages

try:
    from flask import Flask, Response, make_response, redirect, render_template, request
except ImportError as error:
    raise TurngymError("playing in the browser needs Flask: pip install 'turngym[serve]'") from error

ENVIRONMENTS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "household": ("turngym/ALFWorld-v0", {}),
    "shop": ("turngym/WebShop-v0", {"profile": "embedded-small"}),
    "search": ("turngym/Search-v0", {}),
}
"""Name on the page to Gymnasium id and arguments."""
COOKIE = "turngym_play"
# `search[<your keywords>]` and `<answer>answer</answer>`: what stands before, in and behind the slot
_SLOT = re.compile(r"(.*?[\[>])(<[^>]*>|[^<>\[\]]+)([\]<].*)")
SCRIPT = """\
"use strict";
const watch = document.getElementById("watch");
if (watch) {
  watch.checked = sessionStorage.getItem("watch") === "1";
  const press = () => watch.checked && document.getElementById("step").click();
  const go = () => { if (watch.checked) setTimeout(press, 900); };
  watch.addEventListener("change", () => { sessionStorage.setItem("watch", watch.checked ? "1" : "0"); go(); });
  go();
}
"""
"""Presses "one step" while the box is ticked."""


@dataclass(slots=True, kw_only=True)
class BrowserGame:
    """One browser's game: the episode under way and who plays it beside the person."""

    world: str
    agent: str
    opened: OpenedAgent
    runner: EpisodeRunner
    lock: threading.Lock = field(default_factory=threading.Lock)
    note: str = ""
    """What went wrong with the last click."""
    mine: set[int] = field(default_factory=set)
    """Numbers of the turns that the person played."""
    recorded: bool = False

    @property
    def over(self) -> bool:
        return self.runner.status is not None

    def act(self, action: str) -> None:
        """The person's action, written as the agent would have written it, so that it can go on from there."""
        writer, conversation = self.opened.agent.writer, self.runner.conversation
        # a scripted player sees every action, and the agent shows it the last one alone
        if (player := conversation.memory.get("expert")) is not None and conversation.played is not None:
            player.observe(conversation.played)
        self.mine.add(len(self.runner.turns))
        try:
            reply = writer.write(conversation, action, "demonstration")
        except TurngymError:
            # the channel cannot carry the action; the environment says so
            reply = writer.write_text(conversation, action, "demonstration")
        self.runner.take(reply, attempt(partial(self.runner.step, reply.text)))

    def step(self) -> None:
        (reply,) = self.opened.agent.respond([self.runner.conversation])
        if reply.ends is not None:
            # the person may still know what to do
            self.note = f"{self.agent} cannot go on: {reply.error or reply.ends.value}"
            return
        self.runner.take(reply, attempt(partial(self.runner.step, reply.text)))


WAITING = 3
"""Requests that wait for a model at a time, or are answered by it; fewer than there are threads."""
PAGE_WAIT = 1.0
"""Seconds that a page waits for a game in which the agent answers."""


class Games(Visitors[BrowserGame]):
    """All games, and the agents that they share. Settings are those of `turngym serve play`."""

    def __init__(
        self,
        record: Callable[[Episode], None] = lambda episode: None,
        *,
        environments: Mapping[str, tuple[str, dict[str, Any]]] = ENVIRONMENTS,
        models: tuple[str, ...] = (),
        games: int = 64,
        idle: float = 1800.0,
        seed: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(most=games, idle=idle, dismiss=self._leave, clock=clock)
        self.environments, self._named, self._record = environments, models, record
        self._models = threading.Lock()
        self._waiting = threading.BoundedSemaphore(WAITING)
        self._agents: dict[tuple[str, str], OpenedAgent] = {}
        self._players: dict[str, list[str]] = {}
        self._rng = np.random.default_rng(seed)
        self._count = 0

    def players(self, world: str) -> list[str]:
        """Who can be watched in an environment."""
        # asked once: an environment is made for it
        if world not in self._players:
            env_id, kwargs = self.environments[world]
            self._players[world] = ["expert", *probe(env_id, kwargs).players, "random", *self._named]
        return self._players[world]

    def begin(self, name: str, world: str, task: str, agent: str) -> BrowserGame:
        """Begin another game for a visitor, whose last one ends; the `task` "" draws one.

        Raises TurngymError for an unknown environment, task or agent.
        """
        if world not in self.environments:
            names = list(self.environments)
            raise TurngymError(f"there is no environment {excerpt(world, 40)!r}.{did_you_mean(world, names)}")
        if agent not in self.players(world):
            raise TurngymError(f"nobody here is called {excerpt(agent, 60)!r}")
        env_id, kwargs = self.environments[world]
        with self._models:
            opened = self._agents.get((world, agent))
            if opened is None:
                opened = open_agent(resolve_agent({"agent": agent}), lambda: probe(env_id, kwargs))
                self._agents[world, agent] = opened
        env: Any = env_maker(env_id, **kwargs, channel=opened.channel)()
        try:
            ids = tasks_of(env.unwrapped)
            with self._lock:
                self._count += 1
                number, drawn = self._count, int(self._rng.integers(len(ids)))
            job = Job(task_id=task or ids[drawn])
            renderer = opened.agent.writer.renderer
            runner = begin(env, job, number=number, system=opened.system, renderer=renderer)
        except BaseException:
            env.close()
            raise
        game = BrowserGame(world=world, agent=agent, opened=opened, runner=runner)
        self.put(name, game)
        return game

    def step(self, game: BrowserGame) -> None:
        """One turn of the agent; models answer one game at a time.

        Raises TurngymError where `WAITING` others wait already: they would take every thread that serves pages.
        """
        if not self._waiting.acquire(blocking=False):
            raise TurngymError(f"{game.agent} answers in other games at the moment; click again in a while")
        try:
            with self._models:
                game.step()
        finally:
            self._waiting.release()

    def keep(self, game: BrowserGame) -> None:
        """Record a game that is over, once."""
        if not game.recorded and game.runner.turns:
            game.recorded = True
            about = {"agent": game.agent, "interface": "web", "turns_by_person": sorted(game.mine)}
            self._record(game.runner.episode(about))

    def _leave(self, game: BrowserGame) -> None:
        with game.lock:
            if not game.over:
                game.runner.status, game.runner.error = Status.TRUNCATED_DEPTH, LEFT
            self.keep(game)
            # not while the agent answers in another game
            with self._models:
                game.opened.agent.release(game.runner.conversation)
            game.runner.env.close()


class PlayPages:
    """The pages."""

    def __init__(self, games: Games) -> None:
        self.games = games
        self._forms = Forms(COOKIE)

    def start(self) -> Any:
        """GET /: choose an environment, a task and who plays along."""
        return self._start("")

    def begin(self) -> Any:
        """POST /begin: the first page of the game."""
        name = self._forms.sender()
        if name is None:
            return self.error(403)
        world, task, agent = (printable(request.form.get(key, "")).strip() for key in ("world", "task", "agent"))
        try:
            self.games.begin(name, world, task, agent or "expert")
        except TurngymError as error:
            return self._start(str(error)), 404
        return redirect("/game", 303)

    def look(self) -> Any:
        """GET /game: the observation, the possible actions, and how it goes."""
        name = self._forms.visitor()
        game = None if name is None else self.games.get(name)
        if name is None or game is None:
            return redirect("/", 303)
        if not game.lock.acquire(timeout=PAGE_WAIT):
            return self.error(503)
        try:
            conversation = game.runner.conversation
            info = conversation.env.describe()
            templates = list(info.get("admissible_templates") or ())
            slots = [match.groups() for template in templates if (match := _SLOT.fullmatch(template))]
            actions = [action for action in conversation.admissible or () if action not in templates]
            return render_template(
                "play_page.html",
                token=self._forms.token(name),
                game=game,
                runner=game.runner,
                slots=slots,
                actions=actions,
                solved=game.runner.success,
                turns=game.runner.turns[::-1],
            )
        finally:
            game.lock.release()

    def act(self) -> Any:
        """POST /act: an action of the person's, or one turn of the agent's."""
        name = self._forms.sender()
        if name is None:
            return self.error(403)
        game = self.games.get(name)
        if game is None:
            return redirect("/", 303)
        with game.lock:
            # a second click on a button, or a page from before: what it meant is over
            if not game.over and request.form.get("turn") == str(len(game.runner.turns)):
                game.note = ""
                # a form with a slot says which template its words belong to
                text = printable(request.form.get("action", "")).strip()
                before, after = (printable(request.form.get(part, "")) for part in ("before", "after"))
                try:
                    if "step" in request.form:
                        self.games.step(game)
                    elif text:
                        game.act(f"{before}{text}{after}")
                except TurngymError as error:
                    game.note = str(error)
                if game.over:
                    self.games.keep(game)
        return redirect("/game", 303)

    def error(self, status: int) -> tuple[str, int]:
        texts = {
            403: "This page was not made for your game, or the server was restarted since.",
            404: "There is no such page.",
            405: "This address cannot be used like that.",
            503: "The agent is answering in this game. Load this page again in a while.",
            413: f"That was too long: forms may have {MAX_FORM:,} bytes.",
        }
        return render_template("play_page.html", problem=texts.get(status, "Something went wrong.")), status

    def _start(self, note: str) -> Response:
        name = self._forms.visitor_or_new()
        worlds = {world: self.games.players(world) for world in self.games.environments}
        page = render_template("play_page.html", token=self._forms.token(name), worlds=worlds, note=note)
        reply = make_response(page)
        self._forms.remember(reply, name)
        return reply


def create_app(games: Games) -> Flask:
    """A WSGI application; `app.extensions["play"]` is `games`."""
    folder = Path(__file__).parent
    # both paths said, because Flask cannot find them for a package inside a namespace
    app = Flask(
        "turngym.agents.play_web",
        root_path=str(folder),
        instance_path=str(folder),
        template_folder=".",
        static_folder=None,
    )
    web = PlayPages(games)
    guard_pages(app, "script-src 'self'; style-src 'unsafe-inline'", web.error)
    app.extensions["play"] = games
    app.add_url_rule("/", view_func=web.start, methods=["GET"])
    app.add_url_rule("/begin", view_func=web.begin, methods=["POST"])
    app.add_url_rule("/game", view_func=web.look, methods=["GET"])
    app.add_url_rule("/act", view_func=web.act, methods=["POST"])
    app.add_url_rule("/play.js", "script", lambda: Response(SCRIPT, mimetype="text/javascript"), methods=["GET"])

    return app
