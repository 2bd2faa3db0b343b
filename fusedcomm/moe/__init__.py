"""The ops of a mixture of experts behind interfaces of others: torch's TokenSwitch, torchtitan's token dispatcher."""

from fusedcomm.moe.token_dispatcher import TokenDispatcher
from fusedcomm.moe.token_switch import TokenSwitch

__all__ = ["TokenDispatcher", "TokenSwitch"]
