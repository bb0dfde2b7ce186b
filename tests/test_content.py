"""Content blocks are what the wire wants, whatever they are made from."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote_to_bytes, urlsplit

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as some

from antiphon import LimitExceeded, content
from antiphon.schema import encode, v1, v1_unstable

if TYPE_CHECKING:
    from collections.abc import Callable

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256))
BASE64 = base64.b64encode(PNG).decode()


def wire(block: object) -> Any:
    return msgspec.json.decode(encode(block))


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (content.text("hi\n"), {"type": "text", "text": "hi\n"}),
        (
            content.image(PNG, "image/png"),
            {"type": "image", "data": BASE64, "mimeType": "image/png"},
        ),
        (
            content.image(BASE64, "image/png", uri="https://example.org/a.png"),
            {
                "type": "image",
                "data": BASE64,
                "mimeType": "image/png",
                "uri": "https://example.org/a.png",
            },
        ),
        (
            content.audio(bytearray(PNG), "audio/wav"),
            {"type": "audio", "data": BASE64, "mimeType": "audio/wav"},
        ),
        (
            content.resource("file:///a.py", "x = 1", mime_type="text/x-python"),
            {
                "type": "resource",
                "resource": {"uri": "file:///a.py", "text": "x = 1", "mimeType": "text/x-python"},
            },
        ),
        (
            content.resource("file:///empty", ""),
            {"type": "resource", "resource": {"uri": "file:///empty", "text": ""}},
        ),
        (
            content.resource("db:row/1", blob=memoryview(PNG)),
            {"type": "resource", "resource": {"uri": "db:row/1", "blob": BASE64}},
        ),
        (
            content.link("https://example.org/", "example"),
            {"type": "resource_link", "uri": "https://example.org/", "name": "example"},
        ),
        (
            content.link(
                "https://example.org/",
                "example",
                title="An example",
                description="Nothing there.",
                mime_type="text/html; charset=utf-8",
                size=0,
            ),
            {
                "type": "resource_link",
                "uri": "https://example.org/",
                "name": "example",
                "title": "An example",
                "description": "Nothing there.",
                "mimeType": "text/html; charset=utf-8",
                "size": 0,
            },
        ),
    ],
)
def test_a_block_has_what_was_given_and_nothing_else(block: object, expected: object) -> None:
    assert wire(block) == expected


def test_every_block_takes_annotations_and_meta() -> None:
    annotations = v1.Annotations(audience=["user"], priority=0.5)
    meta = {"k": [1]}

    for block in (
        content.text("a", annotations=annotations, meta=meta),
        content.image(b"", "image/png", annotations=annotations, meta=meta),
        content.audio(b"", "audio/wav", annotations=annotations, meta=meta),
        content.resource("file:///a", "", annotations=annotations, meta=meta),
        content.link("file:///a", "a", annotations=annotations, meta=meta),
    ):
        assert wire(block)["annotations"] == {"audience": ["user"], "priority": 0.5}
        assert wire(block)["_meta"] == {"k": [1]}


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: content.image("data:image/png;base64,AA==", "image/png"), "base64"),
        (lambda: content.image("AAA", "image/png"), "base64"),
        (lambda: content.image("é", "image/png"), "base64"),
        (lambda: content.image(PNG, "png"), "mime type of kind image"),
        (lambda: content.image(PNG, "audio/wav"), "mime type of kind image"),
        (lambda: content.audio(PNG, "image/png"), "mime type of kind audio"),
        (lambda: content.audio("?", "audio/wav"), "base64"),
        (lambda: content.resource("/a.py", "x"), "file_uri"),
        (lambda: content.resource(r"C:\a.py", "x"), "file_uri"),
        (lambda: content.resource("file:///a", "x", mime_type="text"), "mime type"),
        (lambda: content.resource("file:///a", blob="?"), "base64"),
        (lambda: content.link("a.py", "a"), "file_uri"),
        (lambda: content.link("file:///a", "a", size=-1), "negative"),
        (lambda: content.link("file:///a", "a", mime_type="text/"), "mime type"),
    ],
)
def test_what_no_peer_could_use_is_refused(make: Callable[[], object], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        make()


@pytest.mark.parametrize("given", [{}, {"text": "a", "blob": b"a"}])
def test_a_resource_has_either_text_or_a_blob(given: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="either"):
        content.resource("file:///a", **given)


# ---------------------------------------------------------------------- from_path


def written(folder: Path, name: str, data: bytes | str) -> Path:
    path = folder / name
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


@pytest.mark.parametrize(
    ("name", "data", "text", "mime_type"),
    [
        ("a.py", "x = 'ä'\r\n", "x = 'ä'\r\n", "text/x-python"),
        ("readme.MD", "# x", "# x", "text/markdown"),
        ("a.json", "{}", "{}", "application/json"),
        ("Makefile", "all:\n", "all:\n", None),
        ("app.ts", "let x", "let x", None),
        ("drawing.svg", "<svg/>", "<svg/>", "image/svg+xml"),
        ("empty", "", "", None),
        ("bom.txt", b"\xef\xbb\xbfx", "x", "text/plain"),
    ],
)
def test_a_text_file_is_embedded_as_text(
    tmp_path: Path, name: str, data: bytes | str, text: str, mime_type: str | None
) -> None:
    path = written(tmp_path, name, data)

    found = wire(content.from_path(path))

    expected = {"uri": path.as_uri(), "text": text}
    if mime_type is not None:
        expected["mimeType"] = mime_type
    assert found == {"type": "resource", "resource": expected}


@pytest.mark.parametrize("data", [PNG, b"text\0and more", "utf-16".encode("utf-16")])
def test_a_file_that_is_no_text_is_embedded_as_a_blob(tmp_path: Path, data: bytes) -> None:
    path = written(tmp_path, "a.bin", data)

    found = wire(content.from_path(str(path)))

    assert base64.b64decode(found["resource"]["blob"]) == data
    assert found["resource"]["mimeType"] == "application/octet-stream"


@pytest.mark.parametrize(
    ("name", "kind", "mime_type"),
    [
        ("a.png", "image", "image/png"),
        ("a.JPG", "image", "image/jpeg"),
        ("a.webp", "image", "image/webp"),
        ("a.mp3", "audio", "audio/mpeg"),
        ("a.wav", "audio", "audio/wav"),
        ("a.ogg", "audio", "audio/ogg"),
    ],
)
def test_images_and_audio_become_blocks_of_their_kind(
    tmp_path: Path, name: str, kind: str, mime_type: str
) -> None:
    path = written(tmp_path, name, PNG)

    found = wire(content.from_path(path))

    assert (found["type"], found["mimeType"], found["data"]) == (kind, mime_type, BASE64)
    assert found.get("uri") == (path.as_uri() if kind == "image" else None)


def test_the_mime_type_can_be_overridden(tmp_path: Path) -> None:
    path = written(tmp_path, "picture", PNG)

    assert wire(content.from_path(path, mime_type="image/png"))["type"] == "image"
    with pytest.raises(ValueError, match="mime type"):
        content.from_path(path, mime_type="png")


def test_a_link_does_not_read_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, "big.mp4", b"")
    os.truncate(path, 1 << 40)

    assert wire(content.from_path(path, embed=False)) == {
        "type": "resource_link",
        "uri": path.as_uri(),
        "name": "big.mp4",
        "mimeType": "video/mp4",
        "size": 1 << 40,
    }


def test_a_folder_can_be_linked_but_not_embedded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a.png"
    folder.mkdir()
    monkeypatch.chdir(folder)

    assert wire(content.from_path(".", embed=False)) == {
        "type": "resource_link",
        "uri": folder.as_uri(),
        "name": "a.png",
    }
    assert wire(content.from_path("/", embed=False))["name"] == "/"
    with pytest.raises(ValueError, match="no regular file"):
        content.from_path(folder)


def test_a_pipe_is_refused_and_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")

    with pytest.raises(ValueError, match="no regular file"):
        content.from_path(tmp_path / "pipe")


def test_a_missing_file_is_an_error_linked_or_not(tmp_path: Path) -> None:
    for embed in (True, False):
        with pytest.raises(FileNotFoundError):
            content.from_path(tmp_path / "none", embed=embed)


def test_a_file_over_the_limit_is_refused_by_name_and_not_read_whole(tmp_path: Path) -> None:
    path = written(tmp_path, "a.txt", "12345")

    assert wire(content.from_path(path, max_bytes=5))["resource"]["text"] == "12345"
    with pytest.raises(LimitExceeded) as caught:
        content.from_path(path, max_bytes=4)
    assert (caught.value.limit, caught.value.maximum, caught.value.size) == ("max_bytes", 4, 5)

    os.truncate(path, 1 << 40)
    with pytest.raises(LimitExceeded) as caught:
        content.from_path(path)
    assert caught.value.size == 1 << 40


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_a_file_that_has_no_size_is_read_to_its_end() -> None:
    assert wire(content.from_path("/proc/self/status"))["resource"]["text"].startswith("Name:")


def test_what_is_embedded_fits_into_a_frame(tmp_path: Path) -> None:
    from antiphon import Limits

    path = written(tmp_path, "a.png", bytes(content.MAX_BYTES))

    assert len(encode(content.from_path(path))) < Limits().frame_bytes


# ---------------------------------------------------------------------- file_uri


@pytest.mark.parametrize(
    ("path", "uri"),
    [
        (PurePosixPath("/home/me/a b.py"), "file:///home/me/a%20b.py"),
        (PurePosixPath("/100%/#1?/ä"), "file:///100%25/%231%3F/%C3%A4"),
        (PurePosixPath("/a\\b"), "file:///a%5Cb"),
        (PurePosixPath("/"), "file:///"),
        (PureWindowsPath("C:\\Users\\me\\a b.py"), "file:///C:/Users/me/a%20b.py"),
        (PureWindowsPath("c:/x/#1"), "file:///c:/x/%231"),
        (PureWindowsPath("\\\\host\\share\\a.py"), "file://host/share/a.py"),
        (PureWindowsPath("\\\\?\\C:\\long\\a.py"), "file:///C:/long/a.py"),
        (PureWindowsPath("\\\\?\\UNC\\host\\share\\a.py"), "file://host/share/a.py"),
    ],
)
def test_a_path_has_the_uri_of_its_system(path: PurePosixPath | PureWindowsPath, uri: str) -> None:
    assert content.file_uri(path) == uri


@pytest.mark.parametrize("path", [PureWindowsPath("a.py"), PureWindowsPath("\\a.py")])
def test_a_relative_path_of_the_other_system_has_no_uri(path: PureWindowsPath) -> None:
    with pytest.raises(ValueError, match="relative"):
        content.file_uri(path)


def test_a_relative_path_is_taken_from_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    assert content.file_uri("a.py") == f"{tmp_path.as_uri()}/a.py"


def test_dots_behind_a_link_are_resolved_on_disk(tmp_path: Path) -> None:
    (tmp_path / "real" / "inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real" / "inner")

    assert content.file_uri(tmp_path / "link" / ".." / "a") == f"{tmp_path.as_uri()}/real/a"
    assert content.file_uri(tmp_path / "link" / "a") == f"{tmp_path.as_uri()}/link/a"


@given(name=some.binary(min_size=1, max_size=20).filter(lambda b: not {0, 47} & set(b)))
def test_any_name_survives_the_way_into_a_uri(name: bytes) -> None:
    path = os.fsdecode(b"/" + name)

    uri = content.file_uri(PurePosixPath(path))

    parts = urlsplit(uri)
    assert (parts.scheme, parts.netloc, parts.query, parts.fragment) == ("file", "", "", "")
    assert unquote_to_bytes(parts.path) == os.fsencode(str(PurePosixPath(path)))


@given(name=some.binary(min_size=1, max_size=20).filter(lambda b: not {0, 47} & set(b)))
def test_a_path_and_its_uri_name_the_same(name: bytes) -> None:
    path = str(PurePosixPath(os.fsdecode(b"/a/" + name)))

    assert content.path_of(content.file_uri(PurePosixPath(path))) == path


@pytest.mark.parametrize(
    ("uri", "path"),
    [
        ("file:///a%20b/%C3%A4", "/a b/ä"),
        ("file:/a", "/a"),
        ("FILE://LocalHost/a#L10:20", "/a"),
        ("file:///a?x#y", "/a"),
        ("file:///", "/"),
    ],
)
def test_a_uri_names_a_path(uri: str, path: str) -> None:
    assert content.path_of(uri) == path


@pytest.mark.parametrize(
    "uri", ["", "/a", "https://example.org/a", "file:a", "file://host/a", "file:///a%00b", "file:"]
)
def test_what_is_no_file_here_has_no_path(uri: str) -> None:
    with pytest.raises(ValueError, match=r"URI of a file|another machine"):
        content.path_of(uri)


@pytest.mark.parametrize(
    ("host", "path", "expected"),
    [
        ("", "/C:/a b.py", "C:\\a b.py"),
        ("", "/c:/", "c:\\"),
        ("host", "/share/a", "\\\\host\\share\\a"),
    ],
)
def test_a_uri_names_a_path_of_windows(host: str, path: str, expected: str) -> None:
    assert content._windows_path(host, path) == expected


@pytest.mark.skipif(sys.platform != "linux", reason="names that are no UTF-8")
def test_a_name_that_is_no_utf_8_can_be_sent(tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.txt"))
    path.write_bytes(b"x")

    found = wire(content.from_path(path, embed=False))

    assert found["uri"].endswith("/%FF.txt")
    assert found["name"] == "�.txt"


# ---------------------------------------------------------------------- text_of


def test_the_text_of_blocks_is_that_of_the_text_blocks() -> None:
    blocks: list[str | v1.ContentBlock] = [
        content.text("one"),
        content.image(PNG, "image/png"),
        "two",
        content.resource("file:///a", "not this"),
        v1_unstable.TextContent(text="three"),
    ]

    assert content.text_of(blocks) == "one\ntwo\nthree"
    assert content.text_of(iter(blocks)) == "one\ntwo\nthree"
    assert content.text_of(blocks[0]) == "one"
    assert content.text_of(blocks[1]) == ""
    assert content.text_of("as it is") == "as it is"
    assert content.text_of([]) == ""


def test_importing_it_loads_no_protocol_version() -> None:
    program = (
        "import sys, antiphon.content; "
        "print([m for m in sys.modules if m.startswith('antiphon.schema.v') or m == 'asyncio'])"
    )

    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=25
    )

    assert (run.stdout, run.stderr) == ("[]\n", "")
