"""`python -m antiphon`: the command `antiphon` without its script."""

from __future__ import annotations

import sys

from antiphon.cli import main

if __name__ == "__main__":
    sys.exit(main())
