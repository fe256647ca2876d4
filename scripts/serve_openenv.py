"""Serve an environment in OpenEnv's interface: reset, step and state over WebSocket and HTTP.

Examples:
    turngym serve openenv --env turngym/ALFWorld-v0
    turngym serve openenv --env turngym/WebShop-v0 --model runs/opd/student --port 8010

With --model, observations bring token ids of that model's tokenizer and clients may answer with sampled ids.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import structs

from turngym.agents.models import load_tokenizer
from turngym.agents.playing.env_maker import probe
from turngym.agents.playing.episode_session import SessionPool
from turngym.agents.rendering.chat_settings import ChatSettings
from turngym.agents.resolve_play import OneGame, resolve_game
from turngym.agents.serving import Listen
from turngym.agents.serving_asgi import AsgiServer
from turngym.core.hub import model_folder
from turngym.core.numbers import Million
from turngym.core.plugins import need
from turngym.core.settings import whole_toml
from turngym.core.spec import Spec
from turngym.scripts.options import Verb
from turngym.trainers.adapters.openenv import app


class ServeOpenEnv(Spec):
    """What to serve, and where."""

    model: str | None = None
    """Folder of a model: its tokenizer, and how it wants to be spoken to (turngym.json). Without it: text only."""
    listen: Listen = Listen()
    clients: Million = 64
    """Most clients at a time; each plays its own episode."""


VERB: Verb[ServeOpenEnv] = Verb(
    name="turngym serve openenv",
    about=__doc__ or "",
    own=ServeOpenEnv,
    spec=OneGame,
    first=("env", "split", "data", "model", "max_turns", "env_kwargs", "host", "port", "clients"),
)


def main(argv: Sequence[str]) -> int:
    line = VERB.asked(argv)
    config, game = line.own, resolve_game(line.layers)
    if line.show:
        print(whole_toml(game), end="")
        return 0
    need("openenv", "turngym serve openenv", "openenv")
    sessions = open_sessions(game.spec, config.model)
    try:
        application = app(sessions, max_concurrent=config.clients)
        server = AsgiServer(application, extra="openenv", **structs.asdict(config.listen))
        server.stop_on_signals()
        print(f"{game.spec.play.env.id} for OpenEnv clients at {server.url}; Ctrl-C ends it", flush=True)
        server.run()
    finally:
        sessions.close()
    return 0


def open_sessions(game: OneGame, model: str | None) -> SessionPool:
    """Sessions on the chosen environment. Raises TurngymError where there is no such environment or tokenizer."""
    env_id, make = game.play.env.id, game.made
    # what the environment does not take would be read as a setting of the sessions
    probe(env_id, make)
    if model is None:
        return SessionPool.of(env_id, None, ChatSettings(), **make)
    need("transformers", "--model", "train")
    tokenizer, folder = load_tokenizer(model), model_folder(model, weights=False)
    return SessionPool.of(env_id, tokenizer, ChatSettings.load(folder), **make)
