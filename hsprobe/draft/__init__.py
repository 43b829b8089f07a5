"""An EAGLE-3 draft, computed by hsprobe itself from its checkpoint: what a server's draft is held against.

`reference.load` gives the draft, `reference.DraftReference` its stages one by one; they need torch, which is
imported with them and not before. `config` and `rope` describe what a configuration asks for.
"""
