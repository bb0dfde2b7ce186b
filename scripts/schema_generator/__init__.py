"""Turns the official JSON schema into the wire types, the method table and the handler classes.

Stations, in order: `pinned` (official files, verified) → `reading` (JSON → `model`) →
`types_module` and `handlers_module` (model → Python text) → `command` (formats, writes or compares).
`notes` holds what a person decided and the JSON does not say. The test strategies
(`tests/strategies`) start from the same `model`, so that both see every definition alike.
"""
