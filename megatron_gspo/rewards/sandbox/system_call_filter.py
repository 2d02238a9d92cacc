"""A seccomp filter of system calls that programs do not need and that reach beyond a namespace
or a limit.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import tempfile

_CLONE_NEWUSER = 0x10000000
# Memory that no limit of a process counts; parts of the kernel without a namespace; what changes
# the machine.
_DENIED = (
    "memfd_create",
    "memfd_secret",
    "shmget",
    "shmat",
    "msgget",
    "semget",
    "mq_open",
    "add_key",
    "request_key",
    "keyctl",
    "bpf",
    "perf_event_open",
    "userfaultfd",
    "io_uring_setup",
    "io_uring_enter",
    "io_uring_register",
    "ptrace",
    "process_vm_readv",
    "process_vm_writev",
    "kcmp",
    "pidfd_getfd",
    "unshare",
    "setns",
    "mount",
    "umount2",
    "pivot_root",
    "chroot",
    "open_tree",
    "move_mount",
    "fsopen",
    "fsconfig",
    "fsmount",
    "fspick",
    "mount_setattr",
    "name_to_handle_at",
    "open_by_handle_at",
    "fanotify_init",
    "quotactl",
    "acct",
    "swapon",
    "swapoff",
    "reboot",
    "kexec_load",
    "kexec_file_load",
    "init_module",
    "finit_module",
    "delete_module",
    "iopl",
    "ioperm",
    "settimeofday",
    "clock_settime",
    "clock_adjtime",
    "adjtimex",
    "sethostname",
    "setdomainname",
    "syslog",
    "vhangup",
    "nfsservctl",
    "lookup_dcookie",
    "_sysctl",
    "uselib",
    "vm86",
    "modify_ldt",
    "move_pages",
    "migrate_pages",
    "mbind",
    "set_mempolicy",
)


def system_call_filter() -> bytes | None:
    """The filter as BPF instructions for `Setup`; None without pyseccomp or libseccomp.

    Denied calls fail with EPERM. Of sockets only those between processes of the machine (AF_UNIX)
    are allowed.
    """
    try:
        import pyseccomp as seccomp
    except (ImportError, OSError, RuntimeError):  # not installed, or no libseccomp
        return None
    refuse = seccomp.ERRNO(errno.EPERM)
    rules = seccomp.SyscallFilter(defaction=seccomp.ALLOW)
    for name in _DENIED:
        try:
            rules.add_rule(refuse, name)
        except (OSError, ValueError):  # unknown to this libseccomp or on this machine
            continue
    rules.add_rule(refuse, "socket", seccomp.Arg(0, seccomp.NE, int(socket.AF_UNIX)))
    rules.add_rule(
        refuse, "clone", seccomp.Arg(0, seccomp.MASKED_EQ, _CLONE_NEWUSER, _CLONE_NEWUSER)
    )
    # The CPU time of children is lost where their parent ignores SIGCHLD. The call succeeds and
    # changes nothing.
    of_children = (seccomp.Arg(0, seccomp.EQ, int(signal.SIGCHLD)), seccomp.Arg(1, seccomp.NE, 0))
    rules.add_rule(seccomp.ERRNO(0), "rt_sigaction", *of_children)
    # Its flags are in memory: the C library falls back to clone.
    rules.add_rule(seccomp.ERRNO(errno.ENOSYS), "clone3")
    with tempfile.TemporaryFile() as file:
        rules.export_bpf(file)
        return os.pread(file.fileno(), 1 << 20, 0)
