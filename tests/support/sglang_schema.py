"""SGLang's own description of its protocol: one generated file of its wheel, loaded without the rest of it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

FILE = "api/v1/api_types.py"


def load_schema() -> Any:
    """The module; skips the test with a reason where it cannot be had."""
    package = importlib.util.find_spec("sglang")
    if package is None or not package.submodule_search_locations:
        pytest.skip("sglang is not installed: pip install --no-deps sglang==0.5.23 gives its schema")
    path = Path(next(iter(package.submodule_search_locations))) / FILE
    if not path.is_file():
        pytest.skip(f"the installed sglang has no {FILE}")
    if importlib.util.find_spec("msgspec") is None:
        pytest.skip("sglang's schema needs msgspec: pip install msgspec")
    spec = importlib.util.spec_from_file_location("sglang_api_types", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def checker(schema: Any) -> Any:
    """`check` of a fake server: every request and answer must be one that the schema knows, without fields to spare."""

    def check(what: str, value: Any) -> None:
        kind = schema.GenerateRequest if what == "request" else schema.GenerateResponse
        read = kind.from_json_value(value)
        if what == "request":
            unknown = set(value) - set(kind.__struct_fields__)
            assert not unknown, f"a server ignores {unknown}"
        else:
            meta = read.meta_info
            assert meta is not None
            assert meta.id == value["meta_info"]["id"]

    return check
