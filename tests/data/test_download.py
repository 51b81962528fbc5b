"""Downloads from a server on this computer: mirrors, retries, checksums, archives, nothing left behind."""

from __future__ import annotations

import gzip
import hashlib
import io
import socket
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pooch
import pytest
from rich.console import Console

from dataset_files import assert_sentence_names, cifar
from engram.common.errors import InputError
from engram.data import download
from engram.data.catalogue import Archive, File, Source
from engram.data.download import Retry, fetch, progress_bars
from engram.data.formats import parse_cifar
from engram.data.sources import load

TRAIN, TEST = cifar(1, 2, 3), cifar(4)
ONCE = Retry(retries=0, timeout_s=5)


class Server:
    """Serves `content` by path, counts requests, and can cut bodies short or fail the first few times."""

    def __init__(self) -> None:
        self.content: dict[str, bytes] = {}
        self.cut: set[str] = set()
        self.redirects: dict[str, str] = {}
        self.failures: Counter[str] = Counter()
        self.requests: Counter[str] = Counter()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.answer(self)

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = request.path
        self.requests[path] += 1
        if path in self.redirects:
            request.send_response(302)
            request.send_header("Location", self.redirects[path])
            request.end_headers()
            return
        if path not in self.content or self.requests[path] <= self.failures[path]:
            request.send_error(404 if path not in self.content else 503)
            return
        body = self.content[path]
        request.send_response(200)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body[: len(body) // 2] if path in self.cut else body)


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.http.shutdown()
    server.http.server_close()


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


def two_files(*mirrors: str) -> Source:
    return Source(
        "made-up",
        train=(File("made/train.bin", md5(TRAIN), parse_cifar),),
        test=(File("made/test.bin", md5(TEST), parse_cifar),),
        mirrors=mirrors,
    )


def packed(archive: bytes, *mirrors: str) -> Source:
    files = two_files(*mirrors)
    return Source("packed", files.train, files.test, mirrors, Archive("all.tar.gz", md5(archive)))


def tar(*members: tuple[str | tarfile.TarInfo, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        for member, content in members:
            info = tarfile.TarInfo(member) if isinstance(member, str) else member
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return stream.getvalue()


def damaged(archive: bytes) -> bytes:
    """The same gzip header, then bytes that cannot be decompressed."""
    return archive[:30] + b"\xff" * (len(archive) - 30)


def files_under(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


def serve_two_files(server: Server, folder: str = "/") -> None:
    server.content |= {f"{folder}train.bin": TRAIN, f"{folder}test.bin": TEST}


def test_fetch_makes_the_folder_and_load_finds_published_data(server: Server, tmp_path: Path) -> None:
    serve_two_files(server)
    source, folder = two_files(f"{server.url}/"), tmp_path / "new" / "folder"
    paths = fetch(source, folder, retry=ONCE)
    assert paths == [folder / "made" / "train.bin", folder / "made" / "test.bin"]
    assert files_under(tmp_path) == {"new/folder/made/train.bin", "new/folder/made/test.bin"}
    dataset = load(source, folder)
    assert dataset.origin == "published"
    assert dataset.train.targets.tolist() == [1, 2, 3]
    assert paths[0].stat().st_mode & 0o777 == 0o644


def test_verified_files_are_not_downloaded_again(server: Server, tmp_path: Path) -> None:
    serve_two_files(server)
    source = two_files(f"{server.url}/")
    fetch(source, tmp_path, retry=ONCE)
    (tmp_path / "made" / "test.bin").write_bytes(TEST[:-1])
    fetch(source, tmp_path, retry=ONCE)
    assert server.requests == {"/train.bin": 1, "/test.bin": 2}
    assert (tmp_path / "made" / "test.bin").read_bytes() == TEST


def test_readable_custom_file_is_never_replaced(server: Server, tmp_path: Path) -> None:
    serve_two_files(server)
    source = two_files(f"{server.url}/")
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "train.bin").write_bytes(cifar(5))
    fetch(source, tmp_path, retry=ONCE)
    assert server.requests == {"/test.bin": 1}
    assert (tmp_path / "made" / "train.bin").read_bytes() == cifar(5)


def test_decompressed_file_with_the_published_content_is_kept(server: Server, tmp_path: Path) -> None:
    packed_train = gzip.compress(TRAIN, mtime=0)
    file = File("train.bin.gz", md5(packed_train), parse_cifar, content_md5=md5(TRAIN))
    source = Source("gz", (file,), (File("test.bin", md5(TEST), parse_cifar),), (f"{server.url}/",))
    (tmp_path / "train.bin").write_bytes(TRAIN)
    server.content["/test.bin"] = TEST
    assert fetch(source, tmp_path, retry=ONCE) == [tmp_path / "train.bin", tmp_path / "test.bin"]
    assert server.requests == {"/test.bin": 1}


def test_second_mirror_serves_what_the_first_does_not_have(server: Server, tmp_path: Path) -> None:
    serve_two_files(server, "/good/")
    fetch(two_files(f"{server.url}/bad/", f"{server.url}/good/"), tmp_path, retry=ONCE)
    assert server.requests["/bad/train.bin"] == 1
    assert files_under(tmp_path) == {"made/train.bin", "made/test.bin"}


def test_dead_first_mirror_is_skipped(server: Server, tmp_path: Path) -> None:
    serve_two_files(server)
    with socket.socket() as unused:  # bound but not listening: connections are refused
        unused.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{unused.getsockname()[1]}/"
        fetch(two_files(dead, f"{server.url}/"), tmp_path, retry=ONCE)
        assert files_under(tmp_path) == {"made/train.bin", "made/test.bin"}
        with pytest.raises(InputError) as error:
            fetch(two_files(dead), tmp_path / "other", retry=ONCE)
    assert_sentence_names(error, dead, "Connection refused", file="train.bin")


def test_download_is_retried_after_a_temporary_failure(server: Server, tmp_path: Path) -> None:
    serve_two_files(server)
    server.failures["/train.bin"] = 2
    source = two_files(f"{server.url}/")
    with pytest.raises(InputError, match="503"):
        fetch(source, tmp_path, retry=Retry(retries=1, pause_s=0))
    server.requests.clear()
    fetch(source, tmp_path, retry=Retry(retries=2, pause_s=0))
    assert server.requests == {"/train.bin": 3, "/test.bin": 1}


def test_failure_of_every_mirror_names_the_file_and_the_last_reason(server: Server, tmp_path: Path) -> None:
    source = two_files(f"{server.url}/one/", f"{server.url}/two/")
    with pytest.raises(InputError) as error:
        fetch(source, tmp_path, retry=Retry(retries=1, pause_s=0))
    assert_sentence_names(error, f"{server.url}/two/", "404", file="train.bin")
    assert server.requests == {"/one/train.bin": 2, "/two/train.bin": 2}
    assert files_under(tmp_path) == set()


def test_wrong_checksum_is_refused(server: Server, tmp_path: Path) -> None:
    serve_two_files(server)
    server.content["/train.bin"] = cifar(9, 9, 9)  # right in structure and size: a download must be the very file
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "train.bin").write_bytes(b"what was there before")
    with pytest.raises(InputError) as error:
        fetch(two_files(f"{server.url}/"), tmp_path, retry=ONCE)
    assert_sentence_names(error, md5(TRAIN), file="train.bin")
    assert files_under(tmp_path) == {"made/train.bin"}
    assert not list((tmp_path / "made").glob(".*"))
    assert (tmp_path / "made" / "train.bin").read_bytes() == b"what was there before"


def test_nothing_is_read_before_it_is_verified(server: Server, tmp_path: Path) -> None:
    def parse(content: bytes, file: str) -> None:
        raise AssertionError("bytes of a stranger were parsed")

    server.content["/train.bin"] = b"another"
    file = File("made/train.bin", md5(TRAIN), parse)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"train\.bin could not be downloaded"):
        fetch(Source("made-up", (file,), (), (f"{server.url}/",)), tmp_path, retry=ONCE)
    assert files_under(tmp_path) == set()


@pytest.mark.parametrize("place", ["/elsewhere.bin", "file:///etc/passwd"])
def test_redirection_must_lead_to_the_published_file(server: Server, tmp_path: Path, place: str) -> None:
    serve_two_files(server)
    server.redirects["/train.bin"] = place
    server.content["/elsewhere.bin"] = cifar(9, 9, 9)
    with pytest.raises(InputError) as error:
        fetch(two_files(f"{server.url}/"), tmp_path, retry=ONCE)
    assert_sentence_names(error, server.url, file="train.bin")
    assert files_under(tmp_path) == set()
    server.redirects["/train.bin"] = "/elsewhere.bin"
    server.content["/elsewhere.bin"] = TRAIN
    fetch(two_files(f"{server.url}/"), tmp_path, retry=ONCE)
    assert (tmp_path / "made" / "train.bin").read_bytes() == TRAIN


def test_truncated_body_is_refused(server: Server, tmp_path: Path) -> None:
    serve_two_files(server)
    server.cut.add("/train.bin")
    with pytest.raises(InputError) as error:
        fetch(two_files(f"{server.url}/"), tmp_path, retry=ONCE)
    assert_sentence_names(error, server.url, file="train.bin")
    assert files_under(tmp_path) == set()


def test_archive_gives_only_the_expected_files(server: Server, tmp_path: Path) -> None:
    link = tarfile.TarInfo("made/link.bin")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    content = tar(
        ("../escaped.bin", b"out"),
        (f"{tmp_path}/absolute.bin", b"out"),
        (link, b""),
        ("made/readme.html", b"in"),
        ("made/train.bin", TRAIN),
        ("made/test.bin", TEST),
    )
    server.content["/all.tar.gz"] = content
    folder = tmp_path / "data"
    source = packed(content, f"{server.url}/")
    assert fetch(source, folder, retry=ONCE) == [folder / "made/train.bin", folder / "made/test.bin"]
    assert files_under(tmp_path) == {"data/made/train.bin", "data/made/test.bin"}
    assert load(source, folder).origin == "published"
    fetch(source, folder, retry=ONCE)
    assert server.requests == {"/all.tar.gz": 1}


def link_to_train(kind: bytes) -> tarfile.TarInfo:
    info = tarfile.TarInfo("made/test.bin")
    info.type, info.linkname = kind, "made/train.bin"
    return info


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (tar(("made/train.bin", TRAIN), (link_to_train(tarfile.SYMTYPE), b"")), "made/test.bin"),
        (tar(("made/train.bin", TRAIN), (link_to_train(tarfile.LNKTYPE), b"")), "made/test.bin"),
        (tar(("made/train.bin", TRAIN), ("../made/test.bin", TEST)), "made/test.bin"),
        (tar(("made/train.bin", TRAIN), ("made/test.bin", TRAIN)), "md5"),
        (tar(("made/train.bin", TRAIN), ("made/test.bin", TEST))[:-20], "can be read"),
        (tar(("made/train.bin", TRAIN), ("made/test.bin", TEST))[:40], "can be read"),
        (damaged(tar(("made/train.bin", TRAIN), ("made/test.bin", TEST))), "can be read"),
        (b"no archive", "can be read"),
    ],
    ids=[
        "symbolic link",
        "hard link",
        "other path",
        "other content",
        "truncated",
        "cut",
        "damaged",
        "no archive",
    ],
)
def test_wrong_archive_leaves_nothing(server: Server, tmp_path: Path, content: bytes, word: str) -> None:
    server.content["/all.tar.gz"] = content
    with pytest.raises(InputError) as error:
        fetch(packed(content, f"{server.url}/"), tmp_path, retry=ONCE)
    assert_sentence_names(error, word, file="all.tar.gz")
    assert files_under(tmp_path) == set()


def special(kind: bytes, name: str = "made/test.bin", **fields: object) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = kind
    for field, value in fields.items():
        setattr(info, field, value)
    return info


def declaring(size: int) -> bytes:
    """An archive whose second member declares a size that it does not have."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        info = tarfile.TarInfo("made/train.bin")
        info.size = len(TRAIN)
        archive.addfile(info, io.BytesIO(TRAIN))
        info = tarfile.TarInfo("made/test.bin")
        info.size = size
        archive.addfile(info)
    return stream.getvalue()


SOUND = [("made/train.bin", TRAIN), ("made/test.bin", TEST)]


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (tar(SOUND[0], (special(tarfile.CHRTYPE, devmajor=1, devminor=5), b"")), "made/test.bin"),
        (tar(SOUND[0], (special(tarfile.BLKTYPE, devmajor=8), b"")), "made/test.bin"),
        (tar(SOUND[0], (special(tarfile.FIFOTYPE), b"")), "made/test.bin"),
        (tar(SOUND[0], (special(tarfile.DIRTYPE), b"")), "made/test.bin"),
        (tar(SOUND[0], (special(tarfile.SYMTYPE, linkname="/dev/zero"), b"")), "made/test.bin"),
        (tar(SOUND[0], ("/made/test.bin", TEST)), "made/test.bin"),
        (tar(SOUND[0], ("made/../made/test.bin", TEST)), "made/test.bin"),
        (declaring(2**40), "all.tar.gz"),
        (declaring(len(TEST)), "all.tar.gz"),
        (tar(*[(f"made/{n}", b"") for n in range(1000)], *SOUND), "made/train.bin"),
    ],
    ids=["device", "block", "fifo", "folder", "zero", "absolute", "dots", "huge", "hollow", "many"],
)
def test_no_archive_writes_outside_or_beyond(server: Server, tmp_path: Path, content: bytes, word: str) -> None:
    server.content["/all.tar.gz"] = content
    folder = tmp_path / "data"
    with pytest.raises(InputError) as error:
        fetch(packed(content, f"{server.url}/"), folder, retry=ONCE)
    assert_sentence_names(error, word, file="all.tar.gz")
    assert files_under(tmp_path) == set()


def test_archive_cannot_fill_the_memory(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = tar(("made/bomb.bin", bytes(100_000)), *SOUND)
    server.content["/all.tar.gz"] = content
    monkeypatch.setattr(download, "MAX_BYTES", 50_000)
    with pytest.raises(InputError) as error:
        fetch(packed(content, f"{server.url}/"), tmp_path, retry=ONCE)
    assert_sentence_names(error, "more than 50000 bytes", file="all.tar.gz")
    assert files_under(tmp_path) == set()


def test_archive_with_another_checksum_is_not_opened(server: Server, tmp_path: Path) -> None:
    server.content["/all.tar.gz"] = tar(("made/train.bin", TRAIN), ("made/test.bin", TEST))
    with pytest.raises(InputError) as error:
        fetch(packed(b"the published one", f"{server.url}/"), tmp_path, retry=ONCE)
    assert_sentence_names(error, md5(b"the published one"), file="all.tar.gz")
    assert files_under(tmp_path) == set()


def test_folder_that_cannot_be_created_is_refused(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError) as error:
        fetch(two_files(f"{server.url}/"), tmp_path / "file", retry=ONCE)
    assert_sentence_names(error, "cannot be written", file=str(tmp_path / "file"))


def test_embedded_dataset_needs_no_download() -> None:
    with pytest.raises(InputError, match="mnist-small is part of Engram"):
        fetch("mnist-small")


def test_download_without_pooch_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(InputError, match="pip install engram-cl"):
        fetch("mnist", tmp_path)


def test_progress_bars_show_bytes_of_each_file(server: Server, tmp_path: Path) -> None:
    serve_two_files(server)
    server.failures["/train.bin"] = 1
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with progress_bars(console) as bars:
        fetch(two_files(f"{server.url}/"), tmp_path, progress=bars, retry=Retry(retries=1, pause_s=0))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "train.bin" in shown
    assert "9.2/9.2 kB" in shown
    assert "3.1/3.1 kB" in shown


def test_pooch_prints_nothing_itself(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve_two_files(server)
    said: list[str] = []
    monkeypatch.setattr(pooch.get_logger(), "handle", lambda record: said.append(record.getMessage()))
    fetch(two_files(f"{server.url}/"), tmp_path, retry=ONCE)
    assert said == []
