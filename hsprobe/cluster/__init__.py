"""Comparisons that run elsewhere than in this process, and those that are continued after an interruption."""
