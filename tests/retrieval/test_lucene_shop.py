"""The ranking of the original WebShop: every result page of the recorded sessions, in order."""

from __future__ import annotations

import json
import lzma
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from turngym.retrieval.bm25_retriever import LuceneIndex


def option_text(options: Any) -> str:
    shown = {}
    for name, contents in (options or {}).items():
        if contents is not None:
            shown[name.lower()] = [content["value"].strip().replace("/", " | ").lower() for content in contents]
    return ", and ".join(f"{name}: {', '.join(values)}" for name, values in shown.items())


def shop_documents(folder: Path) -> Iterator[tuple[str, str]]:
    seen = set()
    for item in json.loads((folder / "items_shuffle_1000.json").read_text(encoding="utf-8")):
        asin, bullets = item["asin"], item["small_description"]
        if asin == "nan" or len(asin) > 10 or asin in seen:
            continue
        seen.add(asin)
        first = bullets[0] if isinstance(bullets, list) else bullets
        options = option_text(item["customization_options"])
        yield asin, " ".join([item["name"], item["full_description"], first, options]).lower()


def result_pages(folder: Path) -> Iterator[tuple[str, int, int, list[str]]]:
    """(query, page, total, asins on the page in lower case) of every result page that was shown."""
    with lzma.open(folder / "transcripts.jsonl.xz", "rt", encoding="utf-8") as lines:
        for line in lines:
            query = None
            for action, observation, available, *_ in json.loads(line).get("steps", ()):
                search = re.match(r"search\[(.+)\]", action)
                query = search[1].lower() if search else query
                shown = re.search(r"Page (\d+) \(Total results: (\d+)\)", observation)
                if shown and query is not None:
                    asins = [text for text in available["clickables"] if re.fullmatch(r"[b\d][0-9a-z]{9}", text)]
                    yield query, int(shown[1]), int(shown[2]), asins


def test_every_result_page_of_the_original(webshop_data: Path) -> None:
    index = LuceneIndex.build(shop_documents(webshop_data))
    assert (len(index), index.statistics.tokens) == (1000, 107_608)
    wrong, pages = [], 0
    for query, page, total, asins in result_pages(webshop_data):
        hits = index.search(query, 50)
        pages += 1
        if (total, asins) != (len(hits), [name.lower() for name, _ in hits[10 * page - 10 : 10 * page]]):
            wrong.append((query, page))
    assert (pages, wrong) == (118, [])
