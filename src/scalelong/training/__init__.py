"""Training: step → guard → optimiser → EMA → signals → checkpoint."""
