"""The server's side of the Python backend: the recipe and the limits of its child processes."""

from __future__ import annotations

import ast
import json
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from modelserver.backend import (
    Backend,
    BackendContext,
    BatchInstance,
    ConfigError,
    ModelConfig,
    Placement,
    ServerError,
    parse_float,
)
from modelserver.backend.process import (
    ProcessInstance,
    ProcessOptions,
    PythonEnvironment,
    Recipe,
    call_in_process,
    config_from_json,
    config_to_json,
    environment_of,
    execute_timeout_s,
    num_instances,
    output_lines_per_s,
    thread_limits,
)

_HOSTED = f"{__package__}.hosted_model"
_MODEL_FILE = "model.py"


class PythonBackend(Backend):
    """Runs `class TritonPythonModel` of `model.py`; a crash of the model never touches the server.

    Parameters of the model's config: `EXECUTION_ENV_PATH` (an environment that the model brings),
    `REQUIREMENTS` ("ignore" leaves its requirements.txt alone), `EXECUTE_TIMEOUT_SECONDS` (a batch that takes longer
    gets the child killed and fails), `START_TIMEOUT_SECONDS` (for `initialize`; also the backend option
    `stub-timeout-seconds`), `RETRY_AFTER_CRASH` (see `_may_retry`).
    """

    model_filenames = (_MODEL_FILE,)
    # Memory between the processes grows as needed: Triton's sizes of it are taken, and mean nothing.
    option_names = frozenset(
        {
            "stub-timeout-seconds",
            "shm-default-byte-size",
            "shm-growth-byte-size",
            "shm-region-prefix-name",
            "busy-wait-us",
        }
    )
    # Of a backend that is a directory with a model.py: that file, for all its models.
    backend_source: ClassVar[Path | None] = None
    # The child asks by itself what devices there are; the server only places it.
    supports_gpu = True
    has_processes = True

    @classmethod
    def source_of(cls, context: BackendContext) -> Path:
        """The file with the class TritonPythonModel. Raises NotFoundError."""
        if cls.backend_source is None:
            return context.model_file(_MODEL_FILE)
        own = context.version_directory / _MODEL_FILE
        return own if own.is_file() else cls.backend_source

    @classmethod
    def runs_code_of(cls, context: BackendContext) -> bool:  # noqa: ARG003  # model.py always is
        return True

    @classmethod
    def complete_config(cls, context: BackendContext) -> ModelConfig:
        path = cls.source_of(context)
        if not may_complete_config(path):
            return context.config
        recipe = Recipe(
            f"{_HOSTED}:complete_config",
            {
                "path": str(path),
                "model_directory": str(context.model_directory),
                "model_config": json.dumps(config_to_json(replace(context.config, name=context.model_name))),
                "version_directory": str(context.version_directory),
            },
        )
        name = f"{context.model_name} auto-complete"
        environment = environment_of(cls, context)
        try:
            completed = call_in_process(
                name,
                recipe,
                timeout_s=_start_timeout_s(context),
                environment={**thread_limits(1), **environment.variables},
                interpreter=environment.interpreter,
            )
        except ServerError as error:
            raise ConfigError(f"model '{context.model_name}': auto_complete_config failed: {error.message}") from error
        return config_from_json(completed, source=f"auto_complete_config of {path}")

    _environment = PythonEnvironment()

    def load(self) -> None:
        self.source_of(self.context)
        self._environment = environment_of(type(self), self.context)

    def create_instance(self, placement: Placement) -> BatchInstance:
        context = self.context
        config = context.config
        source = self.source_of(context)
        environment = self._environment
        recipe = Recipe(
            f"{_HOSTED}:create_instance",
            {
                "path": str(source),
                "version_directory": str(context.version_directory),
                "args": {
                    "model_config": json.dumps(config_to_json(config)),
                    "model_instance_kind": placement.kind.value.removeprefix("KIND_"),
                    "model_instance_name": placement.name,
                    "model_instance_device_id": str(placement.device_id),
                    "model_repository": str(context.model_directory),
                    "model_version": str(context.version),
                    "model_name": context.model_name,
                },
                "outputs": {output.name: output.data_type.value for output in config.output if output.data_type},
                "is_decoupled": config.is_decoupled,
            },
        )
        options = ProcessOptions(
            start_timeout_s=_start_timeout_s(context),
            execute_timeout_s=execute_timeout_s(context),
            output_lines_per_s=output_lines_per_s(context),
            environment={**thread_limits(num_instances(context)), **environment.variables},
            interpreter=environment.interpreter,
            busy_wait_us=_busy_wait_us(context),
            retries_batches=_may_retry(context),
            is_wanted=context.is_wanted,
        )
        return ProcessInstance.of_model(context, placement, recipe, options, answers_later=config.is_decoupled)


def backend_from(source: Path) -> type[PythonBackend]:
    """A backend whose models are all served by the class TritonPythonModel of `source`."""
    return type("SourceBackend", (PythonBackend,), {"backend_source": source, "model_filenames": ()})


def may_complete_config(path: Path) -> bool:
    """Whether model.py can have an `auto_complete_config`: it has one, or inherits who knows what.

    Saves most models a process. A file that cannot be parsed may: its error then comes from Python itself.
    """
    try:
        source = path.read_bytes()
        tree = ast.parse(source)
    except (SyntaxError, ValueError, SystemError, RecursionError):
        # SystemError: CPython 3.11 counts wrongly when two threads parse at once.
        return True
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "TritonPythonModel"]
    if not classes or classes[-1].bases or classes[-1].decorator_list:
        return True
    lines = source.splitlines()[classes[-1].lineno - 1 : classes[-1].end_lineno]
    return any(b"auto_complete_config" in line for line in lines)


def _may_retry(context: BackendContext) -> bool:
    """Whether requests of a batch that ended its process are executed once more, by themselves.

    Not those of sequences, whose model may have seen the first half of one, and not where the config says that to
    execute a request twice does harm. Raises ConfigError for a `RETRY_AFTER_CRASH` that is not a boolean.
    """
    return context.bool_parameter("RETRY_AFTER_CRASH", True) and context.config.sequence_batching is None


def _start_timeout_s(context: BackendContext) -> float:
    text = context.options.get("stub-timeout-seconds", "")
    try:
        default = parse_float(text) if text else ProcessOptions().start_timeout_s
    except ValueError:
        raise ConfigError(
            f"--backend-config python,stub-timeout-seconds={text}: expected a number of seconds"
        ) from None
    return context.float_parameter("START_TIMEOUT_SECONDS", default)


def _busy_wait_us(context: BackendContext) -> int:
    text = context.options.get("busy-wait-us", "")
    if not text:
        return ProcessOptions().busy_wait_us
    if not (text.isascii() and text.isdecimal()):
        raise ConfigError(f"--backend-config python,busy-wait-us={text}: expected a number of microseconds")
    return int(text)
