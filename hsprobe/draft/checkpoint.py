"""Tensors of a checkpoint folder, read without running any code that the folder may hold."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hsprobe.errors import HsprobeError

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def read_tensors(folder: Path | str, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    """The tensors whose names are wanted, from all safetensors files of a folder, or its .bin files.

    Raises:
        HsprobeError: the folder holds neither, or a file is damaged.
    """
    folder = Path(folder)
    sound = sorted(folder.glob("*.safetensors"))
    files = sound or sorted(folder.glob("pytorch_model*.bin")) or sorted(folder.glob("*.bin"))
    if not files:
        raise HsprobeError(f"{folder} holds no weights.", "Give a folder with .safetensors or .bin files.")
    found: dict[str, Tensor] = {}
    for path in files:
        try:
            found.update(_read(path, wanted))
        except (OSError, ValueError, RuntimeError, SafetensorError, EOFError, KeyError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
            raise HsprobeError(f"{path} cannot be read: {reason}.", "Check the checkpoint.") from None
        except Exception as error:  # what unpickling refuses has no common base
            raise HsprobeError(
                f"{path} is refused: {type(error).__name__}.", "Store the weights as safetensors."
            ) from None
    return found


def _read(path: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
    if path.suffix == ".safetensors":
        with safe_open(path, framework="pt") as stored:
            names = [name for name in stored.keys() if wanted(name)]  # noqa: SIM118 (not a mapping)
            for name in names:
                yield name, stored.get_tensor(name)
        return
    loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    if not isinstance(loaded, dict):
        raise ValueError("it holds no tensors by name")
    for name, tensor in loaded.items():
        if isinstance(name, str) and isinstance(tensor, Tensor) and wanted(name):
            yield name, tensor


def floating(tensor: Tensor, name: str, folder: Path) -> Tensor:
    """A weight that is a plain floating-point matrix.

    Raises:
        HsprobeError: it is quantised.
    """
    if tensor.dtype not in _FLOATS:
        raise HsprobeError(
            f"{name} in {folder} is stored as {tensor.dtype}, which hsprobe does not compute with.",
            "Give the draft's folder before it was quantised.",
        )
    return tensor


_EMBEDDINGS = ("model.embed_tokens.weight", "embed_tokens.weight", "language_model.model.embed_tokens.weight")
_HEADS = ("lm_head.weight", "language_model.lm_head.weight")


def target_embedding(folder: Path | str) -> Tensor:
    """The token embedding of a target's folder, as stored. [V, H]

    Raises:
        HsprobeError: it is not there.
    """
    return _one(folder, _EMBEDDINGS, r"embed_tokens\.weight$|wte\.weight$|word_embeddings\.weight$")


def target_head(folder: Path | str) -> Tensor:
    """The lm_head of a target's folder, its embedding where they are tied. [V, H]

    Raises:
        HsprobeError: neither is there.
    """
    found = read_tensors(folder, lambda name: name in _HEADS)
    for name in _HEADS:
        if name in found:
            return floating(found[name], name, Path(folder))
    return target_embedding(folder)


def _one(folder: Path | str, names: tuple[str, ...], pattern: str) -> Tensor:
    found = read_tensors(
        folder, lambda name: name in names or (bool(re.search(pattern, name)) and "vis" not in name)
    )
    for name in (*names, *sorted(found)):
        if name in found:
            return floating(found[name], name, Path(folder))
    raise HsprobeError(f"{folder} holds no token embedding.", "Give the target's folder with --target.")
