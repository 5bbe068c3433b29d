"""Recorded runs made again or played: reproduce, zoom, prove, evaluate, film."""
