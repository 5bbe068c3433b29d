"""Videos of a policy: an episode is played, and drawn in a child process. run/observers.py starts them."""
