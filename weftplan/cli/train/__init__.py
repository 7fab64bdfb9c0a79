"""``weftplan train``: a network trained through every layer."""
