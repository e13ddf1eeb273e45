"""Config names -> arguments and results, by Triton's conventions."""

from __future__ import annotations

import pytest
from modelserver_backends.pytorch.binding import Arguments, InputBinding, bind_inputs, output_positions

from modelserver.backend import ConfigError

TWO = Arguments(("x", "y"), num_required=2)
DEFAULTS = Arguments(("x", "scale", "mask"), num_required=1)


@pytest.mark.parametrize(
    ("names", "arguments", "expected"),
    [
        (["x", "y"], TWO, InputBinding(("x", "y"))),
        (["y", "x"], TWO, InputBinding(("x", "y"))),
        (["INPUT__1", "INPUT__0"], TWO, InputBinding(("INPUT__0", "INPUT__1"))),
        (["a__1", "b__0"], TWO, InputBinding(("b__0", "a__1"))),
        (["left", "right"], TWO, InputBinding(("left", "right"))),
        (["x", "right"], TWO, InputBinding(("x", "right"))),
        (["x"], DEFAULTS, InputBinding(("x",))),
        (["mask", "x"], DEFAULTS, InputBinding(keywords=("x", "mask"))),
        (["any", "names"], Arguments(("d",), 1, takes_dict=True), InputBinding(as_dict=True)),
    ],
)
def test_inputs_find_their_arguments(names: list[str], arguments: Arguments, expected: InputBinding) -> None:
    assert bind_inputs(names, arguments) == expected


@pytest.mark.parametrize(
    ("names", "arguments", "message"),
    [
        (["x"], TWO, r"expected an input for every argument of forward\(x, y\), got x"),
        (["x", "y", "z"], TWO, r"forward\(x, y\), got x, y, z"),
        (["mask"], DEFAULTS, r"forward\(x, scale, mask\), x missing"),
        (["INPUT__0", "INPUT__2"], TWO, "expected the numbers 0 to 1 after '__', each once"),
        (["INPUT__0", "OTHER__0"], TWO, "expected the numbers 0 to 1 after '__', each once"),
        (["first", "x"], TWO, r"input 'x' is argument 0 of forward\(x, y\), but position 1 in the config"),
    ],
)
def test_what_cannot_be_called_is_refused(names: list[str], arguments: Arguments, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        bind_inputs(names, arguments)


@pytest.mark.parametrize(
    ("names", "expected"),
    [(["a", "b"], (0, 1)), (["OUT__1", "OUT__0"], (1, 0)), (["OUT__3"], (3,)), (["OUT__1", "b"], (0, 1))],
)
def test_outputs_find_their_results(names: list[str], expected: tuple[int, ...]) -> None:
    assert output_positions(names) == expected


def test_two_outputs_cannot_be_the_same_result() -> None:
    with pytest.raises(ConfigError, match="a different number after '__'"):
        output_positions(["a__1", "b__1"])
