"""One module a producer: `KEY`, `NAME`, `detect(source)` and `open_dump(source, options)`.

See `hsprobe.formats.dump` for what they give. A module that begins with an underscore is not a reader.
"""
