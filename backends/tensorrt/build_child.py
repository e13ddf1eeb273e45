"""The process that builds one engine: a request on standard input, lines of JSON on standard output.

`python -m <package>.build_child`. When standard input ends, the process that wanted the engine is gone, and
this one ends.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import sys
import threading
from typing import Any, BinaryIO

from modelserver.backend import ServerError

from .build_options import BuildRequest
from .engine_info import to_json
from .network_build import UnsupportedNodesError, build

NICENESS = 10


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # libraries print what they like; only answers go to the pipe
    os.nice(NICENESS)
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(message)s")
    line = sys.stdin.buffer.readline()
    if not line:
        return
    threading.Thread(target=_end_with_parent, name="parent-watch", daemon=True).start()
    _answer(answers, _build(BuildRequest.from_json(json.loads(line)), answers))


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


def _build(request: BuildRequest, answers: BinaryIO) -> dict[str, Any]:
    try:
        built = build(request, lambda phase, fraction: _answer(answers, {"phase": phase, "fraction": fraction}))
    except UnsupportedNodesError as error:
        nodes = [[node.name, node.op, node.reason] for node in error.nodes]
        return {"error": error.message, "code": error.code.value, "nodes": nodes}
    except ServerError as error:
        return {"error": error.message, "code": error.code.value}
    except Exception as error:  # the edge of a request; the parent logs it once
        logging.getLogger(__name__).exception("building an engine failed")
        return {"error": f"{request.onnx}: {type(error).__name__}: {error}", "code": "internal"}
    return {
        "info": to_json(built.info),
        "library_version": built.library_version,
        "num_bytes": built.num_bytes,
        # Linux counts in KiB.
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def _answer(answers: BinaryIO, document: dict[str, Any]) -> None:
    try:
        answers.write(json.dumps(document).encode() + b"\n")
    except BrokenPipeError:
        os._exit(1)


if __name__ == "__main__":
    main()
