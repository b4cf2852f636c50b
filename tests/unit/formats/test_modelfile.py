"""Modelfiles: what they say, options on top, the layers and the config that come of it."""

from pathlib import Path

import pytest

from blobstore.errors import DocumentError, LimitExceededError, UsageError
from blobstore.formats.documents import ModelConfig
from blobstore.formats.modelfile import (
    MAX_MODELFILE,
    Modelfile,
    check_requires,
    parse_parameters,
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
