"""Challenges (RFC 9110 section 11.6.1): what is read, and that garbage only raises our error."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import example, given, strategies as st

from blobstore.store.registry.authorization import Challenge, ChallengeError, parse_challenges

HUB = (
    'Bearer realm="https://auth.docker.io/token",service="registry.docker.io",'
    'scope="repository:samalba/my-app:pull,push"'
)
HUB_FIELDS = {
    "realm": "https://auth.docker.io/token",
    "service": "registry.docker.io",
    "scope": "repository:samalba/my-app:pull,push",
}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ([f'Basic realm="x", {HUB}'], [("basic", {"realm": "x"}), ("bearer", HUB_FIELDS)]),
        (
            ['Basic realm="simple", Newauth realm="apps", type=1, title="Login to \\"apps\\""'],
            [
                ("basic", {"realm": "simple"}),
                ("newauth", {"realm": "apps", "type": "1", "title": 'Login to "apps"'}),
            ],
        ),
        (["Negotiate oYIBSjCC==, Basic"], [("negotiate", {}), ("basic", {})]),
        (['bEaReR ReAlM = "a,b" , Scope=c'], [("bearer", {"realm": "a,b", "scope": "c"})]),
        ([", ,\tBasic realm=x ,, "], [("basic", {"realm": "x"})]),
    ],
)
def test_what_is_read(fields: list[str], expected: list[tuple[str, dict[str, str]]]) -> None:
    assert parse_challenges(fields) == [Challenge(*one) for one in expected]


@pytest.mark.parametrize(
    "text",
    [
        'Bearer realm="x',  # corpus: registry-auth-realm-unquoted-garbage
        'Bearer realm="x" service="y"',
        "Bearer realm=https://auth.docker.io/token",
        'Bearer realm="x",REALM="y"',
        "Bearer Basic realm=x",
        "Bearer ;",
        "a " * 50_000,
        'a b="' + "\\" * 100_000,
    ],
)
def test_what_is_refused(text: str) -> None:
    with pytest.raises(ChallengeError):
        parse_challenges([text])


@given(st.text(alphabet='aB1 \t,="\\;:/?é\x00~', max_size=40))
@example("," * 100_000)
@example("a b=c," * 15_000)
def test_garbage_is_read_or_refused(text: str) -> None:
    with suppress(ChallengeError):
        assert all(challenge.scheme for challenge in parse_challenges([text]))


_words = st.text(alphabet="abcXYZ019-._~!", min_size=1, max_size=8)
_values = st.text(alphabet=st.characters(min_codepoint=32, max_codepoint=126), max_size=12)
_lists = st.lists(
    st.tuples(_words, st.dictionaries(_words.map(str.lower), _values, max_size=3)), max_size=4
)


@given(_lists)
def test_what_is_written_is_read(challenges: list[tuple[str, dict[str, str]]]) -> None:
    texts = []
    for scheme, parameters in challenges:
        quoted = {
            name: '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
            for name, value in parameters.items()
        }
        texts.append(f"{scheme} " + ", ".join(f"{name}={text}" for name, text in quoted.items()))
    expected = [Challenge(scheme.lower(), parameters) for scheme, parameters in challenges]
    assert parse_challenges([", ".join(texts)]) == expected
