"""Odd-one-out data: simulated voters and procedural triplets."""
