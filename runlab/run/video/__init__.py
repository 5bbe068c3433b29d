"""Videos of a policy."""
