"""Named shops: which files or which generated catalog, and who wrote the goals."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from turngym.envs.suggest import did_you_mean
from turngym.envs.webshop.errors import ShopDataError
from turngym.envs.webshop.shop.catalog import Kind

DATA_VARIABLE = "WEBSHOP_DATA"
HUMAN_FILE = "items_human_ins.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A shop by name, as reports cite it."""

    name: str
    kind: Kind
    items: str = ""
    """File of products in the original's format; empty for a generated shop."""
    attributes: str = ""
    """File of attributes and synthetic instructions."""
    preset: str = ""
    """Configuration of a generated shop."""

    @property
    def generated(self) -> bool:
        return bool(self.preset)

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the files it needs, the items first."""
        return (self.items, self.attributes, *((HUMAN_FILE,) if self.kind == "human" else ()))


def _real(name: str, kind: Kind, suffix: str) -> Profile:
    return Profile(name=name, kind=kind, items=f"items_shuffle{suffix}.json", attributes=f"items_ins_v2{suffix}.json")


PROFILES = {
    profile.name: profile
    for profile in (
        Profile(name="embedded", kind="synthetic", preset="full"),
        Profile(name="embedded-small", kind="synthetic", preset="small"),
        _real("1k-synthetic", "synthetic", "_1000"),
        _real("1k-human", "human", "_1000"),
        _real("full-synthetic", "synthetic", ""),
        _real("full-human", "human", ""),
    )
}


def find_profile(name: str) -> Profile:
    """The profile called `name`; ShopDataError lists the valid names."""
    if name not in PROFILES:
        raise ShopDataError(f"profile is {name!r}; valid: {', '.join(PROFILES)}.{did_you_mean(name, PROFILES)}")
    return PROFILES[name]


def find_files(profile: Profile, data: str | os.PathLike[str] | None) -> tuple[Path, ...]:
    """Paths of `profile.files` in the folder `data`, else `$WEBSHOP_DATA`; ShopDataError says what is missing."""
    chosen = data if data is not None else os.environ.get(DATA_VARIABLE)
    size = "small" if "_1000" in profile.items else "all"
    how = f"`./setup.sh -d {size}` of princeton-nlp/WebShop downloads them into its folder `data`"
    if not chosen:
        raise ShopDataError(
            f"profile {profile.name!r} needs {', '.join(profile.files)}: give their folder as data= or ${DATA_VARIABLE}"
            f" ({how}); profile 'embedded' needs no files"
        )
    paths = tuple(Path(chosen).expanduser() / name for name in profile.files)
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise ShopDataError(
            f"profile {profile.name!r}: {', '.join(missing)} not found in {str(chosen)!r}"
            f" (from {'data=' if data is not None else '$' + DATA_VARIABLE}); {how}"
        )
    return paths
