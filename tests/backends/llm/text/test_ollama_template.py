"""Chat templates in Go's language, in the shapes that Ollama's models have them."""

from __future__ import annotations

from typing import Any

import pytest
from modelserver_backends.llm.text.chat_template import ChatTemplates
from modelserver_backends.llm.text.ollama_template import OllamaTemplate, TemplateTraits
from modelserver_backends.llm.text.template_sandbox import TemplateLimits

from modelserver.errors import InvalidArgumentError

CHATML = """\
{{- range .Messages }}<|im_start|>{{ .Role }}
{{ .Content }}<|im_end|>
{{ end }}<|im_start|>assistant
"""
CHATML_TURNS = """\
{{ if .System }}<|im_start|>system
{{ .System }}<|im_end|>
{{ end }}{{ if .Prompt }}<|im_start|>user
{{ .Prompt }}<|im_end|>
{{ end }}<|im_start|>assistant
{{ .Response }}<|im_end|>
"""
LLAMA2 = "[INST] {{ if .System }}<<SYS>>{{ .System }}<</SYS>>\n{{ end }}{{ .Prompt }} [/INST]"
LLAMA3 = """\
{{- if .Tools }}<|start_header_id|>system<|end_header_id|>
{{ range .Tools }}{{ . }}
{{ end }}<|eot_id|>{{ end }}
{{- range $i, $_ := .Messages }}
{{- $last := eq (len (slice $.Messages $i)) 1 }}
{{- if eq .Role "tool" }}<|start_header_id|>ipython<|end_header_id|>

{{ .Content }}<|eot_id|>
{{- else }}<|start_header_id|>{{ .Role }}<|end_header_id|>

{{ if .ToolCalls }}{{ range .ToolCalls }}{"name": "{{ .Function.Name }}", "parameters": {{ .Function.Arguments }}}{{ end }}
{{- else }}{{ .Content }}{{ end }}
{{- if not (and $last (eq .Role "assistant")) }}<|eot_id|>{{ end }}
{{- end }}
{{- if and $last (ne .Role "assistant") }}<|start_header_id|>assistant<|end_header_id|>

{{ end }}
{{- end }}"""  # noqa: E501
GEMMA = """\
{{- $system := "" }}
{{- range .Messages }}
{{- if eq .Role "system" }}
{{- $system = .Content }}
{{- continue }}
{{- end }}<start_of_turn>
{{- if eq .Role "user" }}user
{{ if $system }}{{ $system }}

{{ $system = "" }}{{ end }}
{{- else }}model
{{ end }}
{{- .Content }}<end_of_turn>
{{ end }}<start_of_turn>model
"""
MISTRAL = """\
{{- range $index, $_ := .Messages }}
{{- if eq .Role "user" }}
{{- if and (le (len (slice $.Messages $index)) 2) $.Tools }}[AVAILABLE_TOOLS] {{ $.Tools }}[/AVAILABLE_TOOLS]
{{- end }}[INST] {{ if and (eq (len (slice $.Messages $index)) 1) $.System }}{{ $.System }}

{{ end }}{{ .Content }}[/INST]
{{- else if eq .Role "assistant" }}
{{- if .Content }} {{ .Content }}</s>
{{- else if .ToolCalls }}[TOOL_CALLS] [
{{- range $i, $call := .ToolCalls }}{{ if $i }}, {{ end }}{"name": "{{ $call.Function.Name }}", "arguments": {{ $call.Function.Arguments }}}
{{- end }}]</s>
{{- end }}
{{- else if eq .Role "tool" }}[TOOL_RESULTS] {"content": {{ json .Content }}}[/TOOL_RESULTS]
{{- end }}
{{- end }}"""  # noqa: E501
QWEN3 = """\
{{- $lastUser := -1 }}
{{- range $i, $_ := .Messages }}{{ if eq .Role "user" }}{{ $lastUser = $i }}{{ end }}{{ end }}
{{- if or .System .Tools }}<|im_start|>system
{{ .System }}
{{- if .Tools }}

<tools>
{{- range .Tools }}
{"type": "function", "function": {{ .Function }}}
{{- end }}
</tools>{{ end }}<|im_end|>
{{ end }}
{{- range $i, $_ := .Messages }}
{{- $last := eq (len (slice $.Messages $i)) 1 }}
{{- if eq .Role "user" }}<|im_start|>user
{{ .Content }}
{{- if and $.IsThinkSet (eq $i $lastUser) }} {{ if $.Think }}/think{{ else }}/no_think{{ end }}{{ end }}<|im_end|>
{{ else if eq .Role "assistant" }}<|im_start|>assistant
{{ if and $.IsThinkSet (and .Thinking (or $last (gt $i $lastUser))) }}<think>{{ .Thinking }}</think>
{{ end }}{{ .Content }}
{{- range .ToolCalls }}<tool_call>
{"name": "{{ .Function.Name }}", "arguments": {{ .Function.Arguments }}}
</tool_call>{{ end }}
{{- if .ToolCalls }}<tool_call>{{ end }}
{{- if not $last }}<|im_end|>
{{ end }}
{{- else if eq .Role "tool" }}<|im_start|>user
<tool_response>{{ .Content }}</tool_response><|im_end|>
{{ end }}
{{- if and (ne .Role "assistant") $last }}<|im_start|>assistant
{{ if and $.IsThinkSet (not $.Think) }}<think>

</think>

{{ end }}{{ end }}
{{- end }}"""
DEEPSEEK = """\
{{- range .Messages }}{{ if eq .Role "user" }}<|User|>{{ .Content }}{{ else if eq .Role "assistant" }}<|Assistant|>
{{- if .Thinking }}<think>{{ .Thinking }}</think>{{ end }}{{ .Content }}<|end|>{{ end }}{{ end }}<|Assistant|><think>
"""
COMMAND = """\
{{- range .Tools }}def {{ .Function.Name }}(
{{- range $name, $property := .Function.Parameters.Properties }}{{ $name }}: {{ $property.Type }}, {{ end }})
  '''{{ .Function.Description }} {{ .Function.Parameters.Required }}'''
{{ end }}{{ range .Messages }}{{ .Role }}: {{ .Content }}
{{ end }}"""
TYPESCRIPT = """\
{{ range .Tools }}{{ range $name, $p := .Function.Parameters.Properties }}{{ $name }}: {{ toTypeScriptType $p }}; {{ end }}{{ end }}
{{- range .Messages }}{{ .Content }}{{ end }}"""  # noqa: E501
CODE = "{{ if .Suffix }}<PRE> {{ .Prompt }} <SUF>{{ .Suffix }} <MID>{{ else }}{{ .System }}{{ .Prompt }}{{ end }}"

SYSTEM = {"role": "system", "content": "Be brief."}
HELLO = {"role": "user", "content": "Hello"}
HI = {"role": "assistant", "content": "Hi"}
MORE = {"role": "user", "content": "More"}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"unit": "C", "city": "<Rom>"}}}],
}
RESULT = {"role": "tool", "content": '"21"', "name": "weather"}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells it",
        "parameters": {
            "type": "object",
            "required": ["city"],
            "properties": {
                "city": {"type": "string", "description": "where", "minLength": 1},
                "at": {"type": ["number", "null"]},
            },
        },
    },
}
TOOL_JSON = (
    '{"type":"function","function":{"name":"weather","description":"Tells it","parameters":{"type":"object","required":'
    '["city"],"properties":{"at":{"type":["number","null"]},"city":{"type":"string","description":"where"}}}}}'
)
CALL_JSON = '{"city":"\\u003cRom\\u003e","unit":"C"}'


def render(source: str, *messages: dict[str, Any], **arguments: Any) -> str:
    return ChatTemplates({}, {}, ollama=OllamaTemplate(source)).render(list(messages), **arguments)


def test_chatml_with_messages() -> None:
    assert render(CHATML, SYSTEM, HELLO, HI, MORE) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
        "<|im_start|>assistant\nHi<|im_end|>\n<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_template_of_one_turn_is_rendered_turn_by_turn_and_ends_at_its_response() -> None:
    assert render(CHATML_TURNS, SYSTEM, HELLO, HI, MORE) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
        "<|im_start|>assistant\nHi<|im_end|>\n<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\n"
    )
    assert render(CHATML_TURNS, HELLO, HI).endswith("<|im_start|>assistant\nHi")


def test_a_template_without_a_response_gets_one() -> None:
    assert render(LLAMA2, SYSTEM, HELLO, HI, MORE) == (
        "[INST] <<SYS>>Be brief.<</SYS>>\nHello [/INST]Hi[INST] More [/INST]"
    )


def test_neighbours_of_one_role_are_one_message_except_results_of_tools() -> None:
    assert render("{{ range .Messages }}{{ .Role }}={{ .Content }};{{ end }}", HELLO, MORE, RESULT, RESULT) == (
        'user=Hello\n\nMore;tool="21";tool="21";'
    )
    assert render("{{ .System }}|{{ range .Messages }}{{ end }}", SYSTEM, HELLO, SYSTEM) == "Be brief.\n\nBe brief.|"


def test_llama3_with_tools() -> None:
    text = render(LLAMA3, HELLO, CALL, RESULT, tools=[TOOL])
    assert f"system<|end_header_id|>\n{TOOL_JSON}\n<|eot_id|>" in text
    assert f'{{"name": "weather", "parameters": {CALL_JSON}}}<|eot_id|>' in text
    assert text.endswith('ipython<|end_header_id|>\n\n"21"<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n')
    assert render(LLAMA3, HELLO, HI).endswith("assistant<|end_header_id|>\n\nHi")


def test_gemma_puts_the_system_message_into_the_first_turn() -> None:
    assert render(GEMMA, SYSTEM, HELLO, HI, MORE) == (
        "<start_of_turn>user\nBe brief.\n\nHello<end_of_turn>\n<start_of_turn>model\nHi<end_of_turn>\n"
        "<start_of_turn>user\nMore<end_of_turn>\n<start_of_turn>model\n"
    )


def test_mistral_with_tools() -> None:
    assert render(MISTRAL, SYSTEM, HELLO, tools=[TOOL]) == (
        f"[AVAILABLE_TOOLS] [{TOOL_JSON}][/AVAILABLE_TOOLS][INST] Be brief.\n\nHello[/INST]"
    )
    assert render(MISTRAL, HELLO, CALL, RESULT) == (
        f'[INST] Hello[/INST][TOOL_CALLS] [{{"name": "weather", "arguments": {CALL_JSON}}}]</s>'
        '[TOOL_RESULTS] {"content": "\\"21\\""}[/TOOL_RESULTS]'
    )


def test_qwen3_thinks_unless_it_is_told_not_to() -> None:
    assert render(QWEN3, HELLO) == "<|im_start|>user\nHello /think<|im_end|>\n<|im_start|>assistant\n"
    silent = render(QWEN3, HELLO, variables={"enable_thinking": False})
    assert silent == "<|im_start|>user\nHello /no_think<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    text = render(QWEN3, SYSTEM, HELLO, {**CALL, "reasoning_content": "Hm."}, RESULT, tools=[TOOL])
    assert '{"type": "function", "function": ' + TOOL_JSON.partition('"function":')[2] in text
    assert f'<think>Hm.</think>\n<tool_call>\n{{"name": "weather", "arguments": {CALL_JSON}}}\n</tool_call>' in text


def test_effort_is_a_level_of_thinking() -> None:
    source = "{{ range .Messages }}{{ .Content }}{{ end }} {{ .Think }} {{ .ThinkLevel }} {{ .IsThinkSet }}"
    assert render(source, HELLO) == "Hello false  false"
    assert (
        render(source, HELLO, variables={"enable_thinking": True, "reasoning_effort": "low"}) == "Hello true low true"
    )


def test_the_fields_of_tools() -> None:
    text = render(COMMAND, HELLO, tools=[TOOL])
    assert text == "def weather(at: [number null], city: string, )\n  '''Tells it [city]'''\nuser: Hello\n"
    assert render(TYPESCRIPT, HELLO, tools=[TOOL]) == "at: number | null; city: string; Hello"


def test_a_suffix_is_filled_in_before() -> None:
    variables = {"suffix": "return x"}
    assert render(CODE, HELLO, variables=variables) == "<PRE> Hello <SUF>return x <MID>"
    assert render(CODE, SYSTEM, HELLO) == "Be brief.Hello"


@pytest.mark.parametrize("source", [CHATML, CHATML_TURNS, LLAMA3, GEMMA, QWEN3], ids=str.strip)
def test_a_last_answer_may_be_continued(source: str) -> None:
    text = render(source, HELLO, HI, continue_final_message=True, add_generation_prompt=False)
    assert text.endswith("Hi")


def test_a_models_own_system_message_and_history_come_first() -> None:
    templates = ChatTemplates({}, {}, ollama=OllamaTemplate(CHATML), system="Be kind.", history=[HELLO, HI])
    text = templates.render([MORE])
    assert text.startswith("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHello<|im_end|>")
    assert "Be kind." not in templates.render([SYSTEM, MORE])
    jinja = ChatTemplates({"default": "{% for m in messages %}{{ m.role }};{% endfor %}"}, {}, system="x", history=[HI])
    assert jinja.render([MORE]) == "system;assistant;user;"


@pytest.mark.parametrize(
    ("source", "traits"),
    [
        (CHATML, TemplateTraits()),
        (LLAMA3, TemplateTraits(tool_parser="llama3_json")),
        (MISTRAL, TemplateTraits(tool_parser="mistral")),
        (
            QWEN3.replace("{{- range .ToolCalls }}", "{{- if .ToolCalls }}{{ range .ToolCalls }}", 1).replace(
                "</tool_call>{{ end }}", "</tool_call>{{ end }}{{ end }}", 1
            ),
            TemplateTraits(tool_parser="hermes", reasoning_parser="qwen3"),
        ),
        (DEEPSEEK, TemplateTraits(reasoning_parser="deepseek_r1")),
        (CODE, TemplateTraits(has_suffix=True)),
    ],
)
def test_a_template_tells_what_its_model_can(source: str, traits: TemplateTraits) -> None:
    assert OllamaTemplate(source).traits == traits


def test_errors_name_the_template_and_the_place() -> None:
    with pytest.raises(InvalidArgumentError, match=r"the model's template, line 1, column 4: \{\{if\}\} has no"):
        OllamaTemplate("{{ if .System }}")
    with pytest.raises(
        InvalidArgumentError, match=r"fails on these messages: line 1, column 25: can't evaluate field X"
    ):
        render("{{ range .Messages }}{{ .X }}{{ end }}", HELLO)
    slow = OllamaTemplate(
        "{{ range 9999 }}{{ range 9999 }}{{ end }}{{ end }}{{ .Messages }}", TemplateLimits(seconds=0.1)
    )
    with pytest.raises(InvalidArgumentError, match=r"takes longer than 0\.1 s: send fewer or shorter messages"):
        ChatTemplates({}, {}, ollama=slow).render([HELLO])
