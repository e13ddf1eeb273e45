"""Bounds of requests, and the rules of access: which calls and headers a request may use."""

from __future__ import annotations

from dataclasses import dataclass, field

from modelserver.auth.access import Access, Cors


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Bounds of one request; sizes in bytes.

    `max_body_bytes` holds for the body as sent, for the body after decompression, and for the memory of a tensor
    that arrives as JSON. The flag that sets it is `--http-max-input-size`. `max_parameters` holds for those of the
    request, and for those of each tensor.
    """

    max_body_bytes: int = 64 * 1024 * 1024
    max_json_depth: int = 100
    # Of any document but an infer request, whose tensors have no such bound.
    max_json_values: int = 1 << 19
    max_tensors: int = 1024
    max_parameters: int = 1024
    max_name_len: int = 1024
    # NumPy 1.x arrays end at 32 dimensions.
    max_rank: int = 32
    # Whether repeated requests are recognised by their bytes (`core/recognition.py`).
    recognizes: bool = True
    # The hosts from which pictures of conversations are fetched.
    media_domains: tuple[str, ...] = ()
    access: Access = field(default_factory=Access)
    cors: Cors = field(default_factory=Cors)


@dataclass(frozen=True, slots=True)
class GrpcLimits:
    """Bounds of the gRPC frontend; message sizes are the wire's.

    `max_parameters` holds for those of the request, and for those of each tensor. `max_stream_inflight`
    requests of one ModelStreamInfer call are in flight before it reads no further.
    """

    max_tensors: int = 1024
    max_parameters: int = 1024
    max_stream_inflight: int = 256
    # As in `HttpLimits`.
    recognizes: bool = True
    access: Access = field(default_factory=Access)

    @property
    def max_fields(self) -> int:
        """Of a ModelInferRequest: inputs, outputs, raw contents, parameters; and its names and id."""
        return 3 * self.max_tensors + self.max_parameters + 16


DEFAULT_GRPC_LIMITS = GrpcLimits()
