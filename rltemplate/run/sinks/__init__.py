"""Sinks: the console, TensorBoard and Weights & Biases, which show what `metrics.jsonl` holds."""
