"""One target under atheris: `python -m fuzz.atheris_target TARGET [libFuzzer's arguments]`."""

from __future__ import annotations

import logging
import sys
from importlib import import_module
from typing import Any

atheris: Any = import_module("atheris")

# What is to be watched is imported here, before the target imports parts of it.
with atheris.instrument_imports(include=["antiphon"]):
    for name in ("antiphon.core", "antiphon.schema", "antiphon.sessions"):
        import_module(name)
    check = import_module(f"fuzz.targets.{sys.argv[1]}").check

logging.getLogger("antiphon").addHandler(logging.NullHandler())
logging.getLogger("antiphon").propagate = False
atheris.Setup([sys.argv[0], *sys.argv[2:]], check)
atheris.Fuzz()
