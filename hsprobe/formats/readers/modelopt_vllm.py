"""ModelOpt's hidden states, by its script on vLLM: the names of its other scripts, with other meanings.

Source: NVIDIA Model-Optimizer a2fbac7b, examples/speculative_decoding/collect_hidden_states/
compute_hidden_states_vllm.py. The ids of `--aux-layers` go to vLLM as they are, and there id n is the stream
after n layers: the *input* of layer n, one less deep than with the same flag in the other scripts.
`hidden_states` is the last layer's output, before the norm. Nothing in a file says so, but this script alone
saves two views of one tensor, and torch stores them so.
"""

from __future__ import annotations

from hsprobe.formats.dump import Final, Match, Numbering, Options, Reader, Sure
from hsprobe.formats.readers import modelopt
from hsprobe.formats.source import Source

KEY = "modelopt-vllm"
NAME = "ModelOpt (vLLM script)"


def detect(source: Source) -> Match | None:
    """By the names and the ranks; its tensors are parts of one wider one."""
    found = modelopt.first(source)
    if found is None:
        return None
    if modelopt.of_vllm(found):
        return Match(2, "its hidden_states and aux_hidden_states are parts of one tensor")
    return Match(1, "it has hidden_states and aux_hidden_states")


def open_dump(source: Source, options: Options) -> Reader:
    """See `Format`."""
    return modelopt.samples(source, options, Numbering("--aux-layers", 0), Final("pre", Sure.DEFAULT))
