"""Full turns with peers that we did not write: see README.md."""
