"""A plugin for pytest: the parts in C are those of the directory KERNELS_DIRECTORY, in place of the installed ones."""

import importlib.util
import os
import sys
from pathlib import Path


def _replace(name: str) -> None:
    path = Path(os.environ["KERNELS_DIRECTORY"], f"{name}.abi3.so")
    spec = importlib.util.spec_from_file_location(f"modelserver_backends.llm.{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[spec.name] = module


_replace("_kernels")
_replace("_packed_linear")
