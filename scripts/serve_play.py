"""Play the three environments in the browser: act yourself, watch an agent turn by turn, and take over.

Examples:
    turngym serve play
    turngym serve play --models model:runs/mine/model --out mine.jsonl

Pages work without scripts, and on a phone. With --out, every game is appended to a trace. SIGTERM or Ctrl-C answers
what was accepted, records the games under way, and ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from msgspec import structs

from turngym.agents.serving import DrainingServer, Listen, page_front
from turngym.core.numbers import Million, Positive, Seed, Threads
from turngym.core.spec import Spec
from turngym.scripts.options import read_options


class ServePlay(Spec):
    """Who can be watched, and where."""

    models: tuple[str, ...] = ()
    """Agents to watch beside the expert and the environment's own players: `model:FOLDER`, `openai:MODEL`, ..."""
    out: Path | None = None
    """Trace file to which games are appended; by default nothing is recorded."""
    listen: Listen = Listen(port=3001)
    games: Million = 64
    """Most games at a time. A new one takes the place of the one left alone longest."""
    idle: Positive = 1800.0
    """Seconds without a click after which a game ends."""
    seed: Seed | None = None
    """Seed of the tasks that are drawn at random; by default another order every time."""
    threads: Threads = 8
    """Requests in work at the same time."""


def main(argv: Sequence[str]) -> int:
    """Serve until a signal."""
    config = read_options(ServePlay, argv, prog="turngym serve play", about=__doc__)
    from turngym.agents.play_web import Games, create_app
    from turngym.envs.visitors import EpisodeRecorder

    recorder = None if config.out is None else EpisodeRecorder(config.out)
    try:
        keep = recorder or (lambda episode: None)
        games = Games(keep, models=config.models, games=config.games, idle=config.idle, seed=config.seed)
        server = DrainingServer(page_front(create_app(games), threads=config.threads), **structs.asdict(config.listen))
        server.stop_on_signals()
        recording = "nothing is recorded" if recorder is None else f"games are recorded in {recorder.path}"
        print(f"ready: {server.url}, {', '.join(games.environments)}, {recording}", flush=True)
        server.run()
        games.close()
    finally:
        if recorder is not None:
            recorder.close()
    print("stopped; everything accepted was answered" if server.drained else "stopped before all was answered")
    return 0
