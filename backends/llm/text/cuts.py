"""Where a long text can be cut so that its parts have the same tokens as the whole, read from a tokenizer.json.

A cut lies between a letter or digit and one of the separators of `Cuts`. It is safe where nothing of the tokenizer
reaches across it: the normalizer works on single characters there, no added token contains a letter before a separator,
and either the pre-tokenizer always begins a word at the separator, or no token of the vocabulary has a letter before
one. Text for a tokenizer that is not understood here is not cut.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from modelserver.backend import InvalidArgumentError

from .token_bytes import BYTE_CHARACTERS

# Characters before which a text may be cut, if the tokenizer allows it. All stand for themselves in every normal form.
_IDEOGRAPHIC = "\u3001\u3002\uff08\uff0c\uff1a\uff1b"
_SEPARATORS = ' \n,.;:"(' + _IDEOGRAPHIC
# Characters that are searched before other threads get a turn.
_SEARCHED_AT_ONCE = 1 << 16
# The expression by which ByteLevel splits if `use_regex` is set.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LOCAL_NORMALIZERS = frozenset(
    {"BertNormalizer", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Precompiled", "StripAccents"}
)
# Stands for every letter and digit.
_LETTER = "a"
_CLASSES = {
    "s": " \n",
    "d": _LETTER,
    "w": _LETTER,
    "p{L}": _LETTER,
    "p{Lu}": _LETTER,
    "p{Ll}": _LETTER,
    "p{Lt}": _LETTER,
    "p{Lm}": _LETTER,
    "p{Lo}": _LETTER,
    "p{M}": "",
    "p{N}": _LETTER,
    "p{Nd}": _LETTER,
    "p{P}": ',.;:"(' + _IDEOGRAPHIC,
    "p{S}": "",
    "r": "",
    "n": "\n",
    "t": "",
}
_ALL = frozenset(_LETTER + _SEPARATORS)
_ATOM = re.compile(
    r"\\(?P<escaped>[pP]\{\w+\}|.)|\[(?P<set>\^?(?:\\.|\[[^\]]*\]|[^\]\\])+)\]|(?P<open>\((?:\?i?:)?)|(?P<close>\))"
    r"|(?P<times>[*+?]|\{\d+(?:,\d*)?\})|(?P<bar>\|)|(?P<plain>[^\\\[\](){}*+?|^$])",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Cuts:
    """`separators`: a text may be cut before one that follows a letter. `drops_separator`: the tokenizer puts a space
    before every part, so the one after the cut is left out; a letter must follow it."""

    separators: str
    drops_separator: bool = False

    def split(self, text: str, size: int, longest: int) -> Iterator[str]:
        """The parts of a text in their order, of about `size` characters; longer where it cannot be cut.

        Raises InvalidArgumentError for a part of more than `longest` characters.
        """
        begin = 0
        while len(text) - begin > size:
            end = self._find(text, begin + size, begin + longest)
            if end is None:
                if len(text) - begin > longest:
                    raise InvalidArgumentError(
                        f"the text has more than {longest} characters in which it cannot be cut: no space, line break "
                        "or mark that follows a letter or digit"
                    )
                break
            yield text[begin:end]
            begin = end + self.drops_separator
        yield text[begin:]

    def _find(self, text: str, start: int, stop: int) -> int | None:
        """The first place to cut at between `start` and `stop`."""
        pattern = re.compile(f"[{re.escape(self.separators)}]")
        stop = min(stop, len(text) - 1)
        for begin in range(start, stop, _SEARCHED_AT_ONCE):
            for match in pattern.finditer(text, begin, min(begin + _SEARCHED_AT_ONCE, stop)):
                at = match.start()
                if text[at - 1].isalnum() and (not self.drops_separator or text[at + 1].isalpha()):
                    return at
        return None


def find_cuts(document: Mapping[str, Any]) -> Cuts | None:
    """Where texts for the tokenizer that tokenizer.json describes can be cut; None: nowhere."""
    normalizers = _parts(document.get("normalizer"), "normalizers")
    prepends = [step for step in normalizers if step["type"] == "Prepend"]
    space = " "
    for step in normalizers:
        if step["type"] == "Replace" and step["pattern"] == {"String": " "} and step["content"] == "▁":
            space = "▁"
        elif step["type"] == "Replace" and step["pattern"] == {"Regex": " {2,}"}:
            continue  # a run of spaces is on one side of a cut
        elif step["type"] == "Strip" and not step["strip_left"]:
            continue
        elif step["type"] not in _LOCAL_NORMALIZERS and step not in prepends:
            return None
    if prepends and (len(prepends) > 1 or prepends[0]["prepend"] != "▁" or space != "▁"):
        return None
    model = document["model"]
    if model.get("dropout") or model["type"] not in ("BPE", "WordPiece", "WordLevel", "Unigram"):
        return None
    crossed = _crossed(model["vocab"]) if model["type"] == "BPE" else frozenset(_CROSSABLE)
    separators = "".join(
        each for each in _SEPARATORS if _is_cut(document, each, space if each == " " else each, crossed)
    )
    if prepends:
        starts_with_letter = any(token["content"][:1].isalnum() for token in document.get("added_tokens", ()))
        separators = " " if " " in separators and not starts_with_letter else ""
    return Cuts(separators, drops_separator=bool(prepends)) if separators else None


def max_token_bytes(document: Mapping[str, Any]) -> int | None:
    """The most bytes of a text that one token can stand for; None where that is not known.

    So a text has at least as many tokens as its characters divided by this. Normal forms may make a text shorter, to a
    third at most.
    """
    normalizers = _parts(document.get("normalizer"), "normalizers")
    steps = _parts(document.get("pre_tokenizer"), "pretokenizers")
    added = document.get("added_tokens", ())
    for step in normalizers:
        is_space = step["type"] == "Replace" and step["pattern"] == {"String": " "} and step["content"] == "▁"
        if step["type"] not in ("NFC", "Prepend") and not is_space:
            return None
    if any(step["type"] not in ("ByteLevel", "Digits", "Metaspace", "Split") for step in steps):
        return None
    if any(step.get("behavior") == "Removed" for step in steps) or any(
        token["lstrip"] or token["rstrip"] for token in added
    ):
        return None
    model = document["model"]
    vocabulary = model["vocab"] if model["type"] == "BPE" else ()
    has_bytes = (
        any(step["type"] == "ByteLevel" for step in steps) and vocabulary and vocabulary.keys() >= BYTE_CHARACTERS
    )
    has_fallback = (
        model.get("byte_fallback") and vocabulary and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    )
    if not has_bytes and not has_fallback:
        return None  # a character that the vocabulary lacks may be left out
    longest = max(len(token) if has_bytes else len(token.encode()) for token in vocabulary)
    longest = max([longest, *(len(token["content"].encode()) for token in added)])
    return longest * (4 if any(step["type"] == "NFC" for step in normalizers) else 1)


def _is_cut(document: Mapping[str, Any], separator: str, normalized: str, crossed: frozenset[str]) -> bool:
    """Whether a text can be cut between any letter and `separator`, which the normalizer makes `normalized`.

    `crossed` are the separators that a token of the vocabulary has behind a letter.
    """
    for token in document.get("added_tokens", ()):
        content = token["content"]
        if separator in _crossed([content]) or (token["rstrip"] and content[-1:].isalnum()):
            return False
    steps = _parts(document.get("pre_tokenizer"), "pretokenizers")
    begins_word = False
    for step in steps:
        if step["type"] == "Metaspace":
            normalized = step["replacement"] if separator == " " else normalized
        begins = _begins_word(step, separator, normalized)
        if begins is None:
            return False
        begins_word |= begins
    if begins_word:
        return True
    model = document["model"]
    # No token of a BPE can lie across a cut, if none has a letter before the separator.
    is_plain = (
        model["type"] == "BPE" and all(step["type"] != "ByteLevel" for step in steps) and normalized in _CROSSABLE
    )
    is_plain &= not (model.get("end_of_word_suffix") or model.get("continuing_subword_prefix"))
    return is_plain and normalized not in crossed and (not model.get("fuse_unk") or normalized in model["vocab"])


def _begins_word(step: Mapping[str, Any], separator: str, normalized: str) -> bool | None:
    """Whether a pre-tokenizer always begins a word at a separator behind a letter; None: it may reach across."""
    kind = step["type"]
    if kind == "Metaspace":
        return bool(step.get("split", True)) if separator == " " else None
    if kind in ("Whitespace", "WhitespaceSplit", "BertPreTokenizer"):
        return True if separator in " \n" else None
    if kind == "Digits" or (kind == "Split" and step["pattern"] == {"String": " "} and normalized == "▁"):
        return False  # there is no space left to split at
    if kind == "ByteLevel" and not (step.get("add_prefix_space") and separator != " "):
        pattern = _GPT2 if step.get("use_regex", True) else ""
    elif kind == "Split" and step["behavior"] in ("Isolated", "Removed") and "Regex" in step["pattern"]:
        pattern = step["pattern"]["Regex"]
    else:
        return None
    if not _stays_apart(pattern, normalized):
        return None
    return (r"\p{L}" in pattern or r"\p{Ll}" in pattern) and r"\p{N}" in pattern


_CROSSABLE = _SEPARATORS + "▁"
_CROSSING = re.compile(rf"[^\W_]([{re.escape(_CROSSABLE)}])")


def _crossed(tokens: Iterable[str]) -> frozenset[str]:
    """The separators that stand behind a letter or digit in one of these."""
    return frozenset(match[1] for token in tokens for match in _CROSSING.finditer(token))


def _stays_apart(pattern: str, separator: str) -> bool:
    """Whether no match of a regular expression can have a letter directly before `separator`, nor depend on more
    than whether the character after a letter is white space. Cautious: False for a pattern that it does not understand.

    The atoms of each alternative are taken in their order, with all groups open: a letter must not come before a
    separator, nor may a repeated group or atom have both.
    """
    if separator not in _ALL:
        return False
    pattern = pattern.replace(r"(?!\S)", "")
    pattern = pattern.replace("(?i:", "(?:")
    if re.search(r"\((?=\?(?!:))", pattern) or pattern.count("(") != pattern.count(")"):
        return False  # it looks around, or is of another kind
    has_letter, groups, last = False, [frozenset[str]()], frozenset[str]()
    at = 0
    while at < len(pattern):
        match = _ATOM.match(pattern, at)
        if match is None:
            return False
        at = match.end()
        if match["bar"]:
            has_letter &= len(groups) > 1
            last = frozenset()
        elif match["open"]:
            groups.append(frozenset())
        elif match["close"]:
            last = groups.pop()
            groups[-1] |= last
        elif match["times"]:
            if match["times"] != "?" and {_LETTER, separator} <= last:
                return False
        else:
            found = _characters(match)
            if found is None or (has_letter and separator in found):
                return False
            last = found
            groups[-1] |= found
            has_letter |= _LETTER in found
    return len(groups) == 1


def _characters(atom: re.Match[str]) -> frozenset[str] | None:
    """Which of `_ALL` an atom may match, `_LETTER` for any letter; None if that is not known."""
    if atom["plain"]:
        return _ALL if atom["plain"] == "." else _plain(atom["plain"])
    if atom["escaped"]:
        return _escaped(atom["escaped"])
    inside = atom["set"]
    if "[" in inside or "&&" in inside:
        return None
    is_negated = inside.startswith("^")
    found: frozenset[str] = frozenset()
    rest = inside.removeprefix("^")
    for part in re.finditer(r"\\([pP]\{\w+\}|.)|(.)-(.)|(.)", rest, re.DOTALL):
        if part[1]:
            known = _escaped(part[1])
            if known is None:
                return None
            found |= known
        elif part[2]:
            found |= {each for each in _ALL if part[2] <= each <= part[3]}
            found |= {_LETTER} if any(chr(code).isalpha() for code in range(ord(part[2]), ord(part[3]) + 1)) else set()
        else:
            found |= _plain(part[4])
    if not is_negated:
        return found
    # A set without some letters may still match others.
    has_all = r"\w" in rest or (r"\p{L}" in rest and r"\p{N}" in rest)
    return _ALL - (found if has_all else found - {_LETTER})


def _plain(character: str) -> frozenset[str]:
    return frozenset(_LETTER if character.isalpha() else character) & _ALL


def _escaped(name: str) -> frozenset[str] | None:
    if name in _CLASSES:
        return frozenset(_CLASSES[name])
    if name.startswith("P") or name in ("S", "W", "D"):
        known = _CLASSES.get(name[0].lower() + name[1:])
        # Other letters, or digits, may be left of a negated class.
        return None if known is None else _ALL - (frozenset(known) - (frozenset() if name == "W" else {_LETTER}))
    if name.startswith("p") or name.isalnum():
        return None
    return _plain(name)


def _parts(step: Mapping[str, Any] | None, key: str) -> list[Mapping[str, Any]]:
    """The steps of a normalizer or pre-tokenizer, which may be one, several or none."""
    if step is None:
        return []
    return [part for each in step[key] for part in _parts(each, key)] if step["type"] == "Sequence" else [step]
