"""The draft of a checkpoint, asked which of its chains' tokens are the target's.

Letters: T tokens of a request, R = T-1 draft rows (row p is fed token p+1), A = K*H, S drafting steps,
N heads.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hsprobe.compare.statistics import Floats
from hsprobe.errors import HsprobeError
from hsprobe.impact.texts import Bools, Text
from hsprobe.remote.location import Location

if TYPE_CHECKING:
    from hsprobe.draft.reference import DraftReference


class Chains:
    """Greedy chains of one draft.

    Args:
        draft: the draft. steps: tokens a chain.
    """

    def __init__(self, draft: DraftReference, steps: int, device: str) -> None:
        self.steps = steps
        self._draft = draft
        self._device = device

    @classmethod
    def open(cls, draft: Path, target: Path | None, steps: int, device: str) -> Chains:
        """Load the draft of a folder; embeddings that it lacks are the target's.

        Raises:
            HsprobeError: torch or a file is missing, or the draft cannot be run.
        """
        try:
            import torch

            from hsprobe.draft.reference import load
        except ImportError as error:
            raise HsprobeError(
                f"Running a draft needs {error.name}, which is not installed.",
                "Install it: pip install 'hsprobe[transformers]'",
            ) from None
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:
            said = str(error).strip().splitlines()[0]
            raise HsprobeError(
                f"torch cannot use --device {device}: {said}", "Leave it out for the CPU."
            ) from None
        return cls(load(target, draft, device=device), steps, device)

    def check_width(self, width: int, where: Location) -> None:
        """Whether states of this width can be fed to the draft.

        Raises:
            HsprobeError: they cannot.
        """
        config = self._draft.config
        # A server skips fc for states as wide as the draft's own, and so does the reference.
        if width not in (config.aux_width, config.hidden):
            raise HsprobeError(
                f"The states in {where} are {width} wide, the draft takes {config.aux_width} "
                f"({config.chunks} chunks of {config.target_hidden}): it cannot be run on them.",
                "Check --draft, and 'hsprobe diff' for chunks that are missing.",
            )

    def hits(self, states_TA: Floats, text: Text, heads: range) -> Bools:
        """Whether each step of the chain from each head names the target's token. -> [S, N]

        A head is the row of the last token that the target has been run on: the chain names the tokens from
        two positions further on. Tokens beyond the known ones count as missed.
        """
        import torch

        tokens = torch.from_numpy(np.ascontiguousarray(text.tokens)).to(self._device)
        states_RA = torch.from_numpy(np.ascontiguousarray(states_TA[:-1])).to(self._device)
        found = np.zeros((self.steps, len(heads)), np.bool_)
        with torch.no_grad():
            for step, final_RH in enumerate(self._draft.unroll(states_RA, tokens[1:], self.steps)):
                stop = min(heads.stop, len(text) - 2 - step)
                if stop <= heads.start:
                    continue
                rows = slice(heads.start + step, stop + step)
                named = self._draft.best_tokens(final_RH[rows])
                right = named == tokens[rows.start + 2 : rows.stop + 2]
                found[step, : stop - heads.start] = right.cpu().numpy()
        return found
