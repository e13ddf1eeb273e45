"""Models that declare no tensors: they take any inputs and give any outputs, and check them themselves.

Their config has the parameter `open_signature`, no inputs and outputs, and no batches. A prediction by KServe's first
protocol is one document: the BYTES input `request` in, the BYTES output `response` out, with the parameter `v1` set.
"""

from __future__ import annotations

from modelserver.config.schema import ModelConfig

OPEN_SIGNATURE = "open_signature"
DOCUMENT, ANSWER = "request", "response"
# The parameter of a request whose document is one of the first protocol.
V1 = "v1"


def is_open(config: ModelConfig) -> bool:
    """Whether the model takes and gives what it likes."""
    is_asked = config.parameters.get(OPEN_SIGNATURE, "").strip().lower() == "true"
    return is_asked and not (config.input or config.output or config.max_batch_size)
