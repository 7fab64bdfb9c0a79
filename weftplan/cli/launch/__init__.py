"""``weftplan launch``: start the processes of a distributed kvstore, and say how each of them has ended."""
