"""Execution providers in distributions of their own, which ONNX Runtime loads when it is told where they are.

One is known: TensorRT for RTX, `pip install onnxruntime-ep-nv-tensorrt-rtx` (ONNX Runtime 1.24 and later). Nobody has
run it with this server: it needs a GPU of its list.
"""

from __future__ import annotations

import importlib
import importlib.util
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import onnxruntime

from modelserver.backend import UnavailableError

from .providers import TENSORRT_RTX, Provider

# Module with `get_ep_name` and `get_library_path`, by provider.
_MODULES = {TENSORRT_RTX: "onnxruntime_ep_nv_tensorrt_rtx"}

_lock = threading.Lock()
_registered: set[str] = set()


def plugin_providers(wanted: Iterable[Provider]) -> list[str]:
    """Those of the wanted providers that an installed plugin brings."""
    return [name for name, _ in wanted if name in _MODULES and importlib.util.find_spec(_MODULES[name]) is not None]


def add_plugins(options: Any, asked: Sequence[Provider]) -> None:
    """Give a session's options the devices of the plugins among `asked`. Raises UnavailableError without a device."""
    for name, settings in asked:
        if name not in _MODULES:
            continue
        with _lock:
            if name not in _registered:
                module = importlib.import_module(_MODULES[name])
                onnxruntime.register_execution_provider_library(module.get_ep_name(), module.get_library_path())
                _registered.add(name)
        devices = [device for device in onnxruntime.get_ep_devices() if device.ep_name == name]
        if not devices:
            raise UnavailableError(f"{name} is installed, and finds no device that it supports on this machine")
        options.add_provider_for_devices(devices, settings)
