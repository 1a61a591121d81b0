"""Algorithms as pure functions: sampling steps and windows, advantages, losses, and signs of a fooled reward."""
