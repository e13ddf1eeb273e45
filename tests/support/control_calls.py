"""Repository control over both protocols with any parameters: tritonclient sends only those that Triton knows."""

from __future__ import annotations

from typing import Any

import grpc
import httpx
from support.clients import ClientError, ProtocolClient
from support.serving import RunningServer

from modelserver.errors import ErrorCode
from modelserver.pb import grpc_service_pb2 as pb

_OF_HTTP = {400: ErrorCode.INVALID_ARGUMENT, 404: ErrorCode.NOT_FOUND, 501: ErrorCode.UNSUPPORTED}
_OF_HTTP |= {409: ErrorCode.ALREADY_EXISTS, 500: ErrorCode.INTERNAL, 503: ErrorCode.UNAVAILABLE}


def control_model(
    running: RunningServer,
    protocol: type[ProtocolClient],
    verb: str,
    model: str,
    *,
    repository: str = "",
    **parameters: Any,
) -> None:
    """Load or unload (`verb`) with these parameters. Raises ClientError."""
    if protocol.name == "http":
        _http(running, verb, model, repository, parameters)
    else:
        _grpc(running, verb, model, repository, parameters)


def list_index(running: RunningServer, protocol: type[ProtocolClient], repository: str = "") -> list[dict[str, str]]:
    """The rows of the index, of one repository or all. Raises ClientError."""
    if protocol.name == "http":
        path = f"/{repository}" if repository else ""
        answer = httpx.post(f"http://{running.http_url}/v2/repository{path}/index", timeout=30)
        _check(answer)
        return [{key: row.get(key, "") for key in ("name", "version", "state", "reason")} for row in answer.json()]
    index = _call(running, "RepositoryIndex", pb.RepositoryIndexRequest(repository_name=repository))
    answered = pb.RepositoryIndexResponse.FromString(index)
    return [
        {"name": row.name, "version": row.version, "state": row.state, "reason": row.reason} for row in answered.models
    ]


def _http(running: RunningServer, verb: str, model: str, repository: str, parameters: dict[str, Any]) -> None:
    path = f"/{repository}" if repository else ""
    url = f"http://{running.http_url}/v2/repository{path}/models/{model}/{verb}"
    _check(httpx.post(url, json={"parameters": parameters}, timeout=30))


def _check(answer: httpx.Response) -> None:
    if answer.status_code != 200:
        code = _OF_HTTP[answer.status_code]
        raise ClientError(code, answer.json()["error"], str(answer.status_code))


def _grpc(running: RunningServer, verb: str, model: str, repository: str, parameters: dict[str, Any]) -> None:
    kind = pb.RepositoryModelLoadRequest if verb == "load" else pb.RepositoryModelUnloadRequest
    request = kind(model_name=model, repository_name=repository)
    for key, value in parameters.items():
        parameter = request.parameters[key]
        if isinstance(value, bool):
            parameter.bool_param = value
        elif isinstance(value, int):
            parameter.int64_param = value
        elif isinstance(value, bytes):
            parameter.bytes_param = value
        else:
            parameter.string_param = value
    _call(running, f"RepositoryModel{verb.capitalize()}", request)


def _call(running: RunningServer, method: str, request: Any) -> bytes:
    with grpc.insecure_channel(running.grpc_url) as channel:
        try:
            answer: bytes = channel.unary_unary(f"/inference.GRPCInferenceService/{method}")(
                request.SerializeToString(), timeout=30
            )
        except grpc.RpcError as error:
            code = "UNSUPPORTED" if error.code() is grpc.StatusCode.UNIMPLEMENTED else error.code().name
            raise ClientError(ErrorCode[code], error.details() or "", error.code().name) from None
    return answer
