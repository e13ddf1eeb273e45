"""Names of KServe's protocol that wires know as well: the service of gRPC, and the headers that an infer call reads."""

from __future__ import annotations

from typing import Final

SERVICE: Final = "inference.GRPCInferenceService"
INFER_PATH: Final = f"/{SERVICE}/ModelInfer"

# How long the JSON before the tensors is.
JSON_LEN_HEADER: Final = "inference-header-content-length"
# How long a proxy such as Envoy waits for the answer, in milliseconds.
TIMEOUT_HEADER: Final = "x-envoy-expected-rq-timeout-ms"
# In which format the answer shall say how busy the model is.
ASKING_HEADER: Final = "endpoint-load-metrics-format"
# Through how many servers a request has come that send it on; also a parameter of it.
HOPS: Final = "x-modelserver-hops"
# The headers that an infer call reads on a server without callers and forwarded headers.
READ_HEADERS: Final = (
    JSON_LEN_HEADER,
    TIMEOUT_HEADER,
    ASKING_HEADER,
    "content-encoding",
    "accept-encoding",
    "accept",
)
