"""An exception of a model's code in a few lines that its author can act on."""

from __future__ import annotations

import traceback
from pathlib import Path

import modelserver

_MAX_FRAMES = 20
_SERVER_SOURCE = str(Path(modelserver.__file__).parent)


def describe_exception(error: BaseException) -> str:
    """`Type: message`, then where it happened, innermost first; the server's own frames are left out."""
    frames = [
        (frame, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if not frame.f_code.co_filename.startswith((_SERVER_SOURCE, "<frozen "))
        and not frame.f_globals.get("__name__", "").startswith("modelserver_backends.")
    ]
    lines = [
        f"  {frame.f_code.co_filename}({line}): {frame.f_code.co_name}"
        for frame, line in reversed(frames[-_MAX_FRAMES:])
    ]
    text = f"{type(error).__name__}: {error}"
    return "\n".join([text, "", "At:", *lines]) if lines else text
