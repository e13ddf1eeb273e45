"""A server for models of every kind.

In a Python program: `Server`, with functions and classes (`Model`) as models, whose arrays are described by `Tensor`.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from modelserver.backend import InferRequest as Request
    from modelserver.embed.backend import Model
    from modelserver.embed.server import Server
    from modelserver.embed.signature import Tensor
    from modelserver.errors import InvalidArgumentError, ServerError

__all__ = ["InvalidArgumentError", "Model", "Request", "Server", "ServerError", "Tensor"]

# The builds of ONNX Runtime since 1.29 tell their maker of every session and model, and keep an id of the machine in
# the home directory. They ask this variable once, when they are first imported, also in processes that a server
# starts: so it stands here. Whoever wants to be counted sets it to 0.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

# The modules of the names above, imported when they are first asked for: the command line must start quickly.
_MODULES = {
    "InvalidArgumentError": "errors",
    "Model": "embed.backend",
    "Request": "backend",
    "Server": "embed.server",
    "ServerError": "errors",
    "Tensor": "embed.signature",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'modelserver' has no attribute '{name}'")
    module = importlib.import_module(f"modelserver.{_MODULES[name]}")
    return getattr(module, "InferRequest" if name == "Request" else name)
