"""Modules that somebody names (`package.module:name`): installed ones, and those in the working directory."""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType


def look_here(module: str) -> None:
    """Makes `module` importable where its package is not installed but lies in the working directory.

    A command has the folder of its own program on the path, and not the working directory as `python -m` has.
    """
    package, folder = module.partition(".")[0], Path.cwd()
    try:
        importable = not package.isidentifier() or find_spec(package) is not None
    # what is said of a module without a spec, such as __main__
    except ValueError:
        importable = True
    if not importable and ((folder / package).is_dir() or (folder / f"{package}.py").is_file()):
        # last, so that nothing that is installed is hidden; processes that are started later get this path, too
        sys.path.append(str(folder))
        importlib.invalidate_caches()


def import_named(module: str) -> ModuleType:
    """Imports `module`, if need be from the working directory. Raises ImportError, which says where was looked."""
    look_here(module)
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # not what the module imports in its turn, nor a part that the package lacks
        if (package := module.partition(".")[0]) != error.name:
            raise
        raise ImportError(
            f"{error}: it is not installed, and {Path.cwd()} has neither a folder {package} nor {package}.py; go to "
            "the folder that holds it, or pip install it",
            name=error.name,
        ) from error
    # what importlib says of a relative name and of none
    except (TypeError, ValueError) as error:
        raise ImportError(str(error)) from error
