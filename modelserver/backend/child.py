"""The part of the contract for code that runs in a child process: what it may ask of the server, and how it logs.

`Responses` lets other models answer a request. `ask` and `tell` name a topic of the server: `load_model`,
`unload_model`, `is_model_ready`, and those of metrics. All of it raises RuntimeError outside of a child process.
"""

from __future__ import annotations

from modelserver.backend.discovery import SourceLoader
from modelserver.core.loop_thread import LoopThread
from modelserver.core.tensor import encode_bytes_elements
from modelserver.execution.process.calls_to_server import Responses, ask, tell, tell_soon
from modelserver.execution.process.child_log import describe_exception, write_record

__all__ = [
    "LoopThread",
    "Responses",
    "SourceLoader",
    "ask",
    "describe_exception",
    "encode_bytes_elements",
    "tell",
    "tell_soon",
    "write_record",
]
