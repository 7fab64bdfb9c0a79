"""Graph passes: each rewrites the graph of a symbol before it is planned."""
