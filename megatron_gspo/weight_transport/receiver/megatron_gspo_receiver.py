"""Receives weights from several sources at the same time, inside of a server.

SGLang calls `load` as a custom weight loader (``--custom-weight-loader
megatron_gspo_receiver.load``) in each of its tensor-parallel ranks; a worker extension of vLLM
calls `receive` (``rollout/vllm/worker_extension``). The server's environment has none of this
project: torch and the standard library only.

A request is JSON: `rank` of this process in the groups; `transfer`, a unique name; `timeout` in
seconds; `checksums`, whether to compute them; `sources`, each with `name`, `address`, `port`,
`size` and `backend` of its process group. A source writes, in the store at its address, a key for
each bucket (`transfer`/0, 1, ...) with its entries, broadcasts the bucket's bytes, and ends with a
key that has the checksum of each of its tensors. Each rank answers with a key
`transfer`/done/`rank`: an empty string, or the error, which begins with "broken: " if it is the
group's. `transfer`/abort ends the transfer.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_WORD = 8  # bytes of int64
_ODD = -7046029254386353131  # 2**64 over the golden ratio, as int64
_CHUNK = 1 << 19  # words summed at once
_POLL = 0.002  # seconds between two checks of a broadcast
_AHEAD = 2  # buckets of a source that wait to be loaded
_DEVICES = {"gloo": "cpu", "nccl": "cuda"}
_groups: dict[str, _Group] = {}  # kept between transfers, by name
_held: dict[str, int] = {}  # checksum of each tensor that was loaded


class _Group:
    """The process group of one source, and its store. gpu: of this rank, for NCCL."""

    def __init__(self, source: dict[str, Any], rank: int, timeout: float, gpu: int) -> None:
        limit = timedelta(seconds=timeout)
        client = dist.TCPStore(
            source["address"], source["port"], None, False, limit, wait_for_workers=False
        )
        name = source["name"]
        device = _DEVICES[source["backend"]]
        self.keys = dist.PrefixStore(f"{name}/transfers", client)
        store = dist.PrefixStore(
            f"{device}/", dist.PrefixStore(f"{name}/", dist.PrefixStore(name, client))
        )
        self.device = torch.device("cuda", gpu) if device == "cuda" else torch.device("cpu")
        self.group: Any
        if source["backend"] == "gloo":
            self.group = dist.ProcessGroupGloo(store, rank, source["size"], limit)
        else:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = limit
            self.group = dist.ProcessGroupNCCL(store, rank, source["size"], options)

    def broadcast(self, nbytes: int, abort: str, timeout: float) -> torch.Tensor:
        """[nbytes] uint8 of the source.

        Raises RuntimeError if it breaks, is aborted or takes longer.
        """
        data = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.asyncOp = True
        options.timeout = timedelta(seconds=timeout)
        work = self.group.broadcast([data], options)
        began = time.monotonic()
        looked = time.monotonic()
        while not work.is_completed():
            now = time.monotonic()
            if now - looked > 0.2:
                looked = now
                if self.keys.check([abort]) or now - began > timeout:
                    threading.Thread(
                        target=_discard, args=([self.group, work, data],), daemon=True
                    ).start()
                    self.group = None
                    raise RuntimeError(
                        "aborted" if now - began <= timeout else f"no bucket within {timeout:g} s"
                    )
            time.sleep(_POLL)
        work.wait()
        return data


def _discard(held: list[Any]) -> None:
    """End a group in the background: its destructor waits for running operations."""
    held[0].abort()
    while not held[1].is_completed():
        time.sleep(0.05)
    held.clear()


def checksum(data: torch.Tensor) -> int:
    """The checksum of [n] uint8, on any device: its mixed 8-byte words, each times an odd number of
    its place, modulo 2**64. Every change of one word changes it."""
    whole = data.numel() // _WORD * _WORD
    rest = torch.zeros(_WORD, dtype=torch.uint8, device=data.device)
    rest[: data.numel() - whole] = data[whole:]
    body = data[:whole] if data.storage_offset() % _WORD == 0 else data[:whole].clone()
    total = _mixed(rest.view(torch.int64))[0] + data.numel()
    for first, words in enumerate(body.view(torch.int64).split(_CHUNK)):
        word_positions = torch.arange(
            first * _CHUNK + 1, first * _CHUNK + 1 + len(words), device=data.device
        )
        total = total + (_mixed(words) * (2 * word_positions + 1)).sum()
    return int(total)


def _mixed(words: torch.Tensor) -> torch.Tensor:
    """Words whose every bit depends on several; without it two changed signs would cancel.
    One-to-one.
    """
    mixed = (words ^ ((words >> 32) & 0xFFFFFFFF)) * _ODD
    return mixed ^ ((mixed >> 29) & 0x7FFFFFFFF)


def load(model: Any, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Receive what the request in the first tensor (UTF-8 of JSON as uint8) describes, and load it
    into the model.

    Raises nothing: an exception would end the server.
    """
    try:
        request = json.loads(bytes(named_tensors[0][1].cpu().tolist()))
    except Exception:  # of any kind: it would end the server
        logging.exception("megatron_gspo_receiver: the request can't be read")
        return
    receive(model, request)


def receive(model: Any, request: dict[str, Any]) -> str:
    """Receive what the request describes, and load it with ``model.load_weights``.

    Returns the error, if any.
    """
    try:
        return _receive(model, request)
    except Exception as error:  # of any kind: it would end the server
        logging.exception("megatron_gspo_receiver: the weights were not received")
        return _short(error) or type(error).__name__


def _receive(model: Any, request: dict[str, Any]) -> str:
    names = {source["name"] for source in request["sources"]}
    for old in [name for name in _groups if name not in names]:
        del _groups[old]
    inbox: queue.Queue[tuple[dict[str, Any], Any]] = queue.Queue(_AHEAD * len(names))
    # Of this thread: others begin with GPU 0.
    gpu = torch.cuda.current_device() if torch.cuda.is_available() else 0
    for source in request["sources"]:
        threading.Thread(target=_listen, args=(source, request, inbox, gpu), daemon=True).start()
    error = ""
    sums = dict[str, int]()
    open_sources = len(names)
    while open_sources:
        try:
            entry, data = inbox.get(timeout=2 * request["timeout"])
        except queue.Empty:
            error = error or f"no weights within {2 * request['timeout']:g} s"
            break
        if "entries" not in entry:
            open_sources -= 1
            sums |= entry.get("sums", {})
            error = error or entry.get("error", "")
        elif not error:
            error = _load_bucket(model, entry["entries"], data, request["checksums"])
        del entry, data
    if request["checksums"] and not error:
        stale = [name for name, value in sums.items() if _held.get(name) != value]
        if stale:
            error = f"{stale[0]} is stale"
    if error:
        _held.clear()
    for group in [_groups[name] for name in names if name in _groups]:
        try:
            group.keys.set(f"{request['transfer']}/done/{request['rank']}", error)
        except RuntimeError:  # the source has ended
            pass
    return error


def _load_bucket(model: Any, entries: list[list[Any]], data: torch.Tensor, checksums: bool) -> str:
    """The error, if any."""
    try:
        tensors = []
        for name, dtype, shape, start, stop in entries:
            tensors.append((name, data[start:stop].view(getattr(torch, dtype)).view(shape)))
        model.load_weights(tensors)
        if checksums:
            for name, _, _, start, stop in entries:
                _held[name] = checksum(data[start:stop])
        if data.is_cuda:
            # Another thread and its stream reuse the bucket's memory.
            torch.cuda.current_stream().synchronize()
    except Exception as caught:  # of the server's own loader; it is reported to the sources
        return f"{type(caught).__name__}: {caught}"
    return ""


def _listen(
    source: dict[str, Any],
    request: dict[str, Any],
    inbox: queue.Queue[tuple[dict[str, Any], Any]],
    gpu: int,
) -> None:
    """Put one source's buckets, and then its end, into the inbox."""
    timeout = request["timeout"]
    transfer = request["transfer"]
    name = source["name"]
    try:
        if name not in _groups:
            _groups[name] = _Group(source, request["rank"], timeout, gpu)
        group = _groups[name]
        number = 0
        while True:
            group.keys.wait([f"{transfer}/{number}"], timedelta(seconds=timeout))
            entry = json.loads(group.keys.get(f"{transfer}/{number}"))
            if "entries" not in entry:
                inbox.put((entry, None))
                break
            inbox.put((entry, group.broadcast(entry["nbytes"], f"{transfer}/abort", timeout)))
            number += 1
        if "error" in entry:
            _groups.pop(name, None)
    except Exception as caught:  # in a thread: without its report `_receive` would wait for ever
        broken = _groups.pop(name, None)
        if broken is not None:
            try:
                broken.keys.set(f"{transfer}/done/{request['rank']}", "broken: " + _short(caught))
            except RuntimeError:
                pass
        inbox.put(({"error": f"source {source['address']}: {_short(caught)}"}, None))


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
