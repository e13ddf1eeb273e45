"""What a backend is told about the model version it is to serve, and what it may ask of the server around it.

Part of the contract: authors import these names from `modelserver.backend`.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from modelserver.config.completion import FileSignature, check, complete
from modelserver.config.schema import ModelConfig
from modelserver.core.numerals import is_digits, parse_float, parse_int
from modelserver.core.request import InFlightRequest
from modelserver.core.response import ResponseStream
from modelserver.errors import ConfigError, NotFoundError, UnavailableError

_DEFAULT_MAX_BATCH_SIZE = 4
_BOOLS = {
    word: value for value, words in ((True, "true 1 yes on"), (False, "false 0 no off")) for word in words.split()
}


class DeviceKind(enum.Enum):
    """Where an instance runs; the values are `instance_group.kind` without the decision AUTO."""

    CPU = "KIND_CPU"
    GPU = "KIND_GPU"
    MODEL = "KIND_MODEL"


@dataclass(frozen=True, slots=True)
class Placement:
    """One place for one instance: device kind, device id (0 on a CPU) and the instance's name."""

    name: str
    kind: DeviceKind = DeviceKind.CPU
    device_id: int = 0
    index: int = 0


def missing_package(package: str | None, extra: str, what: str = "the model") -> UnavailableError:
    """The error for a library that `what` needs and that cannot be imported; `extra` brings it."""
    return UnavailableError(
        f"{what} needs the Python package '{package}', which is not installed: pip install 'modelserver-py[{extra}]', "
        "or name what brings it in a requirements.txt beside the model's config.pbtxt"
    )


def always() -> bool:
    """What is wanted for as long as it takes."""
    return True


class ModelMetrics(Protocol):
    """Metrics that models make themselves. Called on the event loop thread."""

    def ask(self, owner: object, topic: str, arguments: Mapping[str, Any]) -> Any:
        """Make, change or read a metric for a process (`owner`). Raises ServerError."""

    def forget(self, owner: object) -> None:
        """Drop what only this process still holds."""


class ServerCalls(Protocol):
    """What a backend may ask of the server that its models are in. All on the thread of `loop`."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...

    @property
    def metrics(self) -> ModelMetrics: ...

    def infer(self, request: InFlightRequest) -> ResponseStream:
        """Let another model, or the same, answer a request. Raises ServerError when it is refused at once."""

    async def ask(self, topic: str, arguments: Mapping[str, Any]) -> Any:
        """`load_model`, `unload_model` or `is_model_ready`. Raises ServerError."""


@dataclass(frozen=True, slots=True)
class BackendContext:
    """What a backend is told about the model version it is to serve.

    `options` are the `--backend-config <backend>,key=value` pairs, defaults of the server included.
    `model_directory` holds config.pbtxt; `version_directory` holds the model's files. `namespace` is the path of
    its repository with `--model-namespacing`, else empty. `batch_strategy` is the model's own code
    that forms batches. `server` is None where there is none around, as in `modelserver check`. `is_uploaded`: the
    files came with the request that loads them, so that nothing in them, nor in the config, is the operator's word.
    `gpu_ids` are CUDA's numbers of the GPUs that models may be placed on, for readers of the config.
    `is_wanted` is asked by a load that takes minutes, from any thread: once it says False (the model is to be
    unloaded, the server stops), the load ends by UnavailableError as soon as it can.
    """

    model_name: str
    version: int
    config: ModelConfig
    model_directory: Path
    version_directory: Path
    options: Mapping[str, str] = field(default_factory=dict)
    namespace: str = ""
    batch_strategy: Path | None = None
    server: ServerCalls | None = None
    is_uploaded: bool = False
    gpu_ids: tuple[int, ...] = ()
    is_wanted: Callable[[], bool] = field(default=always, compare=False)

    def parameter(self, key: str, default: str = "") -> str:
        """The string value of `parameters { key: ... }` in the model's config."""
        return self.config.parameters.get(key, default)

    def int_parameter(self, key: str, default: int = 0) -> int:
        """`parameter` as a whole number. Raises ConfigError if it is none."""
        text = self.parameter(key).strip()
        try:
            return parse_int(text) if text else default
        except ValueError:
            raise self._parameter_error(key, "a whole number", text) from None

    def float_parameter(self, key: str, default: float = 0.0) -> float:
        """`parameter` as a number. Raises ConfigError if it is none."""
        text = self.parameter(key).strip()
        try:
            return parse_float(text) if text else default
        except ValueError:
            raise self._parameter_error(key, "a number", text) from None

    def bool_parameter(self, key: str, default: bool = False) -> bool:
        """`parameter` as true, false, 1, 0, yes, no, on or off. Raises ConfigError if it is none of them."""
        text = self.parameter(key).strip()
        if not text:
            return default
        if text.lower() not in _BOOLS:
            raise self._parameter_error(key, "true or false", text)
        return _BOOLS[text.lower()]

    def int_option(self, key: str, default: int = 0) -> int:
        """A `--backend-config` setting as a whole number, 0 or more. Raises ConfigError if it is none."""
        text = self.options.get(key, "").strip()
        if text and not is_digits(text):
            flag = f"--backend-config={self.config.backend},{key}"
            raise ConfigError(f"{flag}: expected a whole number of 0 or more, got '{text}'")
        return int(text) if text else default

    def complete_config(
        self, signature: FileSignature, *, default_max_batch_size: int = _DEFAULT_MAX_BATCH_SIZE
    ) -> ModelConfig:
        """The config with what a model's file says filled in; for `Backend.complete_config`.

        A file that can batch without telling how much gets the setting `default-max-batch-size`, or else
        `default_max_batch_size`. Raises ConfigError with every line of the config that the file contradicts.
        """
        default_max_batch_size = self.int_option("default-max-batch-size", default_max_batch_size)
        source = str(self.model_directory / "config.pbtxt")
        return complete(self.config, signature, default_max_batch_size=default_max_batch_size, source=source)

    def check_config(self, signature: FileSignature) -> None:
        """Raise ConfigError if a model's file contradicts the config; for `Backend.load`."""
        check(self.config, signature, source=str(self.model_directory / "config.pbtxt"))

    def _parameter_error(self, key: str, expected: str, got: str) -> ConfigError:
        return ConfigError(f"model '{self.model_name}': parameter {key}: expected {expected}, got '{got}'")

    def model_file(self, default_filename: str) -> Path:
        """The model's file or directory: `default_model_filename` of the config, or `default_filename`.

        Raises NotFoundError with the place where it was looked for.
        """
        path = self.version_directory / (self.config.default_model_filename or default_filename)
        if not path.exists():
            raise NotFoundError(f"model '{self.model_name}' version {self.version}: no file {path}")
        return path
