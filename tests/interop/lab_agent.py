"""The command's demo agent on stdio, with a record of its own: `python lab_agent.py RECORD PACE`."""

import sys

from antiphon import serve_stdio
from antiphon.cli._demo_agent import DemoAgent

serve_stdio(DemoAgent(pace=float(sys.argv[2])), record=sys.argv[1])
