"""Both ranks of tensor parallelism on one GPU: an SGLang plugin, with this folder on PYTHONPATH.

NCCL refuses two ranks on a GPU of one host, so each process says that it is a host of its own; they then talk
over sockets (``NCCL_SOCKET_IFNAME=lo``). SGLang asks that ranks lie at least one GPU apart; that is undone
after it has been checked. For correctness alone: it is slow.
"""

import os
from collections.abc import Callable
from typing import Any


def install() -> None:
    """Called by SGLang in each of its processes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    os.environ["NCCL_HOSTID"] = f"process-{os.getpid()}"
    check = "sglang.srt.server_args.ServerArgs.check_server_args"
    HookRegistry.register(check, _on_one_gpu, HookType.AROUND)


def _on_one_gpu(check: Callable[..., None], arguments: Any) -> None:
    check(arguments)
    arguments.gpu_id_step = 0
