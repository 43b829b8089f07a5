"""hsprobe: do the hidden states a draft model sees in production equal the ones it was trained on?"""

__version__ = "0.1.0"
