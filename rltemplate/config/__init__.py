"""Configuration: types of all keys, loading, checks, and the words of a command."""
