"""A captured draft held against its own checkpoint: stage by stage, by identification where one differs.

`material` reads what was captured; `compute` computes any site from what was captured before it, as it
should be or under a hypothesis; `hypotheses`, `attention` and `linear` list what may be wrong with each part,
`trial` tries it; `direct` and `recycle` look at what needs no computation; `gather` runs it all. These need
torch and are imported when a draft is given; `model` and `findings` do not.
"""
