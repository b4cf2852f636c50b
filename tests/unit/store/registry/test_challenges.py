"""Challenges (RFC 9110 section 11.6.1): what is read, and that garbage only raises our error."""

from contextlib import suppress

import pytest
from hypothesis import example, given, settings, strategies as st

from blobstore.store.registry.authorization import ChallengeError, parse_challenges


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        (
            'Basic realm="x", Bearer realm="https://a.io/token",scope="repository:a/b:pull,push"',
            [
                ("basic", {"realm": "x"}),
                ("bearer", {"realm": "https://a.io/token", "scope": "repository:a/b:pull,push"}),
            ],
        ),
        (
            'Newauth realm="apps", type=1, title="Login to \\"apps\\""',
            [("newauth", {"realm": "apps", "type": "1", "title": 'Login to "apps"'})],
        ),
        ("Negotiate oYIBSjCC==, Basic", [("negotiate", {}), ("basic", {})]),
        ('bEaReR ReAlM = "a,b" , Scope=c', [("bearer", {"realm": "a,b", "scope": "c"})]),
        (", ,\tBasic realm=x ,, ", [("basic", {"realm": "x"})]),
    ],
)
def test_what_is_read(field: str, expected: list[tuple[str, dict[str, str]]]) -> None:
    assert parse_challenges([field]) == expected


@pytest.mark.parametrize(
    "text",
    [
        'Bearer realm="x',  # corpus: registry-auth-realm-unquoted-garbage
        'Bearer realm="x" service="y"',
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


@settings(max_examples=15)
@given(st.text(alphabet='aB1 \t,="\\;:/?é\x00~', max_size=40))
@example("," * 100_000)
@example("a b=c," * 15_000)
def test_garbage_is_read_or_refused(text: str) -> None:
    with suppress(ChallengeError):
        assert all(scheme for scheme, _ in parse_challenges([text]))
