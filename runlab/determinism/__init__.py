"""Determinism levels: switches and their read-back, environment variables, kernels, start-up checks."""
