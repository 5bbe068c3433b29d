"""Receivers of metrics: console, TensorBoard, Weights & Biases."""
