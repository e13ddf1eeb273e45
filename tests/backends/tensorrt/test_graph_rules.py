from __future__ import annotations

import pytest
from modelserver_backends.tensorrt.graph_rules import find_graph, graph_shapes
from support.engines import batching_engine, context_with, engine, tensor

from modelserver.backend import ConfigError

IO = 'input [ { name: "in" data_type: TYPE_FP32 dims: [ 16 ] } ]'
VARIABLE = 'input [ { name: "in" data_type: TYPE_FP32 dims: [ -1 ] } ]'


def shapes(text: str) -> list[tuple[int, ...]]:
    graphs, _ = graph_shapes(context_with(text).config, batching_engine(64))
    return [graph.shapes["in"] for graph in graphs]


def spec(text: str, rest: str = f"max_batch_size: 8 {VARIABLE}") -> str:
    return f"{rest} optimization {{ cuda {{ graphs: true graph_spec [ {{ {text} }} ] }} }}"


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("max_batch_size: 64", [1, 2, 3, 4, 6, 8, 12, 16, 64]),
        ("max_batch_size: 5", [1, 2, 3, 4, 5]),
        ("max_batch_size: 8 dynamic_batching { preferred_batch_size: [ 4, 6 ] }", [1, 4, 6, 8]),
        ("max_batch_size: 8 dynamic_batching { }", [1, 8]),
        ("max_batch_size: 8 sequence_batching { oldest { preferred_batch_size: [ 2 ] } }", [1, 2, 8]),
        ("max_batch_size: 4 sequence_batching { direct { } }", [1, 2, 3, 4]),
    ],
)
def test_without_a_spec_the_sizes_are_tritons(text: str, sizes: list[int]) -> None:
    assert shapes(f"{text} {IO} optimization {{ cuda {{ graphs: true }} }}") == [(size, 16) for size in sizes]


def test_without_batching_there_is_one_graph() -> None:
    assert shapes(f"{IO} optimization {{ cuda {{ graphs: true }} }}") == [(16,)]


def test_none_are_captured_unasked() -> None:
    assert shapes(f"max_batch_size: 8 {IO}") == []
    assert shapes(f"max_batch_size: 8 {IO} optimization {{ cuda {{ graphs: false }} }}") == []


def test_variable_dimensions_need_a_spec_and_shape_tensors_have_no_graphs() -> None:
    text = f"max_batch_size: 8 {VARIABLE} optimization {{ cuda {{ graphs: true }} }}"
    graphs, told = graph_shapes(context_with(text).config, batching_engine(8))
    assert not graphs
    assert "in has variable dimensions" in told[0]
    shaped = engine(tensor("in", -1), tensor("in_shape", 2, kind="INT32", is_shape=True), tensor("out", -1))
    graphs, told = graph_shapes(context_with(text).config, shaped)
    assert not graphs
    assert "shape tensors" in told[0]


def test_a_spec_says_one_shape() -> None:
    text = spec('batch_size: 4 input { key: "in" value { dim: [ 128 ] } } graph_lower_bound { batch_size: 2 }')
    graphs, told = graph_shapes(context_with(text).config, batching_engine(8))
    assert (graphs[0].shapes, graphs[0].batch, graphs[0].smallest_batch, told) == ({"in": (4, 128)}, 4, 2, ())
    assert shapes(spec("batch_size: 2", f"max_batch_size: 8 {IO}")) == [(2, 16)]
    assert shapes(spec("batch_size: 0", IO)) == [(16,)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (spec("batch_size: 9"), "batch_size: expected 1 to max_batch_size 8, got 9"),
        (spec("batch_size: 2", VARIABLE), "expected 0, because the model has no batch dimension, got 2"),
        (spec("batch_size: 2"), "in: expected every dimension"),
        (
            spec('batch_size: 2 input { key: "x" value { dim: [ 1 ] } }'),
            r"expected inputs of the model \(in\), got 'x'",
        ),
        (spec('batch_size: 2 input { key: "in" value { dim: [ 1, 2 ] } }'), r"expected dims that fit \[-1\]"),
        (
            spec('batch_size: 2 input { key: "in" value { dim: [ 8 ] } } graph_lower_bound { batch_size: 3 }'),
            "expected at most the graph's 2, got 3",
        ),
        (
            spec(
                'batch_size: 2 input { key: "in" value { dim: [ 8 ] } } '
                'graph_lower_bound { batch_size: 1 input { key: "in" value { dim: [ 4 ] } } }'
            ),
            "only the batch of a graph can be filled up",
        ),
    ],
)
def test_wrong_specs_are_named(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        graph_shapes(context_with(text).config, batching_engine(8))


def test_the_smallest_graph_that_serves_is_found() -> None:
    text = (
        f"max_batch_size: 8 {IO} optimization {{ cuda {{ graphs: true graph_spec [ "
        "{ batch_size: 8 graph_lower_bound { batch_size: 3 } }, { batch_size: 4 graph_lower_bound { batch_size: 2 } }, "
        "{ batch_size: 1 } ] } }"
    )
    graphs, _ = graph_shapes(context_with(text).config, batching_engine(8))

    def batch(rows: int, size: int = 16) -> int | None:
        found = find_graph(graphs, {"in": (rows, size)}, batches=True)
        return None if found is None else found.batch

    assert [batch(rows) for rows in (1, 2, 3, 4, 5, 8, 9)] == [1, 4, 4, 4, 8, 8, None]
    assert batch(1, size=17) is None
    assert find_graph(graphs, {"other": (1, 16)}, batches=True) is None
    fixed, _ = graph_shapes(context_with(f"{IO} optimization {{ cuda {{ graphs: true }} }}").config, batching_engine(8))
    assert find_graph(fixed, {"in": (16,)}, batches=False) is not None
    assert find_graph(fixed, {"in": (15,)}, batches=False) is None
