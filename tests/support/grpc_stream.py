"""A ModelStreamInfer call over a real channel, one message at a time in both directions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

import grpc
from support.serving import RunningServer

from modelserver.pb import grpc_service_pb2 as pb

TIMEOUT_S = 20.0
_PATH = "/inference.GRPCInferenceService/ModelStreamInfer"


@dataclass(frozen=True)
class StreamAnswer:
    """A ModelStreamInferResponse, as tests speak of it; `outputs` are the raw bytes by name."""

    id: str
    error: str
    is_final: bool
    outputs: dict[str, bytes] = field(default_factory=dict)
    model_name: str = ""
    parameters: dict[str, object] = field(default_factory=dict)


class StreamPeer:
    """The call; a context manager, which cancels what is left of it."""

    def __init__(self, server: RunningServer, metadata: Mapping[str, str] | None = None) -> None:
        self._channel = grpc.insecure_channel(server.grpc_url)
        method = self._channel.stream_stream(
            _PATH,
            request_serializer=pb.ModelInferRequest.SerializeToString,
            response_deserializer=pb.ModelStreamInferResponse.FromString,
        )
        self._requests: SimpleQueue[pb.ModelInferRequest | None] = SimpleQueue()
        self._call = method(iter(self._requests.get, None), metadata=tuple((metadata or {}).items()), timeout=TIMEOUT_S)

    def __enter__(self) -> StreamPeer:
        return self

    def __exit__(self, *_: object) -> None:
        self._requests.put(None)
        self._call.cancel()
        self._channel.close()

    def send(self, *requests: pb.ModelInferRequest) -> None:
        for request in requests:
            self._requests.put(request)

    def half_close(self) -> None:
        self._requests.put(None)

    def __iter__(self) -> Iterator[StreamAnswer]:
        """Answers as they come, to the end of the call. Raises grpc.RpcError when that is not OK."""
        for message in self._call:
            yield _answer(message)

    def take(self, count: int) -> list[StreamAnswer]:
        answers = iter(self)
        return [next(answers) for _ in range(count)]

    def rest(self) -> list[StreamAnswer]:
        """All answers after the last request."""
        self.half_close()
        return list(self)

    def cancel(self) -> None:
        self._call.cancel()


def _answer(message: pb.ModelStreamInferResponse) -> StreamAnswer:
    response = message.infer_response
    parameters = {
        key: getattr(value, value.WhichOneof("parameter_choice")) for key, value in response.parameters.items()
    }
    is_final = bool(parameters.pop("triton_final_response"))
    names = [output.name for output in response.outputs]
    outputs = dict(zip(names, response.raw_output_contents, strict=True))
    return StreamAnswer(response.id, message.error_message, is_final, outputs, response.model_name, parameters)


def text_request(
    model: str, name: str, texts: Sequence[str], request_id: str = "", **parameters: bool
) -> pb.ModelInferRequest:
    """A request with one BYTES input of one dimension."""
    raw = b"".join(len(text).to_bytes(4, "little") + text.encode() for text in texts)
    request = pb.ModelInferRequest(model_name=model, id=request_id, raw_input_contents=[raw])
    request.inputs.add(name=name, datatype="BYTES", shape=[len(texts)])
    for key, value in parameters.items():
        request.parameters[key].bool_param = value
    return request
