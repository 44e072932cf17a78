"""A network of this process's own, in which public addresses are this machine, and names that lead to them.

Servers fetch pictures from public addresses only, and loopback is none. In a network namespace of its own a
benchmark can stand for any address: 11.0.0.0/8 is put on its loopback interface, and names are found in a
file that only its own mounts have. What the server checks is the same as ever.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
from collections.abc import Mapping
from pathlib import Path

_NEW_MOUNTS, _NEW_USERS, _NEW_NETWORK = 0x20000, 0x10000000, 0x40000000
_BIND, _RECURSIVE, _PRIVATE = 4096, 16384, 1 << 18
_SET_FLAGS, _SET_ADDRESS, _UP = 0x8914, 0x8916, 1
_NETWORK = "11.0.0.1"  # with the mask of its class, and so all of 11.0.0.0/8
_libc = ctypes.CDLL(None, use_errno=True)


class NoNetwork(Exception):
    """This machine lets nobody have a network of its own, or not us."""


def enter(names: Mapping[str, str], name_server: str, folder: Path) -> None:
    """Move this process, which has one thread, and all that it starts. Other names are asked of
    `name_server`. Raises `NoNetwork`."""
    try:
        _unshare()
        _open_network()
        _mount(b"none", b"/", _RECURSIVE | _PRIVATE)
        hosts = "".join(
            f"{address} {name}\n" for name, address in {"localhost": "127.0.0.1", **names}.items()
        )
        _replace("hosts", hosts, folder)
        _replace("resolv.conf", f"nameserver {name_server}\n", folder)
        _replace("nsswitch.conf", "hosts: files dns\n", folder)
    except OSError as error:
        raise NoNetwork(f"no network namespace can be made here: {error}") from None


def _unshare() -> None:
    if _libc.unshare(_NEW_NETWORK | _NEW_MOUNTS) == 0:
        return
    user, group = os.getuid(), os.getgid()
    _checked(_libc.unshare(_NEW_USERS | _NEW_NETWORK | _NEW_MOUNTS))
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")


def _open_network() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        fcntl.ioctl(asking, _SET_FLAGS, struct.pack("16sh14x", b"lo", _UP))
        address = struct.pack("=HH4s8x", socket.AF_INET, 0, socket.inet_aton(_NETWORK))
        fcntl.ioctl(asking, _SET_ADDRESS, struct.pack("16s", b"lo:1") + address)


def _replace(name: str, text: str, folder: Path) -> None:
    target = Path("/etc", name)
    if not target.exists():
        if name == "nsswitch.conf":
            return  # names are read from files first without it, too
        raise FileNotFoundError(f"there is no {target}")
    own = folder / name
    own.write_text(text)
    _mount(bytes(own), bytes(target.resolve()), _BIND)


def _mount(source: bytes, target: bytes, flags: int) -> None:
    _checked(_libc.mount(source, target, None, ctypes.c_ulong(flags), None))


def _checked(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
