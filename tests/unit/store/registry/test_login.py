"""Logins: a secret is never shown, by whatever way Python makes a text of it."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from dataclasses import asdict

import pytest

from blobstore.store.registry.logins import Login, Secret

TEXT = "correct horse"


def test_a_secret_is_not_shown() -> None:
    secret = Secret(TEXT)
    login = Login("bob", secret, "a file")
    shown = [str(secret), repr(secret), f"{secret}", f"{secret!r:>9}", f"{secret:10}"]
    shown += [str(login), repr(login), repr([login]), repr({secret: secret})]
    assert not [text for text in shown if TEXT in text]
    assert str(secret) == "***"
    assert str(login) == "user 'bob' (from a file)"
    assert str(Login(None, secret)) == "an identity token"


@pytest.mark.parametrize("leave", [pickle.dumps, copy.copy, copy.deepcopy, json.dumps])
def test_a_secret_does_not_leave_the_process(leave: Callable[[object], object]) -> None:
    with pytest.raises(TypeError):
        leave(Secret(TEXT))


def test_a_login_does_not_become_a_dictionary() -> None:
    with pytest.raises(TypeError):
        asdict(Login("bob", Secret(TEXT)))


def test_secrets_are_equal_by_their_texts() -> None:
    assert Secret("a") == Secret("a")
    assert Secret("a") != Secret("b")
    assert Secret("a") != "a"
    assert {Secret("a"): 1}[Secret("a")] == 1
    assert Secret("a")
    assert not Secret("")


def test_basic() -> None:
    # RFC 7617 sections 2 and 2.1
    assert Login("Aladdin", Secret("open sesame")).basic == "Basic QWxhZGRpbjpvcGVuIHNlc2FtZQ=="
    assert Login("test", Secret("123£")).basic == "Basic dGVzdDoxMjPCow=="
    assert Login(None, Secret("token")).basic is None
