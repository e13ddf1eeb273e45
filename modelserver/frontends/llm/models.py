"""A model as APIs of language models see it: recognised by its config, asked by tensors that language models share.

A model need not have every tensor of the contract: what it lacks is left out, or named to the client who needs it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import orjson

from modelserver.config.schema import ModelConfig, ModelInput
from modelserver.core.datatype import Datatype
from modelserver.core.documents import beginning
from modelserver.core.long_work import at_once, long_work
from modelserver.core.request import InFlightRequest
from modelserver.core.response import ParameterValue
from modelserver.core.tensor import Tensor
from modelserver.errors import (
    InvalidArgumentError,
    LoadOnDemandError,
    NotFoundError,
    PermissionDeniedError,
    ServerError,
    UnloadedError,
)
from modelserver.frontends.llm.errors import Fault, ParameterError, UnknownModelError
from modelserver.frontends.llm.reasoning import HARMONY
from modelserver.frontends.llm.tool_formats import HARMONY_CALLS
from modelserver.planes.authorized import AnyDataPlane

# By the name of the parameter: the tensors that may stand for it, the first that a model has.
_TENSORS: dict[str, tuple[str, ...]] = {
    "max_tokens": ("max_tokens", "max_new_tokens", "request_output_len"),
    "min_tokens": ("min_tokens", "min_length"),
    "temperature": ("temperature",),
    "top_p": ("top_p", "runtime_top_p"),
    "top_k": ("top_k", "runtime_top_k"),
    "min_p": ("min_p",),
    "seed": ("seed", "random_seed"),
    "frequency_penalty": ("frequency_penalty",),
    "presence_penalty": ("presence_penalty",),
    "repetition_penalty": ("repetition_penalty",),
    "stop": ("stop_words", "stop"),
    "bad_words": ("bad_words",),
    "n": ("num_return_sequences",),
}
_GUIDE_TYPE, _GUIDE = "guided_decoding_guide_type", "guided_decoding_guide"
# Kinds of `structured_outputs` in TensorRT-LLM's words.
_GUIDES = {"json": "json_schema", "json_object": "json", "regex": "regex", "grammar": "ebnf_grammar"}


def sampling_tensors(sampling: Mapping[str, Any], inputs: Collection[str]) -> tuple[dict[str, Any], list[str]]:
    """The inputs that say what `sampling` says, and the parameters that the model has no input for.

    Texts of an array are a tuple: an element each.
    """
    found: dict[str, Any] = {}
    missing: list[str] = []
    for name, value in sampling.items():
        if value is None:
            continue
        tensor = next((each for each in _TENSORS.get(name, ()) if each in inputs), None)
        if name == "structured_outputs":
            guide = _guide(value)
            if guide is None or not {_GUIDE_TYPE, _GUIDE} <= set(inputs):
                missing.append(name)
            else:
                found[_GUIDE_TYPE], found[_GUIDE] = guide
        elif tensor is None:
            missing.append(name)
        else:
            found[tensor] = tuple(value) if name in ("stop", "bad_words") else value
    return found, missing


def _guide(structure: Mapping[str, Any]) -> tuple[str, str] | None:
    """The type and the text of a constraint; None for a kind that TensorRT-LLM has not."""
    ((kind, value),) = structure.items()
    guide_type = _GUIDES.get(kind)
    if guide_type is None:
        return None
    if kind == "json_object":
        return guide_type, ""
    return guide_type, value if isinstance(value, str) else orjson.dumps(value).decode()


# What of the inputs stands in for which parameter of a request, to name it when the model lacks it.
_PARAM_OF = {"messages": "messages", "input_ids": "prompt", "text_input": "prompt", "return_logprobs": "logprobs"}
_SAMPLING = "sampling_parameters"
# Of a chat that names no bound, for a model that must be given one.
_DEFAULT_MAX_TOKENS = 256
# Of a long text, the characters that are encoded at a time.
_PIECE_LEN = 1 << 18
# What clients call the model of a server that has one; some of Hugging Face's name the server's address.
_ANY_MODEL = frozenset({"tgi", "dummy"})
_ADDRESSES = ("http://", "https://")
# Characters of prompts that become tensors on the event loop.
_MAX_LEN_ON_LOOP = 16 * 1024
_VERBS = {
    "generates": "generate text",
    "embeds": "make embeddings",
    "classifies": "classify texts",
    "ranks": "compare texts: it neither is a cross-encoder with one label nor makes embeddings",
    "pools": "make embeddings or classify",
    "is_served": "serve here",
    "tokenizes": "tell tokens",
    "transcribes": "write sound down",
    "speaks": "read texts aloud",
    "draws": "make pictures",
    "adapts": "take adapters: set enable_lora in its model.json",
}


class LanguageModel:
    """One model that generates, embeds or classifies text, writes sound down, or makes sound or pictures of texts."""

    def __init__(self, config: ModelConfig) -> None:
        self.name = config.name
        # As clients see it in lists; requests may use either. A name of the model store may have slashes.
        self.shown_name = config.parameters.get("stored_name", config.name)
        self.is_batched = config.max_batch_size > 0
        self.inputs: dict[str, ModelInput] = {spec.name: spec for spec in config.input}
        self._output_types = {spec.name: spec.data_type for spec in config.output}
        self.outputs = self._output_types.keys()
        self.parameters: Mapping[str, str] = config.parameters
        self.filename = config.default_model_filename
        # The adapter that a request has named in place of the model; None: none.
        self.adapter: str | None = None

    @property
    def answers_as(self) -> str:
        """Its name in answers: an adapter's where a request has named one."""
        return self.adapter or self.name

    @property
    def adapts(self) -> bool:
        """Whether adapters may be added to it."""
        return self.generates and self.parameters.get("enable_lora") == "true"

    @property
    def listed_adapters(self) -> Mapping[str, str]:
        """Adapters of the model's files, by name, and where they lie."""
        found: dict[str, str] = orjson.loads(self.parameters.get("lora_modules") or "{}") if self.adapts else {}
        return found

    @property
    def is_served(self) -> bool:
        """Whether this API has a use for the model."""
        reads = self.generates or self.embeds or self.classifies or self.classifies_tokens
        return reads or self.transcribes or self.speaks or self.draws

    @property
    def generates(self) -> bool:
        return "text_input" in self.inputs and "text_output" in self.outputs

    @property
    def embeds(self) -> bool:
        return "embedding" in self.outputs and not self.inputs.keys().isdisjoint(("text_input", "input_ids"))

    @property
    def classifies(self) -> bool:
        return "scores" in self.outputs and "text_input" in self.inputs

    @property
    def classifies_tokens(self) -> bool:
        return "token_scores" in self.outputs and "text_input" in self.inputs

    @property
    def transcribes(self) -> bool:
        """Whether the model writes files of sound down."""
        sound = self.inputs.get("audio")
        return sound is not None and sound.data_type is Datatype.BYTES and "text" in self.outputs

    @property
    def speaks(self) -> bool:
        """Whether the model reads texts aloud."""
        return "text_input" in self.inputs and "audio" in self.outputs

    @property
    def draws(self) -> bool:
        """Whether the model makes pictures of descriptions."""
        return "text_input" in self.inputs and "image" in self.outputs

    def output_type(self, name: str) -> Datatype | None:
        """The datatype of an output; None without it."""
        return self._output_types.get(name)

    @property
    def scores_pairs(self) -> bool:
        """Whether the model is a cross-encoder: it has one score, for two texts."""
        return self.classifies and "text_pair" in self.inputs and len(self.labels) == 1

    @property
    def ranks(self) -> bool:
        """Whether two texts can be compared."""
        return self.scores_pairs or self.embeds

    @property
    def pools(self) -> bool:
        return self.embeds or self.classifies or self.classifies_tokens

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of a classifier's classes, in the order of its scores."""
        return tuple(orjson.loads(self.parameters.get("labels") or "[]")) if self.classifies else ()

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
    def writes_harmony(self) -> bool:
        """Whether the model writes in channels, as gpt-oss does: reasoning, text and calls."""
        return self.reasoning_parser == HARMONY or self.tool_parser == HARMONY_CALLS

    @property
    def fills_in_middle(self) -> bool:
        """Whether the model's template takes what follows the text that is to be generated."""
        return self.parameters.get("fill_in_middle") == "template"

    @property
    def max_model_len(self) -> int | None:
        text = self.parameters.get("max_model_len", "")
        return int(text) if text.isascii() and text.isdigit() else None

    async def requests(self, prompts: Sequence[Mapping[str, Any]], wanted: Mapping[str, Any]) -> list[InFlightRequest]:
        """As `request`, for each of `prompts`; beside the event loop if their texts are long."""

        def make() -> list[InFlightRequest]:
            return [self.request(needed, wanted) for needed in prompts]

        if sum(map(_text_len, prompts)) <= _MAX_LEN_ON_LOOP:
            return make()
        return await long_work().run(at_once(make))

    def request(self, needed: Mapping[str, Any], wanted: Mapping[str, Any]) -> InFlightRequest:
        """A request with the inputs `needed`, and those of `wanted` that the model has.

        `sampling_parameters` become a tensor each where the model has no such object. Flags that the model must be
        given are false unless they are said. Raises ParameterError for one of `needed` that the model has not, or
        whose value does not fit.
        """
        if _SAMPLING not in self.inputs:
            needed, wanted = self._with_sampling_tensors(needed, wanted)
        given = needed.keys() | wanted.keys()
        flags = {
            name: False
            for name, spec in self.inputs.items()
            if spec.data_type is Datatype.BOOL and not spec.optional and name not in given
        }
        for name in needed:
            if name not in self.inputs:
                raise ParameterError(
                    f"model '{self.name}' has no input '{name}', which this request needs", _PARAM_OF.get(name)
                )
        inputs = {name: self._tensor(name, value) for name, value in (flags | dict(needed)).items()}
        inputs |= {name: self._tensor(name, value) for name, value in wanted.items() if name in self.inputs}
        parameters: dict[str, ParameterValue] = {} if self.adapter is None else {"lora_name": self.adapter}
        return InFlightRequest(model_name=self.name, version=None, inputs=inputs, parameters=parameters)

    def _with_sampling_tensors(
        self, needed: Mapping[str, Any], wanted: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The same, with a tensor for each of the sampling parameters. Raises ParameterError for one without any."""
        is_needed = _SAMPLING in needed
        sampling = dict(needed.get(_SAMPLING) or wanted.get(_SAMPLING) or {})
        needed = {name: value for name, value in needed.items() if name != _SAMPLING}
        wanted = {name: value for name, value in wanted.items() if name != _SAMPLING}
        if not sampling and not is_needed:
            return needed, wanted
        if sampling.get("max_tokens") is None:
            sampling["max_tokens"] = self._default_max_tokens()
        tensors, missing = sampling_tensors(sampling, self.inputs)
        # A bound that the model has no input for is the model's own affair; logprobs are asked for by another input.
        missing = [name for name in missing if name not in ("max_tokens", "logprobs", "prompt_logprobs")]
        # Whether special tokens are in the text is for models that would leave them out.
        missing = [name for name in missing if name != "skip_special_tokens"]
        if missing and is_needed:
            raise ParameterError(
                f"model '{self.name}' has no input '{_SAMPLING}', and none for '{missing[0]}', which this request "
                "needs",
                missing[0],
                Fault.UNSUPPORTED_PARAMETER,
            )
        return needed | tensors, wanted

    def _default_max_tokens(self) -> int | None:
        """What a model that must be given a bound gets; None for any other."""
        if all(name not in self.inputs or self.inputs[name].optional for name in ("max_tokens", "request_output_len")):
            return None
        text = self.parameters.get("default_max_tokens", "")
        return int(text) if text.isascii() and text.isdigit() else _DEFAULT_MAX_TOKENS

    def _tensor(self, name: str, value: Any) -> Tensor:
        datatype = self.inputs[name].data_type
        assert datatype is not None, "a loaded model's inputs have datatypes"
        data: np.ndarray[Any, Any]
        if datatype is Datatype.BYTES and isinstance(value, tuple):
            data = np.array([each.encode() if isinstance(each, str) else each for each in value], dtype=object)
        elif datatype is Datatype.BYTES:
            data = np.empty(1, dtype=object)
            data[0] = _encoded(value) if isinstance(value, str) else orjson.dumps(value)
        elif isinstance(value, str | dict):
            raise InvalidArgumentError(
                f"model '{self.name}': input '{name}' is {datatype.value}; language models have BYTES there"
            )
        else:
            try:
                data = np.asarray(value if isinstance(value, list) else [value], datatype.numpy)
            except (OverflowError, TypeError, ValueError):
                raise ParameterError(
                    f"model '{self.name}': input '{name}' is {datatype.value}, which {beginning(value, 60)} does not "
                    "fit",
                    name,
                ) from None
        return Tensor(name, datatype, data.reshape(1, -1) if self.is_batched else data)


def _text_len(needed: Mapping[str, Any]) -> int:
    """Characters of the texts among a request's inputs, those of messages included."""
    total = 0
    waiting = list(needed.values())
    while waiting and total <= _MAX_LEN_ON_LOOP:
        value = waiting.pop()
        if isinstance(value, str):
            total += len(value)
        elif isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list | tuple) and value and not isinstance(value[0], int):
            total += len(value)
            waiting += value
    return total


def _encoded(text: str) -> bytes:
    """The text as UTF-8, of which other threads get their turn between two pieces."""
    if len(text) <= _PIECE_LEN:
        return text.encode()
    return b"".join([text[start : start + _PIECE_LEN].encode() for start in range(0, len(text), _PIECE_LEN)])


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
                Fault.MISSING,
            )
        name = names[0]
    try:
        model = LanguageModel(dataplane.model_config(name))
    except PermissionDeniedError:
        # A key for a model is good for its adapters.
        if (adapted := await _adapted(dataplane, name, use)) is None:
            raise
        return adapted
    except NotFoundError as error:
        if name in _ANY_MODEL or name.startswith(_ADDRESSES):
            return await find_model(dataplane, None, use)
        if (adapted := await _adapted(dataplane, name, use)) is not None:
            return adapted
        what = "is not loaded" if isinstance(error, UnloadedError) else "does not exist"
        raise await _unknown(dataplane, name, what) from None
    if not model.is_served:
        raise await _unknown(dataplane, name, "is not a language model")
    if not getattr(model, use):
        raise ParameterError(f"the model '{name:.200}' does not {_VERBS[use]}", "model", Fault.UNSUPPORTED_MODEL)
    return model


async def _adapted(dataplane: AnyDataPlane, name: str, use: str) -> LanguageModel | None:
    """The model that has an adapter of that name, with it."""
    for model in await known_models(dataplane):
        if model.adapts and getattr(model, use) and name in adapters_of(dataplane, model):
            model.adapter = name
            return model
    return None


def adapters_of(dataplane: AnyDataPlane, model: LanguageModel) -> dict[str, str]:
    """All adapters that requests may name, in the order in which they came, and where they lie."""
    if not model.adapts:
        return {}
    return {**model.listed_adapters, **{each.name: each.place for each in dataplane.adapters_of(model.name)}}


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


async def load_on_demand(dataplane: AnyDataPlane, name: str, unloaded: LoadOnDemandError) -> None:
    """Wait until the model is loaded. Raises UnknownModelError if there is none after all, and what its load raises."""
    try:
        await unloaded.load()
    except NotFoundError:
        raise await _unknown(dataplane, name, "does not exist") from None


async def unloaded_models(dataplane: AnyDataPlane) -> list[LanguageModel]:
    """Models that this API would serve after loading them, which a request for one does."""
    models = [LanguageModel(config) for config in await dataplane.unloaded_configs()]
    return [model for model in models if model.is_served]
