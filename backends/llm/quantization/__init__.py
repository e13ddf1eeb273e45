"""The schemes in which weights are stored and multiplied: those in this package, and those of installed packages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelserver.backend import UnsupportedError

from ..extension_points import extension_names, load_extension
from .awq import Awq
from .bitsandbytes import BitsAndBytes
from .compressed_tensors import CompressedTensors
from .exl2 import Exl2
from .exl3 import Exl3
from .fp8 import ModelOpt, StoredFp8
from .gguf import Gguf
from .gptq import Gptq
from .mxfp4 import Mxfp4
from .online import Fp8, Int4, Int8
from .scheme import FloatScheme, Scheme
from .torchao import TorchAo

# The name of an entry point in this group is a `quant_method`, and its object a class like `Scheme`.
ENTRY_POINT_GROUP = "modelserver.llm.quantizations"

# Made from floats when a model is loaded, by the option `quantization`.
_ONLINE: dict[str, type[Scheme]] = {"none": FloatScheme, "int8": Int8, "int4": Int4, "fp8": Fp8}
# Read from checkpoints, by `quant_method`.
_STORED: dict[str, type[Scheme]] = {
    "awq": Awq,
    "bitsandbytes": BitsAndBytes,
    "compressed-tensors": CompressedTensors,
    "exl2": Exl2,
    "exl3": Exl3,
    "fbgemm_fp8": StoredFp8,
    "fp8": StoredFp8,
    "gguf": Gguf,
    "gptq": Gptq,
    "modelopt": ModelOpt,
    "mxfp4": Mxfp4,
    "torchao": TorchAo,
}


def find_scheme(asked: str | None, entries: Mapping[str, Any]) -> Scheme:
    """Of the option `quantization` and config.json's `quantization_config`. UnsupportedError names what there is."""
    stored = _stored_config(entries)
    name = stored_method(entries)
    if name is not None and asked not in (None, name):
        raise UnsupportedError(f"quantization {asked!r} was asked for, but the checkpoint's weights are {name!r}")
    name = name or asked or "none"
    scheme = _find(name, is_stored=stored is not None)
    if scheme is None:
        raise _unsupported(name)
    return scheme.from_config(stored)


def stored_method(entries: Mapping[str, Any]) -> str | None:
    """How the checkpoint's weights are quantized; None if they are floats."""
    stored = _stored_config(entries)
    return str(stored.get("quant_method", "unnamed")) if isinstance(stored, Mapping) else None


def _stored_config(entries: Mapping[str, Any]) -> Any:
    """config.json's `quantization_config`; AutoRound's as one of the format in whose layout it packs weights."""
    stored = entries.get("quantization_config")
    if not isinstance(stored, Mapping) or stored.get("quant_method") != "auto-round":
        return stored
    packing = str(stored.get("packing_format", "auto_round:auto_gptq"))
    method = next((method for method in ("gptq", "awq") if packing.endswith(method)), None)
    if method is None:
        raise UnsupportedError(f"quantization_config.packing_format {packing!r:.80} of auto-round is not supported")
    return {**stored, "quant_method": method, "dynamic": stored.get("extra_config")}


def transformers_options(entries: Mapping[str, Any]) -> dict[str, Any]:
    """What transformers must be told to load such a checkpoint; of methods that are unknown here, nothing."""
    name = stored_method(entries)
    scheme = None if name is None else _find(name, is_stored=True)
    return {} if scheme is None else scheme.from_config(entries["quantization_config"]).transformers_options()


def _find(name: str, *, is_stored: bool) -> type[Scheme] | None:
    bundled = (_STORED if is_stored else _ONLINE).get(name)
    if bundled is not None:
        return bundled
    added = load_extension(ENTRY_POINT_GROUP, name)
    return added if added is None or is_stored or added.is_online else None


def _unsupported(name: str) -> UnsupportedError:
    online = [known for known in _ONLINE if known != "none"]
    added = extension_names(ENTRY_POINT_GROUP)
    text = f"quantization {name!r} is not supported; on plain weights there is: {', '.join(online)}"
    if added:
        text += f"; installed packages add: {', '.join(added)}"
    return UnsupportedError(text)
