"""tritonclient over HTTP and over gRPC behind one small face, so that a test is written once for both."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, ClassVar

import numpy as np
import tritonclient.grpc
import tritonclient.http
from support.serving import RunningServer
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from modelserver.errors import ErrorCode

Array = np.ndarray[Any, Any]


class ClientError(Exception):
    """A request that the server refused. `code` is the same over both protocols; `status` is the protocol's own.

    HTTP has one status, 400, for several codes: all of them arrive as INVALID_ARGUMENT.
    """

    def __init__(self, code: ErrorCode, message: str, status: str) -> None:
        super().__init__(f"{code.name} ({status}): {message}")
        self.code = code
        self.message = message
        self.status = status


@dataclass(frozen=True)
class Answer:
    """What came back from an inference; `outputs` in the order of the response."""

    outputs: dict[str, Array]
    model_name: str
    model_version: str
    id: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Array:
        return self.outputs[name]


class ProtocolClient(abc.ABC):
    """A connected client; a context manager."""

    name: ClassVar[str]
    # tritonclient's module of this protocol, and its client.
    library: ClassVar[Any]
    raw: Any

    def __enter__(self) -> ProtocolClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.raw.close()

    def infer(
        self,
        model: str,
        inputs: Mapping[str, Array],
        outputs: Sequence[str] | None = None,
        *,
        version: str = "",
        datatypes: Mapping[str, str] | None = None,
        **details: Any,
    ) -> Answer:
        """Infer once. Raises ClientError. `details` are arguments of tritonclient's `infer` (request_id, ...)."""
        arguments = self._arguments(model, inputs, outputs, version, datatypes or {})
        return self._answer(self._call(self.raw.infer, **arguments, **details))

    def _arguments(
        self,
        model: str,
        inputs: Mapping[str, Array],
        outputs: Sequence[str] | None,
        version: str,
        datatypes: Mapping[str, str],
    ) -> dict[str, Any]:
        """What tritonclient's `infer` takes, in every client of this protocol."""
        tensors = []
        for name, array in inputs.items():
            tensor = self.library.InferInput(
                name, list(array.shape), datatypes.get(name) or np_to_triton_dtype(array.dtype)
            )
            tensor.set_data_from_numpy(array)
            tensors.append(tensor)
        wanted = None if outputs is None else [self.library.InferRequestedOutput(name) for name in outputs]
        return {"model_name": model, "inputs": tensors, "model_version": version, "outputs": wanted}

    def is_live(self) -> bool:
        return bool(self._call(self.raw.is_server_live))

    def is_ready(self) -> bool:
        return bool(self._call(self.raw.is_server_ready))

    def is_model_ready(self, model: str, version: str = "") -> bool:
        return bool(self._call(self.raw.is_model_ready, model, version))

    def server_metadata(self) -> dict[str, Any]:
        return self._json(self.raw.get_server_metadata)

    def model_metadata(self, model: str, version: str = "") -> dict[str, Any]:
        return self._json(self.raw.get_model_metadata, model, version)

    def model_config(self, model: str, version: str = "") -> dict[str, Any]:
        answer = self._json(self.raw.get_model_config, model, version)
        return answer.get("config", answer)

    def statistics(self, model: str = "", version: str = "") -> list[dict[str, Any]]:
        """`model_stats` of the statistics extension, with the zeros that protobuf's JSON leaves out."""
        rows = self._json(self.raw.get_inference_statistics, model, version).get("model_stats", [])
        for row in rows:
            for stat in row["inference_stats"].values():
                stat.setdefault("count", 0)
                stat.setdefault("ns", 0)
            for key in ("last_inference", "inference_count", "execution_count"):
                row.setdefault(key, 0)
            row.setdefault("batch_stats", [])
        return rows

    def index(self) -> list[dict[str, Any]]:
        answer: Any = self._json(self.raw.get_model_repository_index)
        return answer.get("models", []) if isinstance(answer, dict) else answer

    def load(self, model: str, **details: Any) -> None:
        self._call(self.raw.load_model, model, **details)

    def unload(self, model: str, **details: Any) -> None:
        self._call(self.raw.unload_model, model, **details)

    def _call(self, method: Any, *arguments: Any, **details: Any) -> Any:
        try:
            return method(*arguments, **details)
        except InferenceServerException as error:
            raise self._error(error) from None

    def _error(self, error: InferenceServerException) -> ClientError:
        status = str(error.status())
        return ClientError(self._code(status), error.message(), status)

    @abc.abstractmethod
    def _json(self, method: Any, *arguments: Any) -> Any: ...

    @abc.abstractmethod
    def _code(self, status: str) -> ErrorCode: ...

    @abc.abstractmethod
    def _answer(self, result: Any) -> Answer: ...


class HttpClient(ProtocolClient):
    """tritonclient.http."""

    name = "http"
    library = tritonclient.http
    CODES: ClassVar[dict[int, ErrorCode]] = {
        400: ErrorCode.INVALID_ARGUMENT,
        404: ErrorCode.NOT_FOUND,
        413: ErrorCode.PAYLOAD_TOO_LARGE,
        500: ErrorCode.INTERNAL,
        501: ErrorCode.UNSUPPORTED,
        503: ErrorCode.UNAVAILABLE,
    }

    def __init__(self, server: RunningServer, **details: Any) -> None:
        self.raw = tritonclient.http.InferenceServerClient(server.http_url, **details)

    def _json(self, method: Any, *arguments: Any) -> Any:
        return self._call(method, *arguments)

    def _code(self, status: str) -> ErrorCode:
        return self.CODES.get(int(status) if status.isdigit() else 0, ErrorCode.UNKNOWN)

    def _answer(self, result: Any) -> Answer:
        head = result.get_response()
        return Answer(
            outputs={output["name"]: result.as_numpy(output["name"]) for output in head.get("outputs", [])},
            model_name=head["model_name"],
            model_version=head.get("model_version", ""),
            id=head.get("id", ""),
            parameters=head.get("parameters", {}),
        )


class GrpcClient(ProtocolClient):
    """tritonclient.grpc."""

    name = "grpc"
    library = tritonclient.grpc
    CODES: ClassVar[dict[str, ErrorCode]] = {
        "CANCELLED": ErrorCode.CANCELLED,
        "UNKNOWN": ErrorCode.INVALID_ARGUMENT,
        "INVALID_ARGUMENT": ErrorCode.INVALID_ARGUMENT,
        "NOT_FOUND": ErrorCode.NOT_FOUND,
        "ALREADY_EXISTS": ErrorCode.INVALID_ARGUMENT,
        "RESOURCE_EXHAUSTED": ErrorCode.PAYLOAD_TOO_LARGE,
        "UNIMPLEMENTED": ErrorCode.UNSUPPORTED,
        "INTERNAL": ErrorCode.INTERNAL,
        "UNAVAILABLE": ErrorCode.UNAVAILABLE,
    }

    def __init__(self, server: RunningServer, **details: Any) -> None:
        self.raw = tritonclient.grpc.InferenceServerClient(server.grpc_url, **details)

    def _json(self, method: Any, *arguments: Any) -> Any:
        return _with_numbers(self._call(method, *arguments, as_json=True))

    def _code(self, status: str) -> ErrorCode:
        return self.CODES.get(status.removeprefix("StatusCode."), ErrorCode.UNKNOWN)

    def _answer(self, result: Any) -> Answer:
        response = result.get_response()
        parameters = {
            key: getattr(value, value.WhichOneof("parameter_choice")) for key, value in response.parameters.items()
        }
        return Answer(
            outputs={output.name: result.as_numpy(output.name) for output in response.outputs},
            model_name=response.model_name,
            model_version=response.model_version,
            id=response.id,
            parameters=parameters,
        )


# Strings that are numbers: protobuf's JSON writes every 64-bit integer as a string, HTTP's as a number.
_TEXT_KEYS = frozenset({"name", "version", "versions", "string_value", "reason"})


def _with_numbers(document: Any, key: str = "") -> Any:
    if isinstance(document, dict):
        return {name: _with_numbers(value, name) for name, value in document.items()}
    if isinstance(document, list):
        return [_with_numbers(value, key) for value in document]
    if isinstance(document, str) and key not in _TEXT_KEYS and document.lstrip("-").isdigit():
        return int(document)
    return document
