"""Modelfiles: what they say, options on top, the layers and the config that come of it."""

from pathlib import Path

import pytest

from blobstore.errors import DocumentError, LimitExceededError, UsageError
from blobstore.formats.documents import ModelConfig
from blobstore.formats.modelfile import (
    DEPRECATED,
    MAX_MODELFILE,
    Modelfile,
    check_requires,
    encode_parameters,
    parse_parameters,
    read_script,
    resolve_path,
)

EVERYTHING = b'''# a model
FROM ./weights
TEMPLATE """{{ .System }}
<|user|>{{ .Prompt }}"""
SYSTEM You are "short" & <kind>.
LICENSE MIT
PARAMETER temperature 0.5
PARAMETER stop "<|user|>"
parameter stop <|end|>
PARAMETER num_ctx 4096
PARAMETER num_ctx 8192
LICENSE """
Apache
"""
PARSER qwen3
RENDERER qwen3-coder
REQUIRES v0.20.0
DRAFT ../draft
MESSAGE user Hello, <you>
MESSAGE assistant "Hi: there"
'''
PARAMETERS = (
    rb'{"num_ctx":8192,"stop":["\u003c|user|\u003e","\u003c|end|\u003e"],"temperature":0.5}'
)
MESSAGES = (
    rb'[{"role":"user","content":"Hello, \u003cyou\u003e"},'
    rb'{"role":"assistant","content":"Hi: there"}]'
)
LAYERS = [
    ("template", b"{{ .System }}\n<|user|>{{ .Prompt }}"),
    ("system", b'You are "short" & <kind>.'),
    ("license", b"MIT"),
    ("license", b"\nApache\n"),
    ("params", PARAMETERS + b"\n"),
    ("messages", MESSAGES + b"\n"),
]
MODELFILE = Modelfile.parse(EVERYTHING)


def test_every_command_has_its_field_or_its_layer() -> None:
    assert (MODELFILE.source, MODELFILE.draft, MODELFILE.notes) == ("./weights", "../draft", ())
    config = ModelConfig(renderer="r", parser="p", capabilities=["completion"])
    found = MODELFILE.configure(config)
    assert (found.parser, found.renderer, found.requires) == ("qwen3", "qwen3-coder", "0.20.0")
    assert found.capabilities == ["completion"]
    assert Modelfile(parser="", renderer="").configure(config) == config
    kind = "application/vnd.ollama.image."
    assert MODELFILE.layers() == tuple((kind + name, data) for name, data in LAYERS)


def test_nothing_said_is_no_layer_and_the_last_text_counts() -> None:
    text = b'FROM .\nSYSTEM ""\nTEMPLATE \nLICENSE """"""\nDRAFT ""\nPARAMETER low_vram 1'
    modelfile = Modelfile.parse(text)
    assert modelfile.layers() == Modelfile().layers() == ()
    assert modelfile.draft is None
    modelfile = Modelfile.parse(b"FROM x\nSYSTEM a\nSYSTEM b\nTEMPLATE c\nTEMPLATE d")
    assert (modelfile.system, modelfile.template) == ("b", "d")


def test_what_ollama_leaves_out_is_said() -> None:
    modelfile = Modelfile.parse(b"FROM x\nPARAMETER mirostat 1\nSYSTEM a\0b\x07", "M")
    (no_effect, characters) = modelfile.notes
    assert no_effect.startswith("M: line 2: mirostat")
    assert characters.startswith("M: 2 non-printing characters")
    assert (modelfile.system, modelfile.parameters) == ("ab", {})


BAD = {
    "SYSTEM a": "line 1: .*FROM",
    "FROM a\n\nfrom b": "line 3: .*line 1",
    "FROM a\nPARAMETER use_mmap maybe": "line 2: PARAMETER: .*'maybe'",
    "FROM a\nMESSAGE User hello": "line 2: MESSAGE: .*'User'",
    "FROM a\nREQUIRES 0.14.0": "line 2: REQUIRES: 0.14.0",
}


@pytest.mark.parametrize("text", BAD)
def test_a_wrong_command_is_named_with_its_line(text: str) -> None:
    with pytest.raises(DocumentError, match=f"^the file: {BAD[text]}.* [(]rule T1[)]$"):
        Modelfile.parse(text.encode(), "the file")


def test_one_adapter_may_be_named() -> None:
    assert Modelfile.parse(b"FROM a\nADAPTER ./lora").adapter == "./lora"
    with pytest.raises(DocumentError, match="second ADAPTER"):
        Modelfile.parse(b"FROM a\nADAPTER b\nADAPTER c")


def test_options_win_and_licenses_add_up() -> None:
    parameters = parse_parameters(["stop=x", "seed=7"])
    modelfile = MODELFILE.with_options("T", "", ["BSD", ""], parameters)
    assert (modelfile.template, modelfile.system) == ("T", "")
    assert modelfile.licenses == ("MIT", "\nApache\n", "BSD")
    wanted = {"temperature": 0.5, "stop": ("x",), "num_ctx": 8192, "seed": 7}
    assert modelfile.parameters == wanted
    assert MODELFILE.with_options(None, None, (), {}) == MODELFILE


def test_options_alone_keep_every_character_and_have_limits() -> None:
    ((_, text),) = Modelfile().with_options(None, " a\0\u200d\n", (), {}).layers()
    assert text == " a\0\u200d\n".encode()
    with pytest.raises(UsageError, match="template"):
        Modelfile().with_options("a\udcff", None, (), {})  # what Python makes of odd arguments
    with pytest.raises(LimitExceededError, match="4,194,306 bytes"):
        Modelfile().with_options(None, "é" * (MAX_MODELFILE // 2 + 1), (), {})
    with pytest.raises(LimitExceededError, match="1,001 licenses"):
        Modelfile(licenses=("x",) * 1000).with_options(None, None, ["y"], {})


def test_a_version_is_a_semantic_version_of_019_or_later() -> None:
    for text in ("0.19.0", "1", "v0.20.0", "0.19.1-rc1", "0.20.0-rc.1.x-y+build.01"):
        assert check_requires(text) == text.removeprefix("v")
    for text in ("", "vv1.0.0", "01.2.3", "1.2.3.4", "1.2.3-01", "1.2.3\n", "1." + "9" * 5000):
        with pytest.raises(UsageError, match="version of Ollama"):
            check_requires(text)
    for text in ("0.18.9", "0", "0.19.0-rc9"):
        with pytest.raises(UsageError, match=r"0\.19\.0"):
            check_requires(text)


def test_a_path_is_relative_to_the_modelfile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    paths = {"": "/m", "../w": "/m/../w", "/w": "/w", "~/w": "/home/me/w", "C:\\w": "/m/C:\\w"}
    paths["https://server/w"] = "https://server/w"
    assert {text: resolve_path(text, Path("/m")) for text in paths} == paths


# KEY=VALUE → the JSON value that Go 1.27 wrote for FormatParams' value (None: Go, or we, refuse the
# text). 510,000 random floats, among them every power of two and halves between two floats, gave
# Go's text as well.
VALUES = {
    "num_ctx=4096": "4096",
    "num_ctx=9223372036854775808": None,
    "num_ctx=1.0": None,
    "num_ctx=٣": None,
    "temperature=0.7": "0.7",
    "temperature=-0": "-0",
    "temperature=0.10000000149011612": "0.1",
    "temperature=16777217": "16777216",
    "temperature=1e21": "1e+21",
    "temperature=0.00000099": "9.9e-7",
    "temperature=1e-45": "1e-45",
    "temperature=3.4028236e38": None,
    "temperature=1.000000059604644775390625": "1",
    "temperature=1e-999999999999999999999": "0",
    "temperature=NaN": None,
    "use_mmap=true": "true",
    "use_mmap=yes": None,
    'stop="quoted"': r'["\"quoted\""]',
    "stop=": '[""]',
    "stop=a\udcff": None,
    "stop=é\n\t\x01\u2028&": r'["é\n\t\u0001\u2028\u0026"]',
}


def test_values_have_gos_text() -> None:
    for option, wanted in VALUES.items():
        key = option.partition("=")[0]
        if wanted is None:
            with pytest.raises(UsageError, match=f"^{key} is .*, not "):
                parse_parameters([option])
        else:
            found = encode_parameters(parse_parameters([option]))
            assert found == f'{{"{key}":{wanted}}}\n'.encode(), option


def test_keys_are_sorted_texts_collected_and_of_others_the_last_one_counts() -> None:
    options = ["top_k=1", "stop=b", "min_p=0.05", "stop=a", "top_k=2", "stop=b"]
    found = encode_parameters(parse_parameters(options))
    assert found == b'{"min_p":0.05,"stop":["b","a","b"],"top_k":2}\n'


def test_an_unknown_key_is_refused_and_named() -> None:
    for key in ("", "Temperature", "a" * 1000, "\x1b[31m"):
        with pytest.raises(UsageError, match="unknown parameter '") as caught:
            parse_parameters([f"{key}=1"])
        assert len(str(caught.value)) < 200
        assert "\x1b" not in str(caught.value)
        assert "temperature" in str(caught.value.hint)


def test_options_that_say_nothing_are_refused() -> None:
    with pytest.raises(UsageError, match="'temperature 1'"):
        parse_parameters(["temperature 1"])
    for key in DEPRECATED:
        with pytest.raises(UsageError, match=f"{key} no longer has an effect"):
            parse_parameters([f"{key}=1"])
    for key in ("num_ctx", "temperature"):
        with pytest.raises(UsageError) as caught:
            parse_parameters([f"{key}={'1' * 2**20}"])
        assert len(str(caught.value)) < 200


# Most of these, and 600,000 random ones, were compared with a transcription of Ollama's parser that
# ran in Go.
TEXTS = {
    "any case": ("fRoM a\nSystem b", [("from", "", "a"), ("system", "", "b")]),
    "spaces": (" \t FROM \t a b \t\n\n", [("from", "", "a b")]),
    "quotes": ('SYSTEM " a "', [("system", "", " a ")]),
    "quotes inside": ('SYSTEM a "b" c', [("system", "", 'a "b" c')]),
    "empty": ("SYSTEM \nSYSTEM ''", [("system", "", ""), ("system", "", "''")]),
    "five quotes go on": ('SYSTEM """""\n"""', [("system", "", '""\n')]),
    "several lines": ('SYSTEM """\na "b"\n\nc""" \n', [("system", "", '\na "b"\n\nc')]),
    "text after the closing quotes": ('SYSTEM "a" b\nc"', [("system", "", 'a" b\nc')]),
    "CRLF is kept in quotes": ('SYSTEM "a\r\nb"\r\n', [("system", "", "a\r\nb")]),
    "CR": ("FROM a\rSYSTEM b", [("from", "", "a"), ("system", "", "b")]),
    "comments": ("# FROM x\n  # y\nFROM a # b\n#", [("from", "", "a # b")]),
    "parameter": ("PARAMETER   top_k\t1 ", [("parameter", "top_k", "1")]),
    "message": ('MESSAGE user "a: b"', [("message", "user", "a: b")]),
    "only comments": ("#\n # ", []),
}


def test_texts() -> None:
    for name, (text, wanted) in TEXTS.items():
        for encoding in ("utf-8", "utf-8-sig", "utf-16"):
            commands, dropped = read_script(text.encode(encoding), "Modelfile")
            found = [(command.name, command.key, command.text) for command in commands]
            assert (found, dropped) == (wanted, 0), name
    (command,), _ = read_script(b"\xfe\xff" + "FROM é".encode("utf-16-be"), "Modelfile")
    assert command.text == "é"


def test_characters_that_do_not_print_are_left_out_and_counted() -> None:
    text = "\u00a0SYS\0TEM a\0b\x1b[31mc\u200d\u00a0d\ue000\u2028e\x7f"
    (command,), dropped = read_script(text.encode(), "Modelfile")
    assert (command.name, command.text) == ("system", "ab[31mcde")
    assert dropped == 9
    # U+0378 is in no version of Unicode so far; U+FFFE never will be.
    (command,), _ = read_script("SYSTEM a\u0378\ufffe".encode(), "Modelfile")
    assert command.text == "a\u0378\ufffe"


BAD_COMMANDS = {
    "FROM a\n  @b c": "line 2: .*'@b'",
    "\nSYSTEM\nFROM a": "line 2: SYSTEM",
    "PARAMETER \nstop a": "line 1: PARAMETER",
    "MESSAGE user: hello": "line 1: MESSAGE",
    'FROM a\nSYSTEM """b"" \nLICENSE c\n': 'line 2: SYSTEM: .*"""',
}


def test_what_is_no_modelfile_names_the_line_and_the_command() -> None:
    for text, says in BAD_COMMANDS.items():
        with pytest.raises(DocumentError, match=f"^the file: {says}.* [(]rule T1[)]$"):
            read_script(text.encode(), "the file")
    for raw, place in ((b"FROM \xff", "UTF-8 text at byte 5"), (b"\xff\xfeF\0\0\xd8", "byte 4")):
        with pytest.raises(DocumentError, match=place):
            read_script(raw, "Modelfile")
    with pytest.raises(LimitExceededError, match="100,000,000 bytes"):
        read_script(b"\xff" * 100_000_000, "Modelfile")


HOSTILE = (b'SYSTEM "' + b"\n \n" * 300_000, b'SYSTEM """' + b'"" ' * 300_000)


def test_a_megabyte_of_what_ollama_reads_in_quadratic_time() -> None:
    """Reading the whole value at every space, as Ollama does, takes minutes; this a second."""
    for raw in HOSTILE:
        with pytest.raises(DocumentError) as caught:
            read_script(raw, "Modelfile")
        assert len(str(caught.value)) < 300
