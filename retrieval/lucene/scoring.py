"""Lucene's BM25 in its own arithmetic: float32, with document lengths that fit one byte.

score = sum over the query's terms of weight - weight / (1 + tf * inverse), weight = qtf * idf,
idf = ln(1 + (N - df + 0.5) / (df + 0.5)), inverse = 1 / (k1 * ((1 - b) + b * length / avgdl)).
N counts documents with at least one term; avgdl uses exact lengths, `length` the ones that survived the byte.
"""

from __future__ import annotations

import math

import numpy as np

_EXACT = 24
"""Lengths below this, and 16 more, are kept exactly."""


def _lengths() -> np.ndarray:
    """int64 `[256]`: the length that each byte stands for, three bits of mantissa after the exact ones."""
    decoded = list(range(_EXACT))
    for code in range(256 - _EXACT):
        mantissa, shift = code & 7, (code >> 3) - 1
        decoded.append(_EXACT + (mantissa if shift < 0 else (mantissa | 8) << shift))
    return np.array(decoded, np.int64)


LENGTHS = _lengths()


def encode_lengths(lengths: np.ndarray) -> np.ndarray:
    """uint8 `[documents]` of whole lengths `[documents]`, rounded down to a length that has a byte."""
    return (np.searchsorted(LENGTHS, lengths, side="right") - 1).astype(np.uint8)


def inverse_norms(k1: float, b: float, tokens: int, documents: int) -> np.ndarray:
    """float32 `[256]`: for each length byte what the term frequency is multiplied with.

    `tokens` over `documents` (those with a term) is the average length.
    """
    one, k, share = np.float32(1), np.float32(k1), np.float32(b)
    average = np.float32(tokens / documents) if documents else one
    with np.errstate(divide="ignore"):
        inverses = one / (k * ((one - share) + share * LENGTHS.astype(np.float32) / average))
    assert inverses.dtype == np.float32
    return inverses


def idf(found_in: int, documents: int) -> np.float32:
    """Weight of a term that `found_in` of `documents` have."""
    return np.float32(math.log(1 + (documents - found_in + 0.5) / (found_in + 0.5)))


def contributions(weight: np.float32, scaled: np.ndarray) -> np.ndarray:
    """float32 scores of one term from `scaled` = tf * inverse (float32, overwritten)."""
    scaled += np.float32(1)
    np.divide(weight, scaled, out=scaled)
    return np.subtract(weight, scaled, out=scaled)
