"""Transport between processes: MPI, sockets, shared memory, the wire format, rendezvous and shutdown."""
