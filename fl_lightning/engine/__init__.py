"""The rounds of a federation: who takes part, what happens on clients, which models are scored,
what is recorded."""
