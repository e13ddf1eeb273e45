"""Config names -> arguments and results of a model, by Triton's naming conventions.

Inputs are named like the arguments of forward(), or `<name>__<position>`, or stand in the order of the
config. Outputs are the keys of a dict, or `<name>__<position>`, or stand in the order of the config.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from modelserver.backend import ConfigError

_POSITION = re.compile(r".*__(\d+)")


@dataclass(frozen=True, slots=True)
class Arguments:
    """The parameters of forward(): names in order, how many have no default, or one dict of tensors.

    `texts` are those that are lists of strings, as TorchScript declares them.
    """

    names: tuple[str, ...]
    num_required: int
    takes_dict: bool = False
    texts: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class InputBinding:
    """Config names in the order of a call: some by position, the rest by keyword, or all in one dict."""

    positional: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()
    as_dict: bool = False


def bind_inputs(names: Sequence[str], arguments: Arguments) -> InputBinding:
    """How a call passes the inputs `names`. Raises ConfigError if it cannot."""
    if arguments.takes_dict:
        return InputBinding(as_dict=True)
    shown = f"forward({', '.join(arguments.names)})"
    if not arguments.num_required <= len(names) <= len(arguments.names):
        raise ConfigError(f"expected an input for every argument of {shown}, got {', '.join(names) or 'none'}")
    if set(names) <= set(arguments.names):
        return _bind_by_name(names, arguments, shown)
    order = positions(names)
    for name, position in zip(names, order, strict=True):
        if name in arguments.names and arguments.names.index(name) != position:
            raise ConfigError(
                f"input '{name}' is argument {arguments.names.index(name)} of {shown}, but position {position} in the "
                "config; name every input like its argument"
            )
    return InputBinding(positional=tuple(name for _, name in sorted(zip(order, names, strict=True))))


def check_texts(names: Sequence[str], texts: Sequence[str], arguments: Arguments) -> None:
    """That the inputs `texts` of `names`, and no others, go to lists of strings. Raises ConfigError."""
    binding = bind_inputs(names, arguments)
    given = dict(zip(arguments.names, binding.positional, strict=False)) or {name: name for name in binding.keywords}
    for argument, name in given.items():
        if (name in texts) != (argument in arguments.texts):
            wanted = "TYPE_STRING" if argument in arguments.texts else "a datatype of numbers"
            raise ConfigError(
                f"input '{name}' is {'List[str]' if argument in arguments.texts else 'a Tensor'} in "
                f"forward({', '.join(arguments.names)}): its data_type is to be {wanted}"
            )


def _bind_by_name(names: Sequence[str], arguments: Arguments, shown: str) -> InputBinding:
    left_out = [name for name in arguments.names[: arguments.num_required] if name not in names]
    if left_out:
        raise ConfigError(f"expected an input for every argument of {shown}, {', '.join(left_out)} missing")
    ordered = tuple(sorted(names, key=arguments.names.index))
    if ordered == arguments.names[: len(ordered)]:
        return InputBinding(positional=ordered)
    return InputBinding(keywords=ordered)


def positions(names: Sequence[str]) -> tuple[int, ...]:
    """The position of each name: as in `<name>__<position>` if all follow that, else the order they stand in.

    Raises ConfigError if the positions are not 0, 1, 2, … each once.
    """
    matches = [_POSITION.fullmatch(name) for name in names]
    if not all(matches):
        return tuple(range(len(names)))
    found = tuple(int(match.group(1)) for match in matches if match)
    if sorted(found) != list(range(len(names))):
        raise ConfigError(
            f"expected the numbers 0 to {len(names) - 1} after '__', each once, in the names {', '.join(names)}"
        )
    return found


def output_positions(names: Sequence[str]) -> tuple[int, ...]:
    """The result position of each output; a config may leave outputs out, so numbers may have gaps."""
    matches = [_POSITION.fullmatch(name) for name in names]
    if not all(matches):
        return tuple(range(len(names)))
    found = tuple(int(match.group(1)) for match in matches if match)
    if len(set(found)) != len(found):
        raise ConfigError(f"expected a different number after '__' in each of the names {', '.join(names)}")
    return found
