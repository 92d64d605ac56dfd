"""Configuration: what can be chosen by name, and the arguments that it takes, without importing
it."""
