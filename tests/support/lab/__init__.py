"""The fault laboratory: the parts of the experiments in ``tests/faults``.

``command``  runs our command in a fork, stopped at its system calls: one may kill it, fail, or do
half its work; it stands on ``seccomp`` (how the kernel asks), ``system_calls`` (which, and what
they are) and ``half`` ``checker``  what a store holds, found with the standard library only ·
``figures`` what was counted, in one line ``commands``, ``cases``  what is disturbed, and what may
be there afterwards · ``wandering`` random commands on one store · ``cached`` processes that bring
a bucket's blobs into a cache · ``disk``  a file system whose disk is recorded, and the disks that a
power cut may leave of it; ``fuse``, ``mounts``
"""
