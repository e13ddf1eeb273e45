"""A model's config -> how its instances run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from modelserver.backend import BackendContext, ConfigError, ModelConfig

from .graph_rules import GraphShape

_STRATEGY = "execution_context_allocation_strategy"
_STRATEGIES = ("STATIC", "ON_PROFILE_CHANGE")


@dataclass(frozen=True, slots=True)
class InstanceSettings:
    """The config's settings of how instances run; `profiles` are those of the instance's group."""

    profiles: tuple[int, ...] = (0,)
    allocation_strategy: str = "STATIC"
    is_urgent: bool = False
    busy_waits: bool = False
    has_copy_stream: bool = False
    is_input_pinned: bool = True
    is_output_pinned: bool = True
    captures_graphs: bool = False
    graphs: tuple[GraphShape, ...] = ()


def instance_settings(
    context: BackendContext, profiles: tuple[int, ...], graphs: Sequence[GraphShape]
) -> InstanceSettings:
    """Raises ConfigError for a parameter that Triton does not know either."""
    strategy = context.parameter(_STRATEGY, "STATIC")
    if strategy not in _STRATEGIES:
        raise ConfigError(
            f"model '{context.model_name}': parameter {_STRATEGY}: expected one of {', '.join(_STRATEGIES)}, got "
            f"'{strategy}'"
        )
    optimization = context.config.optimization
    cuda = optimization.cuda if optimization is not None else None
    return InstanceSettings(
        profiles=profiles,
        allocation_strategy=strategy,
        is_urgent=optimization is not None and optimization.priority.name == "PRIORITY_MAX",
        busy_waits=cuda is not None and cuda.busy_wait_events,
        has_copy_stream=cuda is not None and cuda.output_copy_stream,
        is_input_pinned=_is_pinned(context.config, "input"),
        is_output_pinned=_is_pinned(context.config, "output"),
        captures_graphs=cuda is not None and cuda.graphs,
        graphs=tuple(graphs),
    )


def _is_pinned(config: ModelConfig, kind: str) -> bool:
    """Copies go through pinned memory unless the config says that they do not."""
    optimization = config.optimization
    if optimization is None:
        return True
    wish = optimization.input_pinned_memory if kind == "input" else optimization.output_pinned_memory
    return wish is None or wish.enable
