"""Executes templates of Go's text/template, as far as chat templates use it, in bounded time and size.

Values are those of JSON, `Record` (a struct of Go) and `JsonMap`. A template can reach nothing but these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .go_functions import FUNCTIONS, FunctionError, Record, is_true, text_of
from .go_nodes import Action, Argument, Body, Branch, Chain, Constant, Function, Include, Leave, Pipe, Statement, Text
from .go_syntax import TemplateError, error_at, parse
from .template_sandbox import Budget, LimitError, TemplateLimits

_MAX_DEPTH = 100
_NO_VALUE = "<no value>"
# Functions that do not look at their other arguments once the result is known, and whether a true one ends them.
_SHORT = {"and": False, "or": True}


class GoTemplate:
    """A parsed template. Raises TemplateError, with line and column, for what is wrong with it."""

    def __init__(self, source: str, limits: TemplateLimits) -> None:
        self.source = source
        self.body, self.defined = parse(source, FUNCTIONS.keys() | _SHORT.keys())
        self._limits = limits

    def execute(self, data: Mapping[str, Any], body: Body | None = None) -> str:
        """The text for `data`, or that of another body of this template. Raises TemplateError and LimitError."""
        run = _Run(self.source, self.defined, self._limits, dict(data))
        run.execute(self.body if body is None else body)
        return "".join(run.pieces)


class _Run:
    """One execution: the dot, the variables (the newest last) and the text so far."""

    def __init__(self, source: str, defined: Mapping[str, Body], limits: TemplateLimits, data: Any) -> None:
        self.pieces: list[str] = []
        self._source = source
        self._defined = defined
        self._limits = limits
        self._budget = Budget(limits)
        self._depth = 0
        self._dot: Any = data
        self._variables: list[tuple[str, Any]] = [("$", data)]

    def execute(self, body: Body) -> str:
        """Returns "break" or "continue" where the turn of a loop ends before the body, else an empty text."""
        num_variables = len(self._variables)
        left = ""
        for statement in body:
            self._budget.turn()
            left = self._execute_one(statement)
            if left:
                break
        del self._variables[num_variables:]
        return left

    def _execute_one(self, statement: Statement) -> str:
        match statement:
            case Text(text=text):
                self._write(text)
            case Action(pipe=pipe):
                value = self._pipe(pipe)
                if not pipe.variables:
                    self._write(_NO_VALUE if value is None else text_of(value))
            case Branch(kind="range"):
                self._range(statement)
            case Branch():
                return self._choose(statement)
            case Leave(kind=kind):
                return kind
            case Include():
                self._include(statement)
        return ""

    def _write(self, text: str) -> None:
        self._budget.give(text)
        self.pieces.append(text)

    def _choose(self, branch: Branch) -> str:
        num_variables, dot = len(self._variables), self._dot
        value = self._pipe(branch.pipe)
        if is_true(value):
            if branch.kind == "with":
                self._dot = value
            left = self.execute(branch.body)
            self._dot = dot
        else:
            left = self.execute(branch.otherwise)
        del self._variables[num_variables:]
        return left

    def _range(self, branch: Branch) -> None:
        num_variables, dot = len(self._variables), self._dot
        pairs = self._pairs(self._value(branch.pipe), branch.position)
        if not pairs:
            self.execute(branch.otherwise)
        for key, item in pairs:
            self._budget.turn()
            del self._variables[num_variables:]
            self._set(branch.pipe, (item,) if len(branch.pipe.variables) == 1 else (key, item))
            self._dot = item
            if self.execute(branch.body) == "break":
                break
        self._dot = dot
        del self._variables[num_variables:]

    def _pairs(self, value: Any, position: int) -> Sequence[tuple[Any, Any]]:
        if value is None:
            return ()
        if isinstance(value, list):
            return list(enumerate(value))
        if isinstance(value, dict):
            return sorted(value.items())
        if isinstance(value, int) and not isinstance(value, bool):
            self._budget.check_size(value)
            return [(number, number) for number in range(value)]
        raise self._error(position, f"range can't iterate over {text_of(value):.60}")

    def _include(self, include: Include) -> None:
        body = self._defined.get(include.name)
        if body is None:
            raise self._error(include.position, f'template "{include.name:.60}" not defined')
        value = None if include.pipe is None else self._pipe(include.pipe)
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise self._error(include.position, f"more than {_MAX_DEPTH} templates call each other")
        outer = self._dot, self._variables
        self._dot, self._variables = value, [("$", value)]
        self.execute(body)
        self._dot, self._variables = outer
        self._depth -= 1

    # Values.

    def _pipe(self, pipe: Pipe) -> Any:
        """The value of a pipeline, which its variable gets as well."""
        value = self._value(pipe)
        self._set(pipe, (value,))
        return value

    def _value(self, pipe: Pipe) -> Any:
        value: Any = None
        for number, command in enumerate(pipe.commands):
            value = self._command(command, (value,) if number else ())
        return value

    def _set(self, pipe: Pipe, values: Sequence[Any]) -> None:
        for name, value in zip(pipe.variables, values, strict=False):
            if not pipe.is_assignment:
                self._variables.append((name, value))
                continue
            place = max(place for place, (known, _) in enumerate(self._variables) if known == name)
            self._variables[place] = (name, value)

    def _command(self, command: tuple[Argument, ...], before: tuple[Any, ...]) -> Any:
        head = command[0]
        if not isinstance(head, Function):
            if before:
                raise self._error(head.position, "a value that is not a function takes no arguments")
            return self._argument(head)
        if head.name in _SHORT:
            return self._short(head, command[1:], before)
        arguments = [self._argument(argument) for argument in command[1:]]
        return self._call(head, [*arguments, *before])

    def _short(self, function: Function, arguments: tuple[Argument, ...], before: tuple[Any, ...]) -> Any:
        """`and` and `or`: the first argument that settles it, else the last one."""
        if not arguments and not before:
            raise self._error(function.position, f"wrong number of args for {function.name}: want at least 1 got 0")
        value: Any = None
        for argument in arguments:
            value = self._argument(argument)
            if is_true(value) is _SHORT[function.name]:
                return value
        return before[0] if before else value

    def _call(self, function: Function, arguments: list[Any]) -> Any:
        self._budget.turn()
        called = FUNCTIONS[function.name]
        try:
            value = called(*arguments)
        except FunctionError as error:
            raise self._error(function.position, f"error calling {function.name}: {error}") from None
        except TypeError:  # all that functions raise of themselves is a FunctionError
            message = f"wrong number of args for {function.name}: got {len(arguments)}"
            raise self._error(function.position, message) from None
        if isinstance(value, str):
            self._budget.check_size(len(value))
        return value

    def _argument(self, argument: Argument) -> Any:
        match argument:
            case Constant(value=value):
                return value
            case Function():
                return self._command((argument,), ())
            case Chain(base=base):
                value = self._base(base)
                for number, name in enumerate(argument.fields):
                    value = self._field(value, name, argument.position, is_first=number == 0 and base is None)
                return value

    def _base(self, base: str | Pipe | None) -> Any:
        if base is None:
            return self._dot
        if isinstance(base, Pipe):
            return self._pipe(base)
        return next(value for name, value in reversed(self._variables) if name == base)

    def _field(self, value: Any, name: str, position: int, *, is_first: bool) -> Any:
        if isinstance(value, dict):
            return value.get(name)
        if isinstance(value, Record) and name in value.fields:
            return value.fields[name]
        if value is None and is_first:
            return None
        if value is None:
            raise self._error(position, f"nil pointer evaluating .{name}")
        kind = value.kind if isinstance(value, Record) else type(value).__name__
        raise self._error(position, f"can't evaluate field {name} in type {kind}")

    def _error(self, position: int, message: str) -> TemplateError:
        return error_at(self._source, position, message)


def check_limits(error: LimitError | RecursionError) -> TemplateError:
    """The error of a rendering that went past its limits."""
    return TemplateError(f"the rendering {error}" if isinstance(error, LimitError) else "it is nested too deeply")
