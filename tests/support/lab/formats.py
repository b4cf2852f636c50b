"""Journaling file systems for recorded disks: how each is made, mounted and recovered.

Where a disk writes sectors of 512 bytes, a cut may tear a block that lies in several of them. ext4
is made for that in all but its superblock (`_repair_superblock`). XFS and Btrfs are not: XFS does
not replay the log into a block whose first sector is as new as the log (linux
fs/xfs/xfs_buf_item_recover.c `xlog_recover_get_buf_lsn`), and the superblock of Btrfs has 4,096
bytes under one checksum. Their disks write blocks of 4,096 bytes at once, as today's do.
"""

from __future__ import annotations

import os
import struct
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from support.lab.figures import NotShownError

_BLOCK = 4096
_GROUP = (
    8192  # blocks: a second group, and with it a backup of the superblock, on a disk this small
)
_SUPERBLOCK = slice(1024, 2048)
_CRC32C = 0x82F63B78


@dataclass(frozen=True, slots=True)
class Format:
    """A journaling file system of ``nbytes``, made by ``make``, mounted with each of ``options``.

    ``blocks``: bytes that the disk writes as a whole or not at all, one of them chosen for each
    cut. ``start`` does what a machine does at its start before it mounts the disk in a file, and
    returns True when that repaired something.
    """

    name: str
    nbytes: int
    make: tuple[str, ...]
    options: tuple[str, ...]
    blocks: tuple[int, ...]
    start: Callable[[Path], bool]

    def empty_image(self, path: Path) -> bytes:
        """Return the bytes of an empty file system, made at ``path``.

        Raises: NotShownError without the tool for it.
        """
        path.write_bytes(b"")
        os.truncate(path, self.nbytes)
        try:
            subprocess.run([*self.make, path], check=True, capture_output=True)
        except FileNotFoundError as error:
            raise NotShownError(f"{self.make[0]} is not installed") from error
        except subprocess.CalledProcessError as error:
            raise NotShownError(
                f"{self.make[0]} of this machine can't make such a disk: {error.stderr.decode()}"
            ) from error
        return path.read_bytes()


def _repair_superblock(path: Path) -> bool:
    """Repair a torn superblock from its backup, and nothing that needs a decision (e2fsck -p)."""
    with path.open("rb") as file:
        if not has_torn_superblock(file.read(_SUPERBLOCK.stop)):
            return False
    subprocess.run(
        ["e2fsck", "-p", "-b", f"{_GROUP}", "-B", f"{_BLOCK}", path],
        check=False,
        capture_output=True,
    )
    return True


def has_torn_superblock(disk: bytes | bytearray) -> bool:
    """Return True if the superblock does not match its checksum.

    linux fs/ext4/super.c ext4_superblock_csum
    """
    *data, stored = struct.unpack("<1020BI", disk[_SUPERBLOCK])
    checksum = 0xFFFFFFFF
    for byte in data:
        checksum ^= byte
        for _ in range(8):
            checksum = checksum >> 1 ^ (_CRC32C if checksum & 1 else 0)
    return bool(checksum != stored)


def _nothing(_path: Path) -> bool:
    """XFS repairs itself when it is mounted (fsck.xfs(8))."""
    return False


def _forget_devices(_path: Path) -> bool:
    """Let the kernel forget known disks.

    Of two with one name it mounts the one that was written to last.
    """
    subprocess.run(["btrfs", "device", "scan", "--forget"], check=False, capture_output=True)
    return False


_EXT4 = Format(
    "ext4",
    48 * 2**20,
    (
        *(
            "mkfs.ext4",
            "-q",
            "-F",
            "-b",
            f"{_BLOCK}",
            "-g",
            f"{_GROUP}",
            "-O",
            "metadata_csum",
            "-J",
            "size=4",
        ),
        *("-E", "lazy_itable_init=0,lazy_journal_init=0,nodiscard"),
    ),
    ("commit=1", "commit=5", "defaults", "noauto_da_alloc,data=writeback"),
    (4096, 4096, 4096, 512),
    _repair_superblock,
)
_XFS = Format(
    "xfs",
    64 * 2**20,
    ("mkfs.xfs", "-q", "-f", "-K", "--unsupported"),  # smaller than 300 MB
    ("defaults", "logbsize=256k", "wsync", "allocsize=64k"),
    (4096,),
    _nothing,
)
_BTRFS = Format(
    "btrfs",
    112 * 2**20,
    ("mkfs.btrfs", "-q", "-f", "-K", "-m", "single", "-d", "single"),
    ("commit=1", "defaults", "notreelog", "nodatacow"),
    (4096,),
    _forget_devices,
)
FORMATS = {made.name: made for made in (_EXT4, _XFS, _BTRFS)}
"""Formats by the names that mount(8) knows them by."""
