"""Parts of algorithms: networks, distributions, optimiser, statistics, replay buffer, on- and off-policy."""
