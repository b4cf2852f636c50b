"""``sign``, and ``verify`` with a key: output, JSON, exit codes and passwords."""

import stat
import sys
from pathlib import Path

import pytest
from support.commands import Cli, key_pair
from support.stores import commit_model

import blobstore.cli.sharing
from blobstore.store.local.store import Store


@pytest.fixture
def keys(tmp_path: Path) -> tuple[str, str]:
    return key_pair(tmp_path / "cosign")


def test_what_is_missing(keys: tuple[str, str], cli: Cli, store: Store, tmp_path: Path) -> None:
    private, public = keys
    digest = commit_model(store, "m", b"blob").digest
    commit_model(store, "n", b"other")
    (signed,) = cli.json("sign", "m", "--key", private)
    assert signed["digest"] == str(digest)
    assert cli("verify", "m", "--key", public)[0] == 0
    code, out, err = cli("verify", "--key", public)
    assert (code, err) == (3, "")
    assert out.splitlines()[1].endswith(f"is not signed by {public}: it has no signature")
    assert out.splitlines()[-1] == "Checked the signatures of 2 models: 1 refused"
    assert cli("pack", "n")[0] == 0
    assert cli("verify", "n", "--key", public)[0] == 3
    assert cli("sign", "m", "missing", "--key", private)[0] == 1
    _, other = key_pair(tmp_path / "other")
    (found,) = cli.json("verify", "m", "--key", other, code=3)
    assert (found["digest"], found["accepted"], found["found"]) == (str(digest), False, 1)
    assert "a signature is by another key" in found["error"]


def test_wrong_use(keys: tuple[str, str], cli: Cli, store: Store) -> None:
    commit_model(store, "m", b"blob")
    private, public = keys
    for words, message in {
        "sign m": "sign needs a NAME and a --key",
        f"sign m --key {public}": "is not a private key",
        f"verify m --key {private}": "is not a public key",
        f"verify m --key {public} --policy {public}": "either --key or --policy",
        f"verify m --key {public} --quick": "--quick, --sample and --jobs",
    }.items():
        assert message in cli.refused(*words.split())


def test_generated_keys_have_a_password_which_is_asked_for(
    tmp_path: Path, cli: Cli, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit_model(store, "m", b"blob")
    locked = tmp_path / "locked"
    monkeypatch.setenv("COSIGN_PASSWORD", "secret")
    cli.text("sign", "--generate-key", locked)
    assert stat.S_IMODE(Path(f"{locked}.key").stat().st_mode) == 0o600
    assert f"{locked}.key already exists" in cli.refused("sign", "--generate-key", locked)
    monkeypatch.delenv("COSIGN_PASSWORD")
    assert "Hint: Set COSIGN_PASSWORD" in cli.refused("sign", "m", "--key", f"{locked}.key")
    typed = iter(["wrong", "secret", "one", "two"])
    monkeypatch.setattr(blobstore.cli.sharing, "getpass", lambda _prompt: next(typed))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    assert "wrong password" in cli.refused("sign", "m", "--key", f"{locked}.key")
    assert cli("sign", "m", "--key", f"{locked}.key")[0] == 0
    assert cli("verify", "m", "--key", f"{locked}.pub")[0] == 0
    assert "the two passwords differ" in cli.refused("sign", "--generate-key", f"{locked}2")
    assert not Path(f"{locked}2.key").exists()
