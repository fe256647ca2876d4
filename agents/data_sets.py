"""The original benchmarks' data: where they are published, how they are fetched, and where everything looks for them.

`get` resumes interrupted downloads and refuses a wrong file (a page of HTML, another size, another hash). It unpacks
safely, never replaces a file that exists, and leaves no incomplete file where a run would find it. Afterwards
`turngym data verify` checks the content of games and shops: it recomputes the hashes of the panels.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import sys
import urllib.error
import urllib.request
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path, PurePosixPath

from turngym.core.errors import TurngymError, checked_choice
from turngym.core.files import add_files, locked_folder
from turngym.core.http_connection import Unreachable, address_problem, proxy_of, why_not
from turngym.core.manifest import files_under
from turngym.core.redaction import brief
from turngym.core.user_files import user_path
from turngym.envs.alfworld.games import DEFAULT_FOLDER, ROOT_FOLDER, SPLITS, VARIABLE
from turngym.envs.search.sources import DATA_VARIABLE as SEARCH_VARIABLE
from turngym.envs.search.sources import SEARCH_HOME
from turngym.envs.search.test_sets import OFFICIAL, write_test_sets
from turngym.envs.webshop.products import DATA_VARIABLE as SHOP_VARIABLE
from turngym.envs.webshop.products import SHOP_HOME

CHUNK = 1 << 20
SILENT_SECONDS = 60.0
"""Seconds without a byte after which a server is given up."""


class DataError(TurngymError):
    """A file of a data set cannot be fetched, or is not the expected file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """A file of a published data set."""

    name: str
    """Its name, also on a mirror."""
    url: str
    largest: int
    """Bytes at most: far above its size, far below what fills a disk by mistake."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSet:
    """The files of a benchmark."""

    about: str
    variable: str
    """Environment variable that names its folder."""
    home: str
    """Folder that is looked at without it."""
    files: tuple[DataFile, ...]
    panels: tuple[str, ...] = ()
    """Panels whose hashes tell whether it is the original's."""

    def folder(self, given: str | Path | None = None) -> Path:
        """Returns `given`, else the folder that the variable names, else the home folder."""
        return user_path(given or os.environ.get(self.variable) or self.home)


def _drive(name: str, key: str, largest: int) -> DataFile:
    # `confirm` answers the page that warns of large files
    url = f"https://drive.usercontent.google.com/download?id={key}&export=download&confirm=t"
    return DataFile(name=name, url=url, largest=largest)


_FLASHRAG = "https://huggingface.co/datasets/RUC-NLPIR/FlashRAG_datasets/resolve/main"
_SPLIT = {"hotpotqa": "dev", "2wikimultihopqa": "dev", "musique": "dev"}
DATA_SETS: Mapping[str, DataSet] = {
    "alfworld": DataSet(
        about="the 4,027 text games of ALFWorld (MIT), without TextWorld",
        variable=VARIABLE,
        home=DEFAULT_FOLDER,
        files=(
            DataFile(
                name="json_2.1.2_tw-pddl.zip",
                url="https://github.com/alfworld/alfworld/releases/download/0.4.0/json_2.1.2_tw-pddl.zip",
                largest=1 << 30,
            ),
        ),
        panels=("alfworld-valid-seen", "alfworld-valid-unseen"),
    ),
    "webshop": DataSet(
        about="WebShop's 1,000 products with their instructions, for local use",
        variable=SHOP_VARIABLE,
        home=SHOP_HOME,
        files=(
            _drive("items_shuffle_1000.json", "1EgHdxQ_YxqIQlvvq5iKlCrkEKR6-j0Ib", 1 << 27),
            _drive("items_ins_v2_1000.json", "1IduG0xl544V_A_jv3tHXC0kyFi7PnyBu", 1 << 25),
            _drive("items_human_ins.json", "14Kb5SPBk_jfdLZ_CDBNitW98QLDlKR5O", 1 << 27),
        ),
        panels=("webshop-papers-test",),
    ),
    "search": DataSet(
        about="the test sets of Search-R1, questions and answers, as panels (FlashRAG's collection)",
        variable=SEARCH_VARIABLE,
        home=SEARCH_HOME,
        files=tuple(
            DataFile(
                name=f"{source}/{_SPLIT.get(source, 'test')}.jsonl",
                url=f"{_FLASHRAG}/{source}/{_SPLIT.get(source, 'test')}.jsonl",
                largest=1 << 30,
            )
            for source in OFFICIAL
        ),
    ),
}
"""The addresses are those of `alfworld-download` 0.4.2, of WebShop's setup.sh, and of FlashRAG's data sets."""


def data_set(name: str) -> DataSet:
    """Returns the data set called `name`. Raises DataError with the known names."""
    return DATA_SETS[checked_choice("the data set", name, DATA_SETS, DataError)]


def get(
    name: str,
    *,
    out: str | Path | None = None,
    mirror: str | None = None,
    sha256: Mapping[str, str] | None = None,
    progress: bool = True,
) -> Path:
    """Fetches a data set into the folder where everything looks for it, and returns the folder.

    Raises DataError with one line that says what failed and what to do.
    """
    published, hashes = data_set(name), dict(sha256 or {})
    if unknown := sorted(hashes.keys() - {file.name for file in published.files}):
        names = ", ".join(file.name for file in published.files)
        raise DataError(f"{name} has no file {brief(unknown[0], 80)}; its files: {names}")
    folder = published.folder(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked_folder(folder):
            downloads = folder / ".turngym.download"
            for file in published.files:
                url = file.url if mirror is None else f"{mirror.rstrip('/')}/{file.name}"
                fetch(url, downloads / file.name, largest=file.largest, sha256=hashes.get(file.name), progress=progress)
            try:
                if name == "alfworld":
                    unpack(downloads / published.files[0].name, folder)
                elif name == "search":
                    write_test_sets([downloads / file.name for file in published.files], folder)
                else:
                    add_files([file.name for file in published.files], downloads, folder, DataError)
            except TurngymError:
                # files that do not belong here must not be found by a run that names another mirror
                shutil.rmtree(downloads)
                raise
            shutil.rmtree(downloads)
    except OSError as error:
        problem = "the disk is full; make room and run it again" if error.errno == errno.ENOSPC else error.strerror
        raise DataError(
            f"{folder}: {problem}; what was fetched is kept and nothing half-made is in its place"
        ) from None
    return folder


def fetch(url: str, target: Path, *, largest: int, sha256: str | None = None, progress: bool = True) -> None:
    """Fetches `url` into the file `target`, and resumes an interrupted download. Raises DataError."""
    part, tag = target.with_name(f"{target.name}.part"), target.with_name(f"{target.name}.tag")
    if target.is_file() and (sha256 is None or _digest(target) == sha256):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    start = part.stat().st_size if part.is_file() and tag.is_file() else 0
    headers = {"User-Agent": "turngym"}
    if start:
        # a file that has changed is sent from its beginning
        headers |= {"Range": f"bytes={start}-", "If-Range": tag.read_text(encoding="utf-8")}
    if problem := address_problem(url):
        raise DataError(f"{brief(url, 200)} {problem}")
    try:
        proxy = proxy_of(url)
        ways = {} if proxy is None else dict.fromkeys(("http", "https"), proxy.address)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler(ways))
        with opener.open(urllib.request.Request(url, headers=headers), timeout=SILENT_SECONDS) as answer:
            if answer.headers.get_content_type() in ("text/html", "application/xhtml+xml"):
                raise DataError(
                    f"{url} answers with a page of HTML instead of the file (a quota, a login, a warning?): open it in "
                    f"a browser; {BY_HAND}"
                )
            goes_on = re.fullmatch(r"bytes (\d+)-\d+/(?:\d+|\*)", answer.headers.get("Content-Range") or "")
            start = start if answer.status == 206 and goes_on and int(goes_on[1]) == start else 0
            size = _number(answer.headers.get("Content-Length"))
            total = None if size is None else start + size
            if total is not None and total > largest:
                raise DataError(f"{url}: {total:,} bytes; the file has at most {largest:,}")
            # only a strong tag proves that the rest belongs to the same file
            etag = answer.headers.get("ETag") or ""
            tag.write_text(etag, encoding="utf-8") if etag.startswith('"') else tag.unlink(missing_ok=True)
            if progress:
                at = f", from byte {start:,}" if start else ""
                size_text = "unknown size" if total is None else f"{total / 1e6:.1f} MB"
                print(f"turngym: fetching {target.name}, {size_text}{at}, from {url}", file=sys.stderr)
            received = start
            with part.open("r+b" if start else "wb") as file:
                if start:
                    file.seek(start)
                    file.truncate()
                while data := answer.read(CHUNK):
                    received += len(data)
                    if received > largest:
                        raise DataError(f"{url}: more than {largest:,} bytes; that is not the file")
                    file.write(data)
    except urllib.error.HTTPError as error:
        if error.code == 416:
            part.unlink(missing_ok=True)
        raise DataError(f"{url} answers {error.code} ({error.reason}); {BY_HAND}") from None
    except (urllib.error.URLError, HTTPException, TimeoutError, ConnectionError, Unreachable) as error:
        why = why_not(error, url, proxy, SILENT_SECONDS) if isinstance(error, urllib.error.URLError) else error
        raise DataError(f"{url} cannot be fetched ({why}); run it again to go on, or {BY_HAND}") from None
    if total is not None and received != total:
        raise DataError(f"{url}: cut at {received:,} of {total:,} bytes; run it again to go on")
    if sha256 is not None and (digest := _digest(part)) != sha256:
        part.unlink()
        tag.unlink(missing_ok=True)
        raise DataError(f"{url}: SHA-256 {digest}, expected is {sha256}; it was thrown away")
    tag.unlink(missing_ok=True)
    os.replace(part, target)


BY_HAND = "name another place with --mirror URL, or put the files into the folder by hand (`turngym data where`)"


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and re.fullmatch(r"\d{1,15}", text) else None


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


MOST_GAMES, LARGEST_GAME, LARGEST_ALL = 50_000, 1 << 24, 1 << 33
"""Games in an archive, bytes of one, and of all, at most."""


def unpack(archive: Path, folder: Path) -> None:
    """Unpacks the games of a release into `folder`/json_2.1.1 and keeps the files there. Raises DataError."""
    scratch = folder / ".turngym.unpacking"
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        with zipfile.ZipFile(archive) as opened:
            games = [entry for entry in opened.infolist() if entry.filename.endswith(".tw-pddl")]
            if not 0 < len(games) <= MOST_GAMES or sum(entry.file_size for entry in games) > LARGEST_ALL:
                raise DataError(f"{archive.name} holds {len(games):,} games; that is not the release of ALFWorld")
            for entry in games:
                path = PurePosixPath(entry.filename)
                parts = path.parts[1:] if path.parts and path.parts[0] == ROOT_FOLDER else path.parts
                # a link in an archive is a file with this mode
                link = (entry.external_attr >> 16) & 0o170000 == 0o120000
                if (
                    link
                    or path.is_absolute()
                    or len(parts) != 4
                    or parts[0] not in SPLITS
                    or any(part in ("..", ".") or "\\" in part or ":" in part for part in parts)
                    or entry.file_size > LARGEST_GAME
                ):
                    raise DataError(
                        f"{archive.name} holds {brief(entry.filename, 120)}, which is no game's place or size"
                    )
                target = scratch.joinpath(*parts)
                target.parent.mkdir(parents=True, exist_ok=True)
                with opened.open(entry) as source, target.open("wb") as file:
                    shutil.copyfileobj(source, file, CHUNK)
        # alfworld keeps files of its own beside the games, and people add games: only missing files are added
        add_files(files_under(scratch), scratch, folder / ROOT_FOLDER, DataError)
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
        archive.unlink(missing_ok=True)
        raise DataError(f"{archive.name} is no archive that can be read ({error}); run it again") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
