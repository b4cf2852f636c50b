"""Remote folders and the Hub: parallel files, names as addresses, and scoped tokens."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from support.corpus import Case, accepted, case_id, load, refusal, rejected
from support.remotes import Remote, hub_folder
from support.retry_policies import patient_policy
from support.servers import WAIT, Asked, Server, files, part, redirect, reply

from blobstore.errors import InvalidNameError, NotFoundError, UsageError
from blobstore.formats.safetensors.header import header_of as read_header
from blobstore.source.folders import HUB
from blobstore.source.web import HubTarget, WebFolder

from .conftest import RETRY_POLICY
from .test_reader import safetensors_file

SHARDS = {f"model-{number:05}.safetensors": safetensors_file(100 + number) for number in range(40)}


def test_many_files_are_opened_at_once_over_few_connections(server: Server) -> None:
    script = server.play(files(SHARDS))
    with Remote(connections=16, retry_policy=RETRY_POLICY) as remote:
        with WebFolder(remote, server.at("")).reading(list(SHARDS), read_header) as headers:
            assert [len(header.tensors) for header in headers] == [1] * len(SHARDS)
        assert len(script.asked) == len(SHARDS)
        assert script.connections <= 16
        remote.open_all([server.at(name) for name in SHARDS])
        assert script.connections <= 16
        assert remote.open_all([]) == []


def test_no_more_requests_are_made_at_once_than_there_are_connections(server: Server) -> None:
    running: list[int] = []
    most = []
    lock = threading.Lock()

    def answer(asked: Asked) -> Iterator[bytes]:
        with lock:
            running.append(asked.number)
            most.append(len(running))
        yield WAIT
        with lock:
            running.remove(asked.number)
        yield from files(SHARDS)(asked)

    server.play(answer)
    with Remote(connections=3, retry_policy=RETRY_POLICY) as remote:
        remote.open_all([server.at(name) for name in list(SHARDS)[:9]])
    assert max(most) <= 3


def test_the_first_failure_ends_all(server: Server) -> None:
    """The others wait for a server that is silent: they are cut off."""
    failing = threading.Event()

    def answer(asked: Asked) -> Iterator[bytes]:
        if len(script.asked) == 4:
            failing.set()
        if asked.target == "/missing":
            failing.wait(600)
            yield from reply(404)
        while True:
            yield WAIT

    script = server.play(answer)
    with Remote(connections=4, retry_policy=patient_policy()) as remote:
        urls = [server.at(name) for name in ["a", "b", "missing", "c", "d", "e"]]
        error = refusal(lambda: remote.open_all(urls))
    assert isinstance(error, NotFoundError)
    assert str(error.path).endswith("/missing")
    assert len(script.asked) == 4


def test_an_address_that_is_none_is_found_before_anything_is_asked(
    server: Server, remote: Remote
) -> None:
    script = server.play(files(SHARDS))
    assert isinstance(refusal(lambda: remote.open_all([server.url, "ftp://x"])), UsageError)
    assert script.asked == []


# Folders


def test_a_folder(server: Server, remote: Remote) -> None:
    script = server.play(files({"a/b/config.json": b"{}", "a/b/x%20%231%25.json": b"[]"}))
    folder = WebFolder(remote, server.at("a/b"))
    assert folder.read("config.json", 100) == b"{}"
    assert folder.read("x #1%.json", 100) == b"[]"
    assert isinstance(refusal(lambda: folder.read("other.json", 100)), NotFoundError)
    assert isinstance(refusal(lambda: folder.open("other.safetensors")), NotFoundError)
    assert script.connections == 1
    assert WebFolder(remote, server.at("a/b/")).url("c") == folder.url("c")


@pytest.mark.parametrize("case", rejected("path"), ids=case_id)
def test_names_that_lead_elsewhere(case: Case, server: Server, remote: Remote) -> None:
    folder = WebFolder(remote, server.at("a"))
    error = refusal(lambda: folder.url(case.data.decode("utf-8", "surrogatepass")))
    assert isinstance(error, InvalidNameError)


@pytest.mark.parametrize("case", accepted("path"), ids=case_id)
def test_names_stay_below_their_folder(case: Case, server: Server, remote: Remote) -> None:
    folder = WebFolder(remote, server.at("a"))
    url = folder.url(case.data.decode())
    assert url.startswith(folder.base_url)
    assert not set(url.removeprefix(folder.base_url)) & set("?#%") or "%" in url


def test_every_path_of_the_corpus_was_looked_at() -> None:
    assert {case.id for case in load("path")} == {
        case.id for case in accepted("path") + rejected("path")
    }


def test_a_folder_has_no_query(remote: Remote) -> None:
    assert refusal(lambda: WebFolder(remote, "https://example.org/a?b")).rule == "R2"


# The Hub


def test_a_repository_of_the_hub(server: Server) -> None:
    script = server.play(
        files(
            {
                "org/repo/resolve/refs%2Fpr%2F1/config.json": b"{}",
                "gpt2/resolve/main/config.json": b"[]",
            }
        )
    )
    with Remote("hf_secret", retry_policy=RETRY_POLICY) as remote:
        endpoint = server.at("")
        assert (
            hub_folder(remote, "org/repo", "refs/pr/1", endpoint).read("config.json", 10) == b"{}"
        )
        assert hub_folder(remote, "gpt2", endpoint=endpoint).read("config.json", 10) == b"[]"
    assert {asked.fields.get("authorization") for asked in script.asked} == {"Bearer hf_secret"}
    assert HubTarget("bigscience/bloom", "main", "").url(HUB) == (
        "https://huggingface.co/bigscience/bloom/resolve/main/"
    )


@pytest.mark.parametrize(
    "name",
    [
        *(
            "",
            "/",
            "a/",
            "/a",
            "a/b/c",
            "..",
            "a/..",
            ".a",
            "a.",
            "-a",
            "a--b",
            "a..b",
            "a/-b",
            "a b",
            "a/b?c",
            "a#b",
            "ä",
        ),
        *("a\n", "a%2fb", "https://x", "a" * 97, "a/b.git", "a/" + "b" * 97),
    ],
)
def test_names_that_are_no_repositories(name: str, remote: Remote) -> None:
    assert refusal(lambda: hub_folder(remote, name)).rule == "R2"


@pytest.mark.parametrize(
    "name", ["gpt2", "a/b", "org-1/some_model.v2-x", "a" * 96 + "/" + "b" * 96, "_a/b_", "0/1"]
)
def test_names_of_repositories(name: str) -> None:
    with Remote() as remote:
        hub_folder(remote, name)
    url = HubTarget(name, "main", "").url(HUB)
    assert url == f"https://huggingface.co/{name}/resolve/main/"


@pytest.mark.parametrize(
    "revision",
    [
        *(
            "",
            "/",
            "a/",
            "/a",
            "..",
            "a..b",
            "-a",
            "a b",
            "a\n",
            "a?",
            "a*",
            "a[",
            "a^",
            "a~1",
            "a:b",
            "a//b",
            "a\\b",
        ),
        *(".a", "a/.b", "a.", "a.lock", "a.lock/b", "a@{b", "@", "a" * 256, "ä"),
    ],
)
def test_revisions_that_are_none(revision: str, remote: Remote) -> None:
    assert refusal(lambda: hub_folder(remote, "a/b", revision)).rule == "R2"


@pytest.mark.parametrize(
    "revision", ["main", "v1.0", "refs/pr/12", "a@b", "4f4a1ee0d3a6a7c1", "a-b_c", "a.b"]
)
def test_revisions(revision: str) -> None:
    url = HubTarget("a/b", revision, "").url(HUB)
    assert f"/resolve/{revision.replace('/', '%2F').replace('@', '%40')}/" in url


# Tokens


def test_a_token_is_for_the_first_origin_only(server: Server, other_server: Server) -> None:
    data = safetensors_file(100 * 1024)
    here = server.play(
        lambda asked: redirect(other_server.url) if asked.target == "/away" else part(asked, data)
    )
    there = other_server.play(lambda asked: part(asked, data))
    with Remote("secret", retry_policy=RETRY_POLICY) as remote:
        remote.open_all([server.url, other_server.url, server.at("away")])
    assert {asked.fields.get("authorization") for asked in here.asked} == {"Bearer secret"}
    assert {asked.fields.get("authorization") for asked in there.asked} == {None}


def test_a_token_does_not_come_back_from_where_it_was_not(
    server: Server, other_server: Server
) -> None:
    """A, redirected to B, redirected to A: B chose what is asked there."""
    data = safetensors_file(100 * 1024)
    here = server.play(
        lambda asked: part(asked, data) if asked.target == "/2" else redirect(other_server.url)
    )
    other_server.play(lambda _: redirect(server.at("2")))
    with Remote("secret", retry_policy=RETRY_POLICY) as remote:
        read_header(remote.open(server.at("1")))
    seen = [(asked.target, asked.fields.get("authorization")) for asked in here.asked]
    assert seen == [("/1", "Bearer secret"), ("/2", None), ("/2", None)]


def test_no_cookies_and_no_realms(server: Server, other_server: Server) -> None:
    elsewhere = other_server.play(lambda _: reply(200))
    challenge = f'WWW-Authenticate: Bearer realm="{other_server.url}",service="x"'
    script = server.play(lambda _: reply(401, challenge, "Set-Cookie: a=b; Path=/"))
    with Remote("secret", retry_policy=RETRY_POLICY) as remote:
        for _ in range(2):
            error = refusal(lambda: remote.open(server.url))
            assert "secret" not in str(error) + repr(vars(error))
        assert "secret" not in repr(remote) + repr(remote)
    assert (len(script.asked), elsewhere.asked) == (2, [])
    assert {asked.fields.get("cookie") for asked in script.asked} == {None}


@pytest.mark.parametrize("token", ["", "a b", "a\nb", "a\r\nX: y", "ä", "x" * 5000])
def test_what_is_no_token(token: str) -> None:
    error = refusal(lambda: Remote(token))
    assert isinstance(error, UsageError)
    assert token not in str(error) or token == ""


def test_a_token_is_not_sent_in_the_clear_to_a_public_server(server: Server) -> None:
    script = server.play(files(SHARDS))
    with Remote("secret", retry_policy=RETRY_POLICY, is_public=lambda _: True) as remote:
        assert "without TLS" in str(refusal(lambda: remote.open(server.url)))
    with Remote(retry_policy=RETRY_POLICY, is_public=lambda _: True) as remote:
        assert isinstance(refusal(lambda: remote.open(server.at("nothing"))), NotFoundError)
    assert [asked.fields.get("authorization") for asked in script.asked] == [None]
