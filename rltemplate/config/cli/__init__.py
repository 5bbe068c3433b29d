"""The words of `make train`, checked before anything is created."""
