"""The fault laboratory's tools, from the bottom up.

``stops``: a process waits at its system calls. ``command``: a command runs in a fork, and is killed
or fails at one of them. ``commands``: what is disturbed. ``checker``: what a store holds, without
our code. ``cases``: a command with its store, and what may be there afterwards; what is counted.
``wandering``: random commands. ``fuse``, ``disks``: a disk is recorded, and cut off.
``file_systems``: where stores may lie. ``cached``: the cache of a bucket.
"""
