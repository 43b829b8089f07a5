"""The fault classes, one module each, all of one shape.

A module has
- `CODE`, the stable name of the class;
- `RANK`, how damaging it is: findings are shown in ascending rank, and classes are asked in that order;
- `diagnose(evidence, explained) -> list[Finding]`, where `explained` are the chunks that classes of lower
  rank have accounted for.

A new class is a new file here and nothing else.
"""
