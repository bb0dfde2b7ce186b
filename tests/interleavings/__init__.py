"""Random interleavings of a session's events, held against a model of the delivery contract."""
