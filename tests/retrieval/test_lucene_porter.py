"""Porter's stemmer with Martin's extensions."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from turngym.retrieval.lucene_text import stem, words

ENDINGS = (
    "ational tional enci anci izer bli alli entli eli ousli ization ation ator alism iveness fulness ousness aliti "
    "iviti biliti logi icate ative alize iciti ical ful ness al ance ence er ic able ible ant ement ment ent sion tion "
    "ou ism ate iti ous ive ize ed ing eed s es ies sses y e ll at bl iz"
)


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        *(("caresses", "caress"), ("ponies", "poni"), ("caress", "caress"), ("cats", "cat"), ("ies", "i")),
        *(("feed", "feed"), ("agreed", "agre"), ("plastered", "plaster"), ("bled", "bled"), ("sing", "sing")),
        *(("conflated", "conflat"), ("sized", "size"), ("hopping", "hop"), ("falling", "fall"), ("filing", "file")),
        *(("happy", "happi"), ("sky", "sky"), ("possibly", "possibl"), ("archaeology", "archaeolog")),
        *(("generalizations", "gener"), ("oscillators", "oscil"), ("adoption", "adopt"), ("replacement", "replac")),
        *(("rate", "rate"), ("cease", "ceas"), ("controll", "control"), ("roll", "roll"), ("by", "by"), ("as", "as")),
        *(("5.5", "5.5"), ("kid＇s", "kid＇"), ("ｓ", "ｓ"), ("日本s", "日本"), ("yyyyed", "yyyi"), ("men", "men")),
    ],
)
def test_stems(word: str, expected: str) -> None:
    assert stem(word) == expected


def test_equal_to_nltk(webshop_data: Path) -> None:
    porter = pytest.importorskip("nltk.stem.porter", reason="nltk is the other implementation")
    other = porter.PorterStemmer(porter.PorterStemmer.MARTIN_EXTENSIONS)
    items = json.loads((webshop_data / "items_shuffle_1000.json").read_text(encoding="utf-8"))
    found = {word.lower() for item in items for word in words(f"{item['name']} {item['full_description']}")}
    rng = np.random.default_rng(0)
    letters, endings = list("aeiouybcdfglstwxz"), ENDINGS.split()
    for _ in range(5000):
        made = "".join(rng.choice(letters, rng.integers(1, 7))) + "".join(rng.choice(endings, rng.integers(0, 3)))
        found.add(made)
    pairs = {word: (stem(word), other.stem(word)) for word in found}
    wrong = {word: both for word, both in pairs.items() if both[0] != both[1]}
    assert not wrong
    assert len(found) > 10_000
