"""Fuzzing of everything that reads what a peer wrote; `make fuzz`, and README.md says more."""
