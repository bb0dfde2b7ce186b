"""The bench echo agent on Antiphon, with a journal on disk: nothing leaves before it is durable."""

import os
import tempfile

from antiphon_agent import BenchAgent

from antiphon import serve_stdio
from antiphon.journal import SqliteJournal

# On a disk, if $TMPDIR is in memory: BENCH_FOLDER says where.
with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_FOLDER")) as folder:
    serve_stdio(BenchAgent(), journal=SqliteJournal(folder))
