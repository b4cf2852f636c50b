"""Commands run in this process, through the entry of the app."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from blobstore.cli.main import run
from blobstore.store.local.store import Store
from blobstore.store.signing.key_pairs import PrivateKey


class Cli:
    """Runs commands on ``store``, which the environment names."""

    def __init__(self, store: Store, capsys: pytest.CaptureFixture[str]) -> None:
        self.store = store
        self.err = ""
        self._capsys = capsys

    def __call__(self, *words: object) -> tuple[int, str, str]:
        code = run([*map(str, words)])
        out, self.err = self._capsys.readouterr()
        return code, out, self.err

    def text(self, *words: object, code: int = 0) -> str:
        """Return what a command that ends with ``code`` prints on stdout; ``err`` has its notes."""
        found, out, err = self(*words)
        assert found == code, err
        assert "Error: " not in err
        return out

    def json(self, *words: object, code: int = 0) -> Any:
        """Return the document that a command prints with ``--json``."""
        return json.loads(self.text(*words, "--json", code=code))

    def refused(self, *words: object, code: int = 2) -> str:
        """Return a refusal: a line ``Error:``, maybe one ``Hint:``, printable, and no output."""
        found, out, err = self(*words)
        assert (found, out) == (code, ""), err
        assert re.fullmatch(r"Error: .*\n(Hint: .*\n)?", err)
        assert err.replace("\n", "").isprintable()
        return err


def cells(line: str) -> list[str]:
    return re.split(r" {2,}", line.strip())


def table(text: str) -> list[list[str]]:
    return [cells(line) for line in text.splitlines()]


def damage_largest_blob(store: Store) -> Path:
    """Flip a bit at the end of the largest blob; return its file."""
    path = max((store.root / "blobs").iterdir(), key=lambda path: path.stat().st_size)
    data = bytearray(path.read_bytes())
    data[-1] ^= 8
    path.write_bytes(data)
    return path


def key_pair(prefix: Path) -> tuple[str, str]:
    """Write a pair of keys without a password; return their paths, the private one first."""
    key = ec.generate_private_key(ec.SECP256R1())
    private, public = Path(f"{prefix}.key"), Path(f"{prefix}.pub")
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public.write_bytes(PrivateKey(key, "k").public.pem)
    return str(private), str(public)
