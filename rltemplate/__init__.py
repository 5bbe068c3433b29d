"""This project: its algorithms, what they are built of, and what trains them. The rest is in runlab/."""
