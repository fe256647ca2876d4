"""Which words of a title are nouns: a built-in approximation, spaCy's model, or every word."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from turngym.envs.suggest import did_you_mean
from turngym.envs.webshop.errors import ShopDataError

DEFAULT_TAGGER = "builtin"
SPACY_MODEL = "en_core_web_sm"


@dataclass(frozen=True, slots=True, kw_only=True)
class NounTagger:
    """Finds the nouns of a title; they decide how alike two products are in the reward's r_type."""

    name: str
    """Goes into info and reports: rewards of wrong products depend on it."""
    nouns: Callable[[str], tuple[str, ...]]
    """Lower-case nouns in text order, repeats included."""


def make_tagger(name: str = DEFAULT_TAGGER) -> NounTagger:
    """`builtin` (approximate, no dependency), `spacy` (exactly the original's), `all-words` (for tests)."""
    if name not in _MAKERS:
        valid = ", ".join(sorted(_MAKERS))
        raise ShopDataError(f"tagger is {name!r}; valid: {valid}.{did_you_mean(name, sorted(_MAKERS))}")
    return NounTagger(name=name, nouns=_MAKERS[name]())


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


def _builtin() -> Callable[[str], tuple[str, ...]]:
    """Approximate: in titles nearly every word is a noun or a name, so only known other words are left out."""

    def nouns(text: str) -> tuple[str, ...]:
        words = (match.group().lower().removesuffix("'s") for match in _WORD.finditer(text.replace("’", "'")))
        return tuple(word for word in words if len(word) > 1 and not _other(word))

    return nouns


def _other(word: str) -> bool:
    if word in _CLOSED or word in _DESCRIBING:
        return True
    return word.endswith(_ENDINGS) and word not in _LOOK_ALIKE


def _all_words() -> Callable[[str], tuple[str, ...]]:
    """Every word of letters that is not a stop word: what stood in for spaCy when the transcripts were recorded."""

    def nouns(text: str) -> tuple[str, ...]:
        words = (match.group().lower() for match in re.finditer(r"[A-Za-z]+", text))
        return tuple(word for word in words if word not in _CLOSED)

    return nouns


def _spacy() -> Callable[[str], tuple[str, ...]]:
    try:
        import spacy

        # the reward reads tags only: parsing and names would double the time
        model = spacy.load(SPACY_MODEL, exclude=["parser", "ner", "lemmatizer"])
    except (ImportError, OSError) as error:
        raise ShopDataError(
            f"tagger 'spacy' needs spaCy and its model {SPACY_MODEL}: pip install 'turngym[spacy]', then "
            f"python -m spacy download {SPACY_MODEL}; tagger 'builtin' needs neither ({type(error).__name__})"
        ) from None

    def nouns(text: str) -> tuple[str, ...]:
        return tuple(token.text.lower() for token in model(text) if token.pos_ in ("NOUN", "PROPN"))

    return nouns


_MAKERS: dict[str, Callable[[], Callable[[str], tuple[str, ...]]]] = {
    "builtin": _builtin,
    "spacy": _spacy,
    "all-words": _all_words,
}
