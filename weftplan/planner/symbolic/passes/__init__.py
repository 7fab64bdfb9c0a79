"""Graph passes, each in its own file; ``pass_manager`` runs them in order."""
