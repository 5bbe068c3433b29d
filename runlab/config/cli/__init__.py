"""The arguments of `make train`, checked before anything is created."""
