"""What a report that strangers may see hides, apart from the commands that show it: test_doctor.py has those."""

import pytest

from fusedcomm.memory import redact


def test_a_host_is_hidden_with_its_domain_and_so_is_the_head_of_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "head3.corp.example")
    monkeypatch.setenv("HOSTNAME", "node17")
    for module in ("socket.gethostname", "platform.node"):
        monkeypatch.setattr(module, lambda: "node17")
    hidden = redact.redact({"environment": {}, "text": "head3.corp.example, head3 node17.corp.example:1 on node17."})
    assert hidden["text"] == "<host>, <host> <host>:1 on <host>."
    monkeypatch.setenv("MASTER_ADDR", "10.1.2.3")  # the first part of an address is no host
    assert redact.redact({"environment": {}, "text": "10 of 10.1.2.3"})["text"] == "10 of <address>"
