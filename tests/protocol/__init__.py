"""A model of the protocol (DESIGN section 5), all of whose interleavings are explored."""
