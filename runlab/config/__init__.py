"""Configuration: types of all keys, loading, checks, and the arguments of a command."""
