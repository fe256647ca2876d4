"""How a profile becomes a catalog: read into memory, or built once as a folder of mapped files.

With mapped files a million products cost a process a few megabytes. `load_catalog` decides; `build_folder` writes such
a folder; `MappedCatalog` reads it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from turngym.core.errors import RetrievalError
from turngym.core.manifest import Files, changed_files, describe_files, read_manifest, write_manifest
from turngym.core.memory_mapped import ArrayWriter, BlobStore, BlobWriter, map_array
from turngym.core.rows import path_stamp, read_array, read_object
from turngym.core.task import content_hash
from turngym.core.user_files import json_of, user_path
from turngym.envs.webshop.catalog import Catalog, MemoryCatalog, pricing_row, read_products, search_text
from turngym.envs.webshop.catalog_config import find_config
from turngym.envs.webshop.generate import generate_catalog
from turngym.envs.webshop.goals import GoalCollector, GoalEntries, shuffled
from turngym.envs.webshop.products import (
    Kind,
    Product,
    ShopDataError,
    ShopProfile,
    decode_product,
    encode_product,
    find_files,
)
from turngym.retrieval.bm25_retriever import LuceneIndex

FORMAT = 1
Progress = Callable[[str, int], None]
"""Called with what is being done and how many products it has done."""
REPORT_EVERY = 10_000
MAPPED_FROM = 64 << 20
"""A shop is mapped if its items file has more bytes."""
CACHE_VARIABLE = "TURNGYM_CACHE"


def load_catalog(profile: ShopProfile, data: str | os.PathLike[str] | None, *, progress: Any = None) -> Catalog:
    """The products of a profile. A shop whose items file has more than 64 MiB is built once, under the hash of its
    files, and then read from disk.
    """
    if profile.generated:
        items, attributes = generate_catalog(find_config(profile.preset))
        return MemoryCatalog(read_products(items, attributes.get, None, source=profile.name))
    paths = find_files(profile, data)

    def products(staging: Path | None) -> Iterator[Product]:
        """The profile's products; `staging` keeps the attributes file out of memory while it is read."""
        members = read_object(paths[1], ShopDataError)
        entry_of = staged_entries(staging, members) if staging else dict(members).get
        people = dict(read_object(paths[2], ShopDataError)) if profile.kind == "human" else None
        yield from read_products(read_array(paths[0], ShopDataError), entry_of, people, source=paths[0].name)

    if paths[0].stat().st_size <= MAPPED_FROM:
        return MemoryCatalog(products(None))
    # named after everything that fixes the content, so that each content is built once
    root = cache_folder()
    hashes = [file_hash(path, root) for path in paths]
    content = {"source": hashes, "kind": profile.kind, "num_products": None, "format": FORMAT}
    folder = root / "webshop" / content_hash(content)[:32]
    if not (folder / "manifest.json").exists():
        build_folder(folder, products, profile.kind, progress)
    return MappedCatalog(folder)


def cache_folder() -> Path:
    """The folder for what is built once: `$TURNGYM_CACHE` or `~/.cache/turngym`."""
    return user_path(os.environ.get(CACHE_VARIABLE) or "~/.cache/turngym")


def file_hash(path: Path, cache: Path) -> str:
    """SHA-256 of the file's bytes, remembered in `cache` for as long as its path and its stamp stay."""
    key = content_hash({"path": str(path.resolve()), "stamp": path_stamp(path)})
    record = cache / "hashes" / f"{key}.json"
    with suppress(OSError, ValueError):
        digest = json_of(record.read_text("utf-8"))
        if isinstance(digest, str) and len(digest) == 64:
            return digest
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    record.parent.mkdir(parents=True, exist_ok=True)
    # a name of its own, then a rename: processes that start together never read half a file
    part = record.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps(digest), "utf-8")
    part.replace(record)
    return digest


# --- a shop in a folder of mapped files


class AsinTable:
    """Finds the row of an asin in two mapped arrays."""

    def __init__(self, folder: Path) -> None:
        self._asins = map_array(folder / "asins.npy")
        self._rows = map_array(folder / "asin_rows.npy")

    @staticmethod
    def save(folder: Path, asins: Sequence[bytes]) -> None:
        names = np.array(asins, dtype=np.bytes_) if asins else np.zeros(0, "S1")
        # stable: of a key that is repeated the last row stays last, which is the one that JSON readers keep
        order = np.argsort(names, kind="stable")
        np.save(folder / "asins.npy", names[order])
        np.save(folder / "asin_rows.npy", order.astype(np.int32))

    def row(self, asin: str) -> int | None:
        """The last row with that asin; None if there is none."""
        wanted = asin.encode("utf-8", "surrogatepass")
        position = int(np.searchsorted(self._asins, np.bytes_(wanted), side="right")) - 1
        return int(self._rows[position]) if position >= 0 and self._asins[position] == wanted else None


def staged_entries(folder: Path, members: Iterable[tuple[str, Any]]) -> Callable[[str], Any]:
    """Finds an entry of the attributes file by asin; on disk, because a million objects would not fit into memory."""
    asins = []
    with BlobWriter(folder / "entries") as writer:
        for asin, entry in members:
            asins.append(asin.encode("utf-8", "surrogatepass"))
            writer.append(json.dumps(entry).encode())
    AsinTable.save(folder, asins)
    table, entries = AsinTable(folder), BlobStore(folder / "entries")

    def find(asin: str) -> Any:
        row = table.row(asin)
        return None if row is None else json_of(entries[row])

    return find


def build_folder(
    folder: Path, products: Callable[[Path], Iterable[Product]], kind: Kind, progress: Progress | None = None
) -> None:
    """Write a shop into `folder`, which appears only when it is complete.

    Args:
        folder: what `MappedCatalog` will read; a complete one that another process wrote meanwhile stays.
        products: gives the products in their order; it gets an empty folder that it may use until the last of them.
        progress: called with (what, products done).
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    # beside the folder: a rename must not cross file systems
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name[:16]}-") as scratch:
        part, staging = Path(scratch, "shop"), Path(scratch, "staging")
        part.mkdir()
        staging.mkdir()
        manifest = _write_products(part, products(staging), kind, progress)
        shutil.rmtree(staging)
        with BlobStore(part / "products") as records:
            LuceneIndex.build(_documents(records, progress), part / "search").close()
        # products have checksums of their own, one by one, and the search folder has a manifest
        names = [path.name for path in part.iterdir() if path.is_file() and path.name != "products.bin"]
        manifest["files"] = describe_files(part, names)
        write_manifest(part / "manifest.json", manifest)
        try:
            part.rename(folder)
        # another process was first
        except OSError:
            if not (folder / "manifest.json").exists():
                raise


def _write_products(part: Path, products: Iterable[Product], kind: Kind, progress: Progress | None) -> dict[str, Any]:
    collector, digest, asins = GoalCollector(), hashlib.sha256(), []
    with (
        BlobWriter(part / "products", checked=True) as writer,
        ArrayWriter(part / "pricing.npy", np.float64, 2) as pricing,
    ):
        for row, product in enumerate(products):
            record = encode_product(product)
            writer.append(record)
            pricing.extend(np.array([pricing_row(product)]))
            asins.append(product.asin.encode("utf-8", "surrogatepass"))
            collector.add(row, product)
            digest.update(record + b"\n")
            if progress is not None and (row + 1) % REPORT_EVERY == 0:
                progress("reading products", row + 1)
    AsinTable.save(part, asins)
    entries = collector.entries()
    for field in dataclasses.fields(entries):
        np.save(part / f"goal_{field.name}.npy", getattr(entries, field.name))
    goals = int(entries.goals.sum())
    np.save(part / "goal_order.npy", shuffled(goals))
    sha256 = digest.hexdigest()
    return {"format": FORMAT, "kind": kind, "products": len(asins), "goals": goals, "sha256": sha256}


def _documents(records: BlobStore, progress: Progress | None) -> Iterator[tuple[str, str]]:
    for row, record in enumerate(records):
        product = decode_product(record)
        yield product.asin, search_text(product)
        if progress is not None and (row + 1) % REPORT_EVERY == 0:
            progress("indexing products", row + 1)


class _Manifest(msgspec.Struct):
    format: Literal[1]
    sha256: str
    files: Files


class MappedCatalog(Catalog):
    """A folder that `build_folder` wrote. Products are decoded when they are asked for."""

    def __init__(self, folder: Path) -> None:
        """Raises ShopDataError for a folder that is incomplete, damaged or of another format."""
        self.folder = folder
        try:
            manifest = read_manifest(folder / "manifest.json", _Manifest, ValueError)
            if wrong := changed_files(folder, manifest.files):
                raise ValueError("; ".join(wrong))
            self.sha256 = manifest.sha256
            self._records = BlobStore(folder / "products")
            self._table = AsinTable(folder)
            self.pricing = map_array(folder / "pricing.npy")
            columns = {f.name: map_array(folder / f"goal_{f.name}.npy") for f in dataclasses.fields(GoalEntries)}
            self.entries = GoalEntries(**columns)
            self.order: np.ndarray | None = map_array(folder / "goal_order.npy")
        except (ValueError, RetrievalError) as error:
            raise self._unusable(str(error)) from error
        self._engine: LuceneIndex | None = None

    def __len__(self) -> int:
        return len(self._records)

    def item(self, row: int) -> Product:
        try:
            return decode_product(self._records[row])
        except RetrievalError as error:
            raise self._unusable(str(error)) from error

    def row(self, asin: str) -> int | None:
        return self._table.row(asin)

    def engine(self) -> LuceneIndex:
        if self._engine is None:
            try:
                self._engine = LuceneIndex.open(self.folder / "search")
            except RetrievalError as error:
                raise self._unusable(str(error)) from error
        return self._engine

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
        self._engine = None
        self._records.close()

    def _unusable(self, why: str) -> ShopDataError:
        return ShopDataError(f"the shop in {self.folder} cannot be used: {why}; delete that folder, it is built again")
