"""The syntax of Go's text/template: source -> the tree of `go_nodes`. Nothing is executed here."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from modelserver.backend import InvalidArgumentError

from .go_nodes import Action, Argument, Body, Branch, Chain, Constant, Function, Include, Leave, Pipe, Statement, Text

_MAX_SOURCE_LEN = 1 << 20
_MAX_DEPTH = 100
_BLANKS = " \t\r\n"
_OPEN, _CLOSE = "{{", "}}"
_KEYWORDS = frozenset({"block", "break", "continue", "define", "else", "end", "if", "range", "template", "with"})
_END = re.compile(r"(?:[ \t\r\n]+-)?\}\}")
_TOKEN = re.compile(
    r"""(?P<text>"(?:[^"\\\n]|\\.)*"|`[^`]*`)
    |(?P<character>'(?:[^'\\\n]|\\.)+')
    |(?P<number>[+-]?(?:0[xX][0-9a-fA-F_]+|0[bB][01_]+|0[oO][0-7_]+|(?:\d[\d_]*(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?))
    |(?P<field>\.[^\W\d]\w*)
    |(?P<variable>\$\w*)
    |(?P<word>[^\W\d]\w*)
    |(?P<mark>:=|[=|(),.])""",
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([0-7]{3})|(.))", re.DOTALL)
_ESCAPED = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "\\": "\\", '"': '"', "'": "'"}


class TemplateError(InvalidArgumentError):
    """A template that is wrong, or cannot go on; the message begins with line and column."""


def error_at(source: str, position: int, message: str) -> TemplateError:
    line = source.count("\n", 0, position) + 1
    column = position - (source.rfind("\n", 0, position) + 1) + 1
    return TemplateError(f"line {line}, column {column}: {message}")


@dataclass(frozen=True, slots=True)
class _Token:
    """`kind` is a group of `_TOKEN`, or "end" of an action. `is_apart`: blanks precede it."""

    kind: str
    text: str
    position: int
    is_apart: bool


def parse(source: str, functions: Collection[str]) -> tuple[Body, dict[str, Body]]:
    """The template, and those that it defines, by name. Raises TemplateError."""
    if len(source) > _MAX_SOURCE_LEN:
        raise TemplateError(f"line 1, column 1: the template has more than {_MAX_SOURCE_LEN} characters")
    parser = _Parser(source, functions)
    body, end = parser.body()
    if end is not None:
        raise error_at(source, end.position, f"unexpected {{{{{end.text}}}}}")
    return body, parser.defined


def pieces(source: str) -> Iterator[tuple[int, str, list[_Token] | None]]:
    """The texts (trimmed) and the tokens of the actions of a template, with their positions."""
    place, trims = 0, False
    while True:
        start = source.find(_OPEN, place)
        text = source[place:] if start < 0 else source[place:start]
        if trims:
            text = text.lstrip(_BLANKS)
        inner = start + len(_OPEN)
        if start >= 0 and source[inner : inner + 1] == "-" and source[inner + 1 : inner + 2] in tuple(_BLANKS):
            text = text.rstrip(_BLANKS)
            inner += 1
        if text:
            yield place, text, None
        if start < 0:
            return
        place, tokens = _action(source, start, inner)
        trims = source[place - 3] == "-" and source[place - 4] in _BLANKS
        if tokens is not None:
            yield start, "", tokens


def _action(source: str, start: int, place: int) -> tuple[int, list[_Token] | None]:
    """Where an action ends, and its tokens; None for a comment."""
    begin = re.compile(r"\s*/\*").match(source, place)
    if begin is not None:
        stop = source.find("*/", begin.end())
        end = _END.match(source, stop + 2) if stop >= 0 else None
        if end is None:
            raise error_at(
                source, start, "a comment must end with */ before the action's end" if stop >= 0 else "unclosed comment"
            )
        return end.end(), None
    tokens: list[_Token] = []
    while True:
        end = _END.match(source, place)
        if end is not None:
            tokens.append(_Token("end", _CLOSE, place, True))
            return end.end(), tokens
        after = place
        while after < len(source) and source[after] in _BLANKS:
            after += 1
        if after > place and _END.match(source, after):
            place = after
            continue
        found = _TOKEN.match(source, after)
        if found is None:
            what = f"unexpected {source[after]!r} in an action" if after < len(source) else "unclosed action"
            raise error_at(source, after if after < len(source) else start, what)
        tokens.append(_Token(found.lastgroup or "", found[0], after, after > place or not tokens))
        place = found.end()


class _Parser:
    """Reads statements up to the end of their block. `defined` fills up with the templates that have names."""

    def __init__(self, source: str, functions: Collection[str]) -> None:
        self._source = source
        self._functions = functions
        self._pieces = pieces(source)
        self._tokens: list[_Token] = []
        self._next = 0
        self._variables = ["$"]
        self._depth = 0
        self._num_loops = 0
        self.defined: dict[str, Body] = {}

    def body(self) -> tuple[Body, _Token | None]:
        """Statements up to `end` or `else`, which is returned and not read further, or up to the source's end."""
        statements: list[Statement] = []
        for position, text, tokens in self._pieces:
            if tokens is None:
                statements.append(Text(position=position, text=text))
                continue
            self._tokens, self._next = tokens, 0
            first = tokens[0]
            if first.kind == "word" and first.text in ("end", "else"):
                self._next = 1
                return tuple(statements), first
            statements.extend(self._statement(first))
        return tuple(statements), None

    def _statement(self, first: _Token) -> list[Statement]:
        keyword = first.text if first.kind == "word" and first.text in _KEYWORDS else ""
        if keyword:
            self._next = 1
        if keyword in ("if", "with", "range"):
            return [self._branch(first)]
        if keyword in ("break", "continue"):
            if not self._num_loops:
                raise self._error(first, f"{{{{{keyword}}}}} outside {{{{range}}}}")
            self._expect_end()
            return [Leave(position=first.position, kind=keyword)]
        if keyword == "define":
            self._define(first)
            return []
        if keyword in ("template", "block"):
            name = self._name()
            pipe = self._pipe() if self._peek().kind != "end" or keyword == "block" else None
            self._expect_end()
            if keyword == "block":
                self._named_body(name, first)
            return [Include(position=first.position, name=name, pipe=pipe)]
        pipe = self._pipe()
        self._expect_end()
        return [Action(position=first.position, pipe=pipe)]

    def _branch(self, first: _Token) -> Branch:
        kind = first.text
        num_variables = len(self._variables)
        pipe = self._pipe(max_variables=2 if kind == "range" else 1)
        self._expect_end()
        self._num_loops += kind == "range"
        body, end = self._inner(first)
        self._num_loops -= kind == "range"
        otherwise: Body = ()
        if end.text == "else":
            following = self._peek()
            if following.kind == "word" and following.text in ("if", "with") and kind != "range":
                self._next += 1
                self._enter(following)
                otherwise = (self._branch(following),)
                self._depth -= 1
            else:
                self._expect_end()
                otherwise, last = self._inner(first)
                if last.text == "else":
                    raise self._error(last, "expected {{end}}, got {{else}}")
                self._expect_end()
        else:
            self._expect_end()
        del self._variables[num_variables:]
        return Branch(position=first.position, kind=kind, pipe=pipe, body=body, otherwise=otherwise)

    def _inner(self, first: _Token) -> tuple[Body, _Token]:
        self._enter(first)
        body, end = self.body()
        self._depth -= 1
        if end is None:
            raise self._error(first, f"{{{{{first.text}}}}} has no {{{{end}}}}")
        return body, end

    def _define(self, first: _Token) -> None:
        if self._depth:
            raise self._error(first, "{{define}} must not be inside another block")
        name = self._name()
        self._expect_end()
        self._named_body(name, first)

    def _named_body(self, name: str, first: _Token) -> None:
        outer, self._variables = self._variables, ["$"]
        num_loops, self._num_loops = self._num_loops, 0
        body, end = self._inner(first)
        if end.text == "else":
            raise self._error(end, f"unexpected {{{{else}}}} in {{{{{first.text}}}}}")
        self._expect_end()
        self._variables, self._num_loops = outer, num_loops
        self.defined[name] = body

    def _name(self) -> str:
        token = self._take()
        if token.kind != "text":
            raise self._error(token, "expected the name of a template, in quotes")
        return self._unquoted(token)

    # Pipelines.

    def _pipe(self, max_variables: int = 1, closer: str = "end") -> Pipe:
        start = self._peek()
        variables, is_assignment = self._declaration(max_variables) if closer == "end" else ((), False)
        commands: list[tuple[Argument, ...]] = []
        while True:
            commands.append(self._command(is_first=not commands))
            token = self._peek()
            if token.text == "|":
                self._next += 1
                continue
            if token.kind == closer or token.text == closer:
                break
            raise self._error(token, f"unexpected {token.text!r}")
        if not is_assignment:
            self._variables += variables
        return Pipe(position=start.position, commands=tuple(commands), variables=variables, is_assignment=is_assignment)

    def _declaration(self, max_variables: int) -> tuple[tuple[str, ...], bool]:
        """The variables before `:=` or `=`, and whether they exist already."""
        place, names = self._next, []
        while self._tokens[place].kind == "variable":
            names.append(self._tokens[place])
            mark = self._tokens[place + 1].text
            place += 2
            if mark == "," and len(names) < max_variables:
                continue
            if mark not in (":=", "="):
                break
            self._next = place
            for token in names:
                if mark == "=" and token.text not in self._variables:
                    raise self._error(token, f'undefined variable "{token.text}"')
            return tuple(token.text for token in names), mark == "="
        return (), False

    def _command(self, *, is_first: bool) -> tuple[Argument, ...]:
        arguments: list[Argument] = []
        while (token := self._peek()).kind != "end" and token.text not in ("|", ")"):
            if arguments and not token.is_apart:
                raise self._error(token, f"unexpected {token.text!r}: a blank must stand before it")
            arguments.append(self._argument())
        if not arguments:
            raise self._error(token, "missing value for a command")
        head = arguments[0]
        if isinstance(head, Constant) and not is_first:
            raise error_at(self._source, head.position, "a value cannot take what is before '|'")
        if len(arguments) > 1 and not isinstance(head, Function):
            raise error_at(self._source, head.position, "a value that is not a function takes no arguments")
        if isinstance(head, Constant) and head.value is None:
            raise error_at(self._source, head.position, "nil is not a command")
        return tuple(arguments)

    def _argument(self) -> Argument:
        token = self._take()
        match token.kind:
            case "text":
                return Constant(position=token.position, value=self._unquoted(token))
            case "character":
                return Constant(position=token.position, value=ord(self._unquoted(token)[:1] or "\0"))
            case "number":
                return Constant(position=token.position, value=self._number(token))
            case "field":
                return self._fields(token, None, (token.text[1:],))
            case "variable":
                if token.text not in self._variables:
                    raise self._error(token, f'undefined variable "{token.text}"')
                return self._fields(token, token.text)
            case "word":
                return self._word(token)
        if token.text == "(":
            self._enter(token)
            pipe = self._pipe(closer=")")
            self._depth -= 1
            self._next += 1
            return self._fields(token, pipe)
        if token.text == ".":
            return Chain(position=token.position, base=None)
        raise self._error(token, f"unexpected {token.text!r}")

    def _word(self, token: _Token) -> Argument:
        constants = {"true": True, "false": False, "nil": None}
        if token.text in constants:
            return Constant(position=token.position, value=constants[token.text])
        if token.text in _KEYWORDS:
            raise self._error(token, f"unexpected {{{{{token.text}}}}}")
        if token.text not in self._functions:
            raise self._error(token, f'function "{token.text}" not defined')
        return Function(position=token.position, name=token.text)

    def _fields(self, token: _Token, base: str | Pipe | None, fields: tuple[str, ...] = ()) -> Chain:
        while (following := self._peek()).kind == "field" and not following.is_apart:
            fields += (following.text[1:],)
            self._next += 1
        return Chain(position=token.position, base=base, fields=fields)

    # Tokens.

    def _peek(self) -> _Token:
        return self._tokens[self._next]

    def _take(self) -> _Token:
        token = self._tokens[self._next]
        if token.kind == "end":
            raise self._error(token, "unexpected end of the action")
        self._next += 1
        return token

    def _expect_end(self) -> None:
        token = self._peek()
        if token.kind != "end":
            raise self._error(token, f"unexpected {token.text!r}")

    def _enter(self, token: _Token) -> None:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise self._error(token, f"more than {_MAX_DEPTH} blocks and parentheses are inside each other")

    def _number(self, token: _Token) -> int | float:
        digits = token.text.replace("_", "")
        try:
            return int(digits, 0)
        except ValueError:
            pass
        try:
            return float(digits)
        except ValueError:
            raise self._error(token, f"bad number {token.text}") from None

    def _unquoted(self, token: _Token) -> str:
        inner = token.text[1:-1]
        if token.text[0] == "`":
            return inner.replace("\r", "")

        def character(found: re.Match[str]) -> str:
            hexadecimal = found[1] or found[2] or found[3]
            if hexadecimal or found[4]:
                code = int(hexadecimal, 16) if hexadecimal else int(found[4], 8)
                if code <= 0x10FFFF and not 0xD800 <= code < 0xE000:
                    return chr(code)
            elif found[5] in _ESCAPED:
                return _ESCAPED[found[5]]
            raise self._error(token, f"bad escape {found[0]} in a string")

        return _ESCAPE.sub(character, inner)

    def _error(self, token: _Token, message: str) -> TemplateError:
        return error_at(self._source, token.position, message)
