"""Templates of Go: what the language's own implementation makes of the same sources, errors by place, and limits."""

from __future__ import annotations

from typing import Any

import pytest
from modelserver_backends.llm.text.go_syntax import TemplateError
from modelserver_backends.llm.text.go_template import GoTemplate
from modelserver_backends.llm.text.template_sandbox import LimitError, TemplateLimits

LIMITS = TemplateLimits(seconds=0.3, num_characters=10_000)
DATA: dict[str, Any] = {
    "S": "héllo",
    "E": "",
    "N": 3,
    "F": 2.5,
    "B": True,
    "L": ["a", "b", "c"],
    "EL": [],
    "M": {"b": 1, "a": "x<y&z", "n": {"k": "v"}},
    "Z": None,
    "R": [{"Role": "system", "Content": "one"}, {"Role": "user", "Content": "two"}],
}


def render(source: str) -> str:
    return GoTemplate(source, LIMITS).execute(DATA)


# What the text/template of Go 1.19 prints, but for ranges over numbers, which are of Go 1.22.
@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ .S }} {{.N}} {{.F}} {{.B}} {{.L}}", "héllo 3 2.5 true [a b c]"),
        ("{{ .M }} {{ .Z }} {{ .Missing }}", "map[a:x<y&z b:1 n:map[k:v]] <no value> <no value>"),
        ("a {{- 3 }} b {{ 4 -}}  \n c", "a3 b 4c"),
        ("{{-3}} {{ -3 }}", "-3 -3"),
        ("x{{/* c */}}y {{- /* c\n */ -}} z", "xyz"),
        ('{{ "q\\"\\n\\t\\u00e9" }}{{ `raw\\n` }}{{ \'a\' }}', 'q"\n\té' + "raw\\n97"),
        (
            "{{ 0x1F }} {{ 1_000 }} {{ 1e6 }} {{ 2.0 }} {{ 0.00001 }} {{ 1234567.5 }}",
            "31 1000 1e+06 2 1e-05 1.2345675e+06",
        ),
        ("{{ if .E }}y{{ else if .B }}b{{ else }}n{{ end }}", "b"),
        ("{{ with .M }}{{ .a }}{{ $.S }}{{ end }}{{ with .E }}x{{ else }}none{{ end }}", "x<y&zhéllonone"),
        ("{{ range .L }}<{{ . }}>{{ end }}{{ range .EL }}x{{ else }}empty{{ end }}", "<a><b><c>empty"),
        ("{{ range $i, $e := .L }}{{ $i }}={{ $e }},{{ end }}{{ range $e := .L }}{{ $e }}{{ end }}", "0=a,1=b,2=c,abc"),
        ("{{ range $k, $v := .M }}{{ $k }}:{{ $v }};{{ end }}", "a:x<y&z;b:1;n:map[k:v];"),
        ("{{ range $i := 3 }}{{ $i }}{{ end }}", "012"),
        ("{{ $x := 1 }}{{ range .L }}{{ $x = . }}{{ end }}{{ $x }}", "c"),
        ("{{ $x := 1 }}{{ range .L }}{{ $x := . }}{{ $x }}{{ end }}{{ $x }}", "abc1"),
        ("{{ range $i, $e := .L }}{{ if eq $i 1 }}{{ continue }}{{ end }}{{ $e }}{{ end }}", "ac"),
        (
            "{{ range $i, $e := .L }}{{ with $e }}{{ if eq $i 1 }}{{ break }}{{ end }}{{ . }}{{ end }}{{ end }}.",
            "a.",
        ),
        ('{{ eq .S "a" "héllo" }}{{ ne .N 4 }}{{ lt 1 2 }}{{ le 2 2 }}{{ gt .F 2.0 }}{{ ge "b" "a" }}', "true" * 6),
        ('{{ eq .Missing "a" }}{{ ne .S nil }}', "falsetrue"),
        ("{{ and .S .N }}{{ and .E .N }}|{{ or .E .N }}{{ or .E 0 }}{{ not .E }}", "3|30true"),
        ("{{ and .E (index .L 9) }}|{{ or .S (index .L 9) }}", "|héllo"),
        ("{{ len .S }} {{ len .L }} {{ .L | len | eq 3 | not }}", "6 3 false"),
        ('{{ index .L 1 }} {{ index .M "n" "k" }} {{ index .S 0 }} {{ index .M "zz" }}', "b v 104 <no value>"),
        ("{{ slice .S 0 1 }} {{ slice .S 3 }} {{ slice .L 1 2 }}", "h llo [b]"),
        ('{{ printf "%s-%d-%v-%q-%t" .S .N .L .S .B }}', 'héllo-3-[a b c]-"héllo"-true'),
        (
            '{{ printf "%5d|%-5s|%05d|%.2f|%x|%+d|%.2s|100%%" .N .S .N .F .N .N .S }}',
            "    3|héllo|00003|2.50|3|+3|hé|100%",
        ),
        (
            '{{ printf "%d" .S }} {{ printf "%s" }} {{ printf "x" .N }}',
            "%!d(string=héllo) %!s(MISSING) x%!(EXTRA int=3)",
        ),
        ('{{ print .N .N .S .N }} {{ println 1 "a" }}', "3 3héllo3 1 a\n"),
        ("{{ json .M }}{{ json .L }}{{ json .Z }}", '{"a":"x\\u003cy\\u0026z","b":1,"n":{"k":"v"}}["a","b","c"]null'),
        ("{{ (index .R 1).Content }}{{ (.M).a }}{{ $m := index .R 0 }}{{ $m.Role }}{{ .M.n.k }}", "twox<y&zsystemv"),
        (
            '{{ define "t" }}[{{ . }}{{ $ }}]{{ end }}{{ template "t" .S }}{{ template "t" }}',
            "[héllohéllo][<no value><no value>]",
        ),
        ('{{ block "b" .L }}{{ range . }}{{ . }}{{ end }}{{ end }}', "abc"),
        (
            "{{ $a := .L }}{{ range $i, $_ := $a }}{{ if eq (len (slice $a $i)) 1 }}last {{ $i }}{{ end }}{{ end }}",
            "last 2",
        ),
        ("{{ if $v := .S }}{{ $v }}{{ end }}{{ with $v := .M.n }}{{ $v.k }}{{ .k }}{{ end }}", "héllovv"),
    ],
)
def test_a_template_says_what_it_says_in_go(source: str, text: str) -> None:
    assert render(source) == text


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("a\nb {{ if .S }}", "line 2, column 6: {{if}} has no {{end}}"),
        ("{{ end }}", "line 1, column 4: unexpected {{end}}"),
        ("{{ range .L }}{{ end }}\n{{ break }}", "line 2, column 4: {{break}} outside {{range}}"),
        ("{{ if .S }}{{ $q := 5 }}{{ end }}{{ $q }}", 'column 37: undefined variable "$q"'),
        ("{{ foo .S }}", 'column 4: function "foo" not defined'),
        ("{{ .S .N }}", "column 4: a value that is not a function takes no arguments"),
        ("{{ .S | 3 }}", "column 9: a value cannot take what is before '|'"),
        ("{{ nil }}", "nil is not a command"),
        ("{{ }}", "missing value for a command"),
        ("x\n\n {{ .S", "line 3, column 2: unclosed action"),
        ('{{ "abc }}', "unexpected '\"' in an action"),
        ('{{ "\\q" }}', "bad escape \\q in a string"),
        ("{{/* x }}", "unclosed comment"),
        ("{{ if .S }}{{ else }}{{ else }}{{ end }}", "column 25: expected {{end}}, got {{else}}"),
        ('{{ if .S }}{{ define "x" }}{{ end }}{{ end }}', "{{define}} must not be inside another block"),
        ("{{ if 1 }}" * 101 + "{{ end }}" * 101, "more than 100 blocks and parentheses are inside each other"),
        ('{{ eq .N "3" }}', "column 4: error calling eq: incompatible types for comparison"),
        ("{{ eq .L .L }}", "error calling eq: non-comparable type"),
        ("{{ len .N }}", "error calling len: len of type int"),
        ("{{ index .L 3 }}", "error calling index: index out of range: 3"),
        ("{{ slice .S 4 2 }}", "error calling slice: invalid slice index: 4 > 2"),
        ("{{ .S.x }}", "can't evaluate field x in type str"),
        ("{{ .M.zz.yy }}", "nil pointer evaluating .yy"),
        ("{{ range .S }}x{{ end }}", "range can't iterate over héllo"),
        ('{{ template "none" }}', 'template "none" not defined'),
        ("{{ not }}", "wrong number of args for not: got 0"),
        ('{{ define "x" }}{{ template "x" }}{{ end }}{{ template "x" }}', "more than 100 templates call each other"),
        ('{{ printf "%9999d" 1 }}', "a width is larger than 1000"),
    ],
)
def test_errors_tell_the_place(source: str, message: str) -> None:
    with pytest.raises(TemplateError) as caught:
        render(source)
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ range 9999 }}{{ range 9999 }}{{ end }}{{ end }}", "takes longer than"),
        ("{{ range 9999 }}xx{{ end }}", "makes more than 10000 characters"),
        ("{{ range 99999 }}{{ end }}", "makes more than 10000 characters"),
        ('{{ $x := "xy" }}{{ range 50 }}{{ $x = printf "%s%s" $x $x }}{{ end }}', "makes more than 10000 characters"),
    ],
)
def test_a_rendering_is_bounded(source: str, message: str) -> None:
    with pytest.raises(LimitError, match=message):
        render(source)


def test_pythons_insides_are_out_of_reach() -> None:
    for source in ("{{ .S.__class__ }}", "{{ .L.append }}", "{{ (index .R 0).items.x }}"):
        with pytest.raises(TemplateError):
            render(source)
