"""Readers of run folders: table, differences, comparison, statistics, report. Nothing here imports torch."""
