"""CPU symmetric memory: importing `native` registers it, and fails where it was not built."""
