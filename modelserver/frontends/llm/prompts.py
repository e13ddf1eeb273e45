"""Prompts: the text of a conversation, by a chat template, and the tokens of texts, by the model's own tokenizer.

Models that take `messages` make the text themselves; for others a template of the model's directory makes it here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from modelserver.backend.discovery import bundled_module
from modelserver.config.modelfile import FILENAME as MODELFILE
from modelserver.config.modelfile import Modelfile, is_modelfile, read_modelfile
from modelserver.core.response import InferResponse
from modelserver.errors import InternalError, NotFoundError, ServerError
from modelserver.frontends.llm.errors import ParameterError
from modelserver.frontends.llm.models import LanguageModel
from modelserver.frontends.llm.pictures import IMAGE, PictureUrls, sources_of, take_pictures
from modelserver.frontends.llm.requests import only_responses
from modelserver.planes.authorized import AnyDataPlane

# Parameters of a model's config: a template's text or file, or the directory of a tokenizer, as TensorRT-LLM's models
# have it.
_TEMPLATE, _TOKENIZER = "chat_template", "tokenizer_dir"
_FILES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")


async def conversation_input(
    dataplane: AnyDataPlane, model: LanguageModel, conversation: dict[str, Any], urls: PictureUrls
) -> dict[str, Any]:
    """The inputs of `model` that have the conversation: `messages`, or the text that the template makes of it, and
    `image` for its pictures.

    Raises ParameterError if the model takes text but has no template, if the template refuses the messages, and for
    pictures that the model does not take.
    """
    if model.writes_harmony:
        conversation = {**conversation, "messages": [_with_thinking(each) for each in conversation["messages"]]}
    conversation, pictures = take_pictures(model, conversation)
    if pictures:
        return {"messages": conversation, IMAGE: await sources_of(model, pictures, urls)}
    if "messages" in model.inputs or not model.generates:
        return {"messages": conversation}
    directories = dataplane.model_directories(model.name)
    work = asyncio.get_running_loop().run_in_executor(None, _render, model, directories, conversation)
    return {"text_input": await work}


def joined_messages(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages, with texts in a row of the system, or of the user, as one message.

    Agents send several in a row, and many templates refuse that, or see the first system message alone.
    """
    found: list[dict[str, Any]] = []
    for role, row in groupby(messages, _role_of_text):
        if role is None:
            found += row
        else:
            first, *others = row
            found.append({**first, "content": "\n\n".join(each["content"] for each in (first, *others))})
    return found


def _role_of_text(message: dict[str, Any]) -> str | None:
    role = message["role"]
    return role if role in ("system", "user") and isinstance(message["content"], str) else None


def _with_thinking(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its reasoning where the template of gpt-oss looks for it, before calls without a text."""
    reasoning = message.get("reasoning_content")
    return {**message, "thinking": reasoning} if reasoning and not message.get("content") else message


async def template_of(dataplane: AnyDataPlane, model: LanguageModel) -> str:
    """The text of the model's chat template; empty if it has none."""
    directories = dataplane.model_directories(model.name)

    def read() -> str:
        try:
            text: str = _templates(model, directories).default
        except ServerError:
            return ""
        return text

    return await asyncio.get_running_loop().run_in_executor(None, read)


async def text_of_template(
    dataplane: AnyDataPlane,
    model: LanguageModel,
    template: str,
    messages: list[dict[str, Any]],
    variables: dict[str, Any],
) -> str:
    """What a client's own template, in Go's language, makes of messages, after those of the model's Modelfile.

    Raises ParameterError for a template that is wrong, or fails.
    """
    directories = dataplane.model_directories(model.name)

    def render() -> str:
        found = find_modelfile(model, directories)
        system, history = (found[1].system or "", found[1].messages) if found is not None else ("", ())
        try:
            ollama = bundled_module("llm", "text.ollama_template").OllamaTemplate(template)
            templates = bundled_module("llm", "text.chat_template").ChatTemplates(
                {}, {}, ollama=ollama, system=system, history=history
            )
            text: str = templates.render(messages, variables=variables)
        except ServerError as error:
            raise ParameterError(error.message, "template") from error
        return text

    return await asyncio.get_running_loop().run_in_executor(None, render)


def _render(model: LanguageModel, directories: tuple[Path, ...], conversation: dict[str, Any]) -> str:
    templates = _templates(model, directories)
    try:
        text: str = templates.render(
            conversation["messages"],
            tools=conversation.get("tools"),
            documents=conversation.get("documents"),
            add_generation_prompt=conversation["add_generation_prompt"],
            continue_final_message=conversation["continue_final_message"],
            variables=conversation.get("chat_template_kwargs"),
        )
    except ServerError as error:
        raise ParameterError(error.message, "messages") from error
    return text


def _templates(model: LanguageModel, directories: tuple[Path, ...]) -> Any:
    """Of the parameter `chat_template`, else of the first directory that has one."""
    named = model.parameters.get(_TEMPLATE, "")
    if "{{" in named or "{%" in named:
        return _of_text(named)
    if named:
        path = next((path for path in (each / named for each in directories) if path.is_file()), None)
        if path is None:
            places = ", ".join(map(str, directories))
            raise NotFoundError(
                f"model '{model.name}': the parameter {_TEMPLATE} of its config names '{named:.200}', which is neither "
                f"a template nor a file in {places}"
            )
        return _of_text(path.read_text(encoding="utf-8"))
    tokenizer = model.parameters.get(_TOKENIZER, "")
    if (found := find_modelfile(model, directories)) is not None:
        return _of_modelfile(*found)
    for directory in (*directories, *((directories[-1] / tokenizer,) if tokenizer else ())):
        stamps = tuple(_stamp(directory / name) for name in _FILES)
        if any(stamps):
            templates = _of_directory(directory, stamps)
            if templates.names:
                return templates
    raise ParameterError(
        f"model '{model.name}' takes text and not messages, and has no chat template to make text of them: put "
        f"{_FILES[0]} or {_FILES[2]} into its directory, or name a file with the parameter {_TEMPLATE} of its config; "
        "or send a prompt to /v1/completions",
        "messages",
    )


def find_modelfile(model: LanguageModel, directories: Sequence[Path]) -> tuple[Path, Modelfile] | None:
    """The Modelfile by which a model is served, and its path. None without one, or if it cannot be read any more."""
    named = Path(model.filename or MODELFILE)
    path = directories[0] / named if directories and is_modelfile(named) else None
    try:
        return (path, read_modelfile(path)) if path is not None and path.is_file() else None
    except ServerError:
        return None


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


@lru_cache(maxsize=64)
def _of_text(text: str) -> Any:
    return bundled_module("llm", "text.chat_template").ChatTemplates({"default": text}, {})


@lru_cache(maxsize=64)
def _of_directory(directory: Path, _stamps: tuple[tuple[int, int] | None, ...]) -> Any:
    """As the files were when they had these stamps."""
    checkpoint = bundled_module("llm", "checkpoint").open_checkpoint(directory)
    named = checkpoint.entries("tokenizer_config.json"), checkpoint.entries("special_tokens_map.json")
    templates = bundled_module("llm", "text.chat_template")
    return templates.ChatTemplates(checkpoint.chat_templates, templates.special_tokens(*named))


def _of_modelfile(path: Path, modelfile: Modelfile) -> Any:
    ollama = bundled_module("llm", "text.ollama_template").OllamaTemplate(modelfile.template or "")
    place = path.parent / modelfile.source
    return _of_directory(place, (_stamp(place),)).with_conversation(
        ollama=ollama if modelfile.template else None, system=modelfile.system or "", history=modelfile.messages
    )


async def token_texts_of(dataplane: AnyDataPlane, model: LanguageModel, prompts: Sequence[list[int]]) -> list[str]:
    """What the tokens of each prompt say. Raises ServerError."""
    requests = [model.request({"operation": "detokenize", "input_ids": ids}, {}) for ids in prompts]
    found = []
    for response in await only_responses(dataplane, requests):
        texts = column_of(response, "text_output")
        if not texts:
            raise InternalError(f"model '{model.name}' answered no text_output to the operation detokenize")
        found.append(text_of(texts[0]))
    return found


async def token_ids_of(
    dataplane: AnyDataPlane,
    model: LanguageModel,
    prompts: Sequence[dict[str, Any]],
    *,
    adds_special_tokens: bool | None,
) -> list[list[int]]:
    """The tokens of each prompt, which is one of the inputs that have it, as the model reads it. Raises ServerError."""
    common: dict[str, Any] = {"operation": "tokenize"}
    if adds_special_tokens is not None:
        common["add_special_tokens"] = adds_special_tokens
    requests = await model.requests([common | prompt for prompt in prompts], {})
    responses = await only_responses(dataplane, requests)
    return [numbers_of(model, response, "token_ids") for response in responses]


async def token_pieces_of(
    dataplane: AnyDataPlane, model: LanguageModel, prompt: dict[str, Any], *, adds_special_tokens: bool | None
) -> tuple[list[int], list[bytes]]:
    """The tokens of a prompt, and the bytes that each of them is in a text; half a character is possible.

    Raises ServerError.
    """
    needed: dict[str, Any] = {"operation": "tokenize", **prompt}
    if adds_special_tokens is not None:
        needed["add_special_tokens"] = adds_special_tokens
    (request,) = await model.requests([needed], {})
    # The names of tokens stand in for their bytes where a model has no others.
    pieces = "token_bytes" if "token_bytes" in model.outputs else "token_strs"
    request.outputs = tuple(name for name in ("token_ids", pieces) if name in model.outputs)
    (response,) = await only_responses(dataplane, [request])
    if array_of(response, pieces) is None:
        raise no_output(model, pieces)
    return numbers_of(model, response, "token_ids"), [bytes(each) for each in column_of(response, pieces)]


def numbers_of(model: LanguageModel, response: InferResponse, name: str) -> list[int]:
    """The numbers of an output. Raises ParameterError where the model does not have it."""
    if array_of(response, name) is None:
        raise no_output(model, name)
    return [int(value) for value in column_of(response, name)]


def no_output(model: LanguageModel, name: str) -> ParameterError:
    """The error for an output that a request needs and the model does not have."""
    return ParameterError(f"model '{model.name}' has no output '{name}', which this request needs", "model")


def array_of(response: InferResponse, name: str) -> np.ndarray[Any, Any] | None:
    """The elements of an output as a flat array; None where it is missing."""
    return next((tensor.data.reshape(-1) for tensor in response.outputs if tensor.name == name), None)


def column_of(response: InferResponse, name: str) -> list[Any]:
    """The elements of an output; none where it is missing."""
    array = array_of(response, name)
    return [] if array is None else array.tolist()


def text_of(value: bytes | str) -> str:
    """An element of a BYTES output as text."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
