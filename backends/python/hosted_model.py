"""The child's side of the Python backend: imports model.py and runs its TritonPythonModel."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Awaitable, Collection, Coroutine, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from modelserver.backend import (
    RESCHEDULE,
    Answers,
    BatchInstance,
    Datatype,
    InferRequest,
    InferResponse,
    InternalError,
    InvalidArgumentError,
    ServerError,
    Tensor,
)
from modelserver.backend.child import LoopThread, SourceLoader, describe_exception

from . import triton_python_backend_utils as pb_utils
from .pb_call import Execution, Phase, current_requests
from .pb_request import InferenceRequest


class CoroutineRunner:
    """One event loop for all coroutines of a model, in a thread of its own, begun with the first of them.

    It goes on between the calls of the model's methods, so that tasks which `execute` leaves behind are executed.
    """

    def __init__(self) -> None:
        self._thread: LoopThread | None = None

    def complete(self, result: Any) -> Any:
        """`result`; for a coroutine, wait for its result. Blocks."""
        if not inspect.isawaitable(result):
            return result
        outcome = asyncio.run_coroutine_threadsafe(_outcome(result), self._loop()).result()
        if isinstance(outcome, _Raised):
            raise outcome.error
        return outcome

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Run a coroutine, which must not raise, without waiting for it."""
        asyncio.run_coroutine_threadsafe(coroutine, self._loop())

    def close(self) -> None:
        if self._thread is not None:
            self._thread.stop()

    def _loop(self) -> asyncio.AbstractEventLoop:
        if self._thread is None:
            self._thread = LoopThread("coroutines", on_exit=traceback.print_exc)
        return self._thread.loop


class _Raised:
    def __init__(self, error: BaseException) -> None:
        self.error = error


async def _outcome(result: Awaitable[Any]) -> Any:
    """The result of a coroutine, with exceptions that end a program converted, because they would end the loop."""
    try:
        return await result
    except BaseException as error:
        return _Raised(error)


# Whether a model uses response senders: its server must know before the first request, and they cost each a little.
_NAME = b"get_response_sender"
# A module that handles requests has one of these among its names: pb_utils itself, or a class or function of it.
_OURS = frozenset(map(id, (pb_utils, *filter(callable, (getattr(pb_utils, name) for name in pb_utils.__all__)))))


def uses_senders(source: Path, model_directory: Path, known: Collection[str]) -> bool:
    """Whether the model's files mention response senders, or what it has imported from elsewhere does.

    Its files: all beside `source`, imported or not, and those in its directory. `known`: names of modules that were
    imported before the model was; of others those are read that know pb_utils, as a company's base class of its models.
    """
    files = {*source.parent.rglob("*.py"), *model_directory.glob("*.py")}
    for name, module in list(sys.modules.items()):
        if name not in known and module is not pb_utils and _knows_pb_utils(vars(module)):
            files.add(Path(getattr(module, "__file__", None) or ""))
    return any(map(_mentions_senders, files))


def _knows_pb_utils(names: dict[str, object]) -> bool:
    return any(id(value) in _OURS for value in names.values())


def _mentions_senders(path: Path) -> bool:
    """Whether the file does; one without readable source may."""
    try:
        return path.suffix != ".py" or _NAME in path.read_bytes()
    except OSError:
        return True


def create_instance(
    path: str,
    args: dict[str, str],
    outputs: dict[str, str],
    is_decoupled: bool = False,
    version_directory: str = "",
) -> BatchInstance:
    """The instance of the model at `path`, initialized with `args`.

    `outputs` maps the config's output names to their datatypes.
    """
    Execution.model_name = args["model_name"]
    source, model_directory = Path(path), Path(args["model_repository"])
    known = frozenset(sys.modules)
    model = import_model(source, model_directory, version_directory)()
    coroutines = CoroutineRunner()
    if hasattr(model, "initialize"):
        coroutines.complete(model.initialize(args))
    if not callable(getattr(model, "execute", None)):
        raise InvalidArgumentError(f"{path}: class TritonPythonModel has no method execute(self, requests)")
    instance_class = ProbedPythonInstance if hasattr(model, "is_ready") else PythonInstance
    datatypes = {name: Datatype(value) for name, value in outputs.items()}
    name = args["model_instance_name"]
    instance = instance_class(model, name, datatypes, coroutines, is_decoupled=is_decoupled)
    instance.answers_later = is_decoupled or uses_senders(source, model_directory, known)
    Execution.phase = Phase.SERVING
    return instance


def complete_config(path: str, model_directory: str, model_config: str, version_directory: str = "") -> dict[str, Any]:
    """The config, in its JSON form, after the model's `auto_complete_config`; as it was when there is none."""
    model_class = import_model(Path(path), Path(model_directory), version_directory)
    config = pb_utils.ModelConfig(model_config)
    if not hasattr(model_class, "auto_complete_config"):
        return config.as_dict()
    completed = model_class.auto_complete_config(config)
    if not isinstance(completed, pb_utils.ModelConfig):
        raise InvalidArgumentError(
            f"auto_complete_config function in model '{config.as_dict().get('name', '')}' must return a valid "
            f"pb.ModelConfig object. {path} returned {type(completed).__name__}, not "
            "triton_python_backend_utils.ModelConfig"
        )
    return completed.as_dict()


def import_model(path: Path, model_directory: Path, version_directory: str = "") -> Any:
    """The class TritonPythonModel of a model.py, imported as `<version>.model` as in Triton.

    Modules beside it and in the model's directory can be imported, absolutely and, from beside it, relatively. The
    file of a backend is imported as `model`, also as in Triton: its directory may be called as a library, such as vllm,
    and must not hide that.
    """
    sys.modules["triton_python_backend_utils"] = pb_utils
    # The files of a model whose code is its backend's are in its own directory.
    pb_utils.set_model_directory(Path(version_directory) if version_directory else path.parent)
    sys.path += [str(path.parent), str(model_directory)]
    name = path.stem
    if not version_directory or Path(version_directory) == path.parent:
        package = ModuleType(path.parent.name)
        package.__path__ = [str(path.parent)]
        sys.modules[package.__name__] = package
        name = f"{package.__name__}.{path.stem}"
    if path.suffix != ".py":
        raise InvalidArgumentError(f"{path} is not a Python file: expected a name that ends in .py")
    loader = SourceLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None, "its loader is given"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    loader.exec_module(module)
    try:
        return module.TritonPythonModel
    except AttributeError:
        raise InvalidArgumentError(
            f"{path} defines no class TritonPythonModel. Functions are served from a program: 'modelserver serve "
            "FILE.py:NAME' with NAME = modelserver.Server(); a module of PyTorch is written with 'modelserver "
            "convert FILE.py:CLASS DIRECTORY --to pt2'"
        ) from None


class PythonInstance(BatchInstance):
    """Turns batches into the model's requests, and checks its answers."""

    def __init__(
        self,
        model: Any,
        name: str,
        outputs: Mapping[str, Datatype],
        coroutines: CoroutineRunner,
        *,
        is_decoupled: bool,
    ) -> None:
        self._model = model
        self._name = name
        self._outputs = outputs
        self._output_names = list(outputs)
        self._is_decoupled = is_decoupled
        self._process_id = os.getpid()
        self._convert = self._response  # one bound method, not one per request
        # Run the model's coroutines, on one loop: to their end, or many at once.
        self._complete = coroutines.complete
        self._coroutines = coroutines

    def execute(self, requests: Sequence[InferRequest]) -> Answers:
        Execution.requests = (getattr(requests[0], "number", 0), len(requests))
        try:
            wrapped = [InferenceRequest.of(request, self._output_names, self._convert) for request in requests]
            result = self._model.execute(wrapped)
            if not self._is_decoupled:
                if type(result) is not list:
                    result = self._complete(self._with_requests(result))
                return self._check(result, requests, wrapped)
            if inspect.iscoroutine(result):
                self._spawn(result, requests)
            elif result is not None:
                raise self._returned_value()
        except BaseException as error:
            # `sys.exit` in a library of a model's and a cancelled task fail requests, too. A forked copy may leave.
            if os.getpid() != self._process_id:
                raise
            traceback.print_exc()
            raise self._failure(error) from error
        if any(request.is_rescheduled for request in wrapped):
            return [RESCHEDULE if request.is_rescheduled else None for request in wrapped]
        return None

    def on_sequence_end(self, correlation_id: int | str, reason: str) -> None:
        """Beyond Triton: a model may define this to free the state of a sequence."""
        if hasattr(self._model, "on_sequence_end"):
            self._complete(self._model.on_sequence_end(correlation_id, reason))

    def close(self) -> None:
        Execution.phase = Phase.FINISHING
        try:
            if hasattr(self._model, "finalize"):
                self._complete(self._model.finalize())
        finally:
            self._coroutines.close()

    @staticmethod
    def _with_requests(result: Any) -> Any:
        """What `execute` returned; a coroutine, and the tasks that it leaves behind, call others for its requests."""
        if not inspect.iscoroutine(result):
            return result
        numbers = Execution.requests

        async def run() -> Any:
            current_requests.set(numbers)
            return await result

        return run()

    def _returned_value(self) -> Exception:
        text = f"Python model '{self._name}' is using the decoupled mode and the execute function must return None."
        return _WrongReturn(text)

    def _failure(self, error: BaseException) -> InternalError:
        text = str(error) if isinstance(error, _WrongReturn) else describe_exception(error)
        return InternalError(f"Failed to process the request(s) for model '{self._name}', message: {text}")

    def _spawn(self, coroutine: Coroutine[Any, Any, Any], requests: Sequence[InferRequest]) -> None:
        """Let a decoupled model answer while the next batches are executed."""
        senders = [request.sender for request in requests]
        numbers = Execution.requests

        async def run() -> None:
            current_requests.set(numbers)
            try:
                result = await coroutine
                if result is not None:
                    raise self._returned_value()
            except BaseException as error:
                traceback.print_exc()
                failure = self._failure(error)
                for sender in senders:
                    with contextlib.suppress(ServerError):  # those that have ended
                        sender.finish(failure)

        self._coroutines.spawn(run())

    def _check(
        self, responses: Any, requests: Sequence[InferRequest], wrapped: Sequence[InferenceRequest]
    ) -> list[InferResponse | ServerError | None]:
        if responses is None and (
            self.answers_later
            or any(request.is_rescheduled for request in wrapped)
            or any(request.has_taken_sender for request in requests)
        ):
            responses = [None] * len(requests)
        if not isinstance(responses, list):
            raise _WrongReturn(f"Expected a list in the execute return, found type '{type(responses)}'.")
        if len(responses) != len(requests):
            raise _WrongReturn(
                "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
                f"InferenceRequest(s) size is:{len(requests)}, and InferenceResponse(s) size is:{len(responses)}"
            )
        return [
            self._entry(response, request, view)
            for response, request, view in zip(responses, requests, wrapped, strict=True)
        ]

    def _entry(
        self, response: Any, request: InferRequest, view: InferenceRequest
    ) -> InferResponse | ServerError | None:
        if view.is_rescheduled:
            if response is not None:
                raise _WrongReturn(
                    "Expected a None object in the execute function return list for reschduled request, found type "
                    f"'{type(response)}'."
                )
            return RESCHEDULE
        if response is None and self.answers_later:
            return None  # the model may take the sender later; a request whose sender is never taken fails
        if response is None and request.has_taken_sender:
            raise _WrongReturn(
                "None was returned for a request that a response sender answers, but when the model was loaded no "
                "file of it mentioned 'get_response_sender': mention it in model.py, a comment will do."
            )
        if not isinstance(response, pb_utils.InferenceResponse):
            raise _WrongReturn(
                "Expected an 'InferenceResponse' object in the execute function return list, found type "
                f"'{type(response)}'."
            )
        return self._response(response, request.outputs)

    def _response(
        self, response: pb_utils.InferenceResponse, requested: tuple[str, ...] | None
    ) -> InferResponse | ServerError:
        error = response.error()
        if error is not None:
            return error.server_error()
        wanted = self._outputs if requested is None else requested
        try:
            tensors = [self._output(tensor) for tensor in response.output_tensors() if tensor.name() in wanted]
        except ServerError as refusal:
            return refusal
        return InferResponse(tensors, None, response.parameter_values())

    def _output(self, tensor: pb_utils.Tensor) -> Tensor:
        made = tensor.core_tensor()
        if made.datatype is Datatype.UINT16 and self._outputs.get(made.name) is Datatype.BF16:
            return Tensor(made.name, Datatype.BF16, made.data)  # bit patterns: NumPy has no other way to say BF16
        return made


class _WrongReturn(Exception):
    """The error for a wrong return value of `execute`."""


class ProbedPythonInstance(PythonInstance):
    """A model with an `is_ready` of its own."""

    def is_ready(self) -> bool:
        answer = self._complete(self._model.is_ready())
        if not isinstance(answer, bool):
            raise TypeError(f"is_ready() must return a boolean value, got {type(answer).__name__}")
        return answer
