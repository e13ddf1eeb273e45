"""Function calls as models write them in JSON, in Python, and in tags: their name, and their arguments as JSON."""

from __future__ import annotations

import ast
import json
import warnings
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """`arguments` is the text of a JSON object."""

    name: str
    arguments: str


class NotACallError(ValueError):
    """The text looked like a call and is none."""


def call_of(item: Any) -> FunctionCall:
    """The call that an object of name and arguments is."""
    if not isinstance(item, dict):
        raise NotACallError
    name = item.get("name")
    arguments: Any = next((item[key] for key in ("arguments", "parameters") if key in item), {})
    if isinstance(arguments, str):
        arguments = loads(arguments)
    return make_call(name, {} if arguments is None else arguments)


def make_call(name: Any, arguments: Any) -> FunctionCall:
    """A call of these. Raises NotACallError, as all functions here do, for what cannot be one."""
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise NotACallError
    return FunctionCall(name.encode("utf-8", "replace").decode(), _dumps(arguments))


def _dumps(arguments: dict[str, Any]) -> str:
    """As JSON of which every character can be sent. Infinity, which JSON does not have, makes it no call."""
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which models write as an escape
        return json.dumps(arguments)
    except (ValueError, RecursionError):
        raise NotACallError from None
    return text


def loads(text: str) -> Any:
    """What a JSON text says."""
    try:
        # Models write line breaks into strings as they are.
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        raise NotACallError from None


def calls_in_python(text: str) -> list[FunctionCall]:
    """The calls in a list as Python writes it, with literals for arguments."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in strings that Python does not know
            tree = ast.parse(text, mode="eval").body
        if not isinstance(tree, ast.List):
            raise NotACallError
        return [_call_in_python(node) for node in tree.elts]
    except (SyntaxError, ValueError, RecursionError, MemoryError, TypeError):
        raise NotACallError from None


def _call_in_python(node: ast.expr) -> FunctionCall:
    if not isinstance(node, ast.Call) or node.args:
        raise NotACallError
    arguments: dict[Any, Any] = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords}
    if None in arguments:
        raise NotACallError
    return make_call(ast.unparse(node.func), arguments)


def typed(text: str, schema: Any) -> Any:
    """The value of an argument in markup, which does not tell a string from a number: the schema does."""
    kind = schema.get("type") if isinstance(schema, dict) else None
    if kind == "string":
        return text
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return text
