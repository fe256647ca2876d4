"""Serve the shop as web pages: shop for a goal in the browser, by the rules that agents play by.

Examples:
    turngym serve webshop
    turngym serve webshop --profile 1k-synthetic --data ~/webshop --out mine.jsonl
    turngym trace print mine.jsonl

Every visit is appended to a trace as an episode like any other. Pages need no scripts in the browser. SIGTERM or Ctrl-C
answers what was accepted, records the visits under way, and ends; a second one ends at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from msgspec import structs

from turngym.agents.serving import DrainingServer, Listen, page_front
from turngym.core.numbers import Million, Positive, Seed, Threads
from turngym.core.spec import Spec, Unread, needing
from turngym.scripts.options import read_options


class ServeWebshop(Spec):
    """Which shop, for whom, and where."""

    profile: str = "embedded"
    """`embedded` (generated, needs no data), `1k-synthetic`, `1k-human`, `full-synthetic`, `full-human`."""
    data: Path | None = None
    """Folder of the original's files; by default $WEBSHOP_DATA."""
    split: str | None = None
    """Which goals are drawn at random: `train` or `eval`. Any goal can be chosen by its number."""
    compat: Literal["webshop", "repaired"] = "webshop"
    """`webshop` keeps the original's faults, as agents meet them by default."""
    attributes: bool = False
    """Show the page Attributes, which agents do not see by default."""
    pictures: bool = True
    """Let the browser load pictures from where the shop's data says."""
    out: Path | None = Path("webshop-sessions.jsonl")
    """Trace file to which visits are appended; `none` records nothing."""
    listen: Listen = Listen(port=3000)
    visits: Million = 256
    """People in the shop at a time; who was away longest makes room."""
    idle: Positive = 3600.0
    """Seconds without a click after which a visit ends."""
    seed: Seed | None = None
    """Seed of the goals that are drawn at random; by default another order every time."""
    threads: Threads = 8
    """Requests in work at the same time."""

    def unread(self) -> Unread:
        if self.profile == "embedded":
            yield from needing("the --profile of a shop that has files", "data")


def main(argv: Sequence[str]) -> int:
    """Serve until a signal."""
    config = read_options(ServeWebshop, argv, prog="turngym serve webshop", about=__doc__)
    from turngym.envs.visitors import EpisodeRecorder
    from turngym.envs.webshop.shop import open_shop
    from turngym.envs.webshop.web import WebSettings, create_app

    settings = WebSettings(
        split=config.split,
        compat=config.compat,
        attributes=config.attributes,
        pictures=config.pictures,
        seed=config.seed,
        visits=config.visits,
        idle=config.idle,
    )
    recorder = None if config.out is None else EpisodeRecorder(config.out)
    shop = open_shop(
        config.profile, config.data, progress=lambda stage, count: print(f"{stage}: {count:,}", flush=True)
    )
    try:
        app = create_app(shop, settings, recorder)
        server = DrainingServer(page_front(app, threads=config.threads), **structs.asdict(config.listen))
        server.stop_on_signals()
        recording = "nothing is recorded" if recorder is None else f"visits are recorded in {recorder.path}"
        print(
            f"ready: {server.url}, {len(shop.products):,} products, {len(shop.goals):,} goals, {recording}", flush=True
        )
        server.run()
        app.extensions["webshop"].visits.close()
    finally:
        shop.close()
        if recorder is not None:
            recorder.close()
    print("stopped; everything accepted was answered" if server.drained else "stopped before all was answered")
    return 0
