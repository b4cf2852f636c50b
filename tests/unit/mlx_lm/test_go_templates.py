"""Ollama's templates: prompts of known ones, and errors for what is not understood.

The templates are those of models in Ollama's library, shortened; the prompts were worked out by
hand from the rules of Go's text/template.
"""

from __future__ import annotations

import pytest

from blobstore.errors import UnsupportedSourceError
from blobstore.mlx_lm.go_templates import render_ollama

SYSTEM = {"role": "system", "content": "S"}
USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "yo"}
NEXT = {"role": "user", "content": "q"}

LLAMA = """{{ if .System }}<sys>

{{ .System }}<eot>{{ end }}{{ if .Prompt }}<user>

{{ .Prompt }}<eot>{{ end }}<asst>

{{ .Response }}<eot>"""
QWEN = """{{- if .Messages }}
{{- if or .System .Tools }}<im>system
{{- if .System }}
{{ .System }}
{{- end }}
{{- if .Tools }}
{{- range .Tools }}
{"function": {{ .Function }}}
{{- end }}
{{- end }}</im>
{{ end }}
{{- range $i, $_ := .Messages }}
{{- $last := eq (len (slice $.Messages $i)) 1 -}}
{{- if eq .Role "user" }}<im>user
{{ .Content }}</im>
{{ else if eq .Role "assistant" }}<im>assistant
{{ if .Content }}{{ .Content }}
{{- else if .ToolCalls }}<tool_call>
{{ range .ToolCalls }}{"name": "{{ .Function.Name }}"}
{{ end }}</tool_call>
{{- end }}{{ if not $last }}</im>
{{ end }}
{{- end }}
{{- if and (ne .Role "assistant") $last }}<im>assistant
{{ end }}
{{- end }}
{{- else }}{{ .Prompt }}{{ end }}{{ .Response }}{{ if .Response }}</im>{{ end }}"""


def test_a_template_of_one_exchange_is_used_for_each() -> None:
    assert render_ollama(LLAMA, [SYSTEM, USER, ANSWER, NEXT]) == (
        "<sys>\n\nS<eot><user>\n\nhi<eot><asst>\n\nyo<eot><user>\n\nq<eot><asst>\n\n"
    )


def test_a_template_of_messages_gets_all() -> None:
    assert render_ollama(QWEN, [SYSTEM, USER, ANSWER, NEXT]) == (
        "<im>system\nS</im>\n<im>user\nhi</im>\n<im>assistant\nyo</im>\n<im>user\nq</im>\n"
        "<im>assistant\n"
    )


def test_a_template_without_a_response_ends_with_it() -> None:
    assert render_ollama("[{{ .Prompt }}]", [USER, ANSWER, NEXT]) == "[hi]yo[q]"


def test_consecutive_messages_of_a_role_are_one() -> None:
    assert render_ollama("[{{ .Prompt }}]", [USER, NEXT]) == "[hi\n\nq]"


RENDERED = {
    "{{/* a comment */}}a{{- /* } */ -}} b": "ab",
    "a {{- 1 -}} b": "a1b",
    "{{ with .Prompt }}<{{ . }}>{{ end }}": "<hi>",
    "{{ with $p := .Prompt }}{{ $p }}{{ end }}": "hi",
    "{{ with .System }}a{{ else }}b{{ end }}": "b",
    "{{ $x := 1 }}{{ if .Prompt }}{{ $x = 2 }}{{ end }}{{ $x }}": "2",
    "{{ range $.Messages }}{{ .Role }}{{ break }}{{ end }}": "user",
    "{{ range $i, $m := .Messages }}{{ if eq $i 0 }}{{ continue }}{{ end }}x{{ end }}": "",
    "{{ range .Tools }}x{{ else }}none{{ end }}{{ len .Messages }}": "none1",
    "{{ (index .Messages 0).Content | print }}": "hi",
    '{{ print "a" true nil }}{{ .Prompt | eq "hi" }}{{ json .Prompt }}': 'atruetrue"hi"',
    "{{ `}}` }}{{ and .Prompt .System }}{{ or .System .Prompt }}": "}}hi",
    '{{ eq .Prompt "x" "hi" }} {{ lt 1 2 }} {{ ge 1 2 }}': "true true false",
    "{{ .Response }}{{ .Prompt }}": "",
}


@pytest.mark.parametrize("template", RENDERED)
def test_what_is_understood(template: str) -> None:
    messages = [USER]
    named = ".Messages" in template
    ended = template if ".Response" in template or named else template + "{{ .Response }}"
    assert render_ollama(ended, messages) == RENDERED[template]


REFUSED = {
    '{{ define "x" }}{{ end }}': "uses 'define'",
    '{{ printf "%s" .Prompt }}': "uses 'printf'",
    "{{ if .Prompt }}": "never ended",
    "{{ end }}": "end without",
    "{{ else }}": "else without",
    "{{ .Prompt": "can't be read",
    "{{ .Prompt 1 }}": "not expected",
    "{{ 1.5 }}": "can't be read",
    "{{ $x }}": "not defined",
    "{{ $x = 1 }}": "not defined",
    "{{ break }}": "outside a range",
    "{{ .Prompt.Role }}": "without fields",
    "{{ range .Prompt }}{{ end }}": "range over",
    "{{ len 1 }}": "len fails",
    "{{ index .Messages 50 }}": "index fails",
    "{{ slice .Messages 2 1 }}": "slice fails",
    "{{ lt 1 .Prompt }}": "lt fails",
    "{{ .Messages }}": "prints a list",
    "{{ " + "(" * 101 + "1" + ")" * 101 + " }}": "deeper",
    "{{ if 1 }}" * 101 + "{{ end }}" * 101: "deeper",
    "{{ range $a, $b, $c := .Messages }}{{ end }}": "without :=",
    "{{ if 1 }}{{ else with 1 }}{{ end }}": "else with",
    "{{ range $.Messages }}" * 4 + "x" + "{{ end }}" * 4: "too long",
    "{{ range $.Messages }}{{ json $.Messages }}{{ end }}": "too long",
    '{{ $x := "ab" }}' + "{{ $x = print $x $x }}" * 20: "too long",
    '{{ $x := "ab" }}' + "{{ $x = json $x }}" * 20: "too long",
    '{{ "\\x" }}': "not a text",
}


@pytest.mark.parametrize("template", REFUSED)
def test_what_is_not_understood_is_an_error(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blobstore.mlx_lm.go_templates._MAX_STEPS", 10_000)
    monkeypatch.setattr("blobstore.mlx_lm.go_templates._MAX_LENGTH", 10_000)
    messages = [USER, ANSWER] * 10
    with pytest.raises(UnsupportedSourceError, match=REFUSED[template]) as caught:
        render_ollama(template, messages)
    assert "--raw" in (caught.value.hint or "")
