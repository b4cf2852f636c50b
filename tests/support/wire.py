"""A network with distance: a namespace behind a line with latency and limited rates.

`far_network` makes a network namespace and joins it to this one by two TUN devices. A process of
its own (this file as a program) carries each packet over after a delay, not faster than the line
allows, and not faster than one connection may be. TCP at both ends is the kernel's. It does what
``tc netem delay … rate …`` and ``tc fq maxrate …`` do, for kernels that have neither. Source:
torvalds/linux Documentation/networking/tuntap.rst; net/sched/sch_netem.c `netem_enqueue`.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import select
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_SET_DEVICE, _SET_OFFLOADS, _SET_HEADER = 0x400454CA, 0x400454D0, 0x400454D8
_TUN, _NO_INFO, _VIRTUAL_HEADER = 0x1, 0x1000, 0x4000
_CHECKSUM, _TSO4 = 0x1, 0x2
_HEADER = 10  # struct virtio_net_hdr
_PACKET = 2**16 + _HEADER
_QUEUE_S = 0.25
"""Packets that would wait longer for their turn are dropped, as routers do."""
_NEW_NETWORK = 0x40000000
_NEAR, _FAR = "10.213.77.1", "10.213.77.2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line to a far host: ``delay_s`` there and back together; rates in bytes a second.

    ``rate`` is the line's, in each direction; ``each`` a connection's.
    """

    delay_s: float
    rate: float
    each: float


@dataclass(frozen=True, slots=True)
class FarNetwork:
    """The namespace: the address that it has from here, and the command that runs others in it."""

    host: str
    within: tuple[str, ...]


@contextmanager
def own_network() -> Iterator[None]:
    """Give this thread, and what it starts, a network with nothing but loopback. It needs root.

    Where addresses come and go, Chromium breaks off its requests (``ERR_NETWORK_CHANGED``), also
    to loopback, and in other tests. Source: setns(2), network_namespaces(7).
    """
    library = ctypes.CDLL(None, use_errno=True)
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        _checked(library.unshare(_NEW_NETWORK))
        try:
            _ip("link", "set", "lo", "up")
            yield
        finally:
            _checked(library.setns(before, _NEW_NETWORK))
    finally:
        os.close(before)


def _checked(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


@contextmanager
def far_network(line: Line) -> Iterator[FarNetwork]:
    """Make the namespace for as long as the block lasts. It needs root and /dev/net/tun."""
    name = f"far{os.getpid()}"
    within = ("ip", "netns", "exec", name)
    _ip("netns", "add", name)
    try:
        near, far = _device(f"near{os.getpid()}"), _device(name)
        try:
            _ip("link", "set", name, "netns", name)
            _ip("addr", "add", _NEAR, "peer", _FAR, "dev", f"near{os.getpid()}")
            _ip("link", "set", f"near{os.getpid()}", "up")
            _ip("-n", name, "addr", "add", _FAR, "peer", _NEAR, "dev", name)
            _ip("-n", name, "link", "set", name, "up")
            _ip("-n", name, "link", "set", "lo", "up")
            numbers = (line.delay_s, line.rate, line.each)
            command = [sys.executable, str(Path(__file__)), *map(str, (near, far, *numbers))]
            with subprocess.Popen(command, pass_fds=(near, far)) as carrier:
                try:
                    yield FarNetwork(_FAR, within)
                finally:
                    carrier.kill()
        finally:
            os.close(near)
            os.close(far)
    finally:
        _ip("netns", "del", name)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def _device(name: str) -> int:
    """Return the file of a new TUN device, whose packets may be as large as TCP's segments.

    So a packet is up to 64 KiB, and its checksum is not computed: it does not leave this machine.
    """
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    request = struct.pack("16sH22x", name.encode(), _TUN | _NO_INFO | _VIRTUAL_HEADER)
    fcntl.ioctl(device, _SET_DEVICE, request)
    fcntl.ioctl(device, _SET_HEADER, struct.pack("i", _HEADER))
    fcntl.ioctl(device, _SET_OFFLOADS, _CHECKSUM | _TSO4)
    return device


class Carrier:
    """Carries packets between two devices; a turn of each connection, then of the line."""

    def __init__(self, near: int, far: int, line: Line) -> None:
        self._other = {near: far, far: near}
        self._line = line
        self._free = dict.fromkeys(self._other, 0.0)
        self._turns: dict[bytes, float] = {}
        self._moving: list[tuple[float, int, int, bytes]] = []
        self._count = 0

    def run(self) -> None:
        """Carry packets, without end."""
        while True:
            wait = max(0.0, self._moving[0][0] - time.monotonic()) if self._moving else None
            for device in select.select([*self._other], [], [], wait)[0]:
                self._take(device)
            now = time.monotonic()
            while self._moving and self._moving[0][0] <= now:
                _, _, device, packet = heapq.heappop(self._moving)
                os.write(device, packet)

    def _take(self, device: int) -> None:
        """Take the packets that wait at a device, and find the moment at which each arrives."""
        for _ in range(64):
            try:
                packet = os.read(device, _PACKET)
            except BlockingIOError:
                return
            now, nbytes = time.monotonic(), len(packet) - _HEADER
            flow = packet[_HEADER + 12 : _HEADER + 24]  # IPv4's addresses and TCP's ports
            turn = max(now, self._turns.get(flow, 0.0)) + nbytes / self._line.each
            line = max(now, self._free[device]) + nbytes / self._line.rate
            if max(turn, line) > now + _QUEUE_S:
                continue
            self._turns[flow], self._free[device] = turn, line
            self._count += 1
            arrival = max(turn, line) + self._line.delay_s / 2
            heapq.heappush(self._moving, (arrival, self._count, self._other[device], packet))


def main() -> None:
    """Carry packets between the devices whose files are given."""
    near, far, delay_s, rate, each = sys.argv[1:]
    line = Line(delay_s=float(delay_s), rate=float(rate), each=float(each))
    Carrier(int(near), int(far), line).run()


if __name__ == "__main__":
    main()
