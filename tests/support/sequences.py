"""Models with sequences, and clients that keep to them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from support.clients import ProtocolClient
from support.model_files import write_model

START = 'name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] }'
END = 'name: "END" control { kind: CONTROL_SEQUENCE_END fp32_false_true: [ 0, 1 ] }'
READY = 'name: "READY" control { kind: CONTROL_SEQUENCE_READY bool_false_true: [ false, true ] }'
CORRELATION_ID = 'name: "CORRID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_STRING }'

STRATEGIES = {"direct": f"{START} | {READY}", "oldest": f"{START} | {CORRELATION_ID}"}


def controls(*tensors: str) -> str:
    """`control_input` of the config; each tensor is one of the constants above."""
    return " ".join(f"control_input {{ {tensor} }}" for tensor in tensors)


def write_sequence_model(
    repository: Path,
    name: str,
    strategy: str,
    *,
    tensors: Sequence[str] = (),
    more: str = "",
    backend: str = "sequence",
    max_batch_size: int = 4,
    idle_us: int = 60_000_000,
    top: str = "",
    versions: tuple[int, ...] = (1,),
) -> Path:
    """A model of the sequence backend that adds up INPUT; `strategy` as in "direct { }"."""
    kind = strategy.partition(" ")[0]
    tensors = tensors or [tensor.strip() for tensor in STRATEGIES.get(kind, START).split("|")]
    text = f"""
backend: "{backend}"
max_batch_size: {max_batch_size}
input {{ name: "INPUT" data_type: TYPE_INT32 dims: [ 1 ] }}
output {{ name: "OUTPUT" data_type: TYPE_INT32 dims: [ 1 ] }}
sequence_batching {{
  max_sequence_idle_microseconds: {idle_us}
  {strategy}
  {controls(*tensors)}
  {more}
}}
{top}
"""
    return write_model(repository, name, text, versions=versions)


def add(client: ProtocolClient, model: str, sequence_id: int | str, value: int, flags: str = "", **details: Any) -> int:
    """Send one number; the sum that came back. `flags`: + for START, - for END."""
    answer = client.infer(
        model,
        {"INPUT": np.array([[value]], np.int32)},
        sequence_id=sequence_id,
        sequence_start="+" in flags,
        sequence_end="-" in flags,
        **details,
    )
    return int(answer["OUTPUT"].item())
