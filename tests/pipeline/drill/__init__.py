"""A graph of four small stages that behave like the real ones: they log steps, save checkpoints, stop when told."""
