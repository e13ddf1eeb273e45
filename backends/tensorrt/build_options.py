"""How an engine is to be built: from a model's parameters, or from flags; the same to the child process that builds."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelserver.backend import BackendContext, ConfigError, InvalidArgumentError

from .engine_info import Range
from .plan import Flavour

RUNTIMES = ("auto", Flavour.TENSORRT.value, Flavour.RTX.value)
PRECISIONS = ("keep", "fp16", "bf16")
_QUANTIZED = ("int8", "fp8", "int4", "fp4")
HARDWARE = {"none": "NONE", "same-cc": "SAME_COMPUTE_CAPABILITY", "ampere+": "AMPERE_PLUS"}
WEIGHTS = ("keep", "strip", "refit")
RTX_TARGETS = ("any", "current", "sm75", "sm80", "sm86", "sm89", "sm120", "sm121")
_HIGHEST_LEVEL = 5
_UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """Every switch that changes an engine. Precision is the ONNX file's: TensorRT 11 has no other way.

    `targets` are architectures, for TensorRT for RTX alone; empty is any that it knows. `workspace_bytes` 0 is the
    library's choice. `weights`: kept in the plan, stripped from it (and put back at load), or refittable.
    """

    runtime: str = "auto"
    precision: str = "keep"
    opt_level: int = 3
    workspace_bytes: int = 0
    hardware_compatibility: str = "none"
    version_compatible: bool = False
    tf32: bool = True
    sparse: bool = False
    weights: str = "keep"
    weight_streaming: bool = False
    targets: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()
    timing_cache: str = ""

    def __post_init__(self) -> None:
        """Raises InvalidArgumentError for unknown values."""
        _check("runtime", self.runtime, RUNTIMES)
        if self.precision in _QUANTIZED:
            raise InvalidArgumentError(
                f"precision: expected one of {', '.join(PRECISIONS)}, got '{self.precision}': TensorRT takes 8 bits "
                "and fewer from QDQ nodes in the ONNX file (precision keep); those of INT8 come from modelserver "
                "quantize --for-tensorrt"
            )
        _check("precision", self.precision, PRECISIONS)
        _check("hardware_compatibility", self.hardware_compatibility, tuple(HARDWARE))
        _check("weights", self.weights, WEIGHTS)
        for target in self.targets:
            _check("target", target, RTX_TARGETS)
        for plugin in self.plugins:
            if not Path(plugin).is_file():
                raise InvalidArgumentError(f"plugins: expected the file of a library, found none at '{plugin}'")
        if not 0 <= self.opt_level <= _HIGHEST_LEVEL:
            raise InvalidArgumentError(f"opt_level: expected 0 to {_HIGHEST_LEVEL}, got {self.opt_level}")

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> BuildOptions:
        fields: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in document.items()
        }
        return cls(**fields)


def parse_bytes(text: str, source: str) -> int:
    """`4GiB`, `512MiB` or a number of bytes. Raises InvalidArgumentError."""
    stripped = text.strip()
    number = stripped.rstrip("BGiKM")
    unit = stripped[len(number) :]
    if not number.isascii() or not number.isdecimal() or unit not in _UNITS:
        raise InvalidArgumentError(f"{source}: expected a size such as 4GiB or 512MiB, got '{text}'")
    return int(number) * _UNITS[unit]


def options_of(context: BackendContext, plugins: tuple[str, ...]) -> BuildOptions:
    """The `parameters` of a model's config. Raises ConfigError for a wrong one."""
    try:
        return BuildOptions(
            runtime=context.parameter("runtime", "auto"),
            precision=context.parameter("precision", "keep"),
            opt_level=context.int_parameter("opt_level", 3),
            workspace_bytes=parse_bytes(context.parameter("workspace_bytes", "0"), "workspace_bytes"),
            hardware_compatibility=context.parameter("hardware_compatibility", "none"),
            version_compatible=context.bool_parameter("version_compatible"),
            tf32=context.bool_parameter("tf32", True),
            sparse=context.bool_parameter("sparse"),
            weights=context.parameter("weights", "keep"),
            weight_streaming=bool(context.parameter("weight_streaming_budget")),
            plugins=plugins,
        )
    except ConfigError:
        raise
    except InvalidArgumentError as error:
        raise ConfigError(f"model '{context.model_name}': parameters: {error.message}") from error


@dataclass(frozen=True, slots=True)
class BuildRequest:
    """The complete input of the child process."""

    onnx: str
    plan: str
    flavour: Flavour
    profiles: tuple[Mapping[str, Range], ...]
    options: BuildOptions

    def to_json(self) -> dict[str, Any]:
        return {
            "onnx": self.onnx,
            "plan": self.plan,
            "flavour": self.flavour.value,
            "profiles": [
                {name: [bounds.min, bounds.opt, bounds.max] for name, bounds in profile.items()}
                for profile in self.profiles
            ],
            "options": self.options.to_json(),
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> BuildRequest:
        return cls(
            document["onnx"],
            document["plan"],
            Flavour(document["flavour"]),
            tuple(
                {name: Range(*(tuple(bound) for bound in bounds)) for name, bounds in profile.items()}
                for profile in document["profiles"]
            ),
            BuildOptions.from_json(document["options"]),
        )


def _check(what: str, got: str, known: tuple[str, ...]) -> None:
    if got not in known:
        raise InvalidArgumentError(f"{what}: expected one of {', '.join(known)}, got '{got}'")
