"""``weftplan train``: training of a network through every layer of the library."""
