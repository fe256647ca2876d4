"""What can be wrong with a shop's data."""

from __future__ import annotations

from turngym.envs.core import TurngymError


class ShopDataError(TurngymError):
    """Shop data that cannot be used: missing, damaged or foreign files, products or goals; the text names which."""
