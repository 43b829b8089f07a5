"""What needs no computation to see: tokens and positions fed, tokens proposed, fc passed by.

Letters: n rows.
"""

from __future__ import annotations

import numpy as np
import torch

from hsprobe.compare.noise import ROW_ALLOWANCE, expected_error
from hsprobe.compare.statistics import channel_scale, row_errors
from hsprobe.diagnose.draft.hypotheses import SHIFTS, TOKEN_STEP
from hsprobe.diagnose.draft.material import Mask, Material
from hsprobe.diagnose.draft.model import Verdict
from hsprobe.diagnose.naming import phase_name, plural
from hsprobe.draft.timeline import Ints

# Shares of rows: most that may stray from a rule that holds, and least for a rule to be the one.
_STRAY, _RULE = 0.01, 0.98
_MOST = 4096
_UNSURE = 0.8


def tokens_fed(material: Material) -> list[Verdict]:
    """Whether rows fed by the target get the token after theirs, in each phase."""
    rows = material.rows
    index = np.flatnonzero((rows.step == 0) & rows.committed & (rows.expected >= 0))
    wrong = rows.token[index] != rows.expected[index]
    phases = [int(phase) for phase in np.unique(rows.phase[index])]
    bad = [p for p in phases if wrong[rows.phase[index] == p].mean() > _STRAY]
    where = "" if len(bad) == len(phases) else f", in {' and '.join(phase_name(p) for p in bad)}"
    found = [_fed(material, index[rows.phase[index] == phase], where) for phase in bad]
    return list({verdict.title: verdict for verdict in found}.values())


def _fed(material: Material, index: Ints, where: str) -> Verdict:
    """What rows of one phase, of which some are fed a wrong token, are fed."""
    rows = material.rows
    wrong = index[rows.token[index] != rows.expected[index]]
    proof = [_example(material, int(wrong[0]))]
    for shift in SHIFTS:
        there = np.array([_token_at(material, int(i), shift) for i in index])
        telling = (there >= 0) & (there != rows.expected[index])
        agree = int((there[telling] == rows.token[index[telling]]).sum())
        if telling.any() and agree >= _RULE * telling.sum():
            way = "before" if shift < 0 else "after"
            title = f"the draft is fed the token {plural(abs(shift), 'position')} {way} the one due{where}"
            return Verdict(
                "tokens",
                "draft tokens",
                title,
                steps=[TOKEN_STEP],
                proof=proof,
                agree=agree,
                rows=int(telling.sum()),
            )
    return Verdict(
        "tokens",
        "draft tokens",
        f"the draft is fed tokens that do not follow the states it takes{where}",
        steps=[TOKEN_STEP],
        proof=[*proof, "no shift of one or two positions explains them"],
        agree=len(wrong),
        rows=len(index),
    )


def _token_at(material: Material, row: int, shift: int) -> int:
    """The token `shift` places after the one that follows a row's slot; -1 where it is not known."""
    tokens = material.rows.tokens_of[int(material.rows.request[row])]
    at = int(material.rows.slot[row]) + 1 + shift
    return int(tokens[at]) if 0 <= at < len(tokens) else -1


def _example(material: Material, row: int) -> str:
    rows = material.rows
    return (
        f"the row of position {rows.slot[row]} ({phase_name(int(rows.phase[row]))}) is fed token "
        f"{rows.token[row]}; the request goes on with {rows.expected[row]}"
    )


def positions_fed(material: Material) -> list[Verdict]:
    """Whether RoPE positions keep step with the rows' places; one offset for all rows changes nothing."""
    rows = material.rows
    index = np.flatnonzero(rows.slot >= 0)
    off = rows.position[index] - material.positions[index]
    if not len(index) or len(np.unique(off)) == 1:
        return []
    usual = int(np.bincount(off - off.min()).argmax() + off.min())
    proof, agree = [], 0
    for phase in np.unique(rows.phase[index]):
        mine = off[rows.phase[index] == phase]
        others = mine[mine != usual]
        if len(others) <= _STRAY * len(mine):
            continue
        agree += len(others)
        values, counts = np.unique(others, return_counts=True)
        most = int(values[counts.argmax()])
        proof.append(
            f"{phase_name(int(phase))}: position - due is {most:+d} in {counts.max()} of {len(mine)} rows"
        )
    if not proof:
        return []
    return [
        Verdict(
            "position",
            "draft positions",
            "the positions that the draft is given do not keep step with its rows",
            steps=["A row's position is that of the target's state it takes; each step of a chain adds one."],
            proof=proof,
            agree=agree,
            rows=len(index),
        )
    ]


def fc_passed_by(material: Material, watched: bool) -> list[Verdict]:
    """Whether the target's states go past fc, as they do where their width is that of the draft.

    Args:
        watched: whether fc was recorded when it ran.
    """
    rows, config = material.rows, material.ref.config
    fed = np.flatnonzero((rows.step == 0) & material.holds("draft.input"))
    if not len(fed) or not watched:
        return []
    width = material.stored["draft.input"].shape[1]
    if width != config.hidden or material.holds("draft.fc")[fed].any():
        return []
    steps = ["Serve with --speculative-algorithm EAGLE3, and leave use_aux_hidden_state on."]
    if config.aux_width == config.hidden:
        steps = ["SGLang runs fc only where the widths differ: give the draft two chunks or more."]
    return [
        Verdict(
            "fc",
            "draft.fc",
            f"fc is skipped: the draft is handed states of its own width {width}, not {config.aux_width}",
            steps=steps,
            proof=["fc ran in none of these rows, though it was watched"],
            agree=len(fed),
            rows=len(fed),
        )
    ]


def table_passed_over(material: Material) -> list[Verdict]:
    """Whether the checkpoint holds an embedding of its own, other than the target's, which SGLang shares."""
    own, shared = material.ref.own_embedding, material.ref.embedding
    tokens = torch.from_numpy(np.unique(material.rows.token.clip(0, len(shared) - 1)))
    if own is None or material.ref.config.own_embedding or own.shape[1] != shared.shape[1]:
        return []
    tokens = tokens[tokens < len(own)]
    ours, theirs = own[tokens].float().numpy(), shared[tokens].float().numpy()
    errors = row_errors(ours, theirs, channel_scale(theirs))
    differ = int((errors > ROW_ALLOWANCE * expected_error("bfloat16", 0)).sum())
    if not differ:
        return []
    return [
        Verdict(
            "embed",
            "draft.embed",
            "the draft is given the target's token embedding; its checkpoint holds another of its own",
            steps=[
                "SGLang shares the target's table with an EAGLE-3 draft and passes the checkpoint's over: "
                "train with the target's, or make sure that the draft did not learn with its own."
            ],
            proof=[f"{differ} of {len(tokens)} tokens that were fed have another vector in the checkpoint"],
            agree=differ,
            rows=len(tokens),
            confidence=_UNSURE,
        )
    ]


def other_table(material: Material, index: Ints, differs: Mask) -> Verdict | None:
    """Whether rows of one token hold one vector, as those of any table do, though it is not a known one."""
    states = material.read("draft.embed", index).numpy()
    tokens = material.rows.token[index]
    order = np.argsort(tokens, kind="stable")
    twins = np.flatnonzero(tokens[order][1:] == tokens[order][:-1])
    if not len(twins) or not np.array_equal(states[order[twins]], states[order[twins + 1]]):
        return None
    wrong = tokens[differs]
    return Verdict(
        "embed",
        "draft.embed",
        "the draft's token embedding is neither the target's table nor the checkpoint's",
        steps=["Tie it to the target's (set_embed), or find out which table it is."],
        proof=[
            f"{len(np.unique(wrong))} of {len(np.unique(tokens))} tokens have another vector, the same "
            "in all rows of a token: it is a table, of other values"
        ],
        agree=int(differs.sum()),
        rows=len(index),
    )


def vocabulary(material: Material) -> list[Verdict]:
    """Whether the token proposed is the one that the best logit stands for."""
    rows, token_of = material.rows, material.ref.token_of
    proposed = {
        int(rows.after[i]): int(rows.token[i]) for i in np.flatnonzero((rows.step > 0) & (rows.after >= 0))
    }
    proposed |= rows.verified
    held = material.holds("draft.logits")
    index = np.array(sorted(i for i in proposed if held[i])[:_MOST], np.int64)
    if not len(index):
        return []
    logits = material.read("draft.logits", index)
    top = logits.topk(2, dim=-1)
    clear = (top.values[:, 0] - top.values[:, 1]) > 0
    best = top.indices[:, 0]
    told = torch.tensor([proposed[int(i)] for i in index])
    index, best, told = index[clear.numpy()], best[clear], told[clear]
    wrong = token_of[best] != told
    if int(wrong.sum()) <= _STRAY * len(index):
        return []
    size = len(token_of)
    ids = torch.arange(size)
    maps = {
        "draft ids are taken for target ids: d2t is not applied": ids,
        "d2t is added twice: it holds target ids where differences are meant": token_of + ids,
        "d2t counts up in place of holding differences: id i becomes 2 i": 2 * ids,
        "d2t is taken for target ids as it is": token_of - ids,
    }
    for words, table in maps.items():
        if int((table[best] != told).sum()) <= _STRAY * len(index):
            return [_vocab(material, f"proposed tokens are mapped wrongly: {words}", index, wrong)]
    # A map of any kind gives one token for one id; sampled tokens do not.
    seen: dict[int, set[int]] = {}
    for one, token in zip(best.tolist(), told.tolist(), strict=True):
        seen.setdefault(one, set()).add(token)
    repeated = [found for one, found in seen.items() if int((best == one).sum()) > 1]
    if repeated and sum(len(found) == 1 for found in repeated) >= _RULE * len(repeated):
        title = "proposed tokens are mapped by another d2t than the checkpoint's"
        return [_vocab(material, title, index, wrong)]
    return []


def _vocab(material: Material, title: str, index: Ints, wrong: torch.Tensor) -> Verdict:
    return Verdict(
        "vocab",
        "draft.logits",
        title,
        steps=[
            f"Store d2t in {material.served_folder} as target id minus draft id: SGLang adds the draft "
            "id, and passes t2d over."
        ],
        proof=["the token of the best logit, by the checkpoint's d2t, is not the one proposed"],
        agree=int(wrong.sum()),
        rows=len(index),
    )
