"""Algorithms as pure functions: stochastic steps of the sampler, advantages, losses."""
