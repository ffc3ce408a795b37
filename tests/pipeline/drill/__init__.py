"""A graph of small stages that behave like the real ones: they log steps, save checkpoints, and stop on request."""
