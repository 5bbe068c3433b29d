"""Gymnasium environments: making, wrappers, encoding spaces, stepping many, exact state."""
