"""From a profile to a catalog: the original's files or the generator, in memory or in mapped files."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args

from turngym.envs.core import content_hash
from turngym.envs.webshop.errors import ShopDataError
from turngym.envs.webshop.files.json_stream import read_array, read_object
from turngym.envs.webshop.files.load import Check, LoadReport, check_report, read_products
from turngym.envs.webshop.files.mapped import FORMAT, MappedCatalog, StagedEntries, build_folder
from turngym.envs.webshop.files.store import Catalog, MemoryCatalog
from turngym.envs.webshop.generate.shop import find_config, generate_catalog
from turngym.envs.webshop.shop.catalog import Product
from turngym.envs.webshop.shop.profiles import Profile, find_files

Storage = Literal["auto", "memory", "mapped"]
LARGE = 64 << 20
"""Bytes of the items file from which on `auto` maps."""
CACHE_VARIABLE = "TURNGYM_CACHE"


def load_catalog(
    profile: Profile,
    data: str | os.PathLike[str] | None,
    *,
    check: Check = "compat",
    num_products: int | None = None,
    storage: Storage = "auto",
    cache: str | os.PathLike[str] | None = None,
    progress: Any = None,
) -> Catalog:
    """The products of a profile; `num_products` takes the first so many records of the file, as the original does.

    Mapped shops are built once, in `cache`, `$TURNGYM_CACHE` or `~/.cache/turngym`, under the hash of their files.
    """
    for name, value, valid in (("storage", storage, get_args(Storage)), ("check", check, get_args(Check))):
        if value not in valid:
            raise ShopDataError(f"{name} is {value!r}; valid: {', '.join(valid)}")
    if num_products is not None and num_products < 1:
        raise ShopDataError(f"num_products is {num_products}; valid: at least 1, or None for all")
    paths = () if profile.generated else find_files(profile, data)
    mapped = storage == "mapped" or (storage == "auto" and bool(paths) and paths[0].stat().st_size > LARGE)
    if mapped:
        return _load_mapped(profile, paths, check, num_products, _cache_folder(cache), progress)
    report = LoadReport()
    items, attributes, human = _generate(profile) if profile.generated else _read(paths)
    source = paths[0].name if paths else profile.name
    products = read_products(items[:num_products], attributes, human, report=report, check=check, source=source)
    return MemoryCatalog(products, profile.kind, report)


def _generate(profile: Profile) -> tuple[list[Any], dict[str, Any], None]:
    items, attributes = generate_catalog(find_config(profile.preset))
    return items, attributes, None


def _read(paths: tuple[Path, ...]) -> tuple[list[Any], dict[str, Any], dict[str, Any] | None]:
    attributes, *human = (dict(read_object(path)) for path in paths[1:])
    return list(read_array(paths[0])), attributes, human[0] if human else None


def _load_mapped(
    profile: Profile, paths: tuple[Path, ...], check: Check, num_products: int | None, cache: Path, progress: Any
) -> Catalog:
    source = [file_hash(path, cache) for path in paths] if paths else repr(_config(profile))
    parts = {"source": source, "kind": profile.kind, "num_products": num_products, "format": FORMAT}
    folder = cache / "webshop" / content_hash(parts)[:32]
    report = LoadReport()

    def products(staging: Path) -> Iterator[Product]:
        if profile.generated:
            items, attributes, human = _generate(profile)
            yield from read_products(items[:num_products], attributes, human, report=report, check=check)
            return
        entries = StagedEntries(staging, read_object(paths[1]))
        people = dict(read_object(paths[2])) if profile.kind == "human" else None
        first = _first(read_array(paths[0]), num_products)
        yield from read_products(first, entries, people, report=report, check=check, source=paths[0].name)
        entries.close()

    if not (folder / "manifest.json").exists():
        build_folder(folder, products, profile.kind, report, progress)
    catalog = MappedCatalog(folder)
    # the folder may have been built with check="compat"
    check_report(catalog.report, check)
    return catalog


def _config(profile: Profile) -> Any:
    return find_config(profile.preset)


def _first(items: Iterable[Any], count: int | None) -> Iterator[Any]:
    for number, item in enumerate(items):
        if count is not None and number >= count:
            return
        yield item


def _cache_folder(cache: str | os.PathLike[str] | None) -> Path:
    chosen = cache if cache is not None else os.environ.get(CACHE_VARIABLE)
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "turngym"


def file_hash(path: Path, cache: Path) -> str:
    """SHA-256 of the file's bytes, remembered in `cache` for as long as its path, size and time of change stay."""
    state = path.stat()
    key = content_hash({"path": str(path.resolve()), "size": state.st_size, "changed": state.st_mtime_ns})
    known = cache / "hashes" / f"{key}.json"
    if known.exists():
        return str(json.loads(known.read_text("utf-8")))
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    known.parent.mkdir(parents=True, exist_ok=True)
    # a name of its own, then a rename: processes that start together never read half a file
    part = known.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps(digest), "utf-8")
    part.replace(known)
    return digest
