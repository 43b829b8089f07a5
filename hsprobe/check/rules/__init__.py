"""The rules, one module a topic; `hsprobe.check.registry` finds them."""
