"""Readers of run folders. Nothing here imports torch."""
