"""The tree of a template in the language of Go's text/template, and what can be told from it without executing it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """`position` is where it begins in the source."""

    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant(Node):
    value: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain(Node):
    """Fields of something: of the dot where `base` is None, else of a variable ("$x") or of a pipeline.

    Without fields it is the thing itself.
    """

    base: str | Pipe | None
    fields: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Function(Node):
    name: str


Argument = Constant | Chain | Function


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipe(Node):
    """Commands, each of which gets the value of the one before it as its last argument. `variables` get the value."""

    commands: tuple[tuple[Argument, ...], ...]
    variables: tuple[str, ...] = ()
    is_assignment: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Text(Node):
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Action(Node):
    pipe: Pipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch(Node):
    """`kind` is "if", "with" or "range"."""

    kind: str
    pipe: Pipe
    body: Body
    otherwise: Body = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave(Node):
    """`kind` is "break" or "continue"."""

    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Include(Node):
    name: str
    pipe: Pipe | None


Statement = Text | Action | Branch | Leave | Include
Body = tuple[Statement, ...]


# What is known of a tree without executing it.


def names_in(body: Body) -> Iterator[str]:
    """The fields and variables that a body reads."""
    for statement in body:
        if isinstance(statement, Action | Branch) or (isinstance(statement, Include) and statement.pipe is not None):
            assert statement.pipe is not None, "checked above"
            yield from names_in_pipe(statement.pipe)
        if isinstance(statement, Branch):
            yield from names_in(statement.body)
            yield from names_in(statement.otherwise)


def names_in_pipe(pipe: Pipe) -> Iterator[str]:
    """The fields and variables that a pipeline reads."""
    for argument in (argument for command in pipe.commands for argument in command):
        if isinstance(argument, Chain):
            if isinstance(argument.base, str):
                yield argument.base
            elif argument.base is not None:
                yield from names_in_pipe(argument.base)
            yield from argument.fields


def cut_after(body: Body, name: str) -> tuple[Body, bool]:
    """The body up to its first action that reads the field `name`, and whether there is one."""
    kept: list[Statement] = []
    for statement in body:
        is_found = False
        if isinstance(statement, Branch):
            inner, is_found = cut_after(statement.body, name)
            otherwise: Body = ()
            if not is_found:
                otherwise, is_found = cut_after(statement.otherwise, name)
            statement = replace(statement, body=inner, otherwise=otherwise)
        elif isinstance(statement, Action):
            is_found = any(
                isinstance(argument, Chain) and argument.base is None and name in argument.fields
                for command in statement.pipe.commands
                for argument in command
            )
        kept.append(statement)
        if is_found:
            return tuple(kept), True
    return tuple(kept), False
