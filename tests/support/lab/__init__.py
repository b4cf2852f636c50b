"""The fault laboratory: what the experiments in ``tests/faults`` are made of (docs/reliability.md, "The fault laboratory").

``system_calls``  the calls that are watched · ``seccomp`` stops a process at them · ``command`` runs our command that way,
and lets one call kill it, fail, or do half of its work
``checker``  what a store holds, found with the standard library only · ``cases`` commands with what they may leave behind
``fuse``, ``recorder``, ``disk``  a block device whose every write is recorded, and the disks that a power cut may leave
``figures``  what was counted, in one line
"""
