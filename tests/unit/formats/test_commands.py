"""The grammar of Modelfiles: a table of texts and their commands, and of what is no Modelfile."""

import pytest

from blobstore.errors import DocumentError, LimitExceededError
from blobstore.formats.modelfile import read_script

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


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_texts(encoding: str) -> None:
    for name, (text, wanted) in TEXTS.items():
        commands, dropped = read_script(text.encode(encoding), "Modelfile")
        found = [(command.name, command.key, command.text) for command in commands]
        assert found == wanted, name
        assert dropped == 0
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


BAD = {
    "FROM a\n  @b c": "line 2: .*'@b'",
    "\nSYSTEM\nFROM a": "line 2: SYSTEM",
    "PARAMETER \nstop a": "line 1: PARAMETER",
    "MESSAGE user: hello": "line 1: MESSAGE",
    'FROM a\nSYSTEM """b"" \nLICENSE c\n': 'line 2: SYSTEM: .*"""',
}


@pytest.mark.parametrize("text", BAD)
def test_what_is_no_modelfile_names_the_line_and_the_command(text: str) -> None:
    with pytest.raises(DocumentError, match=f"^the file: {BAD[text]}.* [(]rule T1[)]$"):
        read_script(text.encode(), "the file")


def test_bytes_that_are_no_text_are_refused() -> None:
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
