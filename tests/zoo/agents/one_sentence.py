"""Prints one sentence in place of the protocol, and is content."""

print("This version has no ACP mode. Please install the agent's adapter.")
