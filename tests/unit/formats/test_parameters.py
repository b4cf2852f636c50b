"""Parameters: their types, and Go's JSON for them."""

import pytest

from blobstore.errors import UsageError
from blobstore.formats.modelfile import DEPRECATED, encode_parameters, parse_parameters

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
    assert (
        encode_parameters(parse_parameters(options))
        == b'{"min_p":0.05,"stop":["b","a","b"],"top_k":2}\n'
    )


@pytest.mark.parametrize("key", ["", "Temperature", "a" * 1000, "\x1b[31m"])
def test_an_unknown_key_is_refused_and_named(key: str) -> None:
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
