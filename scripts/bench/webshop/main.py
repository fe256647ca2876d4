"""WebShop's speed: steps, a shop of a million products, memory per environment, parity with recorded episodes.

Steps are CPU seconds of one process and every search is computed (`memo=0`), so neither other work on the machine nor
repeated queries decide. The peer renders each page as HTML with Jinja and reads it back with BeautifulSoup, as the
original does, over the same states and the same search; observations must agree step by step. The big shop is built,
searched and checked in processes of their own.

Examples:
    turngym bench webshop
    turngym bench webshop --profile 1k-synthetic --data ~/webshop --parity ~/webshop
    turngym bench webshop --products 1180000 --steps 0 --envs 0
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from turngym.envs.core.tables import print_table, write_json
from turngym.envs.webshop.shop import Shop, open_shop
from turngym.envs.webshop.transcripts import parity
from turngym.scripts.bench.webshop import big, steps

RATE_TARGET = 3000.0
"""Steps per CPU second."""
MEDIAN_TARGET, MEMORY_TARGET, ENV_TARGET = 10.0, 1024.0, 50.0
"""CPU milliseconds of the median search; MiB resident; kB of environment number 1,000."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WebshopBench:
    """What to measure; 0 leaves a part out."""

    profile: str = "embedded"
    """Shop of about 1,000 products: `embedded`, `1k-synthetic` or `1k-human`."""
    data: Path | None = None
    """Folder of the original's files for the real shops; by default $WEBSHOP_DATA."""
    steps: int = 20_000
    """Steps through gym.make and through a bare session."""
    peer_steps: int = 1_000
    """Steps of the peer, and of the comparison."""
    products: int = 50_000
    """Products of the big shop; the original's full catalog has 1,181,436."""
    catalog: Literal["generated", "zipf"] = "generated"
    """The big shop: a whole generated one, or an index over made-up words as uneven as real ones."""
    folder: Path | None = None
    """Folder to keep the big shop in, and to take it from if it is there; by default a temporary one."""
    envs: int = 1_000
    """Environments on one shop."""
    parity: Path | None = None
    """Folder with transcripts.jsonl.xz and the 1,000-product files: replay the original's recorded episodes."""
    json: Path | None = None
    """Also write all figures here."""
    seed: int = 0


def main(argv: Sequence[str]) -> int:
    """Run the parts asked for; status 1 if a target is missed."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    config = tyro.cli(WebshopBench, args=list(argv), prog="turngym bench webshop", description=__doc__)
    figures: dict[str, Any] = {"load_average": os.getloadavg()[0], "cores": os.cpu_count()}
    met: list[bool] = []
    if config.steps or config.envs:
        shop = open_shop(config.profile, config.data, memo=0)
        print(f"{config.profile}: {len(shop.products):,} products, {len(shop.goals):,} goals", flush=True)
        met += throughput(config, shop, figures) if config.steps else []
        met += memory(config, shop, figures) if config.envs else []
        shop.close()
    met += big_shop(config, figures) if config.products else []
    met += replayed(config.parity, figures) if config.parity is not None else []
    if config.json is not None:
        write_json(config.json, figures)
    return 0 if all(met) else 1


def throughput(config: WebshopBench, shop: Shop, figures: dict[str, Any]) -> list[bool]:
    """Steps per CPU second of the three ways."""
    warm = steps.make_scripts(shop, config.steps // 10, config.seed + 1)
    scripts = steps.make_scripts(shop, config.steps, config.seed)
    few, total = [], 0
    for script in scripts:
        if total < config.peer_steps:
            few.append(script)
            total += len(script.actions)
    rates: dict[str, steps.Rate] = {}
    for name, make in (("gym.make, guarded", steps.guarded), ("bare session", steps.bare)):
        run = make(shop)
        steps.measure(run, warm, 0)
        rates[name] = steps.measure(run, scripts, total)
    try:
        rates["peer through HTML"] = steps.measure(steps.through_html(shop), few, total)
    except ImportError as error:
        missing = f"{error.name} is not installed: pip install beautifulsoup4 jinja2"
        figures["steps/peer"] = missing
        print(f"the peer is left out, {missing}")
    return _show_rates(rates, steps.mix_of(scripts), figures)


def _show_rates(rates: dict[str, steps.Rate], mix: dict[str, int], figures: dict[str, Any]) -> list[bool]:
    peer = rates.get("peer through HTML")
    rows = []
    for name, rate in rates.items():
        ratio = None if peer is None else rate.per_second / peer.per_second
        figures[f"steps/{name}"] = {"per_second": rate.per_second, "ratio": ratio, "steps": rate.steps}
        cells = (f"{rate.steps:,}", f"{rate.per_second:,.0f}", f"{1e6 / rate.per_second:,.0f}")
        rows.append([name, *cells, "no peer" if ratio is None else f"{ratio:,.1f}x"])
    figures["steps/mix"] = mix
    counts = ", ".join(f"{count:,} {what}" for what, count in mix.items())
    print_table((["one core", "steps", "steps/s", "us/step", "to the peer"], rows), f"Steps: {counts}")
    ours = rates["gym.make, guarded"]
    results = [_verdict("gym.make, guarded", ours.per_second, " steps/s", ours.per_second >= RATE_TARGET, RATE_TARGET)]
    if peer is not None:
        # the guarded environment marks its last page with the score
        same = [a == b for a, b in zip(rates["bare session"].seen, peer.seen, strict=True)]
        figures["steps/same"] = [sum(same), len(same)]
        results.append(
            _verdict("same observation and reward as the peer", sum(same), f" of {len(same)}", all(same), "all")
        )
    return results


def memory(config: WebshopBench, shop: Shop, figures: dict[str, Any]) -> list[bool]:
    """What one more environment costs, and what sessions leave behind."""
    cost = steps.cost_of_more(shop, config.envs, config.seed) / 1e3
    kept, each = steps.sessions_kept(shop)
    figures |= {"memory/env_kb": cost, "memory/session_ids_kept": kept, "memory/bytes_per_reset": each}
    print(f"  after sessions with 1,500 new ids, one session object remembers {kept:,} ids", flush=True)
    return [
        _verdict(f"environment number {config.envs:,}", cost, " kB", cost < ENV_TARGET, f"below {ENV_TARGET:g} kB"),
        _verdict("session ids remembered", kept, "", kept <= 1000, "at most 1,000"),
    ]


def big_shop(config: WebshopBench, figures: dict[str, Any]) -> list[bool]:
    """Build, search, check."""
    with tempfile.TemporaryDirectory(prefix="turngym-bench-") as scratch:
        folder = config.folder or Path(scratch) / "shop"
        arguments = (folder, config.catalog, config.products)
        print(f"big shop: {config.products:,} products, {config.catalog}", flush=True)
        if not folder.exists():
            figures["big/build"] = built = big.step("build", *arguments)
            _show_build(built)
        figures["big/search"] = found = big.step("search", *arguments)
        figures["big/check"] = checked = big.step("check", *arguments)
    rows = [[name, f"{found[f'{name}_median_ms']:.2f}", f"{found[f'{name}_p99_ms']:.2f}"] for name in ("cpu", "wall")]
    print_table((["search, ms", "median", "p99"], rows), f"{found['queries']} different queries, exact top 50")
    parts = f"{found['RssAnon_mb']:.0f} MiB its own, {found['RssFile_mb']:.0f} MiB mapped files"
    print(f"  a fresh process opens it in {found['open_cpu_s']:.1f} CPU s; resident after the searches: {parts}")
    median, resident = found["cpu_median_ms"], found["VmHWM_mb"]
    exact = checked["exact"] == checked["checked"]
    return [
        _verdict("median search", median, " ms", median <= MEDIAN_TARGET, f"at most {MEDIAN_TARGET:g} ms"),
        _verdict("most resident", resident, " MiB", not resident > MEMORY_TARGET, f"at most {MEMORY_TARGET:g} MiB"),
        _verdict("queries ranked as a plain scorer does", checked["exact"], f" of {checked['checked']}", exact, "all"),
    ]


def _show_build(built: dict[str, Any]) -> None:
    rows = [
        ["products made up, CPU s", f"{built['make_up_cpu_s']:,.0f}"],
        ["stored and indexed, CPU s", f"{built['build_cpu_s']:,.0f}"],
        ["all, wall s", f"{built['wall_s']:,.0f}"],
        ["disk, MB", f"{built['disk_mb']:,.0f}"],
        ["peak memory, MiB", f"{built['peak_mb']:,.0f}"],
    ]
    print_table((["build", ""], rows), f"{built['products']:,} products")


def replayed(data: Path, figures: dict[str, Any]) -> list[bool]:
    """The original's recorded episodes."""
    parts = parity(data)
    for part in parts:
        print(f"  {part}")
        for line in part.mismatches[:5]:
            print(f"    {line}")
    wrong = sum(len(part.mismatches) for part in parts)
    figures["parity"] = {
        "episodes": sum(part.episodes for part in parts),
        "steps": sum(part.steps for part in parts),
        "fields": sum(part.fields for part in parts),
        "mismatches": wrong,
    }
    return [_verdict("mismatches with the original's transcripts", wrong, "", wrong == 0, "none")]


def _verdict(what: str, value: float, unit: str, met: bool, target: float | str) -> bool:
    """Print a figure beside its target."""
    shown = f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:,.2f}"
    wanted = f"{target:,.0f}{unit}" if isinstance(target, float) else target
    print(f"  {what}: {shown}{unit} (target {wanted}: {'met' if met else 'MISSED'})", flush=True)
    return met
