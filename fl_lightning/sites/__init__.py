"""A federation whose clients are sites of their own: what travels, what stays, and who asks whom
(docs/deploy.md)."""
