"""A model of tables by ONNX Runtime: converted, and compared with the library that it comes from.

At few rows, ONNX Runtime answers many times faster than the libraries do. It computes in FP32, so a converted model is
only used if its answers to rows around the model's own thresholds are those of the library.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from modelserver.backend import Array, Datatype, InvalidArgumentError, UnsupportedError

from .table_model import Predict, TableModel, need

_NUM_ROWS = 256
_TOLERANCE = 1e-4
_LOG_ERRORS_ONLY = 3


def onnx_predict(model: TableModel, outputs: Sequence[str], *, num_threads: int) -> Predict:
    """The function that answers by ONNX Runtime. Raises what the converter raises, and ServerError otherwise."""
    if model.columns or model.datatype is Datatype.BYTES:
        raise UnsupportedError("only models of numbers are converted")
    onnxruntime = need("onnxruntime", "onnx")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the converters, about each other's versions
        graph = model.to_onnx()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = num_threads
    options.inter_op_num_threads = 1
    options.log_severity_level = _LOG_ERRORS_ONLY
    session = onnxruntime.InferenceSession(graph.SerializeToString(), options, providers=["CPUExecutionProvider"])
    (name,) = (each.name for each in session.get_inputs())

    def predict(rows: Array) -> dict[str, Array]:
        found = model.outputs_of_onnx(session.run(None, {name: rows.astype(np.float32, copy=False)}))
        return {output: found[output] for output in outputs}

    _compare(model, predict, outputs, _sample(graph, model))
    return predict


def _compare(model: TableModel, predict: Predict, outputs: Sequence[str], rows: Array) -> None:
    """Raise InvalidArgumentError unless the answers are those of the library."""
    ours, theirs = predict(rows), model.predict(rows, outputs)
    for name in outputs:
        expected, got = np.asarray(theirs[name]), np.asarray(ours[name])
        if expected.size != got.size:
            raise InvalidArgumentError(f"output '{name}' has the shape {list(got.shape)}")
        expected, got = expected.reshape(-1), got.reshape(-1)
        if expected.dtype.kind != "f":
            differing = int((expected.astype(got.dtype) != got).sum())
        else:
            scale = np.abs(expected[np.isfinite(expected)]).max(initial=0.0)
            differing = int(
                (~np.isclose(got, expected, rtol=_TOLERANCE, atol=_TOLERANCE * scale, equal_nan=True)).sum()
            )
        if differing:
            raise InvalidArgumentError(f"output '{name}' differs in {differing} of {expected.size} values")


def _sample(graph: Any, model: TableModel) -> Array:
    """Rows of numbers of many sizes; those of trees lie around their thresholds, where mistakes would be seen."""
    random = np.random.default_rng(0)
    count = model.num_features
    rows = random.standard_normal((_NUM_ROWS, count)) * 10.0 ** random.uniform(-2, 3, (_NUM_ROWS, 1))
    attributes = [{each.name: each for each in node.attribute} for node in graph.graph.node]
    scalers = [each for each in attributes if "offset" in each and len(each["offset"].floats) == count]
    # At a threshold itself, only what no scaler has rounded must fall on the same side.
    steps = [-1e-3, 1e-3] if scalers else [-1e-3, 0.0, 1e-3]
    for found in attributes:
        if "nodes_values" in found and "nodes_featureids" in found:
            values = np.array(found["nodes_values"].floats, np.float64)
            features = np.array(found["nodes_featureids"].ints)
            for feature in np.unique(features[features < count]):
                thresholds = random.choice(values[features == feature], _NUM_ROWS)
                rows[:, feature] = thresholds + np.abs(thresholds) * random.choice(steps, _NUM_ROWS)
    for found in scalers:  # in front of them
        scale = np.array(found["scale"].floats, np.float64)
        rows = np.array(found["offset"].floats, np.float64) + rows / np.where(scale == 0, 1.0, scale)
    # What fits FP32 exactly: other numbers of clients are rounded to it, and the nearest one is as good.
    return rows.astype(np.float32).astype(model.datatype.numpy)
