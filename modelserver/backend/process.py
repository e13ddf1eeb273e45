"""The part of the contract for backends whose instances live in child processes: what they use in the server.

`Backend.create_instance` returns a `ProcessInstance`, made from a `Recipe`: a function that the child calls to build
the `BatchInstance` that it executes. The server starts the child, restarts it after a crash, limits it by
`ProcessOptions`, and sends it batches. Code in the child imports `modelserver.backend.child`. Such a backend sets
`has_processes`.
"""

from __future__ import annotations

from modelserver.config.message import config_from_json, config_to_json
from modelserver.execution.process.child_process import call_in_process
from modelserver.execution.process.environment import PythonEnvironment, environment_of
from modelserver.execution.process.instance import ProcessInstance
from modelserver.execution.process.recipe import (
    ProcessOptions,
    Recipe,
    RestartOptions,
    execute_timeout_s,
    num_instances,
    output_lines_per_s,
    thread_limits,
)

__all__ = [
    "ProcessInstance",
    "ProcessOptions",
    "PythonEnvironment",
    "Recipe",
    "RestartOptions",
    "call_in_process",
    "config_from_json",
    "config_to_json",
    "environment_of",
    "execute_timeout_s",
    "num_instances",
    "output_lines_per_s",
    "thread_limits",
]
