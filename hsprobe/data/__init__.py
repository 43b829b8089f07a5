"""Small traces of a real server, for `hsprobe demo`."""
