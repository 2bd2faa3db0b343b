"""Reports that strangers may see: they show no host, user, address, id of a GPU, or value of an unknown variable."""

import getpass
import ipaddress
import os
import platform
import pwd
import re
import socket
from collections.abc import Callable
from typing import Any

from fusedcomm import env

HIDDEN = "<hidden>"
SHOWN_VARIABLES = re.compile(
    "|".join(env.SETTINGS)
    + r"|CUDA_(DEVICE_MAX_CONNECTIONS|LAUNCH_BLOCKING|MODULE_LOADING|MPS_ACTIVE_THREAD_PERCENTAGE)"
    r"|CUDA_VISIBLE_DEVICES"
    r"|NCCL_(CUMEM_ENABLE|IB_DISABLE|NET|NET_GDR_LEVEL|P2P_DISABLE|WIN_ENABLE)|NCCL_SOCKET_IFNAME|GLOO_SOCKET_IFNAME"
    r"|TORCH_(DISTRIBUTED_DEBUG|NCCL_BLOCKING_WAIT|SYMMMEM|SYMM_MEM_(ALLOW_OVERLAPPING_DEVICES|DISABLE_MULTICAST))"
    r"|PYTORCH_(CUDA_)?ALLOC_CONF|(LOCAL_)?(RANK|WORLD_SIZE)|GROUP_RANK|OMP_NUM_THREADS|THP_MEM_ALLOC_ENABLE"
    r"|TRITON_INTERPRET|XDG_CACHE_HOME"
)
HIDDEN_KEYS = {"host", "uuid"}
# These values are fusedcomm's own words, and stay even if a user has such a name.
KEPT_KEYS = {"section", "level", "algorithm", "device", "op", "group", "dtype", "state"}
UUID = re.compile(r"(?:\b(?:GPU|MIG)-)?\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b")
IPV4 = re.compile(r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?![\w.]*\w)")
IPV6 = re.compile(
    r"(?<![\w.:])(\w*[g-zG-Z_]\w*:)?([0-9a-fA-F]{0,4}(?::[0-9a-fA-F]{0,4}){2,7})(?![\w.]*\w)"
)  # the first group is a key in front of the address
HOMES = re.compile(r"/home/[^/\s:'\"]+")


def redact(report: dict[str, Any]) -> dict[str, Any]:
    """A copy of ``report`` without anything private."""
    hide = _hider()
    shown = SHOWN_VARIABLES.fullmatch
    environment = {name: value if shown(name) else HIDDEN for name, value in report["environment"].items()}
    return _walk({**report, "environment": environment}, hide)


def _walk(value: Any, hide: Callable[[str], str]) -> Any:
    if isinstance(value, dict):
        return {
            key: each if key in KEPT_KEYS else HIDDEN if key in HIDDEN_KEYS and each else _walk(each, hide)
            for key, each in value.items()
        }
    if isinstance(value, list | tuple):
        return [_walk(each, hide) for each in value]
    return hide(value) if isinstance(value, str) else value


def _hider() -> Callable[[str], str]:
    home = os.path.expanduser("~")  # "~" itself where the user has no home
    words = {**dict.fromkeys(_host_names(), "<host>"), **dict.fromkeys(_user_names(), "<user>")}
    domain = {"<host>": r"(?:\.[\w-]+)*", "<user>": ""}  # a host may be named with its domain or without
    patterns = [
        (re.compile(rf"(?<!\w){re.escape(word)}{domain[words[word]]}(?!\w)"), words[word])
        for word in sorted(words, key=len, reverse=True)  # longest first, as one may begin with another
    ]

    def hide(text: str) -> str:
        if home not in ("/", "~"):
            text = re.sub(rf"{re.escape(home)}(?![^/\s:'\",;)])", "~", text)
        text = HOMES.sub("<home>", UUID.sub("<uuid>", text))
        text = IPV4.sub(lambda match: _hidden(match[0]), text)
        text = IPV6.sub(lambda match: (match[1] or "") + _hidden(match[2]), text)  # it may end in one of IPv4
        for pattern, instead in patterns:
            text = pattern.sub(instead, text)
        return text

    return hide


def _hidden(text: str) -> str:
    """Keeps versions, times and PCI bus numbers: they look like an address."""
    return "<address>" if _is_address(text) else text


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _host_names() -> set[str]:
    names = {socket.gethostname(), platform.node(), *(os.environ.get(name, "") for name in ("HOSTNAME", "MASTER_ADDR"))}
    names = {name for name in names if not _is_address(name)}  # addresses are hidden as addresses
    names |= {name.partition(".")[0] for name in names}
    return {name for name in names if len(name) > 1 and name != "localhost"}


def _user_names() -> set[str]:
    names = {os.environ.get("SUDO_USER", "")}
    for ask in (getpass.getuser, lambda: pwd.getpwuid(os.getuid()).pw_name):
        try:
            names.add(ask())
        except (KeyError, OSError):  # a container may know no name for the user
            continue
    return {name for name in names if len(name) > 1 and name != "root"}
