"""ONNX models in half precision: weights and arithmetic FP16, inputs and outputs as they were. Needs onnxruntime."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from modelserver.errors import InvalidArgumentError, UnsupportedError
from modelserver.options.flags import nearest_hint
from modelserver.toolkit import require
from modelserver.toolkit.onnx_file import count_ops, onnx_library

# The largest number that FP16 has.
MAX_FLOAT16 = 65504.0
_FLOAT, _FLOAT16 = 1, 10


def to_float16(model: Any, *, keep: Sequence[str] = ()) -> tuple[Any, tuple[str, ...]]:
    """The converted model, and notes. Operators in `keep`, and those that FP16 does not exist for, stay in FP32.

    Raises InvalidArgumentError for an operator to keep that the model lacks, UnsupportedError when nothing is FP32.
    """
    float16 = require("onnxruntime.transformers.float16", extra="convert", purpose="conversion to FP16")
    onnx_library()
    counts = count_ops(model)
    for operator in keep:
        if operator not in counts:
            raise InvalidArgumentError(f"--keep-op: the model has no {operator}{nearest_hint(operator, list(counts))}")
    if not any(tensor.data_type == _FLOAT for tensor in model.graph.initializer):
        what = "it is in FP16 already" if _has_float16(model) else "there are no FP32 weights in it"
        raise UnsupportedError(f"nothing to convert to FP16: {what}")
    blocked = [*float16.DEFAULT_OP_BLOCK_LIST, *keep]
    notes = _notes(model, sorted(set(blocked) & set(counts)))
    try:
        with warnings.catch_warnings():
            # A warning for every value that is rounded to zero: the comparison shows the effect.
            warnings.simplefilter("ignore")
            level = logging.root.manager.disable
            logging.disable(logging.WARNING)
            try:
                converted = float16.convert_float_to_float16(model, keep_io_types=True, op_block_list=blocked)
            finally:
                logging.disable(level)
    except (ValueError, RuntimeError, KeyError, TypeError) as error:
        raise UnsupportedError(f"the model cannot be converted to FP16: {error}") from error
    return converted, notes


def _has_float16(model: Any) -> bool:
    return any(tensor.data_type == _FLOAT16 for tensor in model.graph.initializer)


def _notes(model: Any, kept: Sequence[str]) -> tuple[str, ...]:
    notes = []
    if kept:
        notes.append(f"kept in FP32: {', '.join(kept)}")
    numpy_helper = onnx_library().numpy_helper
    large = [
        tensor.name
        for tensor in model.graph.initializer
        if tensor.data_type == _FLOAT and np.abs(numpy_helper.to_array(tensor)).max(initial=0.0) > MAX_FLOAT16
    ]
    if large:
        notes.append(f"weights beyond {MAX_FLOAT16:.0f} are cut off: {', '.join(large)}")
    return tuple(notes)
