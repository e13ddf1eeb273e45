"""Modelfiles: what a model is made from, and how it is spoken to. Text -> `Modelfile` -> text.

The grammar is Ollama's: an instruction a line, its value up to the line's end, or in quotes ("..." or three of them)
over several lines.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modelserver.config.ollama_options import option_of_text
from modelserver.errors import InvalidArgumentError

FILENAME = "Modelfile"
_SUFFIX = ".modelfile"
_MAX_BYTES = 8 << 20
_INSTRUCTIONS = (
    "from",
    "license",
    "template",
    "system",
    "adapter",
    "draft",
    "renderer",
    "parser",
    "parameter",
    "message",
    "requires",
)
ROLES = ("system", "user", "assistant")
_BLANKS = " \t"
_BETWEEN = re.compile(r"(?:[ \t\r\n]+|#[^\r\n]*)*")
_WORD = re.compile(r"[A-Za-z]+(?=[ \t])")
_NAME = re.compile(r"[ \t]*([A-Za-z0-9_]+)[ \t]")
_LINE_END = re.compile(r"[\r\n]|\Z")
_VERSION = re.compile(r"v?\d+\.\d+\.\d+(?:-[0-9A-Za-z.-]+)?(?:\+[0-9A-Za-z.-]+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Modelfile:
    """`sources` are the values of FROM, `parameters` Ollama's options with values of their types.

    A text that is None is not there. `renderer`, `parser` and `requires` are Ollama's own affairs, and only kept.
    """

    sources: tuple[str, ...]
    adapters: tuple[str, ...] = ()
    drafts: tuple[str, ...] = ()
    template: str | None = None
    system: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    messages: Sequence[Mapping[str, Any]] = ()
    licenses: tuple[str, ...] = ()
    renderer: str = ""
    parser: str = ""
    requires: str = ""

    @property
    def source(self) -> str:
        return self.sources[0]

    def text(self) -> str:
        """The file: `parse_modelfile` reads the same from it."""
        lines = [f"FROM {source}" for source in self.sources]
        lines += [f"{word} {_quoted(text)}" for word, text in self._texts() if text]
        for name, value in self.parameters.items():
            values = value if isinstance(value, list) else [value]
            lines += [f"PARAMETER {name} {_quoted(_parameter_text(each))}" for each in values]
        lines += [f"MESSAGE {each['role']} {_quoted(str(each.get('content', '')))}" for each in self.messages]
        lines += [f"LICENSE {_quoted(text)}" for text in self.licenses]
        return "\n".join(lines) + "\n"

    def _texts(self) -> list[tuple[str, str]]:
        return [
            *(("ADAPTER", text) for text in self.adapters),
            *(("DRAFT", text) for text in self.drafts),
            ("TEMPLATE", self.template or ""),
            ("SYSTEM", self.system or ""),
            ("RENDERER", self.renderer),
            ("PARSER", self.parser),
            ("REQUIRES", self.requires),
        ]


def is_modelfile(path: Path) -> bool:
    """Whether a path is a Modelfile's by its name: Modelfile, Modelfile.NAME or NAME.modelfile."""
    return path.name == FILENAME or path.name.startswith(f"{FILENAME}.") or path.suffix.lower() == _SUFFIX


def name_of_modelfile(path: Path) -> str:
    """The name of its model unless another is given: NAME in the file's name, else that of its directory."""
    if path.suffix.lower() == _SUFFIX:
        return path.stem
    return path.name.removeprefix(FILENAME).removeprefix(".") or path.absolute().parent.name


def read_modelfile(path: Path) -> Modelfile:
    """Raises InvalidArgumentError, which names file and line, for one that cannot be read or is wrong."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise InvalidArgumentError(f"{path} has more than {_MAX_BYTES} bytes")
        content = path.read_bytes()
    except OSError as error:
        raise InvalidArgumentError(f"{path} cannot be read: {error.strerror}") from None
    return parse_modelfile(content, str(path))


def parse_modelfile(content: str | bytes, source: str = FILENAME) -> Modelfile:
    """`source` names the file in errors. Raises InvalidArgumentError with the line of what is wrong."""
    if isinstance(content, bytes):
        encoding = "utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
        try:
            content = content.decode(encoding)
        except UnicodeDecodeError as error:
            raise InvalidArgumentError(f"{source} is not text: {error}") from None
    reader = _Reader(content, source)
    found: dict[str, list[str]] = {}
    parameters: dict[str, Any] = {}
    messages: list[dict[str, str]] = []
    while (instruction := reader.instruction()) is not None:
        if instruction == "parameter":
            name, text = reader.name("the name of a parameter"), reader.value()
            _add_parameter(parameters, name, text, reader)
        elif instruction == "message":
            role = reader.name("the role of a message")
            if role not in ROLES:
                raise reader.error('message role must be one of "system", "user", or "assistant"')
            messages.append({"role": role, "content": reader.value()})
        else:
            text = reader.value()
            if instruction == "requires" and not _VERSION.fullmatch(text):
                raise reader.error("requires must be a valid semver (e.g. 0.14.0)")
            found.setdefault(instruction, []).append(text)
    sources = tuple(text for text in found.get("from", ()) if text)
    if not sources:
        raise InvalidArgumentError(f"{source}: no FROM line")
    return Modelfile(
        sources=sources,
        adapters=tuple(found.get("adapter", ())),
        drafts=tuple(found.get("draft", ())),
        template=found.get("template", [None])[-1],
        system=found.get("system", [None])[-1],
        parameters=parameters,
        messages=tuple(messages),
        licenses=tuple(found.get("license", ())),
        renderer=found.get("renderer", [""])[-1],
        parser=found.get("parser", [""])[-1],
        requires=found.get("requires", [""])[-1].removeprefix("v"),
    )


def _add_parameter(parameters: dict[str, Any], name: str, text: str, reader: _Reader) -> None:
    try:
        value = option_of_text(name, text)
    except InvalidArgumentError as error:
        raise reader.error(error.message) from None
    if isinstance(value, list):
        value = [*parameters.get(name, ()), *value]
    parameters[name] = value


class _Reader:
    """Goes through a text, an instruction and its parts after the other."""

    def __init__(self, text: str, source: str) -> None:
        self._text = text
        self._source = source
        self._place = self._start = 0

    def instruction(self) -> str | None:
        """The next one in lower case; None at the end."""
        between = _BETWEEN.match(self._text, self._place)
        assert between is not None, "it matches nothing as well"
        self._place = self._start = between.end()
        if self._place == len(self._text):
            return None
        word = _WORD.match(self._text, self._place)
        if word is None or word[0].lower() not in _INSTRUCTIONS:
            known = ", ".join(f'"{each}"' for each in _INSTRUCTIONS[:-1])
            raise self.error(f'command must be one of {known}, or "{_INSTRUCTIONS[-1]}"')
        self._place = word.end()
        return word[0].lower()

    def name(self, what: str) -> str:
        """A word before the value."""
        found = _NAME.match(self._text, self._place)
        if found is None:
            raise self.error(f"expected {what}, and a value after it")
        self._place = found.end()
        return found[1]

    def value(self) -> str:
        """Up to the line's end; what begins with quotes, up to a line that ends with them."""
        text = self._text
        start = self._place
        while start < len(text) and text[start] in _BLANKS:
            start += 1
        quotes = next((each for each in ('"""', '"') if text.startswith(each, start)), "")
        least = start + 2 * len(quotes)
        place = start
        while True:
            end = _LINE_END.search(text, place)
            assert end is not None, "a text ends"
            line = text[place : end.start()].rstrip()
            closed = place + len(line)
            if not quotes or (line.endswith(quotes) and closed >= least):
                self._place = end.end()
                return text[start + len(quotes) : closed - len(quotes)]
            if end.start() == len(text):
                raise self.error("unexpected EOF: its quotes are never closed")
            place = end.end()

    def error(self, message: str) -> InvalidArgumentError:
        line = len(re.findall(r"\r\n|\r|\n", self._text[: self._start])) + 1
        return InvalidArgumentError(f"{self._source} (line {line}): {message}")


def _quoted(text: str) -> str:
    """As it must stand in a file to be read as this text."""
    if "\n" in text or "\r" in text or text != text.strip() or text.startswith(('"', "#")) or not text:
        return f'"""{text}"""'
    return text


def _parameter_text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
