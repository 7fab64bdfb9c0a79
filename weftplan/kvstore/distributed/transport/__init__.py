"""Transport between processes: MPI, shared memory, the wire format, rendezvous and shutdown."""
