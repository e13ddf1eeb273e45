"""Which file a model is served from: a plan, or an ONNX file that a plan is built from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from modelserver.backend import BackendContext, ConfigError, InvalidArgumentError, NotFoundError

from .build_options import BuildOptions, options_of
from .engine_info import Range
from .onnx_file import OnnxFile, read_onnx
from .profiles import check_profile, default_sizes, derive_profile, parse_profile

PLAN = "model.plan"
ONNX = "model.onnx"
_PROFILE = "profile."
# As the ONNX Runtime backend has it.
_DEFAULT_BATCH = 4


@dataclass(frozen=True, slots=True)
class ModelSource:
    """One of the two. `onnx_path` may be there beside a plan: weights to refit come from it."""

    plan: Path | None = None
    onnx_path: Path | None = None


def find_source(context: BackendContext, compute_capability: str = "") -> ModelSource:
    """The model's file: of `cc_model_filenames`, `default_model_filename`, or by the usual names.

    `compute_capability` is the GPU's, as "9.0". Raises NotFoundError with where it was looked for.
    """
    directory, config = context.version_directory, context.config
    named = config.cc_model_filenames.get(compute_capability) or config.default_model_filename
    if named and named != PLAN:
        path = directory / named
        if not path.is_file():
            raise NotFoundError(f"unable to find '{path}' for model '{context.model_name}'")
        if path.suffix == ".onnx":
            return ModelSource(onnx_path=path)
        return ModelSource(path, _existing(directory / ONNX))
    plan, onnx = _existing(directory / PLAN), _existing(directory / ONNX)
    if plan is None and onnx is None:
        raise NotFoundError(
            f"unable to find '{directory / PLAN}' for model '{context.model_name}', nor {ONNX} to build it from"
        )
    return ModelSource(plan, onnx)


def _existing(path: Path) -> Path | None:
    return path if path.is_file() else None


@dataclass(frozen=True, slots=True)
class BuildSource:
    """An ONNX file with all that its build needs to know."""

    onnx: OnnxFile
    profiles: tuple[dict[str, Range], ...]
    options: BuildOptions

    @property
    def largest_batch(self) -> int | None:
        """The most rows that the profiles take, where every input has a dimension for them."""
        firsts = [
            min((profile[tensor.name].max[:1] or (0,))[0] for tensor in self.onnx.inputs if tensor.name in profile)
            for profile in self.profiles
            if any(tensor.name in profile for tensor in self.onnx.inputs)
        ]
        return max(firsts, default=None)


def build_source(context: BackendContext, path: Path, plugins: tuple[str, ...] = ()) -> BuildSource:
    """The ONNX file of a model, its profiles by the config, and the options. Raises ServerError for what is wrong."""
    onnx = read_onnx(path)
    options = options_of(context, plugins)
    try:
        profiles = _profiles(context, onnx)
    except ConfigError:
        raise
    except InvalidArgumentError as error:
        raise ConfigError(f"model '{context.model_name}': {error.message}") from error
    return BuildSource(onnx, profiles, options)


def _profiles(context: BackendContext, onnx: OnnxFile) -> tuple[dict[str, Range], ...]:
    """Parameters `profile.0`, `profile.1`, ... ; without any, one from `max_batch_size`."""
    keys = sorted(
        (key for key in context.config.parameters if key.startswith(_PROFILE)),
        key=lambda key: int(key.removeprefix(_PROFILE)) if key.removeprefix(_PROFILE).isdecimal() else -1,
    )
    if [key.removeprefix(_PROFILE) for key in keys] != [str(index) for index in range(len(keys))]:
        raise ConfigError(
            f"model '{context.model_name}': parameters: expected profile.0, profile.1, ... without a gap, got "
            f"{', '.join(keys)}"
        )
    if not keys:
        largest = context.config.max_batch_size or _default_batch(context, onnx)
        return (derive_profile(onnx, batch=default_sizes(largest) if largest else None, sizes={}),)
    profiles = []
    for key in keys:
        source = f"model '{context.model_name}': parameter {key}"
        profile = {**_fixed(onnx), **parse_profile(context.parameter(key), source)}
        check_profile(profile, onnx, source)
        profiles.append(profile)
    return tuple(profiles)


def _default_batch(context: BackendContext, onnx: OnnxFile) -> int:
    """The max_batch_size of a file that can batch if the config names neither inputs nor batches; else 0."""
    can_batch = all(tensor.shape is not None and tensor.shape[:1] == (-1,) for tensor in onnx.inputs)
    return context.int_option("default-max-batch-size", _DEFAULT_BATCH) if can_batch and not context.config.input else 0


def _fixed(onnx: OnnxFile) -> dict[str, Range]:
    """Inputs that have one shape: a profile need not name them."""
    return {
        tensor.name: Range(tensor.shape, tensor.shape, tensor.shape)
        for tensor in onnx.inputs
        if tensor.shape is not None and -1 not in tensor.shape
    }
