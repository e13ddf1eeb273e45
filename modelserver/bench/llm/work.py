"""The work of a load process for a language model: the requests, and how their answers stream."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from modelserver.client.address import Address


class EndpointType(StrEnum):
    """The kind of endpoint: OpenAI's two routes, or Triton's."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    GENERATE = "generate_stream"


@dataclass(frozen=True, slots=True)
class LlmWork:
    """`requests` are complete HTTP requests, sent in turn."""

    endpoint_type: EndpointType
    address: Address
    requests: tuple[bytes, ...]
    seed: int = 0
