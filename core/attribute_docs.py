"""What the strings below the fields of a class say of them."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from typing import Any


@cache
def docs_of(cls: type[Any]) -> Mapping[str, str]:
    """Maps each field of a class to the string below it, as one line. Empty if the source cannot be read."""
    docs: dict[str, str] = {}
    # a class that is made of the fields of another one
    if (source := getattr(cls, "documented_by", None)) is not None:
        docs |= docs_of(source)
    for base in reversed(cls.__mro__):
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError, SyntaxError):
            continue
        body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
        for field, following in pairwise(body):
            if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
                continue
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                docs[field.target.id] = " ".join(str(following.value.value).split())
    return docs
