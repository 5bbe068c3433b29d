"""What observes a run and never changes it: record, logger, sinks, evaluation, video, checkpoints."""
