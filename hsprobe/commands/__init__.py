"""The subcommands, one module each: `add_parser(subparsers)` and `run(args) -> exit code`.

They are imported to build the parser, so they import what they need in `run` only.
"""
