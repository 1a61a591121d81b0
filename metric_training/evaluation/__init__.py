"""Evaluation against people's (or simulated) votes: judges, figures, reports. metric_training/evaluate.py runs it."""
