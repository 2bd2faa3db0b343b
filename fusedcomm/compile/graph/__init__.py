"""What a pass reads from and writes to an FX graph: collectives, layouts, views, matmuls, and new nodes."""
