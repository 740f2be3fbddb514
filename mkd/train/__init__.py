"""The training step: objective, schedule, evaluation, NaN check."""
