"""Conversations become the text that transformers makes of them; what goes wrong is told by name."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from modelserver_backends.llm.text.chat_template import ChatTemplates, tool_parser_of
from modelserver_backends.llm.text.template_sandbox import TemplateLimits
from support.chat_templates import (
    ANSWER,
    CALL,
    CONVERSATIONS,
    GEMMA,
    LLAMA3,
    MACROS,
    PHI,
    SYSTEM,
    TEMPLATES,
    TOOL,
    USER,
)
from support.checkpoints import tokenizer_of
from support.tiny_tokenizers import byte_level, write_tokenizer

from modelserver.errors import InvalidArgumentError

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


@functools.cache
def _transformers_tokenizer() -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=byte_level(), **TOKENS)


def _expected(template: str, messages: list[dict[str, Any]], **arguments: Any) -> str | None:
    """None: transformers refuses it."""
    import jinja2

    try:
        text: str = _transformers_tokenizer().apply_chat_template(
            messages, chat_template=template, tokenize=False, **arguments
        )
    except (ValueError, TypeError, jinja2.TemplateError):
        return None
    return text


def _rendered(template: str, messages: list[dict[str, Any]], **arguments: Any) -> str | None:
    variables = {name: arguments.pop(name) for name in ("enable_thinking",) if name in arguments}
    try:
        return ChatTemplates({"default": template}, TOKENS).render(messages, variables=variables, **arguments)
    except InvalidArgumentError:
        return None


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_the_text_is_that_of_transformers(template: str, messages: list[dict[str, Any]]) -> None:
    for arguments in (
        {"add_generation_prompt": True},
        {"add_generation_prompt": False},
        {"add_generation_prompt": True, "tools": [TOOL], "enable_thinking": False},
        {"add_generation_prompt": False, "documents": [{"title": "a", "text": "b"}]},
    ):
        assert _rendered(template, messages, **arguments) == _expected(template, messages, **arguments)


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("content", ["It is", "It is ", " It\n", ""])
def test_the_last_message_is_continued_as_transformers_does(template: str, content: str) -> None:
    messages = [USER, {"role": "assistant", "content": content}]
    arguments = {"add_generation_prompt": False, "continue_final_message": True}
    rendered = _rendered(template, messages, **arguments)
    assert rendered == _expected(template, messages, **arguments)
    assert rendered is not None


def test_arguments_of_tool_calls_may_be_text() -> None:
    call = {"function": {"name": "add", "arguments": '{"a": 1, "b": "é"}'}}
    as_text = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert _rendered(LLAMA3, [USER, as_text]) == _expected(LLAMA3, [USER, CALL], add_generation_prompt=True)
    with pytest.raises(InvalidArgumentError, match=r"messages\[1\]: the arguments of a tool call are not JSON"):
        ChatTemplates({"default": LLAMA3}, TOKENS).render(
            [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": "{"}}]}]
        )


def test_content_in_parts() -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}
    assert "one\ntwo<|eot_id|>" in (_rendered(LLAMA3, [parts]) or "")
    assert _rendered(GEMMA, [parts]) == _expected(GEMMA, [parts], add_generation_prompt=True)
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    with pytest.raises(InvalidArgumentError, match=r"messages\[0\]: content of type 'image_url' is not supported"):
        ChatTemplates({"default": LLAMA3}, TOKENS).render([image])


def test_what_the_template_says_is_the_error() -> None:
    templates = ChatTemplates({"default": TEMPLATES["mistral"]}, TOKENS)
    with pytest.raises(InvalidArgumentError, match="refuses these messages: Conversation roles must alternate"):
        templates.render([USER, USER])


@pytest.mark.parametrize(
    ("messages", "arguments", "message"),
    [
        ([], {}, "at least one message"),
        (["hello"], {}, r"messages\[0\] must be an object"),
        ([{"content": "x"}], {}, r"messages\[0\] must have a role"),
        ([{"role": "user", "content": object()}], {}, r"messages\[0\] may hold JSON values only"),
        ([USER], {"continue_final_message": True}, "exclude each other"),
        (
            [{"role": "user"}],
            {"continue_final_message": True, "add_generation_prompt": False},
            "a last message with text",
        ),
        ([USER], {"tools": [object()]}, "tools may hold JSON"),
        ([{"role": "user", "content": 5}], {}, "fails on these messages: TypeError|fails on these messages"),
    ],
)
def test_what_is_refused(messages: list[Any], arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        ChatTemplates({"default": PHI}, TOKENS).render(messages, **arguments)


def test_a_template_that_drops_the_message_cannot_continue_it() -> None:
    with pytest.raises(InvalidArgumentError, match="leaves out the last message"):
        ChatTemplates({"default": "x"}, TOKENS).render([USER], continue_final_message=True, add_generation_prompt=False)


def test_names_of_templates(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    tokenizer = tokenizer_of(write_tokenizer(tmp_path, byte_level(), chat_template=named))
    assert tokenizer.apply_chat_template([USER]) == "plain"
    assert tokenizer.apply_chat_template([USER], tools=[TOOL]) == "tools"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "from json"}))
    assert tokenizer_of(tmp_path).apply_chat_template([USER]) == "from json"
    (tmp_path / "chat_template.jinja").write_text("from jinja")
    assert tokenizer_of(tmp_path).apply_chat_template([USER], tools=[TOOL]) == "from jinja"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("additional")
    assert tokenizer_of(tmp_path).apply_chat_template([USER], tools=[TOOL]) == "additional"


def test_variables_are_given(tmp_path: Path) -> None:
    template = "{{ bos_token }}{{ mood }}{{ messages[0].content }}"
    assert ChatTemplates({"default": template}, TOKENS).render([SYSTEM], variables={"mood": "calm "}) == (
        "<s>calm Be brief."
    )
    # Names that Python has for itself are names like others.
    tokenizer = tokenizer_of(write_tokenizer(tmp_path, byte_level(), chat_template="{{ self }}{{ variables }}"))
    assert tokenizer.apply_chat_template([SYSTEM], variables={"self": 1, "variables": 2}).endswith("2")


@pytest.mark.parametrize("name", ["messages", "tools", "documents", "add_generation_prompt", "continue_final_message"])
def test_variables_cannot_replace_what_a_conversation_has(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"must not have '{name}', which has a place of its own"):
        ChatTemplates({"default": "x"}, TOKENS).render([SYSTEM], variables={name: "no"})


def test_without_a_template_the_error_says_what_to_do() -> None:
    with pytest.raises(InvalidArgumentError, match=r"no chat template.*send text instead"):
        ChatTemplates({}, TOKENS).render([USER])
    with pytest.raises(InvalidArgumentError, match="only tool_use"):
        ChatTemplates({"tool_use": "x"}, TOKENS).render([USER])


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_messages_stay_as_they_were(template: str) -> None:
    messages = [USER, ANSWER, USER, CALL]
    before = json.dumps(messages)
    _rendered(template, messages)
    _rendered(template, [USER, ANSWER], continue_final_message=True, add_generation_prompt=False)
    assert json.dumps(messages) == before


def test_limits_do_not_change_what_is_rendered() -> None:
    small = ChatTemplates({"default": MACROS}, TOKENS, TemplateLimits(num_characters=100_000))
    assert small.render([USER] * 300) == _expected(MACROS, [USER] * 300, add_generation_prompt=True)


_EARLIER = "{% for call in message.tool_calls %}MARK{{ call.function.name }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (_EARLIER.replace("MARK", "<tool_call>"), "hermes"),
        (_EARLIER.replace("MARK", "<tool_call><function="), "qwen3_coder"),
        (_EARLIER.replace("MARK", "<tool_call><arg_key>"), "glm45"),
        (_EARLIER.replace("MARK", "[TOOL_CALLS]"), "mistral"),
        (_EARLIER.replace("MARK", "<|python_tag|>"), "llama3_json"),
        (_EARLIER.replace("MARK", "<\uff5ctool\u2581calls\u2581begin\uff5c>```json"), "deepseek_v3"),
        (_EARLIER.replace("MARK", "<\uff5ctool\u2581calls\u2581begin\uff5c>"), "deepseek_v31"),
        (_EARLIER.replace("MARK", ""), ""),
        ("<tool_call>{{ messages[0].content }}", ""),
    ],
)
def test_a_template_shows_how_its_model_writes_calls(template: str, expected: str) -> None:
    assert tool_parser_of(template) == expected
