"""The fault classes, one module each, all of one shape.

A module has
- `EXPLANATION`: code, name, and the text of `hsprobe explain` and docs/faults.md;
- `RANK`: how damaging the class is: findings are shown in ascending rank, classes asked in that order;
- `PROPOSALS`: the forms of a state that are this class's (see `forms`), where it is about the form, and
  `NORM`, which of the model's norms are; both may be absent;
- `of_ranks(facts) -> list[Finding]`, where the ranks of a trace show the class by themselves; may be absent;
- `diagnose(evidence, explained) -> list[Finding]`, where `explained` are the chunks that classes of lower
  rank have accounted for.

A new class is a new file here and nothing else.
"""
