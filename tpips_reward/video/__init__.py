"""Similarity to one frame over time, in several aspects (paper, figure 7). Nothing is imported here: `--help` is quick."""
