"""A vector as the contract's tensors."""

from __future__ import annotations

from typing import Any

import numpy as np

from modelserver.backend import InferResponse, InternalError, InvalidArgumentError

from ..answer import numbers


def embedded(
    vector: np.ndarray[Any, np.dtype[np.float32]],
    *,
    num_tokens: int,
    dimensions: int | None,
    is_normalised: bool,
) -> InferResponse:
    """The response: the vector of a text of so many tokens, or its first `dimensions`; of length one if normalised."""
    if dimensions is not None and dimensions > len(vector):
        error = InvalidArgumentError(f"input 'dimensions': expected at most {len(vector)}, got {dimensions}")
        return InferResponse(error=error)
    part = vector[:dimensions]
    length = float(np.linalg.norm(part))
    if not np.isfinite(length):
        return InferResponse(
            error=InternalError("the embedding is not finite: serve the model with dtype float32 or bfloat16")
        )
    if is_normalised and length:
        part = part / length
    return InferResponse([numbers("embedding", part), numbers("num_input_tokens", [num_tokens])])
