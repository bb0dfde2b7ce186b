"""Prompt content: what a user may write for it, and whether the agent takes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from antiphon._errors import CapabilityError
from antiphon.schema import Unknown, v1
from antiphon.sessions._methods import allowed_by, tag_of

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["as_block", "as_blocks", "blocks_text", "check_prompt_content", "missing_capability"]

#: Block types that are not baseline, with the prompt capability each needs (acp-v1 §5).
_GATED = {"image": "image", "audio": "audio", "resource": "embeddedContext"}
_BLOCKS = frozenset(("text", "resource_link", *_GATED))


def as_block(content: str | v1.ContentBlock) -> v1.ContentBlock:
    """Text becomes a text block, a block stays what it is.

    Raises:
        TypeError: it is neither. Bytes would go out as base64, and all else as what no peer can read.
    """
    if isinstance(content, str):
        return v1.TextContent(text=content)
    if tag_of(content) not in _BLOCKS and not isinstance(content, Unknown):
        msg = f"{type(content).__name__} is no content: it is a text or a content block"
        raise TypeError(msg)
    return content


def as_blocks(
    content: str | v1.ContentBlock | Sequence[str | v1.ContentBlock],
) -> list[v1.ContentBlock]:
    """One or several blocks, given as text or as blocks."""
    if isinstance(content, str):
        return [v1.TextContent(text=content)]
    if isinstance(content, (list, tuple)):
        return [as_block(item) for item in content]
    return [as_block(content)]  # type: ignore[arg-type]


def blocks_text(blocks: Sequence[Any]) -> str:
    """The text blocks of a prompt, joined by line ends."""
    return "\n".join(block.text for block in blocks if tag_of(block) == "text")


def missing_capability(blocks: Sequence[Any], tree: Any) -> str | None:
    """The first prompt capability the blocks need that an agent's capability tree lacks."""
    for block in blocks:
        if block.__class__ is v1.TextContent:  # the usual, which every agent takes
            continue
        needed = _GATED.get(tag_of(block))
        if needed is not None and not allowed_by(tree, f"promptCapabilities.{needed}"):
            return needed
    return None


def check_prompt_content(blocks: Sequence[Any], tree: Any) -> None:
    """Refuse content the agent did not offer to take (R1-42). Raises `CapabilityError`."""
    missing = missing_capability(blocks, tree)
    if missing is not None:
        raise CapabilityError("session/prompt", f"agentCapabilities.promptCapabilities.{missing}")
