"""Addresses as text: what is read, and what is said of what is none."""

from __future__ import annotations

import sys

import pytest

from antiphon.transports import TcpAddress, UnixAddress, parse_address


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("unix:/run/agent.sock", UnixAddress("/run/agent.sock")),
        ("unix:agent.sock", UnixAddress("agent.sock")),
        ("unix:/a:b", UnixAddress("/a:b")),
        ("unix:/with a space/漢", UnixAddress("/with a space/漢")),
        ("tcp:127.0.0.1:4711", TcpAddress("127.0.0.1", 4711)),
        ("tcp:localhost:0", TcpAddress("localhost", 0)),
        ("tcp:[::1]:65535", TcpAddress("::1", 65535)),
        ("tcp:[fe80::1%eth0]:1", TcpAddress("fe80::1%eth0", 1)),
    ],
)
def test_an_address_is_read_and_written_back(text: str, address: object) -> None:
    assert parse_address(text) == address
    assert str(address) == text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is no address: unix:PATH or tcp:HOST:PORT"),
        ("/run/agent.sock", "is no address"),
        ("http://localhost:80", "is no address"),
        ("UNIX:/a", "is no address"),
        ("unix:", "no path"),
        ("unix:/a\0b", "no path"),
        ("tcp:4711", "has no port"),
        ("tcp:localhost", "has no port"),
        ("tcp:localhost:", "has no port"),
        ("tcp:localhost:http", "has no port"),
        ("tcp:localhost:-1", "has no port"),
        ("tcp:localhost:٣", "has no port"),
        ("tcp::4711", "no host"),
        ("tcp://localhost:4711", "no host"),
        ("tcp:a b:1", "no host"),
        ("tcp:[localhost]:1", "no host"),
        ("tcp:::1:4711", "stands in brackets"),
        ("tcp:localhost:65536", "no port"),
    ],
)
def test_what_is_no_address_is_said_to_be_none(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_address(text)


def test_a_path_has_as_many_bytes_as_the_system_takes() -> None:
    most = 107 if sys.platform == "linux" else 103

    assert UnixAddress("x" * most)
    with pytest.raises(ValueError, match=f"at most {most} bytes, not {most + 1}"):
        UnixAddress("x" * (most + 1))
    with pytest.raises(ValueError, match="at most"):  # bytes, not characters
        UnixAddress("漢" * 40)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has abstract sockets")
def test_an_abstract_socket_has_a_name_and_no_file() -> None:
    address = parse_address("unix:@name")

    assert isinstance(address, UnixAddress)
    assert address.abstract
    assert address.sockaddr == "\0name"
    with pytest.raises(ValueError, match="these have a name"):
        parse_address("unix:@")


def test_elsewhere_abstract_sockets_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")

    with pytest.raises(ValueError, match="Linux's alone"):
        UnixAddress("@name")
