"""A report that can be shown to strangers: no host, user, address, serial number, or value of an unknown variable."""

from __future__ import annotations

import getpass
import ipaddress
import os
import platform
import pwd
import re
import socket
from collections.abc import Callable
from typing import Any

from fusedcomm.doctor.settings import KNOWN

HIDDEN = "<hidden>"
HIDDEN_KEYS = {"host", "uuid", "serial"}
KEPT_KEYS = {"section", "level", "algorithm", "device"}  # our own words, whatever a user is called
UUID = re.compile(r"(?:\b(?:GPU|MIG)-)?\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b")
ADDRESS = re.compile(r"(?<![\w.:])(?:\d{1,3}(?:\.\d{1,3}){3}|[0-9a-fA-F]{0,4}(?::[0-9a-fA-F]{0,4}){2,7})(?![\w.]*\w)")
HOMES = re.compile(r"/home/[^/\s:'\"]+")


def redact(report: dict[str, Any]) -> dict[str, Any]:
    """A copy of it."""
    hide = _hider()
    environment = {name: value if name in KNOWN else HIDDEN for name, value in report["environment"].items()}
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
    home = os.path.expanduser("~")  # stays so where the user has none
    words = {**dict.fromkeys(_host_names(), "<host>"), **dict.fromkeys(_user_names(), "<user>")}
    # the longest first: one may begin with another
    patterns = [(re.compile(rf"(?<!\w){re.escape(word)}(?!\w)"), words[word]) for word in sorted(words, key=len)[::-1]]

    def hide(text: str) -> str:
        if home not in ("/", "~"):
            text = re.sub(rf"{re.escape(home)}(?![^/\s:'\",;)])", "~", text)
        text = ADDRESS.sub(_address, HOMES.sub("<home>", UUID.sub("<uuid>", text)))
        for pattern, instead in patterns:
            text = pattern.sub(instead, text)
        return text

    return hide


def _address(match: re.Match[str]) -> str:
    """A time and a PCI bus number look like addresses, but are none."""
    try:
        ipaddress.ip_address(match[0])
    except ValueError:
        return match[0]
    return "<address>"


def _host_names() -> set[str]:
    names = {socket.gethostname(), platform.node(), os.environ.get("HOSTNAME", "")}
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
