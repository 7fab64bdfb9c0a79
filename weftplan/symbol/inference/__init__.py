"""Shape and dtype inference over a graph."""
