"""The algorithms: each in <name>.py, with its hyperparameters and its entry in <name>_config.py."""
