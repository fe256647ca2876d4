"""Which words of a title are nouns? The reward's r_type depends on it, and the original asks a spaCy model.

`find_tagger` finds a shop's tagger. `NounTable` holds what the real one said of known titles: where their nouns stand,
by a hash of the title. The table `SHIPPED` knows the original's 1,000 products; `record_nouns` makes one of another
shop and keeps it with the catalog.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from turngym.core.errors import RetrievalError, checked_choice
from turngym.core.files import locked_file
from turngym.core.manifest import Files, changed_files, describe_files, read_manifest, write_manifest
from turngym.core.memory_mapped import map_array
from turngym.core.redaction import brief
from turngym.envs.spaces import printable
from turngym.envs.webshop.catalog import Catalog
from turngym.envs.webshop.open_catalog import REPORT_EVERY, Progress, cache_folder, load_catalog
from turngym.envs.webshop.products import ShopDataError, ShopProfile, find_profile

BUILTIN = "builtin"
SPACY_MODEL = "en_core_web_sm"
"""The original's tagger, whatever its version; the original names spaCy 3.3."""
SHIPPED = Path(__file__).parent / "data" / "nouns"


@dataclass(frozen=True, slots=True, kw_only=True)
class NounTagger:
    """Finds the nouns of a title; they decide how alike two products are in the reward's r_type."""

    name: str
    """Name with version; goes into info, results and reports, because rewards of wrong products depend on it."""
    nouns: Callable[[str], tuple[str, ...]]
    """Lower-case nouns in text order, repeats included."""
    exact: bool = False
    """Whether this is the original's tagger; scores by another one are approximate in shops that the original has."""


def find_tagger(chosen: str | NounTagger | None, catalog: Catalog, profile: ShopProfile) -> NounTagger:
    """The tagger of a shop: `chosen`, or by default the recorded nouns of all its titles, else the built-in list.

    A generated shop has no original: there the built-in list is what its scores are defined by.
    Raises ShopDataError for an unknown name, and for recorded nouns that were changed.
    """
    if isinstance(chosen, NounTagger):
        return chosen
    if chosen is not None:
        return make_tagger(chosen)
    if not profile.generated:
        folder = kept_folder(catalog)
        if (folder / MANIFEST).exists():
            return NounTable(folder).tagger()
        shipped = NounTable(SHIPPED)
        # in a larger shop the search for a title that is not recorded ends soon
        if all(product.title in shipped for product in catalog):
            return shipped.tagger()
    return make_tagger(BUILTIN)


def make_tagger(name: str) -> NounTagger:
    """`builtin` (approximate, no dependency), `spacy` or `spacy:MODEL` (a model's name or folder; en_core_web_sm is
    the original's), `all-words` (for tests)."""
    kind, colon, model = name.partition(":")
    if kind != "spacy" or (colon and not model):
        kind = checked_choice("tagger", name, (BUILTIN, "spacy", "all-words"), ShopDataError)
    if kind != "spacy":
        return NounTagger(name=kind, nouns=_builtin if kind == BUILTIN else _all_words)
    pipeline = Pipeline(model or SPACY_MODEL)

    def nouns(title: str) -> tuple[str, ...]:
        return _words(title, next(pipeline.spans([title])))

    return NounTagger(name=pipeline.name, nouns=nouns, exact=is_exact(pipeline.name))


def is_exact(name: str) -> bool:
    """Whether a tagger of this name is the original's."""
    return name.startswith(f"{SPACY_MODEL}-")


class Pipeline:
    """A spaCy pipeline as far as the nouns need it."""

    def __init__(self, model: str) -> None:
        """Loads a model by its name or folder. Raises ShopDataError if it, or spaCy, is not there."""
        try:
            import spacy

            # the parser stays: what it takes for an auxiliary or a pronoun is no noun, whatever the tagger said
            self._model = spacy.load(model, exclude=["ner", "lemmatizer", "senter"])
        except (ImportError, OSError) as error:
            raise ShopDataError(
                f"tagger 'spacy' needs spaCy and its model {model}: pip install 'turngym[spacy]', then "
                f"python -m spacy download {SPACY_MODEL}; tagger 'builtin' needs neither ({type(error).__name__})"
            ) from None
        about = self._model.meta
        name = f"{about['lang']}_{about['name']}"
        # copies of the model on package indexes are called after who put them there
        package = SPACY_MODEL if name.startswith(f"{SPACY_MODEL}_") else name
        self.name = f"{package}-{about['version']}"

    def spans(self, titles: Iterable[str]) -> Iterator[np.ndarray]:
        """The nouns of each title, int64 [nouns, 2]: start and length in characters."""
        # in batches three times as fast as one by one, and no noun of 5,617 texts came out otherwise
        for tokens in self._model.pipe(map(printable, titles), batch_size=256):
            nouns = [(token.idx, len(token.text)) for token in tokens if token.pos_ in ("NOUN", "PROPN")]
            yield np.array(nouns, dtype=np.int64).reshape(-1, 2)


def _words(title: str, spans: np.ndarray) -> tuple[str, ...]:
    return tuple(title[start : start + length].lower() for start, length in spans.tolist())


# --- nouns that were found before

FORMAT = 1
MANIFEST = "manifest.json"
FILES = ("keys.npy", "ends.npy", "spans.npy")
LONGEST_TITLE = np.iinfo(np.uint16).max
"""Characters of a title of which nouns can be recorded."""


def title_key(title: str) -> int:
    """64 bits of a hash, by which a title is known without its text."""
    return int.from_bytes(blake2b(title.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


class _Manifest(msgspec.Struct):
    format: Literal[1]
    tagger: str
    files: Files


class NounTable:
    """A folder with the nouns of some titles, mapped.

    `keys.npy` uint64 [N], ascending; `ends.npy` int64 [N]: where the nouns of each title end in `spans.npy`, uint16
    [M, 2]: start and length of each noun in characters.
    """

    def __init__(self, folder: Path) -> None:
        """Raises ShopDataError for a folder that is incomplete, damaged or of another format."""
        try:
            manifest = read_manifest(folder / MANIFEST, _Manifest, ValueError)
            if wrong := changed_files(folder, manifest.files):
                raise ValueError("; ".join(wrong))
            self.name = manifest.tagger
            self.keys, self._ends, self._spans = (map_array(folder / name) for name in FILES)
        except (ValueError, RetrievalError) as error:
            raise ShopDataError(
                f"the nouns in {folder} cannot be used: {error}; delete that folder, and `turngym index nouns` finds "
                "them again"
            ) from error

    def __len__(self) -> int:
        return len(self.keys)

    def __contains__(self, title: object) -> bool:
        return isinstance(title, str) and self.spans(title_key(title)) is not None

    def spans(self, key: int) -> np.ndarray | None:
        """The nouns of the title with this key, uint16 [nouns, 2]; None if it is not known."""
        row = int(np.searchsorted(self.keys, np.uint64(key)))
        if row == len(self.keys) or int(self.keys[row]) != key:
            return None
        return self._spans[int(self._ends[row - 1]) if row else 0 : int(self._ends[row])]

    def tagger(self) -> NounTagger:
        """The tagger that found them, for the titles of the table. It raises ShopDataError for any other."""

        def nouns(title: str) -> tuple[str, ...]:
            spans = self.spans(title_key(title))
            if spans is None:
                raise ShopDataError(f"the recorded nouns do not have the title {brief(title, 80)}")
            return _words(title, spans)

        return NounTagger(name=self.name, nouns=nouns, exact=is_exact(self.name))


def write_table(folder: Path, name: str, rows: Mapping[int, bytes]) -> None:
    """Makes the folder of a table: the nouns of titles by key, as the bytes of spans, found by the tagger `name`."""
    folder.mkdir()
    keys = sorted(rows)
    np.save(folder / "keys.npy", np.array(keys, dtype=np.uint64))
    np.save(folder / "ends.npy", np.cumsum([len(rows[key]) // _SPAN_BYTES for key in keys], dtype=np.int64))
    spans = np.frombuffer(b"".join(rows[key] for key in keys), dtype=np.uint16)
    np.save(folder / "spans.npy", spans.reshape(-1, 2))
    files = describe_files(folder, FILES)
    write_manifest(folder / MANIFEST, {"format": FORMAT, "tagger": name, "titles": len(keys), "files": files})


_SPAN_BYTES = 2 * np.dtype(np.uint16).itemsize


# --- finding the nouns of a whole shop, once

PART = 4096
"""Titles that are written together while a shop is tagged; a kill loses the part that was under way."""


def kept_folder(catalog: Catalog) -> Path:
    """Where the nouns of a catalog are kept: beside the mapped shops, however this one is stored."""
    return cache_folder() / "webshop" / f"nouns-{catalog.sha256[:32]}"


def record_nouns(
    profile: str,
    data: str | os.PathLike[str] | None = None,
    *,
    model: str = SPACY_MODEL,
    progress: Progress | None = None,
) -> NounTable:
    """Finds the nouns of all titles of a shop with a spaCy model, and keeps them for every later use of that shop.

    After a kill the same call goes on where it was. What the same model found of these titles for another shop, or for
    turngym's own table, is taken over; nouns of this shop by another model are replaced.

    Raises ShopDataError for a generated shop, a model that is not there, or a title that is too long.
    """
    chosen = find_profile(profile)
    if chosen.generated:
        raise ShopDataError(f"profile {profile!r} is generated: its scores are defined by the built-in list of nouns")
    pipeline = Pipeline(model)
    catalog = load_catalog(chosen, data, progress=progress)
    try:
        folder = kept_folder(catalog)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked_file(folder):
            if (folder / MANIFEST).exists() and (table := NounTable(folder)).name == pipeline.name:
                return table
            building = folder.with_name(f"building-{folder.name}-{re.sub('[^A-Za-z0-9_.-]', '-', pipeline.name)}")
            building.mkdir(exist_ok=True)
            rows = _tagged(catalog, pipeline, building, progress)
            shutil.rmtree(building / "all", ignore_errors=True)
            write_table(building / "all", pipeline.name, rows)
            shutil.rmtree(folder, ignore_errors=True)
            (building / "all").rename(folder)
            shutil.rmtree(building)
            return NounTable(folder)
    finally:
        catalog.close()


def _tagged(catalog: Catalog, pipeline: Pipeline, building: Path, progress: Progress | None) -> dict[int, bytes]:
    """The nouns of every title by its key. They are written in parts, which are read again after a kill."""
    rows: dict[int, bytes] = {}
    written = sorted(path for path in building.glob("part-*") if (path / MANIFEST).exists())
    for table in map(NounTable, written):
        rows |= {key: table.spans(key).tobytes() for key in table.keys.tolist()}  # type: ignore[union-attr]
    tables = [table for table in _tables(building.parent) if table.name == pipeline.name]
    seen = set(rows)

    def wanted() -> Iterator[str]:
        """The titles that nobody knows yet, each once."""
        for row, product in enumerate(catalog):
            key = title_key(product.title)
            if key not in seen:
                seen.add(key)
                if len(product.title) > LONGEST_TITLE:
                    size = f"{len(product.title):,} characters; {LONGEST_TITLE:,} at most"
                    raise ShopDataError(f"product {product.asin!r} has a title of {size}")
                spans = next((found for table in tables if (found := table.spans(key)) is not None), None)
                if spans is None:
                    yield product.title
                else:
                    rows[key] = spans.tobytes()
            if progress is not None and (row + 1) % REPORT_EVERY == 0:
                progress("finding nouns", row + 1)

    titles = wanted()
    number = len(written)
    while part := list(islice(titles, PART)):
        nouns = (spans.astype(np.uint16).tobytes() for spans in pipeline.spans(part))
        new = dict(zip(map(title_key, part), nouns, strict=True))
        # written elsewhere first: a killed process leaves no half of a part
        shutil.rmtree(building / "new", ignore_errors=True)
        write_table(building / "new", pipeline.name, new)
        (building / "new").rename(building / f"part-{number:06}")
        number += 1
        rows |= new
    return rows


def _tables(shops: Path) -> Iterator[NounTable]:
    """turngym's own table, and those that are kept of any shop."""
    for folder in (SHIPPED, *sorted(shops.glob("nouns-*"))):
        if (folder / MANIFEST).exists():
            try:
                yield NounTable(folder)
            # whoever opens that shop is told
            except ShopDataError:
                continue


# --- without spaCy: approximations

_WORD = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)?")
_CLOSED_WORDS = """
a about above across after again against all along also although always am among an and any are around as at be
because been before behind being below beneath beside besides between beyond both but by can could did do does doing
down during each either else even ever every except few first for from further get had has have having he her here
hers herself him himself his how i if in inside into is it its itself just least less like many may me might mine more
most much must my myself near neither never no none nor not of off often on once one only onto or other our ours
ourselves out outside over own per rather same several shall she should since so some such than that the their theirs
them themselves then there these they this those through throughout to too toward towards under underneath unless
until up upon us use used using very via was we well were what when where whether which while who whom whose why will
with within without would yet you your yours yourself yourselves
"""
_CLOSED = frozenset(_CLOSED_WORDS.split())
"""Determiners, pronouns, prepositions, conjunctions, auxiliaries and the commonest adverbs: never nouns."""
_DESCRIBING_WORDS = """
active adjustable adorable aged antique artificial athletic automatic available beautiful best big bold bright
brilliant broad casual cheap chic classic clean clear clinical cold colorful comfortable comfy compact compatible
complete cool cozy crisp cute daily dark decorative deep delicious delicate detachable different digital dirty
disposable double dry durable easy edible elastic elegant electric empty essential ethical everyday excellent extra
fair famous fancy fashionable fast favorite fine firm fit fitted flat flexible foldable formal free fresh full
functional funny general gentle genuine glossy good great handmade handy happy hard heavy herbal high holistic hot
huge hydrating ideal individual inflatable intense invisible large lasting lightweight little long loose lovely low
luxurious magnetic male manual matte medical mild mini modern moisturizing multiple natural new nice nourishing novel
old open ordinary organic original ornate outdoor perfect personal plain plus poly polished popular portable powerful
practical premium pretty professional protective pure quick quiet ready real rechargeable regular removable
replaceable resistant reusable rich rigid romantic round rugged rustic sexy sharp sheer shiny short simple single
skinny sleek sleeveless slim slippery small smart smooth soft solid special sporty square stackable stainless standard
sterile sticky stretchy strong stunning sturdy stylish super sustainable sweet synthetic thick thin tight tiny top
traditional trendy true ultra unique universal unscented upholstered upper useful vegan versatile vintage visible
vivid warm washable waterproof wet whole wide wild wireless wonderful wooden young
"""
_DESCRIBING = frozenset(_DESCRIBING_WORDS.split())
"""Adjectives common in product titles."""
_ENDINGS = ("able", "ible", "ful", "less", "ous", "proof", "ly")
_LOOK_ALIKE_WORDS = """
table cable vegetable butterfly family jelly belly fly assembly supply doily handful
"""
_LOOK_ALIKE = frozenset(_LOOK_ALIKE_WORDS.split())
"""Nouns with an adjective's ending."""


def _builtin(text: str) -> tuple[str, ...]:
    """Approximate: in titles nearly every word is a noun or a name, so only known other words are left out."""
    words = (match.group().lower().removesuffix("'s") for match in _WORD.finditer(text.replace("’", "'")))
    return tuple(
        word
        for word in words
        if len(word) > 1
        and word not in _CLOSED
        and word not in _DESCRIBING
        and (word in _LOOK_ALIKE or not word.endswith(_ENDINGS))
    )


def _all_words(text: str) -> tuple[str, ...]:
    """Every word of letters that is not a stop word: what stood in for spaCy when the transcripts were recorded."""
    words = (match.group().lower() for match in re.finditer(r"[A-Za-z]+", text))
    return tuple(word for word in words if word not in _CLOSED)
