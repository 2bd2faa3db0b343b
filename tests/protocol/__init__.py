"""A model of the protocol (docs/protocol.md), all of whose interleavings are explored."""
