"""Recorded runs made again: reproduce, zoom, prove."""
