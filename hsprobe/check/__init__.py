"""Checks a target and a draft before they are served: configs and headers of weights, nothing is run."""
