"""What `fusedcomm doctor` finds out: this machine, its settings, what works, and which algorithms will be used."""
