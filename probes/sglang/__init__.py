"""The SGLang plugin: records hidden states, by site and row, in every scheduler process.

SGLang calls :func:`activate` through the entry-point group ``sglang.srt.plugins`` in each of its
processes; where it has no plugins, ``hsprobe.probes.startup`` does, in its scheduler processes. It does
nothing, and imports nothing, unless ``HSPROBE_CAPTURE`` is set.
"""

import os
import sys

SUPPORTED = ("0.5.9", "0.5.15.post1", "0.5.23")


def activate() -> None:
    """Install the probes in this process if a capture was asked for and the process runs a model.

    SGLang imports ``managers.scheduler`` before it loads plugins in a scheduler process; the
    detokenizer and the data-parallel controller do not, and have nothing to record.
    """
    if os.environ.get("HSPROBE_CAPTURE") and "sglang.srt.managers.scheduler" in sys.modules:
        from hsprobe.probes.sglang.install import install

        install()
