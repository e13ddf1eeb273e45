"""Embeddings, scores and their like: a request for each input -> an array for each, and the number of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from modelserver.core.response import InferResponse
from modelserver.errors import InternalError
from modelserver.frontends.llm.edge import Call
from modelserver.frontends.llm.models import LanguageModel, find_model, known_models
from modelserver.frontends.llm.requests import responses_of
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


@dataclass(frozen=True, slots=True)
class Reading:
    """How texts are read. `truncation`: the most tokens of a text or a pair, -1: as many as the model takes,
    None: all of them. `pair_truncation`: the most tokens of a pair's second text. `is_raw`: scores are the network's
    own numbers."""

    truncation: int | None = None
    pair_truncation: int | None = None
    is_raw: bool = False

    def inputs(self) -> dict[str, Any]:
        """The tensors that say it."""
        said = {"truncate_prompt_tokens": self.truncation, "truncate_pair_tokens": self.pair_truncation}
        found: dict[str, Any] = {name: value for name, value in said.items() if value is not None}
        return found | ({"raw_scores": True} if self.is_raw else {})


@dataclass(frozen=True, slots=True)
class Scored:
    """`scores` has a number for each pair; `num_tokens` counts the tokens of all texts that were read."""

    scores: list[float]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Classified:
    """`scores` are float64 [labels] for each text, in the order of the model's `labels`."""

    scores: list[np.ndarray[Any, Any]] = field(default_factory=list)
    num_tokens: int = 0


async def find_ranker(dataplane: AnyDataPlane, name: str | None) -> LanguageModel:
    """The model of that name; without a name the only cross-encoder, or else the only model that makes embeddings.

    Raises as `find_model` does.
    """
    if not name:
        found = [model.name for model in await known_models(dataplane) if model.scores_pairs]
        name = found[0] if len(found) == 1 else None
    return await find_model(dataplane, name, "ranks")


async def score_pairs(
    dataplane: AnyDataPlane, model: LanguageModel, call: Call, pairs: Sequence[tuple[str, str]], reading: Reading
) -> Scored:
    """How well the texts of each pair fit: by a cross-encoder, or by the cosine of both texts' embeddings.

    Raises ParameterError for what the model does not have an input for, and the first error of the model.
    """
    if model.scores_pairs:
        inputs = [{"text_input": first, "text_pair": second} | reading.inputs() for first, second in pairs]
        found = await pool(dataplane, model, call, inputs, operation="classify", output="scores")
        return Scored([float(scores[0]) for scores in found.vectors], found.num_tokens)
    texts = list(dict.fromkeys(text for pair in pairs for text in pair))
    seconds = {second for _, second in pairs}
    inputs = [_embedding_inputs(text, text in seconds, reading) for text in texts]
    embedded = await embed(dataplane, model, call, inputs)
    units = {text: _unit(vector) for text, vector in zip(texts, embedded.vectors, strict=True)}
    return Scored([float(units[first] @ units[second]) for first, second in pairs], embedded.num_tokens)


async def classify(
    dataplane: AnyDataPlane, model: LanguageModel, call: Call, inputs: Sequence[Mapping[str, Any]], reading: Reading
) -> Classified:
    """The scores of each text or pair. Raises as `score_pairs` does."""
    given = [dict(each) | reading.inputs() for each in inputs]
    found = await pool(dataplane, model, call, given, operation="classify", output="scores")
    return Classified(found.vectors, found.num_tokens)


def _embedding_inputs(text: str, is_second: bool, reading: Reading) -> dict[str, Any]:
    truncation = reading.pair_truncation if is_second and reading.pair_truncation is not None else reading.truncation
    return {"text_input": text} | ({} if truncation is None else {"truncate_prompt_tokens": truncation})


def _unit(vector: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    length = float(np.linalg.norm(vector))
    return vector / length if length else vector
