"""Gymnasium environments: making, encoding spaces, stepping many, exact state."""
