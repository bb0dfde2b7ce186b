"""Leaves when its client leaves, but a tool of it stays, ignores TERM and holds the pipes."""

import subprocess
import sys

from tests.zoo.wire import complain, end, prompted, say, until_the_client_leaves

prompt = prompted()
tool = (
    "import signal, time\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "print('ready', flush=True)\n"
    "time.sleep(60)"
)
process = subprocess.Popen([sys.executable, "-S", "-c", tool], stdin=0, stdout=subprocess.PIPE)
assert process.stdout is not None
complain(process.stdout.readline().decode())
say("done")
end(prompt)
until_the_client_leaves()
