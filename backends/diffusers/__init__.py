"""Pictures of descriptions: directories of Hugging Face diffusers, for `/v1/images/generations`."""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from modelserver.backend import (
    Backend,
    BackendContext,
    BatchInstance,
    CancelledError,
    ConfigError,
    Datatype,
    DeviceKind,
    InferRequest,
    InferResponse,
    InternalError,
    InvalidArgumentError,
    ModelConfig,
    ModelInput,
    ModelOutput,
    NotFoundError,
    Placement,
    ServerError,
    Tensor,
    UnsupportedError,
    missing_package,
    note_device_error,
)

_INDEX = "model_index.json"
_EXTRA = "diffusers"
_DTYPES = ("float32", "bfloat16", "float16")
# Optional inputs: the datatype, and what the pipeline calls the argument; the seed is a generator of it.
_OPTIONAL = {
    "negative_prompt": (Datatype.BYTES, "negative_prompt"),
    "width": (Datatype.INT32, "width"),
    "height": (Datatype.INT32, "height"),
    "steps": (Datatype.INT64, "num_inference_steps"),
    "guidance": (Datatype.FP32, "guidance_scale"),
    "seed": (Datatype.INT64, "generator"),
}
_STEPS = "num_inference_steps"


class DiffusersInstance(BatchInstance):
    """Draws one picture at a time, on one device."""

    def __init__(self, context: BackendContext, device: str) -> None:
        import torch

        self._torch = torch
        self._max_steps = context.int_parameter("max_steps", 100)
        self._max_size = context.int_parameter("max_size", 1024)
        self._defaults: dict[str, Any] = {}
        if steps := context.int_parameter("steps"):
            self._defaults[_STEPS] = steps
        if guidance := context.float_parameter("guidance"):
            self._defaults["guidance_scale"] = guidance
        self._num_threads = context.int_parameter("threads")
        self._pipeline = _load(context).to(device, getattr(torch, context.parameter("dtype", _DTYPES[0])))
        self._pipeline.set_progress_bar_config(disable=True)
        self._arguments = inspect.signature(self._pipeline.__call__).parameters
        if "prompt" not in self._arguments:
            raise UnsupportedError(f"the pipeline {type(self._pipeline).__name__} makes no pictures of texts")

    def execute(self, requests: Sequence[InferRequest]) -> list[InferResponse | ServerError]:
        if self._num_threads:
            self._torch.set_num_threads(self._num_threads)
            self._num_threads = 0  # it holds for the thread that calls
        return [self._answer(request) for request in requests]

    def _answer(self, request: InferRequest) -> InferResponse | ServerError:
        try:
            pixels = self._draw(request)
        except ServerError as error:
            return error
        except (ValueError, TypeError) as error:
            return InvalidArgumentError(f"the model refuses the inputs: {error}")
        except Exception as error:
            note_device_error(error)
            return InternalError(f"the model failed: {type(error).__name__}: {error}")
        return InferResponse([Tensor("image", Datatype.UINT8, pixels)])

    def _draw(self, request: InferRequest) -> Any:
        """The pixels of a picture, UINT8 [height, width, 3]."""
        arguments = {**self._defaults, **self._read(request)}

        def check(_pipeline: Any, _step: int, _time: Any, values: dict[str, Any]) -> dict[str, Any]:
            if request.is_cancelled:
                raise CancelledError("the caller no longer wants the picture")
            return values

        if "callback_on_step_end" in self._arguments:
            arguments["callback_on_step_end"] = check
        with self._torch.inference_mode():
            found = self._pipeline(**arguments, output_type="np").images[0]
        return (np.nan_to_num(found) * 255).round().clip(0, 255).astype(np.uint8)

    def _read(self, request: InferRequest) -> dict[str, Any]:
        """The arguments of the pipeline. Raises InvalidArgumentError for what is too large, or what it has not."""
        values = {name: tensor.data.reshape(-1)[0] for name, tensor in request.inputs.items()}
        found = {"prompt": values.pop("text_input").decode("utf-8", "replace")}
        bounds = {"width": self._max_size, "height": self._max_size, "steps": self._max_steps}
        for name, value in values.items():
            argument = _OPTIONAL[name][1]
            if argument not in self._arguments:
                raise InvalidArgumentError(f"'{name}': the pipeline {type(self._pipeline).__name__} has no {argument}")
            if name in bounds and not 1 <= value <= bounds[name]:
                raise InvalidArgumentError(f"'{name}' must be 1 to {bounds[name]}, got {value}")
            if name == "seed":
                # On the CPU on every device: then a seed means the same picture.
                found[argument] = self._torch.Generator().manual_seed(int(value))
            else:
                found[argument] = value.decode("utf-8", "replace") if isinstance(value, bytes) else value.item()
        return found


class DiffusersBackend(Backend):
    """One version of a model. Each instance has weights of its own.

    Parameters: `dtype` (float32, bfloat16 or float16); `steps` and `guidance` if a request names none; `max_steps`
    (100) and `max_size` of width and height (1024) of a request; `threads`.
    """

    model_filenames = (_INDEX,)
    extra = _EXTRA
    option_names = frozenset[str]()
    supports_gpu = True
    completes_quickly = True

    @classmethod
    def complete_config(cls, context: BackendContext) -> ModelConfig:
        config = context.config
        if config.input or config.output or config.max_batch_size:
            raise ConfigError(
                f"model '{context.model_name}': expected no input, output and max_batch_size: the backend 'diffusers' "
                "has its own tensors, and draws one picture at a time"
            )
        optional = [ModelInput(name, kind, dims=(1,), optional=True) for name, (kind, _) in _OPTIONAL.items()]
        return replace(
            config,
            input=(ModelInput("text_input", Datatype.BYTES, dims=(1,)), *optional),
            output=(ModelOutput("image", Datatype.UINT8, dims=(-1, -1, 3)),),
        )

    def load(self) -> None:
        """Check the index. Raises InvalidArgumentError for code in the directory, which would run."""
        context = self.context
        path = context.version_directory / _INDEX
        try:
            name = json.loads(path.read_bytes())["_class_name"]
        except FileNotFoundError:
            raise NotFoundError(f"model '{context.model_name}' version {context.version}: no file {path}") from None
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise InvalidArgumentError(f"{path}: expected a JSON object with _class_name: {error!r}") from error
        code = next(context.version_directory.rglob("*.py"), None)
        if code is not None or not isinstance(name, str):
            raise InvalidArgumentError(
                f"model '{context.model_name}': {code or path} is code that comes with the checkpoint, and does not "
                "run: serve it by a Python model (model.py)"
            )
        if context.parameter("dtype", _DTYPES[0]) not in _DTYPES:
            raise ConfigError(f"model '{context.model_name}': parameter dtype: expected one of {', '.join(_DTYPES)}")

    def create_instance(self, placement: Placement) -> DiffusersInstance:
        context = self.context
        device = f"cuda:{placement.device_id}" if placement.kind is DeviceKind.GPU else "cpu"
        try:
            return DiffusersInstance(context, device)
        except ImportError as error:
            package = error.name or str(error).strip().splitlines()[0]
            raise missing_package(package, _EXTRA, "backend 'diffusers'") from error
        except ServerError:
            raise
        except Exception as error:
            raise InvalidArgumentError(
                f"model '{context.model_name}' version {context.version}: diffusers cannot load "
                f"{context.version_directory}: {' '.join(str(error).split())[:500]}"
            ) from error


def _load(context: BackendContext) -> Any:
    library: Any = importlib.import_module("diffusers")
    # Its progress bars would start a thread, and write into the log.
    importlib.import_module("tqdm").tqdm.monitor_interval = 0
    library.utils.logging.disable_progress_bar()
    importlib.import_module("transformers").logging.disable_progress_bar()
    return library.DiffusionPipeline.from_pretrained(
        str(context.version_directory),
        local_files_only=True,
        use_safetensors=True,  # others are pickles, whose code would run
    )


BACKEND = DiffusersBackend
