"""Keeps clients' and server's state between rounds: `policy` decides which, `store` holds vectors,
`manifest` reads and writes checkpoints."""
