"""Code that runs inside somebody else's process and records what it computes there."""
