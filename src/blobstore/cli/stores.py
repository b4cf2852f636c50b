"""The stores, registries and sources of commands: options, the environment, caches and logins."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

import blobstore
from blobstore.cli.output import counted, note, parse_size
from blobstore.errors import InvalidNameError, ModelNotFoundError, UsageError
from blobstore.io.objects import is_bucket, open_bucket
from blobstore.names import shortened

if TYPE_CHECKING:
    from blobstore.names import ModelName
    from blobstore.store.registry.logins import Credentials

StoreOption = Annotated[
    str | None,
    Option(
        "--store",
        metavar="DIR",
        help="The store, a folder or s3://BUCKET/PREFIX "
        "[default: $BLOBSTORE_STORE, $OLLAMA_MODELS, else ~/.ollama/models].",
    ),
]
LowerOption = Annotated[
    list[str] | None,
    Option(
        "--lower",
        metavar="DIR",
        help="A read-only store for models and blobs that the store lacks; repeatable"
        " [default: $BLOBSTORE_LOWER].",
    ),
]
WaitOption = Annotated[
    float | None,
    Option(
        "--wait",
        metavar="SECONDS",
        min=0,
        help="How long to wait while another process uses the store [default: 10, or 1 when"
        " removing blobs].",
    ),
]
CaFileOption = Annotated[
    str | None,
    Option(
        "--ca-file",
        metavar="FILE",
        help="Certificates (PEM) to trust besides the system's and those of $SSL_CERT_FILE and"
        " $SSL_CERT_DIR.",
    ),
]


def network(ca_file: str | None) -> dict[str, Any]:
    """Return how servers are reached: which certificates are trusted, and through which proxies.

    An option names certificates; the environment names more, and the proxies.
    """
    from urllib.request import getproxies_environment

    named = os.pathsep.join(os.environ.get(f"SSL_CERT_{kind}", "") for kind in ("FILE", "DIR"))
    files = [ca_file, *filter(os.path.exists, named.split(os.pathsep))]
    return {
        "ca_file": os.pathsep.join(filter(None, files)) or None,
        "proxies": getproxies_environment(),
    }


def store_at(
    folder: str | None,
    wait_s: float | None = None,
    *,
    may_be_new: bool = False,
    cache: CacheChoice | None = None,
    ca_file: str | None = None,
) -> Any:
    """Return the store that ``--store``, the environment or the default names.

    ``cache``: for the blobs of a bucket; None: they are read from it.

    Raises: NotFoundError when ``folder`` does not exist, and it is not ``may_be_new``: the path is
    misspelt. On a fresh machine the others need not exist.
    """
    from blobstore.store.local.store import default_place

    if folder == "":
        raise UsageError("--store is empty", hint="Is a variable unset?")
    named = folder or default_place()
    if "://" in named:
        trusted = {"ca_file": network(ca_file)["ca_file"] or ""}
        bucket = open_bucket(named, bucket_options(named) | trusted)
        kept = None if cache is None else _open_cache(*cache)
        return blobstore.BucketStore(bucket, cache=kept, wait_s=wait_s)
    store = blobstore.open_store(named, wait_s=wait_s)
    if not may_be_new and (folder or os.path.lexists(store.root)):
        store.require()
    return store


def is_new(store: Any) -> bool:
    """Return True if no program has made the default store yet.

    False for one that is named: it may be on a disk that is not mounted.
    """
    is_named = os.environ.get("BLOBSTORE_STORE") or os.environ.get("OLLAMA_MODELS")
    return not (is_named or store.root is None or os.path.lexists(store.root))


def source_at(address: str, ca_file: str | None = None) -> str | blobstore.Folder:
    """Return an address as an open folder, with the Hub's token where it is the Hub's.

    The token is a secret between its owner and the Hub. A path is returned as it is.

    Raises: as `open_folder`.
    """
    from blobstore.source.addresses import is_address
    from blobstore.source.folders import HUB

    if not is_address(address):
        return address
    endpoint = os.environ.get("HF_ENDPOINT") or HUB
    return blobstore.open_folder(
        address,
        token=_token_for(address, endpoint),
        endpoint=endpoint,
        bucket_options=bucket_options(address),
        **network(ca_file),
    )


def _token_for(address: str, endpoint: str) -> str | None:
    """Return the Hub's token for an address of the Hub, None for every other."""
    from blobstore.io.http.web_addresses import WebAddress
    from blobstore.source.addresses import is_web_address

    if is_web_address(address):
        is_hubs = WebAddress.parse(address).origin == WebAddress.parse(endpoint).origin
    else:
        is_hubs = address.lower().startswith("hf://")
    return os.environ.get("HF_TOKEN", "").strip() or None if is_hubs else None


def stores_at(
    folder: str | None,
    lower: Sequence[str] | None,
    wait_s: float | None = None,
    *,
    may_be_new: bool = False,
    copies_up: bool = False,
    cache: CacheChoice | None = None,
    ca_file: str | None = None,
) -> Any:
    """Return the store of `store_at`, over those that ``--lower`` or the environment names.

    Raises: as `store_at`; UsageError if a cache is asked for, and no store is in a bucket.
    """
    if lower is not None and "" in lower:
        raise UsageError("--lower is empty", hint="Is a variable unset?")
    # Colons separate the folders and addresses, but for those of addresses.
    exported = re.split(rf"{os.pathsep}(?!//)", os.environ.get("BLOBSTORE_LOWER", ""))
    folders = lower or list(filter(None, exported))
    upper = store_at(
        folder, wait_s, may_be_new=may_be_new or bool(folders), cache=cache, ca_file=ca_file
    )
    below = [store_at(folder, cache=cache, ca_file=ca_file) for folder in folders]
    if lower is None:  # an exported variable may name the store itself
        below = [store for store in below if store.address != upper.address]
    if any(cache or ()) and not any(home.has_cache for home in (upper, *below)):
        raise UsageError(
            f"a cache is for a store in a bucket, and {upper.address} is a folder",
            hint="Leave out --cache and --cache-size.",
        )
    return blobstore.LayeredStore(upper, below, copies_up=copies_up) if below else upper


CacheOption = Annotated[
    str | None,
    Option(
        "--cache",
        metavar="DIR",
        help="Folder that caches the blobs of a bucket [default: $BLOBSTORE_CACHE, else"
        " ~/.cache/blobstore].",
    ),
]
CacheSizeOption = Annotated[
    str | None,
    Option("--cache-size", metavar="SIZE", help="Maximum size of the cache [default: 50GB]."),
]


CacheChoice = tuple[str | None, str | None]
"""What ``--cache`` and ``--cache-size`` say about the cache of a bucket's blobs."""
CACHE: CacheChoice = (None, None)
"""The cache that the environment names, or the default."""


def _open_cache(folder: str | None, nbytes: str | None) -> Any:
    from blobstore.store.bucket.objects import CACHE_NBYTES, BlobCache

    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111
    place = folder or os.environ.get("BLOBSTORE_CACHE") or f"{home}/blobstore"
    return BlobCache(place, CACHE_NBYTES if nbytes is None else parse_size(nbytes))


def folder_store_at(
    command: str, folder: str | None, wait_s: float | None = None, *, may_be_new: bool = False
) -> Any:
    """Return the store of `store_at`. Raises: UsageError if it is in a bucket."""
    store = store_at(folder, wait_s, may_be_new=may_be_new)
    if store.root is None:
        raise UsageError(
            f"{command} is for a store in a folder, and {store.address} is a bucket",
            hint="blobstore cp --to DIR copies a model to a folder.",
        )
    return store


_ALLOWED = ("AWS_ALLOW_HTTP", "GOOGLE_ALLOW_HTTP", "AZURE_ALLOW_HTTP")
# The options of buckets, by scheme, and the variables for each: the first one that is set.
_BUCKET_VARIABLES: dict[str, dict[str, tuple[str, ...]]] = {
    "s3": {
        "endpoint": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
        "allow_http": _ALLOWED,
    },
    "gs": {"base_url": ("GOOGLE_BASE_URL",), "allow_http": _ALLOWED},
    "az": {
        "endpoint": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
        "allow_http": _ALLOWED,
        "use_emulator": ("AZURE_STORAGE_USE_EMULATOR",),
    },
}


def bucket_options(address: str) -> dict[str, str]:
    """Return the settings of a bucket that the environment has and obstore does not see.

    obstore reads the other variables itself; an endpoint of http needs to be known before.
    """
    variables = _BUCKET_VARIABLES.get(address.partition("://")[0].lower(), {})
    said = {
        option: next(filter(None, map(os.environ.get, names)), None)
        for option, names in variables.items()
    }
    return {option: value for option, value in said.items() if value is not None}


InsecureOption = Annotated[
    bool,
    Option("--insecure", help="Allow http for registries on other machines."),
]
RealmsOption = Annotated[
    list[str] | None,
    Option(
        "--realm",
        metavar="HOST",
        help="A token server that belongs to the registry; repeatable "
        "[default: $BLOBSTORE_REALMS].",
    ),
]


def credentials() -> Credentials:
    """Return the logins in the files that the environment names."""
    from blobstore.store.registry.logins import Credentials, login_files

    home = Path(os.path.expanduser("~"))  # noqa: PTH111  # Path.home raises without a home
    return Credentials(*login_files(os.environ, home, os.getuid()))


def realms_of(given: list[str] | None) -> list[str]:
    """Return the token servers that ``--realm`` or the environment names."""
    named = given or os.environ.get("BLOBSTORE_REALMS", "").split(",")
    return [realm.strip().lower() for realm in named if realm.strip()]


def registry_access(
    insecure: bool, ca_file: str | None, realm: list[str] | None = None
) -> blobstore.RegistryAccess:
    """Return how to connect to registries, with the logins of the environment."""
    return blobstore.RegistryAccess(
        insecure=insecure,
        credentials=credentials(),
        realms=realms_of(realm),
        **network(ca_file),
    )


PlaceModel = Annotated[
    str | None,
    Argument(metavar="MODEL", help="Which model, of a place that has several."),
]
# A registry, or a repository or model of it. A host has a dot or a colon, as docker has it.
_REGISTRY = re.compile(
    r"(?:https?://)?(?=localhost|[^/]*[.:])[^./:][^/:]*(?::[0-9]+)?"
    r"(?P<repository>/[^/]+/[^/]+)?/?"
)
_ARCHIVE = (".tar", ".tgz", ".gz", ".zst")
_NAMES = 8


def _is_bucket(text: str) -> bool:
    """Return True for the address of a store, as ``--store`` takes it."""
    return "://" in text and not text.lower().startswith(("http", "hf:"))


def is_registry(text: str) -> bool:
    """Return True for ``HOST/NAMESPACE/MODEL``, with or without a tag and a digest."""
    named = None if os.path.lexists(text) else _REGISTRY.fullmatch(text)
    return named is not None and named["repository"] is not None


def holds_models(text: str, ca_file: str | None) -> bool:
    """Return True for an archive, and for the address of a store in a bucket."""
    if is_bucket(text) and not text.endswith((".safetensors", ".gguf", ".json")):
        return bool(store_at(text, ca_file=ca_file).manifests.names())
    return text.endswith(_ARCHIVE) and Path(text).is_file()


def home_at(text: str, access: blobstore.RegistryAccess) -> Any:
    """Return the home at a place, to be read.

    That is ``s3://…``, a folder, an archive, or a registry's ``HOST`` or ``HOST/NAMESPACE/MODEL``.

    Raises: UsageError for another text; as the home.
    """
    if _is_bucket(text) or Path(text).is_dir():
        return store_at(text, cache=CACHE, ca_file=access.ca_file)
    if Path(text).is_file():
        return blobstore.open_archive(text)
    if _REGISTRY.fullmatch(text) is None:
        raise UsageError(
            f"{text!r} is not a place that has models",
            hint="Write HOST, HOST/NAMESPACE/MODEL, s3://BUCKET/PREFIX, a folder or an archive.",
        )
    return access.open_all(text)


def model_at(
    text: str,
    model: str | None,
    access: blobstore.RegistryAccess,
    store: str | None,
    lower: Sequence[str] | None,
) -> tuple[Any, ModelName]:
    """Return the home of the model that a text names, and the model's name there.

    It is a stored model, else ``HOST/NAMESPACE/MODEL[:TAG][@DIGEST]`` at that registry; or the only
    model, or ``model``, of another place.

    Raises: UsageError for a path of files, a place without a model, or with several; as `home_at`.
    """
    from blobstore.store.registry.api import Reference

    if model is not None or _is_bucket(text) or holds_models(text, access.ca_file):
        home = home_at(text, access)
        names = home.manifests.names() if model is None else [home.find(model)]
        if len(names) != 1:
            hint = f"Name one after it: {shortened(names, _NAMES)}." if names else None
            raise UsageError(f"{text} has {counted(len(names), 'model')}", hint=hint)
        return home, names[0]
    is_path = os.path.lexists(text)
    with suppress(ModelNotFoundError, *[InvalidNameError] * is_path):
        reference = Reference.parse(text)
        if reference.digest is None:
            opened = stores_at(store, lower, ca_file=access.ca_file)
            if is_path or is_registry(text):
                opened.holder(reference.name)
            return opened, reference.name
    if is_path:
        raise UsageError(
            f"{text} is a path, not a stored model",
            hint=f"blobstore inspect {text} shows a checkpoint, blobstore import {text} stores it.",
        )
    note(f"{text} is not in the store: asking the registry")
    return access.open(reference), reference.name
