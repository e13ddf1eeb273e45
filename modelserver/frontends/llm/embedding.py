"""Embeddings and their like: a request to the model for each input -> an array for each, and the number of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from modelserver.core.response import InferResponse
from modelserver.errors import InternalError
from modelserver.frontends.llm.edge import Call
from modelserver.frontends.llm.models import LanguageModel
from modelserver.frontends.llm.requests import responses_of

if TYPE_CHECKING:
    from modelserver.planes.authorized import AnyDataPlane


@dataclass(frozen=True, slots=True)
class Embeddings:
    """`vectors` are float64 [dimensions], one for each input; `num_tokens` counts the tokens of all inputs."""

    vectors: list[np.ndarray[Any, Any]]
    num_tokens: int


async def embed(
    dataplane: AnyDataPlane, model: LanguageModel, call: Call, inputs: Sequence[Mapping[str, Any]]
) -> Embeddings:
    """Ask `model` for the vector of each of `inputs`, which are sent together.

    Raises ParameterError for an input that the model does not have, and the first error of the model.
    """
    found = await pool(dataplane, model, call, inputs, operation="embed", output="embedding")
    return Embeddings([vector.reshape(-1) for vector in found.vectors], found.num_tokens)


async def pool(
    dataplane: AnyDataPlane,
    model: LanguageModel,
    call: Call,
    inputs: Sequence[Mapping[str, Any]],
    *,
    operation: str,
    output: str,
) -> Embeddings:
    """The same of any `operation` of the model's and its `output`, whose arrays keep their shapes."""
    # A model that does one thing only need not be told to.
    common: dict[str, Any] = {"operation": operation} if model.generates or "operation" in model.inputs else {}
    wanted = {"return_num_input_tokens": True}
    made = await model.requests([common | dict(each) for each in inputs], wanted)
    requests = [call.adopt(request) for request in made]
    found = await responses_of(dataplane, requests)
    return Embeddings([_array(model, response, output) for response in found], sum(map(_num_tokens, found)))


def _array(model: LanguageModel, response: InferResponse | None, output: str) -> np.ndarray[Any, Any]:
    for tensor in response.outputs if response is not None else ():
        if tensor.name == output:
            array: np.ndarray[Any, Any] = tensor.data.astype(np.float64)
            return array
    raise InternalError(f"model '{model.name}' answered without the output '{output}'")


def _num_tokens(response: InferResponse | None) -> int:
    for tensor in response.outputs if response is not None else ():
        if tensor.name == "num_input_tokens" and tensor.data.size:
            return int(tensor.data.reshape(-1)[0])
    return 0
