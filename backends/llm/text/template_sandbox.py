"""One Jinja template that can do nothing but make a text, of bounded size, in bounded time.

The sandbox is Jinja's, which forbids reaching Python's insides and changing what the template is given. Loops and
calls count, and look at the clock; text is counted as it comes.
"""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from modelserver.backend import InvalidArgumentError

# How many loop turns and calls pass between looks at the clock.
_TURNS_PER_LOOK = 256
_BUDGET = "_render_budget"


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    """Of one rendering: its time, the characters of its text, and of any string made on the way."""

    seconds: float = 5.0
    num_characters: int = 16 * 2**20


class LimitError(Exception):
    """A rendering went past a limit."""


class Budget:
    """The remaining budget of one rendering."""

    def __init__(self, limits: TemplateLimits) -> None:
        self._limits = limits
        self._deadline = time.monotonic() + limits.seconds
        self._num_turns = 0
        self._num_characters = 0

    def turn(self) -> None:
        self._num_turns += 1
        if self._num_turns % _TURNS_PER_LOOK == 0 and time.monotonic() > self._deadline:
            raise LimitError(f"takes longer than {self._limits.seconds:g} s")

    def give(self, text: str) -> None:
        self._num_characters += len(text)
        self.check_size(self._num_characters)

    def check_size(self, num_characters: int) -> None:
        if num_characters > self._limits.num_characters:
            raise LimitError(f"makes more than {self._limits.num_characters} characters")


class _CountedLoops(CodeGenerator):
    """Wraps what each `for` goes through, so that its turns are counted."""

    def visit_Template(self, node: nodes.Template, frame: Frame | None = None) -> None:  # noqa: N802  # jinja's name
        # Before anything is visited: the generator collects the filters' names of a block first.
        for loop in list(node.find_all(nodes.For)):
            loop.iter = nodes.Filter(loop.iter, "_counted", [], [], None, None, lineno=loop.lineno)
        super().visit_Template(node, frame)


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's text for training; its body is text like any other."""

    tags = {"generation"}  # noqa: RUF012  # jinja's attribute

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(lineno)

    def _body(self, caller: Macro) -> str:
        return caller()


class _Environment(ImmutableSandboxedEnvironment):
    code_generator_class = _CountedLoops
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, max_characters: int) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        self._max_characters = max_characters
        self.filters["tojson"] = _to_json
        self.filters["_counted"] = _counted
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def call(
        __self,  # noqa: N805  # a template may pass `self` as a keyword
        __context: Context,
        __obj: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        budget = __context.get(_BUDGET)
        if budget is not None:
            budget.turn()
        result = super().call(__context, __obj, *args, **kwargs)
        if budget is not None and isinstance(result, str):
            budget.check_size(len(result))
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Refuse before it is made what would be too large."""
        if operator == "*" and isinstance(left, (str, list)) and isinstance(right, int):
            self._check(len(left) * right)
        elif operator == "*" and isinstance(right, (str, list)) and isinstance(left, int):
            self._check(len(right) * left)
        elif operator == "+" and isinstance(left, (str, list)) and isinstance(right, (str, list)):
            self._check(len(left) + len(right))
        elif operator == "**" and isinstance(right, int):
            self._check(right)
        return super().call_binop(context, operator, left, right)

    def _check(self, size: int) -> None:
        if size > self._max_characters:
            raise LimitError(f"makes a value of {size} characters; {self._max_characters} may be")


@jinja2.pass_context
def _counted(context: Context, iterable: Iterable[Any]) -> Iterable[Any]:
    """The same items; a list stays as long as it says it is."""
    budget = context.get(_BUDGET)
    return _CountedItems(iterable, budget.turn) if budget is not None else iterable


class _CountedItems:
    """Iterates over something, and calls something else before each item."""

    def __init__(self, items: Iterable[Any], before_each: Callable[[], None]) -> None:
        self._items = items
        self._before_each = before_each

    def __len__(self) -> int:
        return len(self._items)  # type: ignore[arg-type]  # TypeError where the items have no length, as without us

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            self._before_each()
            yield item


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """transformers' filter: Jinja's own escapes characters of HTML, which models have not learned."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _reads_content_parts(tree: nodes.Template) -> bool:
    """Whether a template goes through the parts of a message's content: `for part in message['content']`."""
    for loop in tree.find_all(nodes.For):
        for access in (loop.iter, *loop.iter.find_all((nodes.Getitem, nodes.Getattr))):
            if isinstance(access, nodes.Getattr) and access.attr == "content":
                return True
            if (
                isinstance(access, nodes.Getitem)
                and isinstance(access.arg, nodes.Const)
                and access.arg.value == "content"
            ):
                return True
    return False


class SandboxedTemplate:
    """A compiled template. `reads_content_parts`: content may stay a list of parts, the template goes through it.

    `needs_content_parts`: it does so without asking whether content is a string, whose text it would leave out.
    """

    def __init__(self, source: str, limits: TemplateLimits) -> None:
        self._limits = limits
        environment = _Environment(limits.num_characters)
        try:
            tree = environment.parse(source)
            self.reads_content_parts = _reads_content_parts(tree)
            asks_for_strings = any(test.name == "string" for test in tree.find_all(nodes.Test))
            self.needs_content_parts = self.reads_content_parts and not asks_for_strings
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise InvalidArgumentError(f"the model's chat template, line {error.lineno}: {error.message}") from error

    def render(self, variables: dict[str, Any]) -> str:
        """The text. Raises InvalidArgumentError with the template's own error, or for a violation of the sandbox."""
        budget = Budget(self._limits)
        pieces = []
        try:
            for piece in self._template.generate({**variables, _BUDGET: budget}):
                budget.give(piece)
                pieces.append(piece)
        except LimitError as error:
            raise InvalidArgumentError(f"the model's chat template {error}: send fewer or shorter messages") from error
        except SecurityError as error:
            raise InvalidArgumentError(f"the model's chat template does what is not allowed: {error}") from error
        except jinja2.TemplateError as error:
            raise InvalidArgumentError(f"the model's chat template refuses these messages: {error}") from error
        except (TypeError, ValueError, LookupError, ArithmeticError, RecursionError, AttributeError) as error:
            raise InvalidArgumentError(
                f"the model's chat template fails on these messages: {type(error).__name__}: {error}"
            ) from error
        return "".join(pieces)
