"""Configuration: types of all keys, loading, checks, arguments of a command, secrets, and the project."""
