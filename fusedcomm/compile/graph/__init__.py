"""Reading and writing FX graphs: collectives, layouts, views, matmuls, and new nodes."""
