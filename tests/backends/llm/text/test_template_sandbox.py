"""A template can make a text and nothing else, and not for ever."""

from __future__ import annotations

import pytest
from modelserver_backends.llm.text.template_sandbox import SandboxedTemplate, TemplateLimits

from modelserver.errors import InvalidArgumentError

LIMITS = TemplateLimits(seconds=0.3, num_characters=10_000)


def _render(source: str, **variables: object) -> str:
    return SandboxedTemplate(source, LIMITS).render(variables)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ self._TemplateReference__context }}",
        "{{ ''.format_map({}).__class__ }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__ }}",
        "{{ _render_budget.__init__.__globals__ }}",
        "{{ _render_budget._deadline }}",
        "{% set ns = namespace(a=1) %}{{ ns.__init__ }}",
        "{% include 'x' %}",
        "{% import 'x' as y %}",
        "{{ lipsum.__globals__ }}",
    ],
)
def test_pythons_insides_are_out_of_reach(source: str) -> None:
    try:
        text = _render(source, messages=[])
    except InvalidArgumentError as error:
        assert "chat template" in error.message  # noqa: PT017  # either way is right
    else:
        assert text == ""


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "takes longer than"),
        ("{% macro f(x) %}{{ f(x) }}{{ f(x) }}{% endmacro %}{{ f(1) }}", "RecursionError|takes longer than"),
        ("{% for item in [1] recursive %}{{ loop([1]) }}{% endfor %}", "RecursionError"),
        ("{% for a in range(20000) %}x{% endfor %}", "makes more than 10000 characters"),
        ("{{ 'x' * 20000 }}", "20000 characters"),
        ("{{ 20000 * 'x' }}", "20000 characters"),
        ("{% set x = 'x' * 9000 %}{{ x + x }}", "18000 characters"),
        ("{% set x = 'x' * 9000 %}{% set y = x ~ x %}{{ y }}", "more than 10000 characters"),
        ("{{ 9 ** 99999999 }}", "99999999 characters"),
        ("{{ 'x'.ljust(20000) }}", "more than 10000 characters"),
        ("{{ [1] * 20000 }}", "20000 characters"),
        ("{{ range(999999) | list }}", "not allowed|fails on these"),
    ],
)
def test_limits(source: str, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        _render(source)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("a\n{% if %}", "line 2"),
        ("{{ nothing.at.all }}", "refuses these messages"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ [1][5] + 1 }}", "fails|refuses"),
        ("{{ raise_exception('no ' ~ x) }}", "refuses these messages: no 5"),
    ],
)
def test_errors_are_told(source: str, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        _render(source, x=5)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (
            "{% for x in [1, 2, 3] %}{% if x == 2 %}{% continue %}{% endif %}{{ x }}{{ loop.last }}{% endfor %}",
            "1False3True",
        ),
        ("{% for x in [1, 2, 3] %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}", "1"),
        ("{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{{ loop.length }}{{ loop.revindex }}{% endfor %}", "a111"),
        ("{% for x in [] %}a{% else %}b{% endfor %}", "b"),
        ("{% for x in [3, 1] | sort if x > 1 %}{{ x }}{{ loop.index }}{% endfor %}", "31"),
        ("{% generation %}a{{ 1 + 1 }}{% endgeneration %}", "a2"),
        ("{{ {'a': '<é>', 'b': [1, none]} | tojson }}", '{"a": "<é>", "b": [1, null]}'),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=2, sort_keys=true) }}", '{\n  "a": 2,\n  "b": 1\n}'),
        ("{{ [1] | tojson(separators=(',', ':')) }}", "[1]"),
        ("{{ '%s-%d' % ('a', 3) }}{{ 7 % 4 }}{{ 2 ** 3 }}", "a-338"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("  {% if true %}\n  a\n  {% endif %}\n", "  a\n"),
    ],
)
def test_what_templates_use(source: str, text: str) -> None:
    assert _render(source) == text


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for m in messages %}{{ m['content'] }}{% endfor %}", False),
        ("{% for m in messages %}{% for p in m['content'] %}{{ p.text }}{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{% for p in m.content | list %}{{ p.text }}{% endfor %}{% endfor %}", True),
    ],
)
def test_whether_parts_of_content_are_read(source: str, expected: bool) -> None:
    assert SandboxedTemplate(source, LIMITS).reads_content_parts is expected
