"""Exchanges move over the ops between them and matmuls, in the joint graph of forward and backward."""
