"""Determinism levels: switches and their read-back, kernels, start-up checks, machine facts."""
