"""Fuzz a target of `parsers`, `http1_connection` or `http2_connection`, guided by coverage, for as long as you like.

Needs `pip install atheris`.

    PYTHONPATH=tests:. python -m fuzz.run http2_frames -max_total_time=600 [CORPUS_DIRECTORY]

What follows the target goes to libFuzzer. An input that fails is written to a file; give that file as the last
argument to see the failure again.
"""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(
    include=[
        "modelserver.wire",
        "modelserver.frontends.grpc",
        "modelserver_backends.llm.checkpoint",
        "modelserver_backends.llm.quantization",
        "httptools",
    ]
):
    from fuzz import http1_connection, http2_connection, parsers

TARGETS = parsers.PARSERS | http1_connection.TARGETS | http2_connection.TARGETS


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in TARGETS:
        sys.exit(f"{__doc__}\nTargets: {', '.join(TARGETS)}")
    target = TARGETS[sys.argv.pop(1)]
    atheris.Setup(sys.argv, target)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
