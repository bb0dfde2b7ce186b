"""What a user may write for a prompt, and what an agent takes."""

from __future__ import annotations

from typing import Any

import pytest

from antiphon import CapabilityError
from antiphon.schema import Unknown, v1
from antiphon.sessions._content import (
    as_block,
    as_blocks,
    blocks_text,
    check_prompt_content,
    missing_capability,
)

IMAGE = v1.ImageContent(data="", mime_type="image/png")
AUDIO = v1.AudioContent(data="", mime_type="audio/wav")
RESOURCE = v1.EmbeddedResource(resource=v1.TextResourceContents(text="x", uri="file:///x"))
LINK = v1.ResourceLink(name="x", uri="file:///x")
TEXT = v1.TextContent(text="hello")


def test_text_becomes_a_text_block_and_a_block_stays() -> None:
    assert as_block("hello") == TEXT
    assert as_block(IMAGE) is IMAGE


@pytest.mark.parametrize(
    "other", [5, None, b"bytes", {"type": "text", "text": "x"}, ["x"], v1.Content(content=TEXT)]
)
def test_what_is_no_content_is_refused_where_it_is_given(other: Any) -> None:
    with pytest.raises(TypeError, match=f"{type(other).__name__} is no content"):
        as_block(other)


def test_a_block_of_a_kind_that_came_from_a_peer_may_be_passed_on() -> None:
    unknown: Any = Unknown(b'{"type":"hologram"}', "unknown type")
    assert as_block(unknown) is unknown


def test_a_prompt_is_one_thing_or_several() -> None:
    assert as_blocks("hello") == [TEXT]
    assert as_blocks(IMAGE) == [IMAGE]
    assert as_blocks(["hello", IMAGE]) == [TEXT, IMAGE]
    assert as_blocks(("hello",)) == [TEXT]


def test_the_text_of_a_prompt_is_that_of_its_text_blocks() -> None:
    assert blocks_text([TEXT, IMAGE, v1.TextContent(text="there")]) == "hello\nthere"
    assert blocks_text([]) == ""


@pytest.mark.covers("R1-79")
def test_text_and_links_are_always_taken() -> None:
    assert missing_capability([TEXT, LINK], {}) is None
    check_prompt_content([TEXT, LINK], {})


@pytest.mark.parametrize(
    ("block", "needed"), [(IMAGE, "image"), (AUDIO, "audio"), (RESOURCE, "embeddedContext")]
)
@pytest.mark.covers("R1-42")
def test_other_content_is_refused_unless_advertised(block: Any, needed: str) -> None:
    assert missing_capability([TEXT, block], {}) == needed
    for value in (False, None, "yes"):
        tree = {"promptCapabilities": {needed: value}}
        with pytest.raises(CapabilityError) as refused:
            check_prompt_content([block], tree)
        assert refused.value.capability == f"agentCapabilities.promptCapabilities.{needed}"
    check_prompt_content([block], {"promptCapabilities": {needed: True}})
