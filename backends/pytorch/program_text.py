"""The texts in a `.pt2` file that torch.export evaluates, and whether they contain only sizes and operators.

torch.export.load gives expressions of sizes to sympy's parser and guards to `exec`, and looks operators up by dotted
names: any of them can be a program (torch 2.13, torch/_export/serde). What torch.export writes has a narrow form, and
whatever has another is not loaded. That does not prove the rest of torch safe: serve only what you trust.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

from modelserver.backend import UnsupportedError

# Classes of sympy, and of torch.utils._sympy.functions, that stand in expressions of sizes.
_FUNCTIONS = frozenset(
    """Symbol Dummy Integer Float Rational One Zero Half NegativeOne Add Mul Pow Mod Max Min Abs Eq Equality Ne
    Unequality Le LessThan Lt StrictLessThan Ge GreaterThan Gt StrictGreaterThan And Or Not Piecewise
    ExprCondPair floor ceiling BooleanTrue BooleanFalse Infinity NegativeInfinity IntInfinity NegativeIntInfinity oo
    int_oo FloorDiv CleanDiv ModularIndexing Where PythonMod CeilToInt FloorToInt TruncToInt TruncToFloat RoundToInt
    RoundDecimal ToFloat IntTrueDiv FloatTrueDiv PowByNatural FloatPow LShift RShift Identity
    IsNonOverlappingAndDenseIndicator BitwiseFn_bitwise_and BitwiseFn_bitwise_or BitwiseFn_bitwise_xor""".split()  # noqa: SIM905  # a list would take a page
)
_OPAQUE = re.compile(r"OpaqueUnaryFn_[a-z0-9_]+")
_SIZE_NAME = re.compile(r"[suz]u?f?\d+")
# The attributes that guards read of the inputs `L`.
_METHODS = frozenset({"size", "stride", "storage_offset", "dim", "shape", "ndim"})
_GUARD_FUNCTIONS = _FUNCTIONS | {"L", "math", "min", "max", "abs"}
_NODES = (
    ast.Expression,
    ast.Call,
    ast.keyword,
    ast.Name,
    ast.Load,
    ast.Constant,
    ast.BinOp,
    ast.UnaryOp,
    ast.BoolOp,
    ast.Compare,
    ast.operator,
    ast.unaryop,
    ast.boolop,
    ast.cmpop,
    ast.Subscript,
    ast.Attribute,
    ast.Tuple,
)
_OPERATORS = (
    re.compile(r"torch\.ops\.\w+(?:\.\w+){1,2}"),
    re.compile(r"torch\._?sym_\w+"),
    re.compile(r"math\.[a-z]\w*"),
    re.compile(r"_operator\.(?!methodcaller|attrgetter|itemgetter|call|i?concat|setitem|delitem)[a-z]\w*"),
    re.compile(r"_operator\.(?:__?)?(?:and|or|not|xor|lshift|rshift)_?"),
)
_MAX_TEXT = 20_000
_MAX_TRIES = 4


def check_program_text(program: Any, *, where: str) -> None:
    """Raise UnsupportedError if a serialised program (parsed JSON) holds text beyond sizes and operators."""
    for kind, text in _texts(program):
        if not _is_plain(kind, text):
            raise UnsupportedError(f"{where} holds {kind} that could run any code: {text:.80}")


def _texts(program: Any) -> Iterator[tuple[str, str]]:
    """A text that is evaluated, and its kind."""
    waiting = [program]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting += value
        elif isinstance(value, dict):
            waiting += value.values()
            yield from (("a size", str(text)) for key, text in value.items() if key == "expr_str")
            if "target" in value and "inputs" in value:
                yield "an operator", str(value["target"])
            guards = value.get("guards_code")
            if guards is not None:
                yield from (("a guard", str(text)) for text in (guards if isinstance(guards, list) else [guards]))


def _is_plain(kind: str, text: str) -> bool:
    if kind == "an operator":
        return "__" not in text and any(form.fullmatch(text) for form in _OPERATORS)
    if len(text) > _MAX_TEXT:
        return False
    try:
        tree = _parse(text.strip())
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    names = _GUARD_FUNCTIONS if kind == "a guard" else _FUNCTIONS
    return all(_is_plain_node(node, names, is_guard=kind == "a guard") for node in ast.walk(tree))


def _parse(text: str) -> ast.AST:
    """Python 3.11 counts the depth of trees for all threads in one place, and fails when another thread makes one."""
    for _ in range(_MAX_TRIES):
        try:
            return ast.parse(text, mode="eval")
        except SystemError:
            continue
    return ast.parse(text, mode="eval")


def _is_plain_node(node: ast.AST, names: frozenset[str], *, is_guard: bool) -> bool:
    if not isinstance(node, _NODES):
        return False
    if isinstance(node, ast.Name):
        return node.id in names or bool(_OPAQUE.fullmatch(node.id) or _SIZE_NAME.fullmatch(node.id))
    if isinstance(node, ast.Attribute):
        if isinstance(node.value, ast.Name) and node.value.id == "math":
            return is_guard and not node.attr.startswith("_")
        return is_guard and node.attr in _METHODS
    if isinstance(node, ast.Subscript):
        return is_guard
    return True
