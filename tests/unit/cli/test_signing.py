"""``sign``, and ``verify`` with a key or a policy: output, JSON, exit codes and passwords."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from support.commands import Cli
from support.stores import blob_path, commit_model

import blobstore.cli.sharing
from blobstore.store.local.store import Store
from blobstore.store.signing.key_pairs import PrivateKey, PublicKey


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """The prefix of a pair of keys without a password."""
    return write_pair(tmp_path / "cosign")


def write_pair(prefix: Path) -> Path:
    key = ec.generate_private_key(ec.SECP256R1())
    raw = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    Path(key_of(prefix)).write_bytes(raw)
    Path(pub_of(prefix)).write_bytes(PrivateKey(key, "k").public.pem)
    return prefix


def key_of(prefix: Path) -> str:
    return f"{prefix}.key"


def pub_of(prefix: Path) -> str:
    return f"{prefix}.pub"


def test_sign_and_verify(prefix: Path, cli: Cli, store: Store) -> None:
    digest = commit_model(store, "m", b"blob").digest
    blob_path(store, b"blob").write_bytes(b"blub")  # blobs are not read
    line = f"m:latest ({digest.short})"
    code, out, err = cli("sign", "M", "--key", key_of(prefix))
    assert (code, out, err) == (0, f"Signed {line} for registry.ollama.ai/library/m\n", "")
    code, out, _ = cli("sign", "m", "--key", key_of(prefix))
    assert (code, out) == (0, f"Already signed {line} for registry.ollama.ai/library/m\n")
    code, out, err = cli("verify", "m", "--key", pub_of(prefix))
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        f"{line} is signed by {prefix}.pub for registry.ollama.ai/library/m",
        "Checked the signatures of 1 model: all accepted",
    ]
    assert cli("verify", "m")[0] == 3


def test_what_is_missing(prefix: Path, cli: Cli, store: Store, tmp_path: Path) -> None:
    digest = commit_model(store, "m", b"blob").digest
    commit_model(store, "n", b"other")
    cli("sign", "m", "--key", key_of(prefix))
    code, out, err = cli("verify", "--key", pub_of(prefix))
    assert (code, err) == (3, "")
    assert out.splitlines()[1].endswith(f"is not signed by {prefix}.pub: it has no signature")
    assert out.splitlines()[-1] == "Checked the signatures of 2 models: 1 refused"
    assert cli("verify", "n", "m", "--key", pub_of(prefix), "--json")[0] == 3
    write_pair(tmp_path / "other")
    code, out, _ = cli("verify", "m", "--key", tmp_path / "other.pub", "--json")
    (found,) = json.loads(out[out.index("[") :])
    assert code == 3
    assert found == {
        "name": "m:latest",
        "digest": str(digest),
        "accepted": False,
        "found": 1,
        "signatures": [],
        "error": f"m:latest ({digest}) is not signed by {tmp_path}/other.pub: "
        "a signature is by another key",
    }


def test_json(prefix: Path, cli: Cli, store: Store) -> None:
    digest = commit_model(store, "m", b"blob").digest
    _, out, _ = cli("sign", "m", "--key", key_of(prefix), "--identity", "a.b/c:D", "--json")
    (signed,) = json.loads(out[out.index("[") :])
    public = PublicKey.parse(Path(pub_of(prefix)).read_bytes(), "p")
    assert signed == {
        "name": "m:latest",
        "digest": str(digest),
        "identity": "a.b/c:D",
        "key": str(public.digest),
        "is_new": True,
    }
    assert cli("verify", "m", "--key", pub_of(prefix))[0] == 3
    options = ("--key", pub_of(prefix), "--identity", "a.b/c")
    _, out, _ = cli("verify", "m", *options, "--json")
    assert json.loads(out) == [
        {
            "name": "m:latest",
            "digest": str(digest),
            "accepted": True,
            "found": 1,
            "signatures": [{"identity": "a.b/c:D", "key": pub_of(prefix)}],
        }
    ]


def test_a_policy(prefix: Path, cli: Cli, store: Store, tmp_path: Path) -> None:
    commit_model(store, "m", b"blob")
    commit_model(store, "host.example/ns/n", b"other")
    cli("sign", "m", "--key", key_of(prefix))
    required = {
        "type": "sigstoreSigned",
        "keyPath": pub_of(prefix),
        "signedIdentity": {"type": "matchRepository"},
    }
    policy = {
        "default": [required],
        "transports": {"docker": {"host.example/ns": [{"type": "insecureAcceptAnything"}]}},
    }
    path = tmp_path / "policy.json"
    path.write_text(json.dumps(policy))
    code, out, _ = cli("verify", "--policy", path)
    assert code == 0
    assert [line.partition(" (")[0] for line in out.splitlines()[:-1]] == [
        "host.example/ns/n:latest",
        "m:latest",
    ]
    assert "needs no signature" in out
    path.write_text('{"default": [{"type": "reject"}], "transport": {}}')
    code, _, err = cli("verify", "--policy", path)
    assert (code, "unknown key 'transport'" in err) == (1, True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("sign", "m"), "sign needs a NAME and a --key"),
        (("sign", "m", "--generate-key", "x"), "makes keys and signs nothing"),
        (("sign", "m", "--key", "PUB"), "is not a private key"),
        (("sign", "m", "--key", "KEY", "--identity", "a b"), "not a docker reference"),
        (("verify", "m", "--key", "KEY"), "is not a public key"),
        (("verify", "m", "--key", "PUB", "--policy", "PUB"), "either --key or --policy"),
        (("verify", "m", "--identity", "a/b"), "either --key or --policy"),
        (("verify", "m", "--policy", "PUB", "--identity", "a/b"), "--identity needs --key"),
        (("verify", "m", "--key", "PUB", "--quick"), "without --quick"),
        (("verify", "m", "--key", "PUB", "--jobs", "1"), "without --quick"),
    ],
)
def test_wrong_use(
    prefix: Path, cli: Cli, store: Store, words: tuple[str, ...], message: str
) -> None:
    commit_model(store, "m", b"blob")
    names = {"KEY": key_of(prefix), "PUB": pub_of(prefix)}
    code, _, err = cli(*(names.get(word, word) for word in words))
    assert code == 2
    assert message in err


def test_missing_things(prefix: Path, cli: Cli, store: Store, tmp_path: Path) -> None:
    commit_model(store, "m", b"blob")
    assert cli("sign", "n", "--key", key_of(prefix))[0] == 1
    for words in (("sign", "m"), ("verify", "m")):
        code, _, err = cli(*words, "--key", tmp_path / "none")
        assert (code, "none: no such file" in err) == (1, True)
    # Nothing is signed if one of the names is wrong.
    assert cli("sign", "m", "n", "--key", key_of(prefix))[0] == 1
    assert cli("verify", "m", "--key", pub_of(prefix))[0] == 3


def test_generated_keys_have_a_password_which_is_asked_for(
    tmp_path: Path, cli: Cli, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit_model(store, "m", b"blob")
    locked = tmp_path / "locked"
    monkeypatch.setenv("COSIGN_PASSWORD", "secret")
    cli.text("sign", "--generate-key", locked)
    assert stat.S_IMODE(Path(key_of(locked)).stat().st_mode) == 0o600
    code, _, err = cli("sign", "--generate-key", locked)
    assert (code, err) == (2, f"Error: {locked}.key already exists\nHint: Choose another PREFIX.\n")
    monkeypatch.delenv("COSIGN_PASSWORD")
    code, _, err = cli("sign", "m", "--key", key_of(locked))
    assert (code, "Hint: Set COSIGN_PASSWORD" in err) == (2, True)
    typed = iter(["wrong", "secret", "one", "two"])
    monkeypatch.setattr(blobstore.cli.sharing, "getpass", lambda _prompt: next(typed))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    code, out, err = cli("sign", "m", "--key", key_of(locked))
    assert (code, "wrong password" in err, "secret" in out + err) == (2, True, False)
    assert cli("sign", "m", "--key", key_of(locked))[0] == 0
    assert cli("verify", "m", "--key", pub_of(locked))[0] == 0
    code, _, err = cli("sign", "--generate-key", f"{locked}2")
    assert (code, err) == (2, "Error: the two passwords differ\n")
    assert not Path(f"{locked}2.key").exists()


def test_packed_models_are_signed_and_checked(prefix: Path, cli: Cli, store: Store) -> None:
    commit_model(store, "m", b"blob")
    assert cli("pack", "m")[0] == 0
    for words in (("verify",), ("verify", "m")):
        code, out, _ = cli(*words, "--key", pub_of(prefix))
        assert (code, "it has no signature" in out) == (3, True)
    assert cli("sign", "m", "--key", key_of(prefix))[0] == 0
    assert cli("verify", "--key", pub_of(prefix))[1].endswith("1 model: all accepted\n")
    assert store.packed.manifests.names()
    assert cli("unpack", "m")[0] == 0
    assert cli("verify", "m", "--key", pub_of(prefix))[0] == 0


def test_a_pair_that_can_t_be_written_leaves_no_file(
    prefix: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COSIGN_PASSWORD", "secret")
    made: list[int] = []

    def full(fd: int) -> None:
        made.append(fd)
        if len(made) > 1:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("blobstore.io.durable.sync", full)
    code, _, err = cli("sign", "--generate-key", f"{prefix}2")
    assert (code, f"can't write {prefix}2.pub: no space left" in err) == (1, True)
    assert list(prefix.parent.glob("cosign2*")) == []
