"""How text becomes token ids, so that a control token that a content spells stays text.

    content     a page says <|im_end|>            what an environment, a client or a document says
    shielded    a page says ?|im_end|>            `shield` hides a character of every control token in it
    rendered    <|im_start|>user\\na page says ?|im_end|><|im_end|>       the chat template writes its own around it
    ids         <|im_start|> user \\n a page says < | im _ end | > <|im_end|>     `encode` tells the two apart

Which tokens control the model is read from the tokenizer: those that it calls special, and of its other added tokens
the markup that the chat template writes itself, that stands between `<|` and `|>`, or that is numbered (unused ones).
Any other is text with an id of its own, as Gemma's `<b>` and two line ends. Text without control tokens gets the ids
that the tokenizer gives it.
"""

from __future__ import annotations

import copy
import json
import re
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turngym.core.user_files import json_of

MARK = "\ufdd0"
"""Begins a hidden character. Unicode reserves this code point for such uses; one in a content is hidden itself."""
HIDDEN = re.compile("\ufdd0([\ue000-\ue10f])([\ue200-\uf1ff])")
"""A hidden character: its code point in two private characters, which no template trims, escapes or compares."""
OPAQUE = (MARK, "\ue000", "\ua66e")
"""Stand for a hidden character while the template's own tokens are looked for: the first that a normalizer keeps."""
START = f"\ufdd1{secrets.token_hex(8)}\ufdd1"
"""Stands in front of text that does not begin a prompt, as SentencePiece begins a prompt with a space. Nobody knows it,
so no content holds it."""
CUT = "".join(chr(ord("a") + int(digit, 16)) for digit in secrets.token_hex(12))
"""Stands where a unigram model must not look across; letters, which no normalizer rewrites, and nobody's either."""
JOINER = "\u2060"
UNTOUCHED = '"\\ \t\r\n'
"""Characters that are not hidden, since templates escape or trim them."""
BYTE = r"<0x[0-9A-F]{2}>"
"""Names of SentencePiece's bytes, which stand for one byte where a unigram model meets them as text."""
PIPED = re.compile(r"<[|｜]|.*[|｜]>$")
"""Added tokens in the form that families give to their control tokens, special or not (`<|fim_prefix|>`, `<|turn>`)."""
HEADINGS = 6
"""Added tokens that differ in a number alone are placeholders if there are more of them than headings in HTML."""
CACHE = 1 << 16
"""Most texts whose ids are kept."""
SHORT = 4096
"""Most characters of a text that is kept shielded, and most such texts."""


class Shielded(str):
    """A text that `TextEncoder.shield` has read, so that it is not read a second time."""

    __slots__ = ()


def _character(hidden: re.Match[str]) -> str:
    return chr((ord(hidden[1]) - 0xE000 << 12) + ord(hidden[2]) - 0xE200)


class TextEncoder:
    """Turns text into ids with one tokenizer.

    Args:
        written: what the chat template writes, its source included.
    """

    def __init__(self, tokenizer: Any, written: str = "") -> None:
        self.tokenizer, self._written_by_template = tokenizer, written
        self._fast = bool(getattr(tokenizer, "is_fast", False))
        self._normalizer: Any = self._backend.normalizer if self._fast else None
        self._added: dict[int, Any] = dict(getattr(tokenizer, "added_tokens_decoder", {}))
        special = [
            *map(str, tokenizer.all_special_tokens),
            *(str(added) for added in self._added.values() if added.special),
        ]
        self.special = frozenset(text for text in special if text and not self._is_letter(text))
        """Texts of the tokens that the tokenizer calls special."""
        plain = [str(token) for token in self._added.values() if not token.special]
        series = Counter(map(_unnumbered, plain))
        self.control = self.special.union(
            text
            for text in filter(_is_markup, plain)
            if text in written
            or PIPED.match(text)
            or (_unnumbered(text) != text and series[_unnumbered(text)] > HEADINGS)
        )
        """Texts of all control tokens."""
        ids = {str(token): number for number, token in self._added.items()}
        self.ids: dict[int, str] = {
            ids[text] if text in ids else tokenizer.convert_tokens_to_ids(text): text for text in self.control
        }
        """Control tokens by id."""
        self._unknown = getattr(tokenizer, "unk_token_id", None)
        self._spelled = frozenset(filter(self._model_reads, self.control))
        """Control tokens that the model finds by itself: pieces of unigram and word models."""
        self._bytes = self._model_reads("<0x41>")
        """Whether it finds the names of bytes."""
        self._opaque = next((char for char in OPAQUE if self._normalized(char) == char), OPAQUE[-1])
        self._late = {str(token): self._normalized(str(token)) for token in self._added.values() if token.normalized}
        """Added tokens that are looked for in normalized text, and how they stand there."""
        self._beginnings = frozenset(text[:cut] for text in self.control for cut in range(1, len(text)))
        self._endings = frozenset(text[cut:] for text in self.control for cut in range(1, len(text)))
        self._longest = max(map(len, self.control), default=1)
        # caches per instance: one on the methods would be shared and keep every tokenizer alive
        self._patterns = lru_cache(8)(_Patterns)
        self._border = lru_cache(256)(self._encode)
        self._shield_cached = lru_cache(SHORT)(self._shield)
        self.encode: Callable[..., NDArray[np.int32]] = lru_cache(CACHE)(self.encode_new)

    def copy(self) -> TextEncoder:
        """A copy with a tokenizer of its own, for another thread."""
        return TextEncoder(copy.deepcopy(self.tokenizer), self._written_by_template)

    @property
    def _backend(self) -> Any:
        return self.tokenizer.backend_tokenizer

    def _is_letter(self, text: str) -> bool:
        """Whether a special token is a letter of the vocabulary, as the "!" that some use for padding."""
        return len(text) == 1 and self._fast and self._backend.model.token_to_id(text) is not None

    def _model_reads(self, text: str) -> bool:
        """Whether the model itself, without the list of added tokens, makes one token of the name of that token."""
        if not self._fast:
            return False
        try:
            read = [token.id for token in self._backend.model.tokenize(text)]
        except Exception:  # word models raise on unknown words
            return False
        return read == [self._backend.model.token_to_id(text)]

    # What a content says.

    def shield(self, text: str, keep: Collection[str] = ()) -> str:
        """`text` with a character of every control token hidden, but for those in `keep`.

        A token that begins or ends outside `text`, or that only a normalizer makes, counts as one.
        """
        if isinstance(text, Shielded):
            return text
        return (self._shield_cached if len(text) <= SHORT else self._shield)(text, frozenset(keep))

    def shield_all(self, value: Any, keep: Collection[str] = ()) -> Any:
        """`shield` of every text in lists and objects; of keys, too."""
        if isinstance(value, str):
            return self.shield(value, keep)
        if isinstance(value, Mapping):
            return {self.shield_all(key, keep): self.shield_all(item, keep) for key, item in value.items()}
        return [self.shield_all(item, keep) for item in value] if isinstance(value, (list, tuple)) else value

    def shield_sampled(self, ids: Sequence[int], text: str, keep: Collection[str] = ()) -> str:
        """What the sampled `ids` say, `text`, with control tokens hidden that are spelled and were not sampled."""
        places = {*self._starts(text, frozenset(keep)), *self._marks(text)}
        if places:
            start = last = 0
            for index in (index for index, number in enumerate(ids) if number in self.ids):
                # from the control token before, not from the beginning: a policy may sample thousands of them
                token_text = self._decode(ids[index : index + 1])
                start += len(self._decode(ids[last : index + 1])) - len(token_text)
                places.discard(start + _hideable(token_text))
                last = index
        return _hide_at(text, places)

    def spells_control(self, text: str, among: Collection[str] | None = None) -> str | None:
        """A control token that `text` spells, in whatever way; None if there is none. `among` leaves others out."""
        patterns = self._patterns_for(frozenset() if among is None else self.control - frozenset(among))
        match = patterns.one.search(text) if patterns.one is not None else None
        if match is None and patterns.disguised is not None:
            match = patterns.disguised.search(self._normalized(text))
        return None if match is None else match[0]

    def broken(self, text: str) -> str:
        """`text` for those who tokenize it by themselves: every control token that it spells has a word joiner in it,
        which is not seen; where a normalizer takes joiners away, U+FFFD stands for its characters."""
        if self.spells_control(text) is None:
            return text
        positions = set(self._starts(text, frozenset()))
        joined = "".join(char + JOINER if position in positions else char for position, char in enumerate(text))
        if self.spells_control(joined) is None:
            return joined
        return HIDDEN.sub("\ufffd", self.shield(text))

    def _shield(self, text: str, keep: frozenset[str]) -> Shielded:
        shielded = _hide_at(text, {*self._starts(text, keep), *self._edges(text), *self._marks(text)})
        disguised = self._patterns_for(keep).disguised
        if disguised is not None and disguised.search(self._normalized(self._opaquely(shielded))):
            # which characters become the token is the normalizer's secret, so all are hidden
            shielded = _hide_at(text, {position for position, char in enumerate(text) if char not in UNTOUCHED})
        return Shielded(shielded)

    def _marks(self, text: str) -> Iterator[int]:
        """Where characters stand that have a meaning here."""
        if MARK in text or self._opaque in text:
            yield from (position for position, char in enumerate(text) if char in (MARK, self._opaque))

    def _starts(self, text: str, keep: frozenset[str]) -> Iterator[int]:
        """Where a character must be hidden so that no control token is left in `text`."""
        patterns = self._patterns_for(keep)
        if patterns.one is None or patterns.every is None or patterns.one.search(text) is None:
            return
        for match in patterns.every.finditer(text):
            # tokens may overlap: each loses a character of its own
            yield match.start() + _hideable(match[1])

    def _edges(self, text: str) -> Iterator[int]:
        """Where a token may begin that the next text ends, or end that the text before began."""
        begun, end = text.lstrip(), len(text.rstrip())
        for size in range(1, min(self._longest, end + 1)):
            if text[end - size : end] in self._beginnings:
                yield end - size + _hideable(text[end - size : end])
            if begun[:size] in self._endings:
                yield len(text) - len(begun) + _hideable(begun[:size])

    def _patterns_for(self, keep: frozenset[str]) -> _Patterns:
        texts = self.control - keep
        late = {self._late[text] for text in texts if text in self._late} | (self._spelled - keep)
        byte = BYTE if self._bytes else ""
        return self._patterns(texts, None if self._normalizer is None else frozenset(late), byte)

    def _normalized(self, text: str) -> str:
        return text if self._normalizer is None else str(self._normalizer.normalize_str(text))

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    # From text to ids.

    def encode_new(self, text: str, after: str = "") -> NDArray[np.int32]:
        """Ids of `text` as it stands behind the text `after`, int32 [n]; no special tokens are added. Read-only.

        What is hidden (`shield`) becomes text. `encode` keeps what it has made.
        """
        ids = self.encode_between(after, text) if after else self._encode(text)
        if ids is None:
            # A token reaches over the border. Behind a line's end there is no such token, and no space that
            # SentencePiece would put before the first word.
            ids = self.encode_between("\n", text) or self._encode(text)
        array = np.asarray(ids, dtype=np.int32)
        array.setflags(write=False)
        return array

    def encode_between(self, before: str, text: str, behind: str = "") -> list[int] | None:
        """The ids of `text` where the three texts are tokenized as one; None if a token reaches over a border.

        `behind` is a control token, or empty.
        """
        first, last = self._border(before), self._border(behind)
        joined = self._encode(before + text + behind)
        stop = len(joined) - len(last)
        if stop < len(first) or joined[: len(first)] != first or joined[stop:] != last:
            return None
        return joined[len(first) : stop]

    def _encode(self, text: str) -> list[int]:
        if HIDDEN.search(text) is None:
            # the template has written the BOS already; the tokenizer would add a second one
            return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        characters = map(_character, HIDDEN.finditer(text))
        opaque, ids, done = self._opaquely(text), list[int](), 0
        for number, start, stop in self._written(opaque):
            ids += self._text_ids(opaque[done:start], characters, first=done == 0)
            ids.append(number)
            done = stop
        return ids + self._text_ids(opaque[done:], characters, first=done == 0)

    def _opaquely(self, text: str) -> str:
        return HIDDEN.sub(self._opaque, text) if MARK in text else text

    def _written(self, opaque: str) -> Iterator[tuple[int, int, int]]:
        """The template's own control tokens: (id, start, stop), with the white space that belongs to a token."""
        if not self._fast:
            pattern = self._patterns_for(frozenset()).one
            ids_of = {text: number for number, text in self.ids.items()}
            for match in () if pattern is None else pattern.finditer(opaque):
                yield ids_of[match[0]], match.start(), match.end()
            return
        read = self.tokenizer(opaque, add_special_tokens=False, return_offsets_mapping=True)
        for number, (start, stop) in zip(read["input_ids"], read["offset_mapping"], strict=True):
            # an unknown character has the id of the unknown token, too
            if number in self.ids and (number != self._unknown or opaque[start:stop].strip() == self.ids[number]):
                yield number, start, stop

    def _text_ids(self, opaque: str, characters: Iterator[str], *, first: bool) -> list[int]:
        """Ids of a stretch without control tokens; what is hidden in it are the next `characters`."""
        if not opaque:
            return []
        # within a name of a byte the text is cut, so that the model does not find it
        cut = CUT if self._bytes else ""
        text = "".join(next(characters) + cut if char == self._opaque else char for char in opaque)
        if not self._fast:
            return list(self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])
        backend, renumbered = self._text_backend
        ids = backend.encode(text if first else START + text, add_special_tokens=False).ids
        return [renumbered.get(number, number) for number in (ids if first else ids[1:])]

    @cached_property
    def _text_backend(self) -> tuple[Any, dict[int, int]]:
        """The tokenizer without control tokens, and its ids of added tokens where they differ from the tokenizer's."""
        from tokenizers import AddedToken, Tokenizer, pre_tokenizers

        original = self._backend
        plain = Tokenizer(self._model_without() if self._spelled else original.model)
        if original.normalizer is not None:
            plain.normalizer = original.normalizer
        steps = [] if original.pre_tokenizer is None else [original.pre_tokenizer]
        steps += [pre_tokenizers.Split(CUT, "removed")] if self._bytes else []
        if steps:
            plain.pre_tokenizer = steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)
        words = {number: token for number, token in self._added.items() if number not in self.ids}
        plain.add_tokens(list(words.values()))
        plain.add_special_tokens([AddedToken(START, normalized=False)])
        ids = {int(plain.token_to_id(str(token)) or 0): number for number, token in words.items()}
        return plain, {number: token_id for number, token_id in ids.items() if number != token_id}

    def _model_without(self) -> Any:
        """The tokenizer's model, its control tokens under names that no text has."""
        from tokenizers import Tokenizer

        table = json_of(self._backend.to_str())
        model, renamed = table["model"], {text: START + text for text in self._spelled}
        vocabulary = model["vocab"]
        if isinstance(vocabulary, dict):
            model["vocab"] = {renamed.get(piece, piece): number for piece, number in vocabulary.items()}
        else:
            model["vocab"] = [[renamed.get(piece, piece), score] for piece, score in vocabulary]
        if "merges" in model:
            pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
            model["merges"] = [pair for pair in pairs if not {"".join(pair), *pair} & renamed.keys()]
        if model.get("unk_token") in renamed:
            model["unk_token"] = renamed[model["unk_token"]]
        return Tokenizer.from_str(json.dumps(table | {"added_tokens": [], "post_processor": None})).model


class _Patterns:
    """Regular expressions that find `texts`, control tokens, and names of bytes, if `byte` is their expression.

    `late` are the control tokens that may arise in normalized text; None without a normalizer.
    """

    def __init__(self, texts: frozenset[str], late: frozenset[str] | None, byte: str) -> None:
        either = "|".join(filter(None, (_either(texts), byte)))
        self.one = re.compile(either) if either else None
        """Pattern that finds one control token."""
        self.every = re.compile(f"(?=({either}))") if either else None
        """Finds every place where one begins."""
        disguised = "" if late is None else "|".join(filter(None, (_either(late), byte)))
        self.disguised = re.compile(disguised) if disguised else None
        """Finds one in normalized text."""


def _either(texts: Collection[str]) -> str:
    """A regular expression for any of `texts`, the longest that fits.

    It branches by letter: one branch for each text would make every "<" of a content cost as much as there are texts.
    """
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for char in text:
            node = node.setdefault(char, {})
        node[""] = {}
    return _branches(tree)


def _branches(node: Mapping[str, Any]) -> str:
    branches = [re.escape(char) + _branches(child) for char, child in sorted(node.items()) if char]
    if not branches:
        return ""
    either = branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"
    return f"(?:{either})?" if "" in node else either


def _hide_at(text: str, positions: Collection[int]) -> str:
    parts, done = list[str](), 0
    for position in sorted(positions):
        number = ord(text[position])
        parts += [text[done:position], MARK, chr(0xE000 + (number >> 12)), chr(0xE200 + (number & 0xFFF))]
        done = position + 1
    return "".join((*parts, text[done:])) if parts else text


def _is_markup(text: str) -> bool:
    """Whether an added token is more than white space or a word: Gemma has lines' ends among them, DeepSeek letters."""
    return any(not char.isalnum() and not char.isspace() for char in text.replace("▁", " "))


def _unnumbered(text: str) -> str:
    return re.sub(r"[0-9]+", "", text)


def _hideable(text: str) -> int:
    """The place of the first character in `text` that templates leave as it is."""
    return next((position for position, char in enumerate(text) if char not in UNTOUCHED), 0)
