"""The laboratory: the paper's statements as experiments, κ from data and models, stability as numbers."""
