"""What exists in C and in Python: tests run with both, where both are there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from modelserver.core import accelerator
from modelserver.wire.http2 import receiver
from modelserver.wire.http2.frame import read_in_python

# Without the accelerator there is nothing to compare, and the tests are those of Python's part.
TWINS = ["python"] if accelerator.read_array is None else ["python", "c"]


@contextlib.contextmanager
def using(twin: str) -> Iterator[None]:
    """Everything in the block is done by this twin."""
    with pytest.MonkeyPatch.context() as patch:
        if twin == "python":
            for name in ("read_array", "read_call", "write_array", "join_answer"):
                patch.setattr(accelerator, name, None)
            patch.setattr(receiver, "read_usual_frame", read_in_python)
        yield
