"""A backend each of whose instances lives in its own process, so that crashes and leaks end with that process.

This is used for the parameter `instance_in_process`, for an environment of the model's own, or if the backend says that
the model needs it. The server's own process never loads such a model; in the first two cases its config is completed in
a process too.
"""

from __future__ import annotations

import json
from typing import Any

from modelserver.backend import Backend, BackendContext, BatchInstance, ConfigError, ModelConfig, Placement
from modelserver.config.instance_rules import instance_in_process
from modelserver.config.message import config_from_json, config_to_json
from modelserver.execution.process.child_process import call_in_process
from modelserver.execution.process.environment import PythonEnvironment, environment_of, has_environment
from modelserver.execution.process.hosting import backend_recipe, context_of, find_class, reference
from modelserver.execution.process.instance import ProcessInstance
from modelserver.execution.process.recipe import (
    ProcessOptions,
    Recipe,
    execute_timeout_s,
    num_instances,
    output_lines_per_s,
    start_timeout_s,
    thread_limits,
)

# Completing a config may take as long as loading the model.
_COMPLETE_TIMEOUT_S = 300.0


def is_hosted(backend_class: type[Backend], context: BackendContext) -> bool:
    """Whether the model's instances get processes of their own. Raises ServerError of `needs_process`."""
    if backend_class.has_processes or context.config.is_ensemble:
        return False
    asked = instance_in_process(context.config)
    if has_environment(backend_class, context):
        if asked is False:
            raise ConfigError(
                f"model '{context.model_name}': a model with an environment of its own lives in a process: leave out "
                "instance_in_process"
            )
        return True
    return backend_class.needs_process(context) if asked is None else asked


def make_backend(backend_class: type[Backend], context: BackendContext) -> Backend:
    """The backend of a model, or a HostedBackend in its place."""
    return HostedBackend(backend_class, context) if is_hosted(backend_class, context) else backend_class(context)


def complete_config(backend_class: type[Backend], context: BackendContext) -> ModelConfig:
    """`backend_class.complete_config`, in a process if the config wants the model to live in one. Raises as that does.

    A backend that asks for processes itself knows what it may load here, unless a client has sent it, and one that
    completes quickly loads nothing.
    """
    is_hosted_model = not backend_class.completes_quickly and is_hosted(backend_class, context)
    is_apart = context.is_uploaded or instance_in_process(context.config) or has_environment(backend_class, context)
    if not (is_hosted_model and is_apart):
        return backend_class.complete_config(context)
    recipe = backend_recipe(reference(backend_class), context, Placement(context.model_name))
    arguments = {key: value for key, value in recipe.arguments.items() if key != "placement"}
    name = f"{context.model_name} auto-complete"
    recipe = Recipe(f"{__name__}:complete_here", arguments)
    environment = environment_of(backend_class, context)
    text, messages = call_in_process(
        name,
        recipe,
        timeout_s=_COMPLETE_TIMEOUT_S,
        environment={**thread_limits(1), **environment.variables},
        interpreter=environment.interpreter,
    )
    if messages:
        raise ConfigError("\n".join(messages))
    return config_from_json(text, source=f"config of model '{context.model_name}'")


def complete_here(backend: str, **described: Any) -> tuple[str, list[str]]:
    """Called in the child: the completed config as JSON, or the problems of the written one."""
    try:
        return json.dumps(config_to_json(find_class(backend).complete_config(context_of(described)))), []
    except ConfigError as error:
        return "", [error.message]


class HostedBackend(Backend):
    """Represents in the server a backend that is loaded in the process of each instance."""

    def __init__(self, backend_class: type[Backend], context: BackendContext) -> None:
        super().__init__(context)
        self._class = backend_class
        self.prefix_inputs = backend_class.prefix_inputs
        self._environment = PythonEnvironment()

    def load(self) -> None:
        self._environment = environment_of(self._class, self.context)

    def create_instance(self, placement: Placement) -> BatchInstance:
        context = self.context
        options = ProcessOptions(
            start_timeout_s=start_timeout_s(context),
            execute_timeout_s=execute_timeout_s(context),
            output_lines_per_s=output_lines_per_s(context),
            environment={**thread_limits(num_instances(context)), **self._environment.variables},
            interpreter=self._environment.interpreter,
            is_wanted=context.is_wanted,
        )
        recipe = backend_recipe(reference(self._class), context, placement)
        return ProcessInstance.of_model(context, placement, recipe, options)
