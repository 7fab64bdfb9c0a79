"""``weftplan plan``: the memory of a network, computed without running it."""
