"""Is federating worth it? For each silo: what it gains over training alone, with an interval and a verdict."""
