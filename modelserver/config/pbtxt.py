"""Reads and writes config.pbtxt: protobuf's text format, reporting every mistake at once with its position."""

from __future__ import annotations

from dataclasses import dataclass

from google.protobuf import text_encoding, text_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from modelserver.config import literal
from modelserver.config.literal import Lines, Token, tokenize
from modelserver.config.message import config_from_message, config_to_message
from modelserver.config.problem import Locations, Problem, Repair, error_of, key_path
from modelserver.config.schema import ModelConfig
from modelserver.core.spelling import did_you_mean, suggest_field
from modelserver.pb import model_config_pb2 as pb

# Far above any real config (a few kB); parsing takes time and memory in proportion.
MAX_CHARACTERS = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class ParsedConfig:
    """A config and where its fields are in the text.

    `problems` are mistakes in the text that were skipped to read the config; `doubtful` are the paths of fields
    whose values are unreliable because of them.
    """

    config: ModelConfig
    locations: Locations
    problems: tuple[Problem, ...] = ()
    doubtful: frozenset[str] = frozenset()


def parse_pbtxt(text: str, source: str = "config.pbtxt") -> ParsedConfig:
    """Parse a model config; raises ConfigError with every problem. Does not check the meaning of values."""
    parsed = read_pbtxt(text, source)
    if parsed.problems:
        raise error_of(parsed.problems, source)
    return parsed


def read_pbtxt(text: str, source: str = "config.pbtxt") -> ParsedConfig:
    """As `parse_pbtxt`, but reads past mistakes where it can; raises ConfigError where it cannot."""
    if len(text) > MAX_CHARACTERS:
        too_long = f"expected at most {MAX_CHARACTERS} characters, got {len(text)}"
        raise error_of([Problem(source, None, None, "", too_long)], source)
    text = text.removeprefix("\ufeff")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        line, column = Lines(text).position(error.start)
        raise error_of([Problem(source, line, column, "", "expected UTF-8 text")], source) from None
    locations, problems, repair = locate(text, pb.DESCRIPTOR.message_types_by_name["ModelConfig"], source)
    if problems and not repair.is_possible:
        raise error_of(problems, source)
    message = pb.ModelConfig()
    try:
        if problems:  # Merge takes a field twice: misspelt and spelt well
            text_format.Merge(repair.apply(text), message)
        else:
            text_format.Parse(text, message)
    except text_format.ParseError as error:
        if problems:
            raise error_of(problems, source) from None
        # The walk above accepts a little more than protobuf, whose parser decides.
        problem = Problem(source, error.GetLine(), error.GetColumn(), "", _reason(error))
        raise error_of([problem], source) from None
    config = config_from_message(message, source=source)
    return ParsedConfig(config, locations, tuple(problems), frozenset(repair.doubtful))


def _reason(error: text_format.ParseError) -> str:
    """The text of a parse error without its position."""
    line, column = error.GetLine(), error.GetColumn()
    return str(error).removeprefix(f"{line}:{column} : ")


def config_text(config: ModelConfig, *, comments: tuple[str, ...] = ()) -> str:
    """A config as text, with `comments` as lines in front. Raises ConfigError for values that no config can hold."""
    lines = [f"# {line}".rstrip() for comment in comments for line in comment.splitlines()]
    text = text_format.MessageToString(config_to_message(config), as_utf8=True)
    return "\n".join([*lines, text]) if lines else text


# Walks a config.pbtxt along the proto, recording the position of each field and every mistake.
#
# It continues after a mistake, so that one run shows them all; protobuf's own parser stops at the first.
# Protobuf parses the values: this module only checks whether a field may have them.

MAX_PROBLEMS = 100
_CLOSING = {"{": "}", "<": ">", "[": "]"}
_VALUE_STARTS = (":", "{", "<", "[")


def locate(text: str, descriptor: Descriptor, source: str) -> tuple[Locations, list[Problem], Repair]:
    """Positions of all fields of the text, its problems, at most MAX_PROBLEMS, and the edits that remove them."""
    walker = _Walker(text, source)
    walker.message(descriptor, "", None)
    walker.repair.is_possible &= walker.num_excused == len(walker.problems) < MAX_PROBLEMS
    return Locations(walker.positions), walker.problems[:MAX_PROBLEMS], walker.repair


class _Walker:
    def __init__(self, text: str, source: str) -> None:
        tokens = tokenize(text)
        self._tokens = [token for token in tokens if token.kind != "junk"]
        self._lines = Lines(text)
        self._source = source
        self._index = 0
        self._root: Descriptor | None = None
        self._open: list[Token] = []  # brackets that are not closed yet, the outermost first
        self.positions: dict[str, tuple[int, int]] = {}
        self.problems: list[Problem] = []
        self.repair = Repair()
        self.num_excused = 0  # problems that the edits of `repair` remove
        for token in tokens:
            if token.kind == "junk":
                self._report(token, "", f"unexpected {literal.shown(token)}")

    @property
    def _token(self) -> Token:
        return self._tokens[self._index]

    def _next(self) -> Token:
        token = self._tokens[self._index]
        if token.kind != "end":
            self._index += 1
        return token

    def _skip(self, *texts: str) -> bool:
        if self._token.kind == "mark" and self._token.text in texts:
            self._index += 1
            return True
        return False

    def message(self, descriptor: Descriptor, path: str, opening: Token | None, key: str | None = None) -> None:
        """Walk the fields of one message up to and with its closing brace, or to the end of the text.

        `key` is the path of a map entry, whose fields `key` and `value` have no names of their own.
        """
        self._root = self._root or descriptor
        seen: dict[str, int] = {}
        oneofs: dict[str, str] = {}
        while not self._closes(path, opening):
            if self._token.kind != "name":
                self._syntax_error(path)
                continue
            num_others = len(self.problems) - self.num_excused
            name = self._next()
            field = descriptor.fields_by_name.get(name.text)
            inner = key if key is not None else f"{path}.{name.text}" if path else name.text
            if field is None:
                self._unknown_field(name, descriptor, inner if key is None else f"{key}.{name.text}")
                self._skip_value()
            else:
                self.positions.setdefault(inner, self._lines.position(name.offset))
                if not field.is_repeated:
                    self._check_single(field, name, seen, oneofs, inner)
                self._field(field, name, inner, seen)
            self._skip(",", ";")
            if len(self.problems) - self.num_excused > num_others:
                self._excuse(name, field, descriptor, inner, len(self.problems) - num_others)

    def _excuse(
        self, name: Token, field: FieldDescriptor | None, descriptor: Descriptor, path: str, num_excused: int
    ) -> None:
        """Repair a field in whose walk problems were found that no inner field accounts for."""
        if field is not None and field.message_type is not None and field.is_repeated:
            self.repair.is_possible = False  # without it, the paths of the following entries would change
            return
        suggestion = None if field else suggest_field(name.text, descriptor.fields_by_name)
        if suggestion:
            self.repair.rename(name.offset, name.offset + len(name.text), suggestion)
            self.positions.setdefault(path.removesuffix(name.text) + suggestion, self._lines.position(name.offset))
        else:
            self.repair.cut(name.offset, self._token.offset, path)
        self.num_excused = num_excused

    def _opens(self) -> Token:
        opening = self._next()
        self._open.append(opening)
        return opening

    def _closes(self, path: str, opening: Token | None) -> bool:
        """Consume the end of a message or list; report it if it is the wrong bracket."""
        token = self._token
        if token.kind == "mark" and token.text in ("}", ">", "]"):
            if opening is None:
                self._index += 1
                self._report(token, "", f"'{token.text}' closes nothing")
                return False
            if token.text == _CLOSING[opening.text]:
                self._index += 1
            elif any(token.text == _CLOSING[outer.text] for outer in self._open[:-1]):
                self._never_closed(opening, path)
            else:
                self._index += 1
                line, column = self._lines.position(opening.offset)
                what = f"expected '{_CLOSING[opening.text]}' to close the '{opening.text}' of {line}:{column}"
                self._report(token, path, f"{what}, got '{token.text}'")
        elif token.kind != "end":
            return False
        elif opening is not None:
            self._never_closed(opening, path)
        if opening is not None:
            self._open.pop()
        return True

    def _never_closed(self, opening: Token, path: str) -> None:
        self._report(opening, path, f"'{opening.text}' is never closed", f"add a '{_CLOSING[opening.text]}'")

    def _syntax_error(self, path: str) -> None:
        """Report the current token, then go to where a field may begin."""
        token = self._token
        hint = "this file is not JSON: write its fields without enclosing braces" if token.offset == 0 else None
        self._report(
            token, path, f"expected a field name, got {literal.shown(token)}", hint if token.text == "{" else None
        )
        while self._token.kind != "end" and self._token.text not in ("}", ">"):
            if self._token.kind == "name" and self._tokens[self._index + 1].text in _VALUE_STARTS:
                return
            if self._token.text in ("{", "<", "["):
                self._skip_group()
            else:
                self._index += 1

    def _check_single(
        self, field: FieldDescriptor, name: Token, seen: dict[str, int], oneofs: dict[str, str], path: str
    ) -> None:
        if field.name in seen:
            line, column = self._lines.position(seen[field.name])
            self._report(name, path, f"given twice, first at {line}:{column}")
            return
        seen[field.name] = name.offset
        oneof = field.containing_oneof
        if oneof is None:
            return
        first = oneofs.setdefault(oneof.name, field.name)
        if first != field.name:
            members = ", ".join(member.name for member in oneof.fields)
            self._report(name, path, f"cannot be set beside {first}: only one of {members} may be")

    def _field(self, field: FieldDescriptor, name: Token, path: str, seen: dict[str, int]) -> None:
        is_message = field.message_type is not None
        if not self._skip(":") and not is_message:
            self._report(self._token, path, f"expected ':' after {name.text}, got {literal.shown(self._token)}")
        if self._token.text == "[" and self._token.kind == "mark":
            if field.is_repeated:
                self._list(field, path, seen)
            else:
                self._report(self._token, path, f"{_expected(field)}, got a list")
                self._skip_group()
            return
        self._item(field, name, path, seen)

    def _list(self, field: FieldDescriptor, path: str, seen: dict[str, int]) -> None:
        opening = self._opens()
        while not self._closes(path, opening):
            if self._starts_field():
                self._never_closed(opening, path)
                self._open.pop()
                return
            before = self._index
            self._item(field, self._token, path, seen)
            if self._skip(","):
                if self._token.text == "]":
                    self._report(self._token, path, f"{_expected(field)} after the comma, got ']'")
            elif self._token.kind != "end" and self._token.text not in ("]", "}", ">"):
                self._report(self._token, path, f"expected ',' or ']', got {literal.shown(self._token)}")
                self._index += self._index == before  # skip the token, whatever its kind

    def _item(self, field: FieldDescriptor, at: Token, path: str, seen: dict[str, int]) -> None:
        """One value of a field: the only one, or the next of a repeated field or map."""
        entry = field.message_type
        is_map = entry is not None and entry.GetOptions().map_entry
        if field.is_repeated and not is_map:
            index = seen.get(field.name, 0)
            seen[field.name] = index + 1
            path = f"{path}[{index}]"
            self.positions.setdefault(path, self._lines.position(at.offset))
        if entry is None:
            self._scalar(field, path)
        elif self._token.kind == "mark" and self._token.text in ("{", "<"):
            if is_map:
                path = key_path(path, self._map_key(entry))
                self.positions.setdefault(path, self._lines.position(at.offset))
            self.message(entry, path, self._opens(), path if is_map else None)
        else:
            self._report(
                self._token, path, f"{_expected(field)}, got {literal.shown(self._token)}", _message_hint(field, at)
            )
            self._skip_scalar()

    def _map_key(self, entry: Descriptor) -> str | int:
        """The key of the map entry that begins at the current token, wherever in the entry it stands."""
        depth = 0
        for index in range(self._index, len(self._tokens) - 2):
            token = self._tokens[index]
            if token.kind == "mark":
                depth += (token.text in "{<[") - (token.text in "}>]")
                if depth == 0:
                    break
            elif depth == 1 and token.text == "key" and token.kind == "name" and self._tokens[index + 1].text == ":":
                return literal.key_of(entry, self._tokens[index + 2])
        return literal.default_key(entry)

    def _scalar(self, field: FieldDescriptor, path: str) -> None:
        token = self._token
        if token.kind == "end" or token.text in ("}", ">", "]", ",", ";"):
            self._report(token, path, f"{literal.expected(field)}, got {literal.shown(token)}")
            return
        if self._starts_field() and self._is_on_new_line():
            self._report(token, path, f"{literal.expected(field)}, got the next field, {token.text}")
            return
        if token.kind == "mark":
            self._report(token, path, f"{literal.expected(field)}, got {literal.shown(token)}")
            self._skip_value()
            return
        strings = self._skip_scalar()
        if field.cpp_type == FieldDescriptor.CPPTYPE_STRING and token.kind == "string":
            for part in strings:
                self._check_string(part, path)
            return
        problem = literal.scalar_problem(field, token)
        if problem:
            self._report(token, path, *problem)

    def _check_string(self, token: Token, path: str) -> None:
        if len(token.text) < 2 or token.text[-1] != token.text[0]:
            self._report(token, path, f"the string {literal.shown(token)} has no closing quote")
            return
        try:
            text_encoding.CUnescape(token.text[1:-1]).decode()
        except ValueError as error:
            self._report(token, path, f"expected a string, got {literal.shown(token)}: {error}")

    def _skip_scalar(self) -> list[Token]:
        """Pass one scalar value; adjacent strings are one."""
        parts = [self._next()] if self._token.kind != "mark" else []
        while parts and parts[0].kind == "string" and self._token.kind == "string":
            parts.append(self._next())
        return parts

    def _skip_value(self) -> None:
        """Pass the value of an unknown field."""
        self._skip(":")
        if self._token.kind == "mark":
            if self._token.text in _CLOSING:
                self._skip_group()
        else:
            self._skip_scalar()

    def _skip_group(self) -> None:
        """Pass a bracket and everything up to its closing bracket."""
        opening, depth = self._token, 0
        while self._token.kind != "end":
            token = self._next()
            if token.kind == "mark":
                depth += (token.text in "{<[") - (token.text in "}>]")
                if depth == 0:
                    return
        self._never_closed(opening, "")

    def _starts_field(self) -> bool:
        return self._token.kind == "name" and self._tokens[self._index + 1].text in _VALUE_STARTS

    def _is_on_new_line(self) -> bool:
        previous = self._tokens[self._index - 1]
        return self._lines.position(previous.offset)[0] < self._lines.position(self._token.offset)[0]

    def _unknown_field(self, name: Token, descriptor: Descriptor, path: str) -> None:
        is_entry = descriptor.GetOptions().map_entry
        title = "a map entry" if is_entry else descriptor.full_name.removeprefix("inference.")
        self._report(name, path, f"unknown field of {title}", self._field_hint(name.text, descriptor))

    def _field_hint(self, name: str, descriptor: Descriptor) -> str | None:
        """A hint: the place of a misplaced field, or the likely name of a misspelt one."""
        root = self._root
        owners = [
            f"{field.name} {{ {name} }}"
            for field in descriptor.fields
            if field.message_type is not None and name in field.message_type.fields_by_name
        ]
        suggestion = suggest_field(name, [field.name for field in descriptor.fields])
        if suggestion is None and 0 < len(owners) <= 3 and not descriptor.GetOptions().map_entry:
            return did_you_mean(" or ".join(owners))
        if root is not None and descriptor is not root and name in root.fields_by_name:
            return f"{name} is a field of {root.name}: is a '}}' missing before it?"
        return did_you_mean(suggestion)

    def _report(self, token: Token, path: str, message: str, hint: str | None = None) -> None:
        line, column = self._lines.position(token.offset)
        self.problems.append(Problem(self._source, line, column, path, message, hint))
        if len(self.problems) >= MAX_PROBLEMS:
            self._index = len(self._tokens) - 1  # enough problems: go to the end


def _expected(field: FieldDescriptor) -> str:
    if field.message_type is not None:
        return "expected a message in braces"
    return literal.expected(field)


def _message_hint(field: FieldDescriptor, at: Token) -> str | None:
    return f"write {at.text} {{ }}" if at.text == field.name else None
