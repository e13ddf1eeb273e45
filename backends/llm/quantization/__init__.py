"""The schemes in which weights are stored and multiplied: those in this package, and those of installed packages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelserver.backend import UnsupportedError

from ..extension_points import extension_names, load_extension
from .awq import Awq
from .gguf import Gguf
from .gptq import Gptq
from .mxfp4 import Mxfp4
from .online import Fp8, Int4, Int8
from .scheme import FloatScheme, Scheme

# The name of an entry point in this group is a `quant_method`, and its object a class like `Scheme`.
ENTRY_POINT_GROUP = "modelserver.llm.quantizations"

_BUNDLED: dict[str, type[Scheme]] = {
    "none": FloatScheme,
    "int8": Int8,
    "int4": Int4,
    "fp8": Fp8,
    "awq": Awq,
    "gguf": Gguf,
    "gptq": Gptq,
    "mxfp4": Mxfp4,
}


def find_scheme(asked: str | None, entries: Mapping[str, Any]) -> Scheme:
    """Of the option `quantization` and config.json's `quantization_config`. UnsupportedError names what there is."""
    stored = entries.get("quantization_config")
    name = stored_method(entries)
    if name is not None and asked not in (None, name):
        raise UnsupportedError(f"quantization {asked!r} was asked for, but the checkpoint's weights are {name!r}")
    name = name or asked or "none"
    scheme = _find(name)
    if scheme is None or (stored is not None and scheme is FloatScheme) or (stored is None and not scheme.is_online):
        raise _unsupported(name)
    return scheme.from_config(stored)


def stored_method(entries: Mapping[str, Any]) -> str | None:
    """How the checkpoint's weights are quantized; None if they are floats."""
    stored = entries.get("quantization_config")
    return str(stored.get("quant_method", "unnamed")) if isinstance(stored, Mapping) else None


def transformers_options(entries: Mapping[str, Any]) -> dict[str, Any]:
    """What transformers must be told to load such a checkpoint; of methods that are unknown here, nothing."""
    name = stored_method(entries)
    scheme = None if name is None else _find(name)
    return {} if scheme is None else scheme.from_config(entries["quantization_config"]).transformers_options()


def _find(name: str) -> type[Scheme] | None:
    return _BUNDLED.get(name) or load_extension(ENTRY_POINT_GROUP, name)


def _unsupported(name: str) -> UnsupportedError:
    online = [known for known, scheme in _BUNDLED.items() if scheme.is_online and scheme is not FloatScheme]
    added = extension_names(ENTRY_POINT_GROUP)
    text = f"quantization {name!r} is not supported; on plain weights there is: {', '.join(online)}"
    if added:
        text += f"; installed packages add: {', '.join(added)}"
    return UnsupportedError(text)
