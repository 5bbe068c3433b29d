"""The algorithms once more, as plainly as torch allows, for the package to be compared with.

Ordinary modules, autograd, torch's own optimiser, clipping and distributions, a dictionary as replay buffer,
statistics over a list of everything seen, and loops over time and environments. Nothing here is fast, and
nothing is shared with the package but what both are given: the configuration, the first weights, and the
named streams, from which both draw the same numbers in the same order.
"""
