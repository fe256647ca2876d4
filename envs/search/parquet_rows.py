"""Rows of parquet files, bounded by what they hold and not by what their pages say."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from turngym.core.plugins import need
from turngym.core.redaction import brief
from turngym.core.rows import RATIO, UNPACKED

BATCH = 1 << 28
"""Bytes of a batch of rows at most."""


def read_parquet(
    path: Path, choose: Callable[[Sequence[str]], Sequence[str]], error: type[Exception], most_rows: int
) -> Iterator[dict[str, Any]]:
    """The rows of a file as column name -> value, in file order.

    Raises `error`, which names the file, if it is damaged, unpacks to more than `RATIO` times its size (a small file to
    more than `UNPACKED` bytes), or has too many rows.

    Args:
        choose: gets the names of all columns, returns those to read; the others are never unpacked.
        most_rows: rows that the file may have.
    """
    arrow, parquet = (need(name, "a parquet file", "parquet") for name in ("pyarrow", "pyarrow.parquet"))
    try:
        # opened here, because pyarrow takes no path whose bytes are not UTF-8
        with path.open("rb") as raw, parquet.ParquetFile(raw) as file:
            size = path.stat().st_size
            most = max(UNPACKED, RATIO * size)
            groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
            unpacked = sum(group.total_byte_size for group in groups)
            if unpacked > most or file.metadata.num_rows > most_rows:
                raise error(
                    f"{path}: {file.metadata.num_rows:,} rows in {unpacked:,} unpacked bytes are too many for a file "
                    f"of {size:,} bytes; valid: at most {most_rows:,} rows and {RATIO} times the size"
                )
            columns = list(choose(file.schema_arrow.names))
            if len(set(columns)) < len(columns):
                raise error(f"{path}: two columns have one name: {brief(columns, 200)}")
            # a text that stands once in the file may be the value of every row: no batch takes more than `BATCH` bytes.
            # Columns of groups are not asked for: pyarrow ends the process where their statistics are damaged
            longest = max((group.total_byte_size for group in groups), default=0)
            number = unpacked = 0
            for batch in file.iter_batches(batch_size=min(256, max(1, BATCH // max(1, longest))), columns=columns):
                unpacked += batch.nbytes
                if unpacked > most:
                    raise error(f"{path}: its first {number:,} rows have more than {most:,} bytes")
                for row in _rows(batch, path, error):
                    number += 1
                    yield row
    except (arrow.ArrowException, OSError, ValueError, OverflowError) as reason:
        raise error(f"{path} cannot be read as parquet: {reason}") from reason


def _rows(batch: Any, path: Path, error: type[Exception]) -> Iterator[dict[str, Any]]:
    """The rows of a batch. Raises `error`, which names the column, for a value that Python cannot have."""
    values: dict[str, list[Any]] = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            values[name] = column.to_pylist()
        # a time zone that this machine does not know is a KeyError
        except (KeyError, ValueError, OverflowError) as reason:
            problem = f"{type(reason).__name__}: {reason}"
            raise error(f"{path}, column {name!r}: values that cannot be read ({problem})") from reason
    for number in range(batch.num_rows):
        yield {name: column[number] for name, column in values.items()}
