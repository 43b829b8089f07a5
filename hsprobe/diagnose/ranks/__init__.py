"""The ranks of one trace: each by itself, against one another, and what they hold jointly."""
