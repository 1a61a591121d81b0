"""The parts of a training: settings, model, examples, schedule, checkpoints, and what is left at the end."""
