"""What must not matter over real pipes (C-16)."""

from __future__ import annotations

import base64
import hashlib
import random
import sys
from pathlib import Path

import pytest

from antiphon import spawn
from antiphon.schema import v1

PROGRAM = Path(__file__).with_name("image_agent.py")


@pytest.mark.covers("C-16")
async def test_an_image_of_five_mebibytes_arrives_whole() -> None:
    data = base64.b64encode(random.Random(5).randbytes(5 << 20)).decode()
    image = v1.ImageContent(data=data, mime_type="image/png")
    told = f"{len(data)} {hashlib.sha256(data.encode()).hexdigest()} image/png"
    cut = f"{len(data) - 1} {hashlib.sha256(data[:-1].encode()).hexdigest()} image/png"

    async with spawn([sys.executable, str(PROGRAM)]) as agent:
        session = await agent.new_session()
        outcome = await session.prompt(["look", image])
        # A single character less is told apart.
        again = await session.prompt(v1.ImageContent(data=data[:-1], mime_type="image/png"))

    assert outcome.text == told
    assert again.text == cut != told
