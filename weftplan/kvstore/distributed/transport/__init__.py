"""How processes reach each other: MPI, shared memory, the wire format, rendezvous and shutdown."""
