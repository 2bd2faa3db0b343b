"""IOMMU and ACS, which send traffic between GPUs on PCIe through the root complex, or break it. These are hints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fusedcomm.doctor.findings import OK, WARNING, Finding

EXTENDED = 0x100  # where PCIe's extended capabilities begin in a device's configuration
ACS = 0x000D  # id of Access Control Services
REDIRECTS = 0b11100  # bits of its control word: request redirect, completion redirect, upstream forwarding
BRIDGE = "0x0604"


def survey(sys: Path = Path("/sys")) -> dict[str, Any]:
    """What /sys says of the bridges; ``acs_bridges`` is None where it cannot be read, as without root."""
    bridges = [device for device in sorted(sys.glob("bus/pci/devices/*")) if _read(device / "class")[:6] == BRIDGE]
    redirecting = [acs_redirects(_bytes(bridge / "config")) for bridge in bridges]
    known = [each for each in redirecting if each is not None]
    return {
        "iommu": any(sys.glob("class/iommu/*")),
        "pci_bridges": len(bridges),
        "acs_bridges": sum(known) if known or not bridges else None,
    }


def find(found: dict[str, Any], num_gpus: int) -> list[Finding]:
    if num_gpus < 2:
        return []
    findings = []
    if found["acs_bridges"]:
        text = f"{found['acs_bridges']} of {found['pci_bridges']} PCI bridges redirect peer traffic (ACS)"
        advice = "over NVLink it does no harm; copies over PCIe are slow or hang: turn ACS off in the BIOS"
        findings.append(Finding("topology", "ACS", WARNING, text, advice))
    if found["iommu"]:
        text = "an IOMMU is on: over NVLink it does no harm, peer copies over PCIe can be slow or wrong"
        findings.append(
            Finding("topology", "IOMMU", OK, text, "if the peer copy fails, try iommu=pt on Linux' command line")
        )
    return findings


def acs_redirects(config: bytes) -> bool | None:
    """Whether a bridge redirects; None: the extended configuration is not there (not root) or has no ACS."""
    offset, seen = EXTENDED, set()
    while offset >= EXTENDED and offset + 8 <= len(config) and offset not in seen:
        seen.add(offset)
        header = int.from_bytes(config[offset : offset + 4], "little")
        if header & 0xFFFF == ACS:
            return bool(int.from_bytes(config[offset + 6 : offset + 8], "little") & REDIRECTS)
        offset = header >> 20
    return None


def _read(file: Path) -> str:
    return _bytes(file).decode(errors="replace").strip()


def _bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""
