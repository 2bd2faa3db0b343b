"""The ops of a mixture of experts behind interfaces of others: torch's TokenSwitch, torchtitan's token dispatcher."""

from fusedcomm.moe.token_dispatcher import TokenDispatcher

__all__ = ["TokenDispatcher"]
