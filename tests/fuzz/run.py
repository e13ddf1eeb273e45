"""Fuzz a function of `parsers` or `connections`, guided by coverage, for as long as you like.

Needs `pip install atheris`.

    PYTHONPATH=tests:. python -m fuzz.run hpack_blocks -max_total_time=600 [CORPUS_DIRECTORY]

What follows the target goes to libFuzzer. An input that fails is written to a file; give that file as the last
argument to see the failure again.
"""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["modelserver.wire", "modelserver.frontends.grpc", "httptools"]):
    from fuzz.connections import CONNECTIONS
    from fuzz.parsers import PARSERS

TARGETS = PARSERS | CONNECTIONS


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in TARGETS:
        sys.exit(f"{__doc__}\nTargets: {', '.join(TARGETS)}")
    target = TARGETS[sys.argv.pop(1)]
    atheris.Setup(sys.argv, target)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
