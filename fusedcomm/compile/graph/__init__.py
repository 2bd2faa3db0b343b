"""What a pass reads and writes of an FX graph: collectives, layouts, views, matmuls, and new nodes."""
