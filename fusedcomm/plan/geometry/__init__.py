"""Which elements of which tensor go where: shapes, exchanges and sets of indices. No communication, no memory."""
