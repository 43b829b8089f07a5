"""One module a container: bytes of a file in, a description of its contents out. Nothing is ever executed.

Contents are plain values: mappings, lists, strings, numbers, and `Stored` tensors that are read on demand.
"""
