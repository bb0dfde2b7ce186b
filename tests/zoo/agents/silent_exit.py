"""Is gone before it was asked anything."""
