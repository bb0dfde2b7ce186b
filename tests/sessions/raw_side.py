"""The names that tests of sessions have for the raw peers of `antiphon.testing`."""

from antiphon.testing import RawPeer as RawSide
from antiphon.testing import raw_agent, raw_client, raw_pair, unshaken_client

__all__ = ["RawSide", "raw_agent", "raw_client", "raw_pair", "unshaken_client"]
