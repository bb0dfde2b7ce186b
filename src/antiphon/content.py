"""Content blocks: what prompts, messages and tool calls are made of.

Responsible for making valid blocks out of what a program has (text, bytes, paths), and for getting
text back out. Leaves to `sessions` whether a peer takes a kind of block: text and links always,
`image`, `audio` and `resource` where it advertised them (acp-v1 §5); `Session.prompt` raises
`CapabilityError` otherwise.

Importing this module loads no protocol version; the first block does.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import stat
from mimetypes import MimeTypes
from pathlib import Path, PurePath, PureWindowsPath
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import quote, unquote_to_bytes, urlsplit

from antiphon._errors import LimitExceeded
from antiphon.schema import UNSET

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from antiphon.schema import v1

    Bytes: TypeAlias = bytes | bytearray | memoryview

__all__ = [
    "MAX_BYTES",
    "audio",
    "file_uri",
    "from_path",
    "image",
    "link",
    "path_of",
    "resource",
    "text",
    "text_of",
]

#: The largest file that `from_path` embeds unless told otherwise: as base64 it fills two thirds of
#: the largest frame.
MAX_BYTES = 8 << 20


def text(
    text: str,
    *,
    annotations: v1.Annotations | None = None,
    meta: Mapping[str, Any] | None = None,
) -> v1.TextContent:
    """A text block: `{"type": "text", "text": …}`. A plain string does as well wherever blocks go.

    Args:
        text: plain text or Markdown.
        annotations: for whom it is, and how important.
        meta: `_meta` of the block.
    """
    from antiphon.schema import v1

    return v1.TextContent(text=text, annotations=_given(annotations), meta=_members(meta))


def image(
    data: Bytes | str,
    mime_type: str,
    *,
    uri: str | None = None,
    annotations: v1.Annotations | None = None,
    meta: Mapping[str, Any] | None = None,
) -> v1.ImageContent:
    """An image block: `{"type": "image", "data": base64, "mimeType": …, "uri"?}`.

    Args:
        data: the bytes of the image file, or base64 text of them.
        mime_type: "image/png", "image/jpeg", …
        uri: where the image comes from.
        annotations: for whom it is, and how important.
        meta: `_meta` of the block.

    Raises:
        ValueError: the mime type is none of an image, or the text is no base64.
    """
    from antiphon.schema import v1

    return v1.ImageContent(
        data=_base64(data),
        mime_type=_mime_type(mime_type, "image"),
        uri=_given(uri),
        annotations=_given(annotations),
        meta=_members(meta),
    )


def audio(
    data: Bytes | str,
    mime_type: str,
    *,
    annotations: v1.Annotations | None = None,
    meta: Mapping[str, Any] | None = None,
) -> v1.AudioContent:
    """An audio block: `{"type": "audio", "data": base64, "mimeType": …}`.

    Args:
        data: the bytes of the audio file, or base64 text of them.
        mime_type: "audio/wav", "audio/mpeg", …
        annotations: for whom it is, and how important.
        meta: `_meta` of the block.

    Raises:
        ValueError: the mime type is none of audio, or the text is no base64.
    """
    from antiphon.schema import v1

    return v1.AudioContent(
        data=_base64(data),
        mime_type=_mime_type(mime_type, "audio"),
        annotations=_given(annotations),
        meta=_members(meta),
    )


def resource(
    uri: str,
    text: str | None = None,
    *,
    blob: Bytes | str | None = None,
    mime_type: str | None = None,
    annotations: v1.Annotations | None = None,
    meta: Mapping[str, Any] | None = None,
) -> v1.EmbeddedResource:
    """A resource with its contents: `{"type": "resource", "resource": {"uri", "text"|"blob", …}}`.

    Args:
        uri: what it is, e.g. `file_uri(path)`.
        text: its contents, if they are text.
        blob: its contents, if they are not: bytes, or base64 text of them.
        mime_type: of the contents.
        annotations: for whom it is, and how important.
        meta: `_meta` of the block.

    Raises:
        TypeError: not exactly one of `text` and `blob` is given.
        ValueError: the URI has no scheme, the mime type is none, or the blob's text is no base64.
    """
    from antiphon.schema import v1

    contents: v1.EmbeddedResourceResource
    kind = _given(None if mime_type is None else _mime_type(mime_type))
    if text is not None and blob is None:
        contents = v1.TextResourceContents(uri=_uri(uri), text=text, mime_type=kind)
    elif blob is not None and text is None:
        contents = v1.BlobResourceContents(uri=_uri(uri), blob=_base64(blob), mime_type=kind)
    else:
        msg = "a resource has either text or a blob"
        raise TypeError(msg)
    return v1.EmbeddedResource(
        resource=contents, annotations=_given(annotations), meta=_members(meta)
    )


def link(
    uri: str,
    name: str,
    *,
    title: str | None = None,
    description: str | None = None,
    mime_type: str | None = None,
    size: int | None = None,
    annotations: v1.Annotations | None = None,
    meta: Mapping[str, Any] | None = None,
) -> v1.ResourceLink:
    """A link to a resource: `{"type": "resource_link", "uri": …, "name": …}`. Every agent takes it.

    Args:
        uri: what it is, e.g. `file_uri(path)`.
        name: what to call it, e.g. the name of the file.
        title: what to show instead of the name.
        description: one sentence.
        mime_type: of the contents.
        size: of the contents, in bytes.
        annotations: for whom it is, and how important.
        meta: `_meta` of the block.

    Raises:
        ValueError: the URI has no scheme, the mime type is none, or the size is negative.
    """
    from antiphon.schema import v1

    if size is not None and size < 0:
        msg = f"a size is not negative: {size}"
        raise ValueError(msg)
    return v1.ResourceLink(
        uri=_uri(uri),
        name=name,
        title=_given(title),
        description=_given(description),
        mime_type=_given(None if mime_type is None else _mime_type(mime_type)),
        size=_given(size),
        annotations=_given(annotations),
        meta=_members(meta),
    )


def from_path(
    path: str | os.PathLike[str],
    *,
    embed: bool = True,
    mime_type: str | None = None,
    max_bytes: int = MAX_BYTES,
) -> v1.ImageContent | v1.AudioContent | v1.EmbeddedResource | v1.ResourceLink:
    """A block for a file: its contents, or a link to it.

    Images and audio become blocks of their kind, anything else a resource: as text where the whole
    file is UTF-8 (a byte order mark is left out), as a blob where it is not. The kind is told by the
    mime type, and that by the name's ending, the same on every machine; a text whose ending tells
    nothing has none. SVG is text.

    Reads the file at once, in the calling thread.

    Args:
        path: the file; made absolute for the URI.
        embed: False makes a link, which every agent takes, and does not read the file. A folder
            can be linked too.
        mime_type: overrides what the ending tells.
        max_bytes: the largest file to embed.

    Raises:
        OSError: there is no such file, or it cannot be read.
        ValueError: it is no regular file, or the mime type is none.
        LimitExceeded: it is larger than `max_bytes` ("max_bytes"); raise that, or link it.
    """
    path = Path(path)
    kind = _guess(path.name) if mime_type is None else _mime_type(mime_type)
    status = path.stat()
    if not embed:
        regular = stat.S_ISREG(status.st_mode)
        size = status.st_size if regular else None
        return link(file_uri(path), _name(path), mime_type=kind if regular else None, size=size)
    # Looked at before it is opened: a pipe without a writer would block the open.
    if not stat.S_ISREG(status.st_mode):
        msg = f"{os.fspath(path)!r} is no regular file"
        raise ValueError(msg)
    with path.open("rb") as file:
        # What grows while it is read, or has no size at all (/proc), must not get past the limit.
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise LimitExceeded("max_bytes", max_bytes, max(status.st_size, len(data)))
    return _embedded(data, file_uri(path), kind)


def text_of(content: str | v1.ContentBlock | Iterable[str | v1.ContentBlock]) -> str:
    """The text in one or several blocks: that of the text blocks, joined by line ends.

    Strings count as text blocks; images, audio, links and resources have no text here. The same as
    `Turn.text` for a prompt.
    """
    from antiphon.schema import v1

    if isinstance(content, str):
        return content
    blocks: Iterable[str | v1.ContentBlock]
    blocks = [content] if isinstance(content, v1.ContentBlock) else content
    return "\n".join(
        block if isinstance(block, str) else block.text
        for block in blocks
        if isinstance(block, (str, v1.TextContent))
    )


def file_uri(path: str | os.PathLike[str]) -> str:
    """The `file:` URI of a path: "file:///home/me/a%20b.py", "file:///C:/a.py", "file://host/share/a".

    A relative path is taken from the current directory. Names that are no UTF-8 are kept byte for
    byte. Parts that are ".." are resolved on disk, since whoever reads a URI drops them by its text
    alone, which is wrong behind a symbolic link. Paths of the other system (`PureWindowsPath` here,
    `PurePosixPath` there) work if they are absolute.

    Raises:
        ValueError: a relative path of the other system.
    """
    pure = path if isinstance(path, PurePath) else Path(path)
    if isinstance(pure, Path):
        pure = pure.resolve() if ".." in pure.parts else pure.absolute()
    if not pure.is_absolute():
        msg = f"a relative path has no URI: {os.fspath(pure)!r}"
        raise ValueError(msg)
    if isinstance(pure, PureWindowsPath):
        return _windows_uri(pure.as_posix())
    return "file://" + quote(os.fsencode(str(pure)))


def path_of(uri: str) -> str:
    """The absolute path that a `file:` URI names on this system; the reverse of `file_uri`.

    A query or a fragment ("#L10", as some clients point at lines) is left out. Nothing is looked up:
    whether the path may be used is for the caller, or a client's `Files`, to decide.

    Raises:
        ValueError: it is no URI of a file, or of one on another machine.
    """
    parts = urlsplit(uri)
    path = os.fsdecode(unquote_to_bytes(parts.path))
    if parts.scheme != "file" or not path.startswith("/") or "\0" in path:
        msg = f"{uri!r} is no URI of a file"
        raise ValueError(msg)
    host = "" if parts.netloc.lower() == "localhost" else parts.netloc
    if os.name == "nt":
        return _windows_path(host, path)
    if host:
        msg = f"{uri!r} is on another machine"
        raise ValueError(msg)
    return path


def _windows_path(host: str, path: str) -> str:
    if host:
        path = f"//{host}{path}"
    elif path[2:3] == ":":  # "/C:/a.py"
        path = path[1:]
    return path.replace("/", "\\")


def _windows_uri(path: str) -> str:
    """The URI of an absolute Windows path that is written with forward slashes."""
    if path[:4] in {"//?/", "//./"}:  # the long form of what follows
        path = path[4:]
        if path[:4].upper() == "UNC/":
            path = "//" + path[4:]
    if path.startswith("//"):
        return "file:" + quote(path, errors="surrogatepass")
    return f"file:///{path[:2]}" + quote(path[2:], errors="surrogatepass")


# -------------------------------------------------------------------- inside


def _embedded(
    data: bytes, uri: str, kind: str | None
) -> v1.ImageContent | v1.AudioContent | v1.EmbeddedResource:
    family = "" if kind is None else kind.partition("/")[0]
    if family == "image" and kind != "image/svg+xml":
        assert kind is not None
        return image(data, kind, uri=uri)
    if family == "audio":
        assert kind is not None
        return audio(data, kind)
    try:
        contents = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        contents = "\0"
    if "\0" in contents:
        return resource(uri, blob=data, mime_type=kind)
    return resource(uri, contents, mime_type=kind)


#: Endings that Python's own table lacks, has only in some versions, or takes for something else.
_ENDINGS: dict[str, str | None] = {
    ".avif": "image/avif",
    ".bmp": "image/bmp",
    ".flac": "audio/flac",
    ".heic": "image/heic",
    ".jpg": "image/jpeg",
    ".m4a": "audio/mp4",
    ".md": "text/markdown",
    ".mp3": "audio/mpeg",
    ".oga": "audio/ogg",
    ".ogg": "audio/ogg",
    ".opus": "audio/ogg",
    ".toml": "application/toml",
    ".ts": None,  # TypeScript, hardly ever a transport stream
    ".wav": "audio/wav",
    ".weba": "audio/webm",
    ".webp": "image/webp",
    ".yaml": "application/yaml",
    ".yml": "application/yaml",
}
_types: list[MimeTypes] = []


def _guess(name: str) -> str | None:
    """The mime type that a name's ending tells; without the tables of the machine, which differ."""
    ending = os.path.splitext(name)[1].lower()  # noqa: PTH122  (a name, not a path)
    if ending in _ENDINGS:
        return _ENDINGS[ending]
    if not _types:
        _types.append(MimeTypes())
    return _types[0].types_map[True].get(ending)


def _name(path: Path) -> str:
    """What to call a file: its name, and the whole path for "." and "/", which have none."""
    name = path.name or path.absolute().name or str(path.absolute())
    return os.fsencode(name).decode("utf-8", "replace")


def _base64(data: Bytes | str) -> str:
    if not isinstance(data, str):
        return base64.b64encode(data).decode("ascii")
    try:
        base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        msg = "data given as text is base64 without anything around it; give bytes as bytes"
        raise ValueError(msg) from None
    return data


_MIME_TYPE = re.compile(r"([\w!#$&^.+-]+)/[\w!#$&^.+-]+(\s*;.*)?", re.ASCII)
# Two characters at least: "C:" is a drive.
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")


def _mime_type(given: str, family: str | None = None) -> str:
    match = _MIME_TYPE.fullmatch(given)
    if match is None or family not in {None, match[1].lower()}:
        kind = "mime type" if family is None else f"mime type of kind {family}"
        msg = f"{given!r} is no {kind}"
        raise ValueError(msg)
    return given


def _uri(given: str) -> str:
    if _SCHEME.match(given) is None:
        msg = f"{given!r} is no URI; file_uri(path) makes one of a path"
        raise ValueError(msg)
    return given


def _given(value: Any) -> Any:
    """Absent, where a caller gave None: nobody needs to send null."""
    return UNSET if value is None else value


def _members(meta: Mapping[str, Any] | None) -> Any:
    return UNSET if meta is None else dict(meta)
