"""A model as OpenAI's API sees it: recognised by its config, asked by tensors of the names that language models share.

A model need not have every tensor of the contract: what it lacks is left out, or named to the client who needs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from modelserver.config.schema import ModelConfig, ModelInput
from modelserver.core.datatype import Datatype
from modelserver.core.request import InferRequest
from modelserver.core.tensor import Tensor
from modelserver.errors import InvalidArgumentError, ModelAsleepError, NotFoundError, ServerError, UnloadedError
from modelserver.frontends.openai.errors import ParameterError, UnknownModelError

if TYPE_CHECKING:
    from modelserver.dataplane import AnyDataPlane

# What of the inputs stands in for which parameter of a request, to name it when the model lacks it.
_PARAM_OF = {"messages": "messages", "input_ids": "prompt", "text_input": "prompt", "return_logprobs": "logprobs"}
_VERBS = {
    "generates": "generate text",
    "embeds": "make embeddings",
    "is_served": "serve here",
    "tokenizes": "tell tokens",
}


class LanguageModel:
    """One model that generates or embeds text."""

    def __init__(self, config: ModelConfig) -> None:
        self.name = config.name
        self.is_batched = config.max_batch_size > 0
        self.inputs: dict[str, ModelInput] = {spec.name: spec for spec in config.input}
        self.outputs = frozenset(spec.name for spec in config.output)
        self.parameters: Mapping[str, str] = config.parameters

    @property
    def is_served(self) -> bool:
        """Whether this API has a use for the model."""
        return self.generates or self.embeds

    @property
    def generates(self) -> bool:
        return "text_input" in self.inputs and "text_output" in self.outputs

    @property
    def embeds(self) -> bool:
        return "embedding" in self.outputs and not self.inputs.keys().isdisjoint(("text_input", "input_ids"))

    @property
    def tokenizes(self) -> bool:
        return self.generates or ("operation" in self.inputs and "token_ids" in self.outputs)

    @property
    def tool_parser(self) -> str:
        """The name of the format in which the model calls tools; empty for none."""
        return self.parameters.get("tool_parser", "")

    @property
    def reasoning_parser(self) -> str:
        """The name of the tags around the model's reasoning; empty for none."""
        return self.parameters.get("reasoning_parser", "")

    @property
    def max_model_len(self) -> int | None:
        text = self.parameters.get("max_model_len", "")
        return int(text) if text.isascii() and text.isdigit() else None

    def request(self, needed: Mapping[str, Any], wanted: Mapping[str, Any]) -> InferRequest:
        """A request with the inputs `needed`, and those of `wanted` that the model has.

        Raises ParameterError for one of `needed` that the model has not, or whose value does not fit.
        """
        for name in needed:
            if name not in self.inputs:
                raise ParameterError(
                    f"model '{self.name}' has no input '{name}', which this request needs", _PARAM_OF.get(name)
                )
        inputs = {name: self._tensor(name, value) for name, value in needed.items()}
        inputs |= {name: self._tensor(name, value) for name, value in wanted.items() if name in self.inputs}
        return InferRequest(self.name, None, inputs)

    def _tensor(self, name: str, value: Any) -> Tensor:
        datatype = self.inputs[name].data_type
        assert datatype is not None, "a loaded model's inputs have datatypes"
        data: np.ndarray[Any, Any]
        if datatype is Datatype.BYTES:
            data = np.empty(1, dtype=object)
            data[0] = value.encode() if isinstance(value, str) else orjson.dumps(value)
        elif isinstance(value, str | dict):
            raise InvalidArgumentError(
                f"model '{self.name}': input '{name}' is {datatype.value}; language models have BYTES there"
            )
        else:
            data = np.asarray(value if isinstance(value, list) else [value], datatype.numpy)
        return Tensor(name, datatype, data.reshape(1, -1) if self.is_batched else data)


async def find_model(dataplane: AnyDataPlane, name: str | None, use: str = "generates") -> LanguageModel:
    """The model of that name, or the only one of its kind; `use` is a property that it must have.

    Raises UnknownModelError, ParameterError for a model of another kind, and as the data plane does for one that is not
    ready.
    """
    if not name:
        names = [model.name for model in await known_models(dataplane) if getattr(model, use)]
        if len(names) != 1:
            raise ParameterError(
                f"'model' is missing: it must be one of {', '.join(names) or 'the models'}",
                "model",
                "missing_required_parameter",
            )
        name = names[0]
    try:
        model = LanguageModel(dataplane.model_config(name))
    except NotFoundError as error:
        what = "is not loaded" if isinstance(error, UnloadedError) else "does not exist"
        raise await _unknown(dataplane, name, what) from None
    if not model.is_served:
        raise await _unknown(dataplane, name, "is no language model")
    if not getattr(model, use):
        raise ParameterError(f"the model '{name:.200}' does not {_VERBS[use]}", "model", "unsupported_model")
    return model


async def _unknown(dataplane: AnyDataPlane, name: str, what: str) -> UnknownModelError:
    known = ", ".join(model.name for model in await known_models(dataplane)) or "none"
    return UnknownModelError(f"the model '{name:.200}' {what}; the language models here are: {known}")


async def known_models(dataplane: AnyDataPlane) -> list[LanguageModel]:
    """Every model that this API serves, by name: those that are ready, and those that a request would load."""
    models = {model.name: model for model in await unloaded_models(dataplane)}
    models |= {model.name: model for model in _ready_models(dataplane)}
    return [model for _, model in sorted(models.items())]


def _ready_models(dataplane: AnyDataPlane) -> list[LanguageModel]:
    found = []
    for name in dataplane.model_names():
        try:
            model = LanguageModel(dataplane.model_config(name))
        except ServerError:  # unloaded meanwhile, or two of that name
            continue
        if model.is_served:
            found.append(model)
    return found


async def wake(dataplane: AnyDataPlane, name: str, asleep: ModelAsleepError) -> None:
    """Wait until the model is loaded. Raises UnknownModelError if there is none after all, and what its load raises."""
    try:
        await asleep.wake()
    except NotFoundError:
        raise await _unknown(dataplane, name, "does not exist") from None


async def unloaded_models(dataplane: AnyDataPlane) -> list[LanguageModel]:
    """Models that this API would serve after loading them, which a request for one does."""
    models = [LanguageModel(config) for config in await dataplane.unloaded_configs()]
    return [model for model in models if model.is_served]
