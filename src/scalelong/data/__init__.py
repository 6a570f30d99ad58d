"""Data: from a source on disk to batches on the training device."""
