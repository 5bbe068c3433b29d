"""Building blocks of algorithms: networks, distributions, optimisers, statistics, replay buffer, engine."""
