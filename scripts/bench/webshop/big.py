"""A catalog of a million products: built streamed, searched from a fresh process, checked against a plain scorer.

Each step is a process of its own, so that one does not count into the memory of another; figures come back as JSON on
the last line of its output. Two catalogs: `generated`, a whole shop from the generator of the embedded one (small
vocabulary, long postings), and `zipf`, an index over made-up words that are as uneven as those of real products.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from turngym.envs.core.errors import TurngymError
from turngym.retrieval.bm25 import LuceneIndex
from turngym.retrieval.lucene_text import analyze
from turngym.scripts.bench.webshop.big_shop import BigShop

T = TypeVar("T")
Figures = dict[str, Any]
Search = Callable[[str], Sequence[str]]
CATALOGUES = ("generated", "zipf")
K = 50
QUERIES = 400
"""Different ones that are timed."""
_WARM = 20


def step(name: str, folder: Path, catalog: str, count: int) -> Figures:
    """Run one of `STEPS` in a process of its own; lines before its figures are passed on."""
    command = [sys.executable, "-m", "turngym.scripts.bench.webshop.big", name, str(folder), catalog, str(count)]
    last = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if last:
                print(last, end="", flush=True)
            last = line
    if process.returncode:
        raise TurngymError(f"{' '.join(command[2:])} ended with status {process.returncode}: {last.strip()}")
    return dict(json.loads(last))


def build_shop(folder: Path, catalog: str, count: int) -> Figures:
    """Write the catalog and its index; seconds are CPU time, those of making products up apart."""
    wall, cpu, made = time.perf_counter(), time.process_time(), [0.0]
    if catalog == "zipf":
        index = LuceneIndex.build(_timed(BigShop().documents(count), made), folder, progress=partial(_say, "indexing"))
        index.close()
    else:
        _write_shop(folder, count, made)
    spent = time.process_time() - cpu
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return {
        "products": count,
        "make_up_cpu_s": made[0],
        "build_cpu_s": spent - made[0],
        "wall_s": time.perf_counter() - wall,
        "disk_mb": size / 1e6,
        "peak_mb": _memory()["VmHWM"],
    }


def _write_shop(folder: Path, count: int, made: list[float]) -> None:
    from turngym.envs.webshop.catalog import LoadReport, read_pairs
    from turngym.envs.webshop.generate import FULL, records
    from turngym.envs.webshop.open_catalog import build_folder

    report = LoadReport()
    # more clusters than needed: what is not asked for is not made
    config = replace(FULL, name="big", clusters=max(count // 1000, 1) + 1)
    pairs = _timed(islice(records(config), count), made)
    build_folder(folder, lambda staging: read_pairs(pairs, report=report), "synthetic", report, _say)


def _timed(items: Iterable[T], spent: list[float]) -> Iterator[T]:
    """The same items; adds the CPU seconds that making them took."""
    source = iter(items)
    while True:
        start = time.process_time()
        try:
            item = next(source)
        except StopIteration:
            return
        finally:
            spent[0] += time.process_time() - start
        yield item


def _say(what: str, count: int) -> None:
    if count % 100_000 == 0:
        print(f"  {what}: {count:,}", flush=True)


def open_catalog(folder: Path, catalog: str, count: int) -> tuple[Search, Callable[[int], list[str]]]:
    """(search, makes so many different queries) of a catalog on disk."""
    if catalog == "zipf":
        index = LuceneIndex.open(folder)
        return (
            lambda text: [name for name, _ in index.search(text, K)],
            lambda number: list(dict.fromkeys(BigShop().queries(number, count))),
        )
    from turngym.envs.webshop.open_catalog import MappedCatalog
    from turngym.envs.webshop.products import find_profile
    from turngym.envs.webshop.shop import Shop

    shop = Shop(MappedCatalog(folder), find_profile("embedded"), memo=0)

    def queries(number: int) -> list[str]:
        """Titles, instructions, kind and features, some words of the instruction; all in lower case."""
        rng, found = np.random.default_rng(0), []
        for place in rng.integers(len(shop.goals), size=number // 4 + 1).tolist():
            goal = shop.goals[place]
            words = goal.instruction_text.split()
            some = rng.choice(words, size=min(int(rng.integers(2, 7)), len(words)), replace=False)
            wanted = " ".join([goal.query, *goal.attributes])
            found += [goal.title, goal.instruction_text, wanted, " ".join(some)]
        return [text.lower() for text in found[:number]]

    return shop.search, queries


def search(folder: Path, catalog: str, count: int) -> Figures:
    """Latency of `QUERIES` different queries, in milliseconds, and the memory of this process."""
    start = time.process_time()
    find, make_queries = open_catalog(folder, catalog, count)
    opened = time.process_time() - start
    queries = make_queries(QUERIES + _WARM)
    warm, queries = queries[:_WARM], queries[_WARM:]
    for text in warm:
        find(text)
    cpu, wall = [], []
    for text in queries:
        began, used = time.perf_counter(), time.thread_time()
        find(text)
        cpu.append(1e3 * (time.thread_time() - used))
        wall.append(1e3 * (time.perf_counter() - began))
    figures: Figures = {"queries": len(queries), "open_cpu_s": opened}
    for name, values in (("cpu", cpu), ("wall", wall)):
        figures |= {f"{name}_median_ms": float(np.median(values)), f"{name}_p99_ms": float(np.percentile(values, 99))}
    memory = _memory()
    return figures | {f"{name}_mb": memory[name] for name in ("VmRSS", "VmHWM", "RssAnon", "RssFile")}


def check(folder: Path, catalog: str, count: int) -> Figures:
    """A few queries against a scorer that reads every text: number of queries whose list is exactly the same."""
    find, make_queries = open_catalog(folder, catalog, count)
    queries = [text for text in make_queries(48)[::6] if analyze(text)]
    wrong = [
        text
        for text, plain in zip(queries, plain_search(_texts(folder, catalog, count), queries), strict=True)
        if list(find(text)) != plain
    ]
    return {"checked": len(queries), "exact": len(queries) - len(wrong), "wrong": wrong[:3]}


def _texts(folder: Path, catalog: str, count: int) -> Iterator[tuple[str, str]]:
    if catalog == "zipf":
        yield from BigShop().documents(count)
        return
    from turngym.envs.webshop.catalog import search_text
    from turngym.envs.webshop.open_catalog import MappedCatalog

    for product in MappedCatalog(folder):
        yield product.asin, search_text(product)


def plain_search(documents: Iterable[tuple[str, str]], queries: Sequence[str], k: int = K) -> list[list[str]]:
    """The best `k` ids for each query, with the formula spelled out: one pass over all texts, no index, no bounds."""
    asked = [Counter(analyze(query)) for query in queries]
    wanted = frozenset().union(*asked)
    ids, lengths, rows = [], [], []
    for name, text in documents:
        terms = analyze(text)
        ids.append(name)
        lengths.append(len(terms))
        rows.append(Counter(term for term in terms if term in wanted))
    present = sum(1 for length in lengths if length)
    average = np.float32(sum(lengths) / present)
    found_in = Counter(term for row in rows for term in row)
    one, k1, b = np.float32(1), np.float32(0.9), np.float32(0.4)
    lists = []
    for query in asked:
        scored = []
        for name, length, row in zip(ids, lengths, rows, strict=True):
            total = 0.0
            for term in query.keys() & row.keys():
                df = found_in[term]
                weight = np.float32(query[term]) * np.float32(np.log(1 + (present - df + 0.5) / (df + 0.5)))
                inverse = one / (k1 * ((one - b) + b * np.float32(_lossy(length)) / average))
                total += float(weight - weight / (one + np.float32(row[term]) * inverse))
            if total:
                scored.append((-float(np.float32(total)), name))
        lists.append([name for _, name in sorted(scored)[:k]])
    return lists


def _lossy(length: int) -> int:
    """The length after a trip through one byte: exact below 40, then four significant bits of what is above 24."""
    if length < 40:
        return length
    above = length - 24
    keep = above.bit_length() - 4
    return 24 + (above >> keep << keep)


def _memory() -> dict[str, float]:
    """Megabytes (MiB) by name from /proc/self/status; NaN where the system does not say."""
    found = dict.fromkeys(("VmRSS", "VmHWM", "RssAnon", "RssFile"), float("nan"))
    status = Path("/proc/self/status")
    for line in status.read_text().splitlines() if status.exists() else ():
        name, _, rest = line.partition(":")
        if name in found:
            found[name] = int(rest.split()[0]) / 1024
    return found


STEPS = {"build": build_shop, "search": search, "check": check}
if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(json.dumps(STEPS[sys.argv[1]](Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))))
