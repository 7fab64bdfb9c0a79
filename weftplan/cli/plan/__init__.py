"""``weftplan plan``: the memory of a network without running it."""
