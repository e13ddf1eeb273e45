"""Which CUDA graphs are captured, and which one serves a batch: Triton's rules, over plain data.

`optimization { cuda { graphs: true graph_spec [ ... ] } }`. A graph replays one shape. It serves smaller batches too
down to its `graph_lower_bound`, filled up; the other dimensions must be equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from modelserver.backend import ConfigError, ModelConfig, model_inputs

from .engine_info import EngineInfo, Shape

_SIZES_WITHOUT_BATCHER = (1, 2, 3, 4, 6, 8, 12, 16)


@dataclass(frozen=True, slots=True)
class GraphShape:
    """One graph: the complete shapes of all inputs. It is used for at least `smallest_batch` rows."""

    shapes: Mapping[str, Shape]
    batch: int
    smallest_batch: int

    @property
    def key(self) -> tuple[tuple[str, Shape], ...]:
        return tuple(sorted(self.shapes.items()))


def graph_shapes(config: ModelConfig, info: EngineInfo) -> tuple[tuple[GraphShape, ...], tuple[str, ...]]:
    """The graphs that a config asks for, and in words the ones that cannot be made. Raises ConfigError."""
    cuda = config.optimization.cuda if config.optimization is not None else None
    if cuda is None or not cuda.graphs:
        return (), ()
    if info.has_shape_tensors:
        return (), ("CUDA graphs are not captured for models with shape tensors",)
    dims = {spec.name: _model_dims(spec) for spec in model_inputs(config)}
    batches = config.max_batch_size > 0
    found: dict[tuple[tuple[str, Shape], ...], GraphShape] = {}
    problems = []
    if cuda.graph_spec:
        for index, spec in enumerate(cuda.graph_spec):
            where = f"optimization.cuda.graph_spec[{index}]"
            _check_batch(spec.batch_size, config.max_batch_size, where)
            shapes = _spec_shapes(dims, {name: shape.dim for name, shape in spec.input.items()}, where)
            lower = _lower_batch(spec, shapes, where) if spec.graph_lower_bound is not None else spec.batch_size
            graph = _with_batch(shapes, spec.batch_size, lower, batches=batches)
            found.setdefault(graph.key, graph)
    else:
        variable = sorted(name for name, shape in dims.items() if -1 in shape)
        if variable:
            problems.append(
                f"CUDA graphs are captured of whole shapes, and {', '.join(variable)} has variable dimensions: say "
                "which in optimization.cuda.graph_spec"
            )
            return (), tuple(problems)
        for size in _batch_sizes(config):
            graph = _with_batch(dims, size, size, batches=batches)
            found.setdefault(graph.key, graph)
    return tuple(found.values()), tuple(problems)


def find_graph(graphs: Sequence[GraphShape], shapes: Mapping[str, Shape], *, batches: bool) -> GraphShape | None:
    """The smallest graph that serves inputs of these shapes, padded if necessary."""
    fitting = [graph for graph in graphs if _serves(graph, shapes, batches)]
    return min(fitting, key=lambda graph: graph.batch, default=None)


def _serves(graph: GraphShape, shapes: Mapping[str, Shape], batches: bool) -> bool:
    if graph.shapes.keys() != shapes.keys():
        return False
    if not batches:
        return all(graph.shapes[name] == shape for name, shape in shapes.items())
    return all(
        graph.shapes[name][1:] == shape[1:] and graph.smallest_batch <= shape[0] <= graph.batch
        for name, shape in shapes.items()
    )


def _model_dims(spec: object) -> Shape:
    """The dims that the model sees, without the batch."""
    reshape = getattr(spec, "reshape", None)
    return tuple(reshape.shape if reshape is not None else spec.dims)  # type: ignore[attr-defined]


def _batch_sizes(config: ModelConfig) -> Sequence[int]:
    """Triton's choice: the preferred batch sizes, or several small sizes."""
    largest = config.max_batch_size
    if not largest:
        return (0,)
    oldest = config.sequence_batching.oldest if config.sequence_batching is not None else None
    if config.dynamic_batching is not None:
        preferred = config.dynamic_batching.preferred_batch_size
    elif oldest is not None:
        preferred = oldest.preferred_batch_size
    else:
        return sorted({*(size for size in _SIZES_WITHOUT_BATCHER if size <= largest), largest})
    return sorted({1, *preferred, largest})


def _check_batch(size: int, largest: int, where: str) -> None:
    if largest == 0 and size not in (0, 1):
        raise ConfigError(f"{where}.batch_size: expected 0, because the model has no batch dimension, got {size}")
    if largest and not 1 <= size <= largest:
        raise ConfigError(f"{where}.batch_size: expected 1 to max_batch_size {largest}, got {size}")


def _spec_shapes(dims: Mapping[str, Shape], given: Mapping[str, Shape], where: str) -> dict[str, Shape]:
    """Every input's dims: those of the spec, where it says some, else the config's, which must then be fixed."""
    unknown = sorted(given.keys() - dims.keys())
    if unknown:
        raise ConfigError(f"{where}.input: expected inputs of the model ({', '.join(dims)}), got '{unknown[0]}'")
    shapes = {}
    for name, wanted in dims.items():
        shape = tuple(given.get(name, wanted))
        if len(shape) != len(wanted) or any(ours not in (-1, size) for ours, size in zip(wanted, shape, strict=False)):
            raise ConfigError(f"{where}.input.{name}: expected dims that fit {list(wanted)}, got {list(shape)}")
        if -1 in shape:
            raise ConfigError(
                f"{where}.input.{name}: expected every dimension, because a graph has one shape; got none"
            )
        shapes[name] = shape
    return shapes


def _lower_batch(spec: object, shapes: Mapping[str, Shape], where: str) -> int:
    bound = spec.graph_lower_bound  # type: ignore[attr-defined]
    largest = spec.batch_size  # type: ignore[attr-defined]
    for name, shape in bound.input.items():
        if tuple(shape.dim) != shapes.get(name):
            raise ConfigError(
                f"{where}.graph_lower_bound.input.{name}: expected the graph's own dims {list(shapes.get(name, ()))}, "
                f"got {list(shape.dim)}: only the batch of a graph can be filled up"
            )
    if not 0 <= bound.batch_size <= largest:
        raise ConfigError(
            f"{where}.graph_lower_bound.batch_size: expected at most the graph's {largest}, got {bound.batch_size}"
        )
    return int(bound.batch_size)


def _with_batch(dims: Mapping[str, Shape], size: int, lower: int, *, batches: bool) -> GraphShape:
    if not batches:
        return GraphShape(dict(dims), 0, 0)
    return GraphShape({name: (size, *shape) for name, shape in dims.items()}, size, max(1, lower))
