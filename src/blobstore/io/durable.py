"""Durable file operations: after they return, the data survive a power cut.

Facts: fsync of a file makes its bytes durable, not its name; the name needs an fsync of its folder
(fsync(2)). A failed fsync may have dropped the bytes, and a second one would then succeed: it is
never retried ("fsyncgate", PostgreSQL 2018).
"""

import ctypes
import errno
import fcntl
import itertools
import os
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from blobstore.errors import (
    BlobStoreError,
    LimitExceededError,
    StorageError,
    UsageError,
    from_os_error,
)
from blobstore.hashing import Bytes
from blobstore.io import _native
from blobstore.io.ranges import FileReader, close_quietly

PAGE = 4096
"""Offsets, lengths and addresses of I/O around the page cache are multiples of this."""
DIRECT_FROM = 2**18
"""Bytes from which going around the page cache pays."""
FILE_MODE = 0o644
FOLDER_MODE = 0o755
# How often another process may remove a folder before it has contents.
_REMOVALS = 100
# ext2 to ext4, XFS, Btrfs, F2FS, tmpfs, ZFS (statfs(2), and OpenZFS's ZFS_SUPER_MAGIC).
_WITH_SYNCFS = frozenset({0xEF53, 0x58465342, 0x9123683E, 0xF2F52010, 0x01021994, 0x2FC12FC1})
# NFS, CIFS, SMB2, SMB, Ceph, AFS, 9p (statfs(2), linux/magic.h).
_REMOTE = frozenset({0x6969, 0xFF534D42, 0xFE534D42, 0x517B, 0x00C36400, 0x5346414F, 0x01021997})
# And FUSE, Lustre, GPFS (Spectrum Scale), BeeGFS, GFS2: several machines may have mounted it.
_SHARED = _REMOTE | {0x65735546, 0x0BD00BD0, 0x47504653, 0x19830326, 0x01161970}
_STATFS_BYTES = 256  # struct statfs has 120; its first member is the type
_SYNCFS_REPORTS_ERRORS = (5, 8)
_CALLS = ("syncfs", "fstatfs", "sync_file_range", "fallocate")
_CAN_NOT_RESERVE = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EPERM})
# SYNC_FILE_RANGE_WAIT_BEFORE, _WRITE and _WAIT_AFTER (linux/fs.h).
_WRITE_AND_WAIT = 1 | 2 | 4


@contextmanager
def os_errors(operation: str, path: object) -> Iterator[None]:
    """Turn an OSError inside the block into our error: "can't OPERATION PATH: reason"."""
    try:
        yield
    except BlobStoreError:  # some are OSErrors too
        raise
    except OSError as error:
        raise from_os_error(error, operation, path) from error


def sync(fd: int) -> None:
    """Make an open file's bytes (or an open folder's names) durable.

    Raises: OSError; the file is then lost.
    """
    if sys.platform == "darwin":  # fsync there stops at the drive's cache
        fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
    else:
        os.fsync(fd)


def syncs_whole(fd: int) -> bool:
    """Return True when one syncfs makes all of the file system durable, and reports errors.

    syncfs(2) takes one journal commit where fsync takes one a file, and since Linux 5.8 it reports
    the write errors that happened since its descriptor was opened. On FUSE it does nothing
    (fs/fuse/inode.c `fuse_sync_fs`), so only file systems that are known are trusted: elsewhere
    every file is synced when it is finished. Raises: OSError.
    """
    return _file_system(fd) in _WITH_SYNCFS


def is_remote(folder: Path) -> bool:
    """Return True when a folder is on another machine's file system. Raises: OSError.

    Locks on it may not be seen here.

    Linux sends an flock on NFS to the server, unless it is mounted with local locks; SMB and others
    differ (flock(2), nfs(5) "local_lock"). Other systems than Linux don't say it: returns False.
    """
    return _is_on(folder, _REMOTE)


def may_be_shared(folder: Path) -> bool:
    """Return True when several machines may have mounted a folder's file system.

    Raises: OSError.
    """
    return _is_on(folder, _SHARED)


def _is_on(folder: Path, kinds: Collection[int]) -> bool:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return _file_system(fd) in kinds
    finally:
        close_quietly(fd)


def _file_system(fd: int) -> int | None:
    """Return the number of the kind of file system that ``fd`` is on; None if unknown.

    Raises: OSError.
    """
    if _libc is None:
        return None
    status = ctypes.create_string_buffer(_STATFS_BYTES)
    _check(_libc.fstatfs(fd, status))
    kind = status.raw[: ctypes.sizeof(ctypes.c_long)]
    return int.from_bytes(kind, sys.byteorder) & 0xFFFF_FFFF


def sync_file_system(fd: int) -> None:
    """Make everything written to the file system of ``fd`` durable, where it `syncs_whole`.

    Raises: OSError; what was written since the descriptor was opened is lost.
    """
    if _libc is not None:
        _check(_libc.syncfs(fd))


def write_back(fd: int) -> None:
    """Write an open file's dirty pages to the disk and drop its clean ones.

    The next read then comes from the disk. For files that another process wrote and did not sync. A
    write that failed since then may go unnoticed:

    - An error that one descriptor has reported is not reported to a descriptor that is opened
      later (lib/errseq.c `errseq_sample`). So our syncfs may succeed although another process's
      syncfs failed.
    - The pages of a failed write are marked clean. As long as they stay in the page cache, reads
      and hashes see the right bytes, which the disk does not have.

    The kernel also keeps the error in the file's inode, apart from that of the file system
    (include/linux/pagemap.h `mapping_set_error`), so it is asked for here. If another process asked
    for that before, or the inode was evicted, which drops its pages too, only reading from the disk
    tells. sync_file_range(2) reports the inode's error as fsync does (mm/filemap.c
    `file_fdatawait_range`), without flushing the disk's cache for every file: the import's own
    syncfs does that. Where that is not trusted (`syncs_whole`) it is an fsync: on overlayfs
    sync_file_range does nothing. Pages that another process has mapped are not dropped
    (posix_fadvise(2)). Sources: files of torvalds/linux.

    Raises: OSError; the file's bytes are lost.
    """
    if _libc is not None and syncs_whole(fd):
        zero = ctypes.c_int64(0)  # from the beginning to the end
        _check(_libc.sync_file_range(fd, zero, zero, _WRITE_AND_WAIT))
    else:
        sync(fd)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _check(result: int) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _find_libc() -> ctypes.CDLL | None:
    """Return the C library, where its syncfs reports errors."""
    if sys.platform != "linux" or _kernel_version() < _SYNCFS_REPORTS_ERRORS:
        return None
    library = ctypes.CDLL(None, use_errno=True)
    return library if all(hasattr(library, name) for name in _CALLS) else None


def _kernel_version() -> tuple[int, int]:
    match = re.match(r"([0-9]+)\.([0-9]+)", os.uname().release)
    return (int(match[1]), int(match[2])) if match else (0, 0)


_libc = _find_libc()


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable. Raises: OSError.

    Some file systems can't sync folders and refuse with EINVAL (VirtualBox's shared folders: linux
    fs/vboxsf/dir.c has no fsync). They hand each change of a name to a server at once; all that can
    be done beyond that is a sync of the whole.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        sync_file_system(fd)
    finally:
        close_quietly(fd)


def make_folder(path: Path, *, durable: bool = True) -> None:
    """Make a folder and its missing ancestors, each name durable. Nothing happens when it is there.

    An ancestor that another process removes while it is empty is made again. Raises: OSError.
    """
    for _ in range(_REMOVALS):
        with suppress(FileNotFoundError):
            _make_missing(path, durable=durable)
            return
    _make_missing(path, durable=durable)


def _make_missing(path: Path, *, durable: bool) -> None:
    missing = list(itertools.takewhile(lambda folder: not folder.is_dir(), (path, *path.parents)))
    for folder in reversed(missing):
        try:
            folder.mkdir(mode=FOLDER_MODE)
        except FileExistsError:
            if not folder.is_dir():
                raise
        if durable:
            sync_folder(folder.parent)


def list_folder(folder: Path) -> list[os.DirEntry[str]]:
    """Return the entries of a folder, by name; an empty list when it is missing.

    Raises: OSError.
    """
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except FileNotFoundError:
        return []


def read_own(path: str | os.PathLike[str], limit: int, *, follow: bool = False) -> bytes:
    """Return the bytes of a small file that we wrote; a link or FIFO in its place is not opened.

    ``follow``: a file of the user's, which may be a link.

    Raises: NotFoundError; LimitExceededError for more than ``limit`` bytes; StorageError.
    """
    with FileReader(path, follow=follow) as reader:
        if reader.size > limit:
            raise LimitExceededError(
                f"limit exceeded: {path} has {reader.size:,} bytes, at most {limit:,}",
                path=reader.name,
            )
        return reader.read(0, reader.size)


def create_file(path: str | Path, size: int = 0, *, mode: int = FILE_MODE) -> int:
    """Return a new open file of ``size`` zeros; a file or link that is there already is an error.

    Raises: OSError.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
    try:
        if size:
            os.ftruncate(fd, size)  # pieces after the end would otherwise wait for each other
    except BaseException:
        os.close(fd)
        raise
    return fd


def reserve(fd: int, size: int) -> None:
    """Give a new file ``size`` bytes of zeros, and their place on the disk if that is possible.

    Then a full disk is found before anything is written. Several threads may write around the page
    cache at once: ext4 lets one at a time write where no place is reserved (torvalds/linux
    fs/ext4/file.c `ext4_dio_write_checks`). Raises: OSError, of no space too.
    """
    begin, nbytes = ctypes.c_int64(0), ctypes.c_int64(size)
    code = errno.EINTR if _libc is not None else errno.ENOSYS
    while _libc is not None and code == errno.EINTR:
        code = ctypes.get_errno() if _libc.fallocate(fd, 0, begin, nbytes) else 0
    if code in _CAN_NOT_RESERVE:
        os.ftruncate(fd, size)
    elif code != 0:
        raise OSError(code, os.strerror(code))


def open_direct(path: Path) -> int:
    """Open a file a second time, to write around the page cache; -1 where that is not supported."""
    if sys.platform != "linux":
        return -1
    try:
        return os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return -1


def write_all_at(fd: int, offset: int, data: memoryview) -> None:
    """Write all of ``data`` at ``offset``; interrupted and partial writes go on.

    Raises: OSError.
    """
    while data:
        count = os.pwrite(fd, data, offset)
        if count == 0:
            raise OSError(errno.EIO, "nothing was written")
        data, offset = data[count:], offset + count


def write_aligned(
    fd: int,
    direct: int,
    offset: int,
    data: memoryview,
    extra: Sequence[tuple[int, Bytes]] = (),
) -> None:
    """Write all of ``data`` at ``offset``, whole pages around the page cache.

    The address of ``data`` and ``offset`` have the same remainder by the page size. ``direct`` is
    the same file by `open_direct`, or -1. Parts of pages go through the cache, and so does what is
    ``extra``: bytes for other offsets. Interrupted and partial writes go on. Raises: OSError.
    """
    cached = [(fd, at, part) for at, part in extra]
    head = -offset % PAGE
    tail = head + (len(data) - head) // PAGE * PAGE
    if direct >= 0 and tail - head >= DIRECT_FROM:
        edges = [(fd, offset, data[:head]), (fd, offset + tail, data[tail:])]
        try:
            _native.write_parts([*cached, *edges, (direct, offset + head, data[head:tail])])
        except OSError as error:
            if error.errno != errno.EINVAL:  # the file system turns out not to do that
                raise
        else:
            return
    _native.write_parts([*cached, (fd, offset, data)])


def remove_if_there(path: Path) -> bool:
    """Remove a file; return False if it was missing."""
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    return True


def check_one_mount(folder: Path, place: Path) -> None:
    """Raise StorageError when files of ``folder`` can't be renamed into ``place``, if that exists.

    A rename across mounts fails before the kernel looks up either file (torvalds/linux fs/namei.c
    `do_renameat2`). So this also finds bind mounts of one file system, whose device numbers are
    equal. Raises: StorageError also if ``place`` is not a folder.
    """
    with os_errors("write", place):
        is_one = not place.exists() or _is_one_mount(folder, place)
    if not is_one:
        raise StorageError(
            f"{place} and {folder.parent} must be on the same file system", path=str(place)
        )


def _is_one_mount(folder: Path, place: Path) -> bool:
    name = "not-there"
    try:
        os.rename(folder / name, place / name)  # noqa: PTH104  # nothing is renamed
    except FileNotFoundError:
        return place.stat().st_dev == folder.stat().st_dev
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
    return False


# Small files of ours: appended to, or written at once and renamed into place.


def append_file(path: Path, data: bytes) -> None:
    """Append to a file, which is made when it is missing.

    A link is an error, and so is a FIFO. Raises: OSError.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    with os.fdopen(os.open(path, flags, FILE_MODE), "ab") as file:
        file.write(data)


def replace_file(
    path: Path,
    data: bytes,
    *,
    temporary: Path | None = None,
    mode: int = FILE_MODE,
    syncs: bool = False,
) -> None:
    """Write a file and put it in the place of the one that is there.

    ``temporary``: its path until it is complete (None: a random name next to ``path``).
    ``syncs``: its bytes are durable then; its name is after a `sync_folder`.

    Raises: OSError.
    """
    written = temporary or path.with_name(f"{path.name}.{os.urandom(8).hex()}")
    write_new_file(written, data, mode=mode, syncs=syncs)
    with removed_after_an_error(written):
        written.rename(path)


def check_regular(path: str | os.PathLike[str]) -> None:
    """Raise StorageError if something is there that is not a file: a folder, a device, a FIFO.

    A rename would replace a device, such as /dev/null.
    """
    if os.path.lexists(path) and not Path(path).is_file():
        name = os.fspath(path)
        raise StorageError(f"{name} is not a regular file", path=name)


def check_place(path: str | os.PathLike[str], *, replace: bool) -> None:
    """Check where a file shall go, before the work that makes it.

    Raises: UsageError if a file is there, unless ``replace``; StorageError if something else is;
    MissingFileError without its folder.
    """
    place = Path(path)
    with os_errors("write", place):
        os.stat(f"{place.parent}/.")  # noqa: PTH116  # a file there is an error
        with suppress(FileNotFoundError):
            place.lstat()  # the name may be too long
        check_regular(place)
    if not replace and os.path.lexists(place):
        hint = "Choose another name, or replace it: `replace=True`."
        raise UsageError(f"{place} already exists", path=str(place), hint=hint)


def write_new_file(path: Path, data: bytes, *, mode: int = FILE_MODE, syncs: bool = False) -> None:
    """Write a file that must not exist; none is left if that fails. As `replace_file`."""
    fd = create_file(path, mode=mode)
    with removed_after_an_error(path), os.fdopen(fd, "wb") as file:
        write_all_at(file.fileno(), 0, memoryview(data))
        if syncs:
            sync(file.fileno())


@contextmanager
def removed_after_an_error(path: Path) -> Iterator[None]:
    """Remove the file at ``path`` if the block fails."""
    try:
        yield
    except BaseException:
        with suppress(OSError):
            path.unlink()
        raise
